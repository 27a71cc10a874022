"""What this machine's memory can do at best: a copy, timed beside what reads from it."""

from collections.abc import Callable

import torch
from torch import Tensor

from pkmlm.bench.rounds import Timing

COPIED = 1 << 28  # bytes of the buffer


def copying(device: torch.device) -> Callable[[], Tensor]:
    """The action to be timed: a copy of a buffer of `COPIED` bytes."""
    buffer = torch.ones(COPIED // 4, device=device)
    target = torch.empty_like(buffer)
    return lambda: target.copy_(buffer)


def bandwidth(copy: Timing) -> float:
    """Bytes a second, read and written, of such copies."""
    return 2 * COPIED / copy.median
