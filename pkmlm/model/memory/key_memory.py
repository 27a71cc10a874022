"""What memories with keys have in common: queries in, the values of the best slots out.

B: sequences; T: positions; N: tokens (B * T); D: model width; H: heads; q: width of a query; k: slots a head reads.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn

from pkmlm.device import at_least_fp32
from pkmlm.model.memory.query import Query
from pkmlm.model.memory.uncompiled import uncompiled
from pkmlm.model.memory.usage_tap import UsageTap
from pkmlm.model.memory.values import Values
from pkmlm.recipe.schema import Memory


class KeyMemory(nn.Module, ABC):
    """m(x) = sum over heads and their k best slots of w * v, w the softmax of scores (Lample et al. 2019, eq. 1 to 3).

    All heads share the values, which start at N(0, 1/D) (not in the paper; the authors' released choice).

    Args:
        dim: model width.
        memory: of the recipe, of the kind that the class builds.
        layer: the block it stands in, counted from 1.
        momentum: of the query's batch normalisation, for one forward.

    Raises:
        ValueError: `memory` is of another kind.
    """

    kind: ClassVar[str]

    def __init__(self, dim: int, memory: Memory, layer: int, momentum: float):
        super().__init__()
        if memory.kind != self.kind:
            raise ValueError(f"{type(self).__name__}: found a memory of kind {memory.kind} (expected {self.kind})")
        self.topk = memory.topk
        self.query = Query(dim, memory, momentum)
        self.tap = UsageTap(layer, "memory", memory.kind, memory.slots, memory.heads)
        self.values = Values(memory.slots, dim, std=dim**-0.5, group="values")

    @abstractmethod
    def select(self, q_NHq: Tensor) -> tuple[Tensor, Tensor]:
        """The k best slots of each query: scores (N, H, k), differentiable, and slots (N, H, k), int64."""

    @uncompiled
    def forward(self, x_BTD: Tensor) -> Tensor:
        """The memory's answer (B, T, D), in the dtype of the rows read; search and softmax are in fp32."""
        q_NHq = self.query(x_BTD.flatten(0, 1))
        with torch.autocast(x_BTD.device.type, enabled=False):
            scores_NHk, slots_NHk = self.select(at_least_fp32(q_NHq))
            slots_NHk, weights_NHk = self.tap(slots_NHk, scores_NHk.softmax(-1))
        out: Tensor = self.values(slots_NHk.flatten(1), weights_NHk.flatten(1))
        return out.view_as(x_BTD)
