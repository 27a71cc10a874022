"""Flat-key memory: one key a slot, all of them compared (the baseline of Lample et al. 2019, table 4).

N: tokens; H: heads; q: width of a query; K: slots; k: slots a head reads.
"""

import torch
from torch import Tensor, nn

from pkmlm.kernels import ops
from pkmlm.model.initial import Initial, Uniform
from pkmlm.model.memory.key_memory import KeyMemory
from pkmlm.recipe.schema import Memory


class FlatKeyMemory(KeyMemory):
    """A memory of num_keys^2 slots with a whole key each, for each head: a search of O(slots), not O(sqrt(slots))."""

    kind = "flat-key"

    def __init__(self, dim: int, memory: Memory, layer: int, momentum: float):
        super().__init__(dim, memory, layer, momentum)
        self.keys_HKq = nn.Parameter(torch.empty(memory.heads, memory.slots, memory.key_dim))

    def initial(self) -> dict[str, Initial]:
        return {"keys_HKq": Uniform(self.keys_HKq.shape[-1] ** -0.5)}

    def select(self, q_NHq: Tensor) -> tuple[Tensor, Tensor]:
        """The exact top-k over all keys, as `ops.flat_key_select`."""
        return ops.flat_key_select(q_NHq, self.keys_HKq, self.topk)
