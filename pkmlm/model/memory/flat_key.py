"""Flat-key memory: one key a slot, all of them compared (the baseline of Lample et al. 2019, table 4).

B: sequences; T: positions; N: tokens (B * T); D: model width; H: heads; q: width of a query; K: slots; k: slots a head
reads.
"""

import torch
from torch import Tensor, nn

from pkmlm.kernels import ops
from pkmlm.model.initial import Initial, Uniform
from pkmlm.model.memory.query import Query, at_least_fp32
from pkmlm.model.memory.usage_tap import UsageTap
from pkmlm.model.memory.values import Values
from pkmlm.recipe.schema import Memory


class FlatKeyMemory(nn.Module):
    """As `ProductKeyMemory`, with num_keys^2 whole keys for each head: a search of O(slots), not O(sqrt(slots))."""

    def __init__(self, dim: int, memory: Memory, layer: int, *, compact: bool, momentum: float):
        super().__init__()
        slots = memory.num_keys**2
        self.topk = memory.topk
        self.query = Query(dim, memory, momentum)
        self.keys_HKq = nn.Parameter(torch.empty(memory.heads, slots, memory.key_dim))
        self.tap = UsageTap(layer, "memory", memory.kind, slots, memory.heads)
        self.values = Values(slots, dim, std=dim**-0.5, group="values", compact=compact)

    def initial(self) -> dict[str, Initial]:
        return {"keys_HKq": Uniform(self.keys_HKq.shape[-1] ** -0.5)}

    def forward(self, x_BTD: Tensor) -> Tensor:
        """The memory's answer (B, T, D), in the dtype of the values."""
        q_NHq = self.query(x_BTD.flatten(0, 1))
        with torch.autocast(x_BTD.device.type, enabled=False):
            scores_NHk, slots_NHk = ops.flat_key_select(q_NHq, at_least_fp32(self.keys_HKq), self.topk)
            slots_NHk, weights_NHk = self.tap(slots_NHk, scores_NHk.softmax(-1))
            return self.values(slots_NHk.flatten(1), weights_NHk.flatten(1)).view_as(x_BTD)
