"""Several things timed in turn, so that what else the machine does falls on all of them alike."""

import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

LEAST_SECONDS = 0.02  # that are timed on a GPU: a launch and the wait for its end take far less
Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Timing:
    """Seconds of one action, one number a round."""

    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def milliseconds(self) -> list[float]:
        """Median, least and most."""
        return [1000 * value for value in (self.median, min(self.seconds), max(self.seconds))]

    def as_json(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "median": self.median}


@dataclass(frozen=True)
class Overhead:
    """A step or a pass of this package, timed beside the bare work that it does.

    Attributes:
        amount: how much one time is for: tokens of a step, bytes of a text.
    """

    whole: Timing
    bare: Timing
    amount: int

    @property
    def ratio(self) -> float:
        """The median over rounds of whole / bare, which run back to back."""
        return statistics.median(a / b for a, b in zip(self.whole.seconds, self.bare.seconds, strict=True))


def in_turn(
    actions: Mapping[Name, Callable[[], object]],
    rounds: int,
    device: torch.device,
    say: Callable[[str], None],
) -> dict[Name, Timing]:
    """Time every action once a round, see `in_rounds`.

    Args:
        device: see `seconds_of`.
    """
    return in_rounds({name: partial(seconds_of, action, device) for name, action in actions.items()}, rounds, say)


def in_rounds(
    actions: Mapping[Name, Callable[[], float]], rounds: int, say: Callable[[str], None]
) -> dict[Name, Timing]:
    """Run every action once a round; each round starts with another one, so that none has a fixed place.

    One round more comes first and is not counted: in it things are allocated and compiled.

    Args:
        actions: each gives the seconds that count of what it did.
        say: is told which round runs.
    """
    seconds: dict[Name, list[float]] = {name: [] for name in actions}
    names = list(actions)
    for number in range(rounds + 1):
        say(f"round {number} of {rounds}" if number else "warming up")
        start = number % len(names)
        for name in names[start:] + names[:start]:
            taken = actions[name]()
            if number:
                seconds[name].append(taken)
    return {name: Timing(values) for name, values in seconds.items()}


def seconds_of(action: Callable[[], object], device: torch.device) -> float:
    """How long an action takes, with what it queues on a device, whose queue is emptied before and after.

    A GPU gets a short one again and again, until `LEAST_SECONDS` have passed: of a kernel by itself one would time the
    host, which takes longer to launch it and to learn of its end than it runs.
    """
    taken = seconds_of_each(action, 1, device)
    again = math.ceil(LEAST_SECONDS / taken) if device.type == "cuda" else 1
    return taken if again == 1 else seconds_of_each(action, again, device)


def seconds_of_each(action: Callable[[], object], times: int, device: torch.device) -> float:
    """The mean over so many runs, one after the other, with nothing else between them."""
    synchronize(device)
    began = time.perf_counter()
    for _ in range(times):
        action()
    synchronize(device)
    return (time.perf_counter() - began) / times


def synchronize(device: torch.device) -> None:
    """Wait for what a GPU has still to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
