"""Flat keys, the baseline of Lample et al. 2019 (table 4): every slot has a key of its own.

H: heads; K: slots; q: width of a query and of a key; N: tokens; k: slots a head reads.
"""

import torch
from torch import Tensor, nn

from pkmlm.kernels import ops
from pkmlm.memory.flat_key.spec import FlatKeySpec
from pkmlm.memory.key_memory import KeyMemory
from pkmlm.memory.key_spec import KeySpec


class FlatKeyMemory(KeyMemory):
    """A memory of num_keys^2 slots, each of which has its own key for each head (table 4).

    A search takes O(slots), not O(sqrt(slots)). The parameters are `keys_HKq`, those of the `query` network, and the
    values, `values.weight_KD` (n^2, D).
    """

    spec_class = FlatKeySpec
    saved_per_read = 5

    def make_keys(self, memory: KeySpec) -> None:
        self.keys_HKq = nn.Parameter(torch.empty(memory.heads, memory.slots, memory.key_dim))

    def select(self, q_NHq: Tensor) -> tuple[Tensor, Tensor]:
        """The exact top-k over all keys, as `ops.flat_key_select`."""
        return ops.flat_key_select(*self.normed(q_NHq, self.keys_HKq), self.topk)
