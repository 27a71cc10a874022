"""Times actions in interleaved rounds, so that other work on the machine affects all of them equally."""

import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from pkmlm.device import default_device, free_bytes
from pkmlm.environment import keep_freed_memory
from pkmlm.errors import UserError

MIN_SECONDS = 0.02  # timed at least on a GPU: a launch and the wait for its end take far less
COPY_BYTES = 1 << 28  # of the buffer whose copy shows the memory's bandwidth
COPY = "copy"
Name = TypeVar("Name", bound=Hashable)
Say = Callable[[str], None]  # called with a line on what is being done


def check_room(what: str, needed: float, hint: str) -> None:
    """Refuse what does not fit into memory all at once, as interleaved rounds require.

    Args:
        what: what needs the memory, in the plural.
        needed: bytes that it needs.
        hint: how to need less.

    Raises:
        UserError: (exit code 1) fewer bytes are free.
    """
    free = free_bytes(default_device())
    if needed > free:
        raise UserError(f"{what} need {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free", hint, exit_code=1)


@dataclass(frozen=True)
class Timing:
    """Seconds of one action, one number per round."""

    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def milliseconds(self) -> list[float]:
        """Median, least and most."""
        return [1000 * value for value in (self.median, min(self.seconds), max(self.seconds))]

    def as_json(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "median": self.median}


def interleaved(
    actions: Mapping[Name, Callable[[], object]], rounds: int, device: torch.device, say: Say
) -> dict[Name, Timing]:
    """Time every action once per round; each round starts with another one, so that none has a fixed place.

    A first round, in which memory is allocated and code compiled, is not counted. The process keeps the memory that it
    frees, as in training.

    Args:
        device: its queue is emptied before and after each action.
        say: called with a line on which round runs.
    """
    keep_freed_memory()
    seconds: dict[Name, list[float]] = {name: [] for name in actions}
    names = list(actions)
    for number in range(rounds + 1):
        say(f"round {number} of {rounds}" if number else "warming up")
        start = number % len(names)
        for name in names[start:] + names[:start]:
            taken = seconds_of(actions[name], device)
            if number:
                seconds[name].append(taken)
    return {name: Timing(values) for name, values in seconds.items()}


def interleaved_with_copy(
    actions: Mapping[Name, Callable[[], object]], rounds: int, device: torch.device, say: Say
) -> tuple[dict[Name, Timing], float]:
    """`interleaved`, with the copy of a large buffer among the actions: what the machine's memory can do at best.

    Returns:
        the times of the actions; bytes per second, read and written, of the copy.
    """
    buffer = torch.ones(COPY_BYTES // 4, device=device)
    target = torch.empty_like(buffer)
    times: dict[Any, Timing] = interleaved({**actions, COPY: lambda: target.copy_(buffer)}, rounds, device, say)
    return times, 2 * COPY_BYTES / times.pop(COPY).median


def seconds_of(action: Callable[[], object], device: torch.device) -> float:
    """How long an action takes, with what it queues on a device.

    On a GPU, a short action is repeated until `MIN_SECONDS` have passed: with a single kernel, one would time the host,
    which takes longer to launch it and to learn of its end than it runs.
    """
    taken = mean_seconds(action, 1, device)
    repeats = math.ceil(MIN_SECONDS / taken) if device.type == "cuda" else 1
    return taken if repeats == 1 else mean_seconds(action, repeats, device)


def mean_seconds(action: Callable[[], object], repeats: int, device: torch.device) -> float:
    """The mean over `repeats` runs, one after the other, with nothing else between them."""
    synchronize(device)
    began = time.perf_counter()
    for _ in range(repeats):
        action()
    synchronize(device)
    return (time.perf_counter() - began) / repeats


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done all that is queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
