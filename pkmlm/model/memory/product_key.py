"""Product-key memory (Lample et al. 2019, sec. 3).

B: sequences; T: positions; N: tokens (B * T); D: model width; H: heads; q: width of a query; n: sub-keys of a half; f:
q / 2; k: slots a head reads.
"""

import torch
from torch import Tensor, nn

from pkmlm.kernels import ops
from pkmlm.model.initial import Initial, Uniform
from pkmlm.model.memory.query import Query, at_least_fp32
from pkmlm.model.memory.usage_tap import UsageTap
from pkmlm.model.memory.values import Values
from pkmlm.recipe.schema import Memory


class ProductKeyMemory(nn.Module):
    """m(x) = sum over heads and selected slots of w * v (eq. 1 to 4), over n^2 slots with 2n sub-keys a head.

    All heads share the values; each has its own queries and its own two sets of sub-keys. Sub-keys start at
    U(+-1/sqrt(f)), values at N(0, 1/D) (not in the paper; the authors' released choice).

    Args:
        dim: model width.
        layer: the block it stands in, counted from 1.
        compact: gradients of the values only for rows read.
        momentum: of the query's batch normalisation, for one forward.
    """

    def __init__(self, dim: int, memory: Memory, layer: int, *, compact: bool, momentum: float):
        super().__init__()
        n, half = memory.num_keys, memory.key_dim // 2
        self.topk = memory.topk
        self.query = Query(dim, memory, momentum)
        self.subkeys_H2nf = nn.Parameter(torch.empty(memory.heads, 2, n, half))
        self.tap = UsageTap(layer, "memory", memory.kind, n * n, memory.heads)
        self.values = Values(n * n, dim, std=dim**-0.5, group="values", compact=compact)

    def initial(self) -> dict[str, Initial]:
        return {"subkeys_H2nf": Uniform(self.subkeys_H2nf.shape[-1] ** -0.5)}

    def forward(self, x_BTD: Tensor) -> Tensor:
        """The memory's answer (B, T, D), in the dtype of the values."""
        q_NHq = self.query(x_BTD.flatten(0, 1))
        with torch.autocast(x_BTD.device.type, enabled=False):
            scores_NHk, slots_NHk = ops.product_key_select(q_NHq, at_least_fp32(self.subkeys_H2nf), self.topk)
            slots_NHk, weights_NHk = self.tap(slots_NHk, scores_NHk.softmax(-1))
            return self.values(slots_NHk.flatten(1), weights_NHk.flatten(1)).view_as(x_BTD)
