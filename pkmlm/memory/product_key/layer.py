"""Product keys (Lample et al. 2019, sec. 3): the exact k best of n^2 slots, found by 2n sub-keys.

H: heads; n: sub-keys of a half; f: width of a sub-key; N: tokens; q: width of a query; k: slots a head reads.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from pkmlm.kernels import ops
from pkmlm.memory.key_memory import KeyMemory
from pkmlm.memory.key_spec import KeySpec
from pkmlm.memory.product_key.spec import ProductKeySpec


class ProductKeyMemory(KeyMemory):
    """A memory of n^2 slots searched with 2n sub-keys a head (eq. 4).

    Each head has its own two sets of sub-keys; they start at U(+-1/sqrt(f)) (not in the paper; the authors' code). The
    parameters are `subkeys_H2nf`, those of the `query` network, and the values, `values.weight_KD` (n^2, D), of which
    a step of training changes few rows: see `pkmlm.memory.row_adam.RowAdam`.
    """

    spec_class: ClassVar[type[KeySpec]] = ProductKeySpec
    saved_per_read = 3

    def make_keys(self, memory: KeySpec) -> None:
        self.subkeys_H2nf = nn.Parameter(torch.empty(memory.heads, 2, memory.num_keys, memory.key_dim // 2))

    def select(self, q_NHq: Tensor) -> tuple[Tensor, Tensor]:
        """The exact top-k over all n^2 product keys, as `ops.product_key_select`."""
        return ops.product_key_select(*self.normed(q_NHq, self.subkeys_H2nf), self.topk)
