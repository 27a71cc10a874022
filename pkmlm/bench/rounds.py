"""Several things timed in turn, so that what else the machine does falls on all of them alike."""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

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


def in_turn(
    actions: Mapping[Name, Callable[[], object]],
    rounds: int,
    device: torch.device,
    say: Callable[[str], None],
) -> dict[Name, Timing]:
    """Run every action once a round and time it; each round starts with another one, so that none has a fixed place.

    One round more comes first and is not counted: in it things are allocated and compiled.

    Args:
        device: whose queued work belongs to the action that queued it.
        say: is told which round runs.
    """
    seconds: dict[Name, list[float]] = {name: [] for name in actions}
    names = list(actions)
    for number in range(rounds + 1):
        say(f"round {number} of {rounds}" if number else "warming up")
        start = number % len(names)
        for name in names[start:] + names[:start]:
            synchronize(device)
            began = time.perf_counter()
            actions[name]()
            synchronize(device)
            if number:
                seconds[name].append(time.perf_counter() - began)
    return {name: Timing(values) for name, values in seconds.items()}


def synchronize(device: torch.device) -> None:
    """Wait for what a GPU has still to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
