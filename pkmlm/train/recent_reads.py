"""The share of a memory's slots that training reads, for the line that people see."""

from typing import Any

import torch
from torch import Tensor

from pkmlm.model.memory.usage_tap import UsageTap
from pkmlm.runtime.distributed import World

WINDOW = 100  # steps


class RecentReads:
    """The share of a memory's slots that training has read in the last whole window of steps.

    Args:
        tap: of the memory to watch.
        ranks: those whose tokens count together.
    """

    def __init__(self, tap: UsageTap, ranks: World):
        self.tap, self.ranks = tap, ranks
        self.read_K: Tensor | None = None
        self.steps = 0
        self.share: float | None = None
        tap.register_forward_hook(self._note)

    def _note(self, tap: torch.nn.Module, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        if not tap.training:
            return
        if self.read_K is None:
            self.read_K = torch.zeros(self.tap.slots, dtype=torch.bool, device=output[0].device)
        self.read_K[output[0].flatten()] = True

    def after_step(self) -> str:
        """Count a step, which all ranks do together; the share, for the progress line, or nothing until a window is
        whole.
        """
        self.steps += 1
        if self.steps % WINDOW == 0 and self.read_K is not None:
            self.share = float(self.ranks.all_any(self.read_K).float().mean())
            self.read_K.zero_()
        return "" if self.share is None else f"layer {self.tap.layer} reads {self.share:.0%}"
