"""What this machine's memory can do at best: a copy, timed beside what reads from it."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pkmlm.bench.rounds import Name, Timing, in_turn

COPIED = 1 << 28  # bytes of the buffer
COPY = "copy"


def beside_a_copy(
    actions: Mapping[Name, Callable[[], object]], rounds: int, device: torch.device, say: Callable[[str], None]
) -> tuple[dict[Name, Timing], Timing]:
    """Time actions in turn (see `in_turn`), and among them the copy of a buffer of `COPIED` bytes."""
    buffer = torch.ones(COPIED // 4, device=device)
    target = torch.empty_like(buffer)
    times: dict[Any, Timing] = in_turn({**actions, COPY: lambda: target.copy_(buffer)}, rounds, device, say)
    copy = times.pop(COPY)
    return times, copy


def bandwidth(copy: Timing) -> float:
    """Bytes a second, read and written, of such copies."""
    return 2 * COPIED / copy.median
