"""Which slots of a memory training reads.

K: slots.
"""

from typing import Any

import torch
from torch import Tensor, nn

from pkmlm.distributed import World
from pkmlm.model.memory.base import SparseMemory

WINDOW = 100  # steps


class ReadSlots:
    """Notes which slots of a memory training reads.

    Args:
        ranks: those that train the memory together.

    Attributes:
        read_K: whether each slot has been read (bool), on this rank; on any, once ranks have met.
    """

    def __init__(self, memory: SparseMemory, ranks: World):
        self.tap, self.ranks = memory.tap, ranks
        self.read_K = torch.zeros(self.tap.slots, dtype=torch.bool, device=memory.values.weight_KD.device)
        self.tap.register_forward_hook(self._note)

    def _note(self, tap: nn.Module, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        if tap.training:
            self.read_K.index_fill_(0, output[0].flatten(), True)

    def meet(self) -> None:
        """Note what other ranks have read, too; all of them call it together."""
        self.read_K = self.ranks.all_any(self.read_K)


class RecentReads(ReadSlots):
    """The share of a memory's slots that training has read in the last whole window of steps, for the progress line."""

    def __init__(self, memory: SparseMemory, ranks: World):
        super().__init__(memory, ranks)
        self.steps = 0
        self.share: float | None = None

    def after_step(self) -> str:
        """Count a step, which all ranks do together; what to say, or nothing until a window is whole."""
        self.steps += 1
        if self.steps % WINDOW == 0:
            self.meet()
            self.share = float(self.read_K.float().mean())
            self.read_K.zero_()
        return "" if self.share is None else f"layer {self.tap.layer} reads {self.share:.0%}"
