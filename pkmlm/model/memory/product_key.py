"""Product-key memory (Lample et al. 2019, sec. 3).

N: tokens; H: heads; q: width of a query; n: sub-keys of a half; f: q / 2; k: slots a head reads.
"""

import torch
from torch import Tensor, nn

from pkmlm.kernels import ops
from pkmlm.model.initial import Initial, Uniform
from pkmlm.model.memory.key_memory import KeyMemory
from pkmlm.recipe.schema import Memory


class ProductKeyMemory(KeyMemory):
    """A memory of n^2 slots searched with 2n sub-keys a head (eq. 4).

    Each head has its own two sets of sub-keys; they start at U(+-1/sqrt(f)) (not in the paper; the authors' code).

    Raises:
        ValueError: as `KeyMemory`, or the width of a query is odd.
    """

    kind = "product-key"

    def __init__(self, dim: int, memory: Memory, layer: int, momentum: float):
        super().__init__(dim, memory, layer, momentum)
        if memory.key_dim % 2:
            raise ValueError(f"key_dim: found {memory.key_dim} (expected an even number, to be halved)")
        self.subkeys_H2nf = nn.Parameter(torch.empty(memory.heads, 2, memory.num_keys, memory.key_dim // 2))

    def initial(self) -> dict[str, Initial]:
        return {"subkeys_H2nf": Uniform(self.subkeys_H2nf.shape[-1] ** -0.5)}

    def select(self, q_NHq: Tensor) -> tuple[Tensor, Tensor]:
        """The exact top-k over all n^2 product keys, as `ops.product_key_select`."""
        return ops.product_key_select(q_NHq, self.subkeys_H2nf, self.topk)
