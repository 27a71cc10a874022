"""From the residual stream to queries: a map and a normalisation.

N: tokens (of this rank); D: model width; H: heads; q: width of a query; F: H * q.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from pkmlm.device import at_least_fp32
from pkmlm.kernels.matmul import Linear
from pkmlm.model.initial import Constant, Initial, Normal
from pkmlm.model.memory.query_norm import QueryBatchNorm
from pkmlm.recipe.schema import Memory


class Query(nn.Module):
    """The query network: linear, or two maps with a ReLU between, then the normalisation of `memory.query_norm`.

    batch normalises all H * q entries by their statistics over tokens; layer and rms normalise each head's query.

    Args:
        dim: model width.
        memory: of the recipe: its `query`, `query_norm`, `heads` and `key_dim`.
        momentum: of the batch normalisation's running statistics, for one forward.
    """

    def __init__(self, dim: int, memory: Memory, momentum: float):
        super().__init__()
        self.heads, self.key_dim = memory.heads, memory.key_dim
        features = memory.heads * memory.key_dim
        last = UnitLinear(dim, features)
        self.map = last if memory.query == "linear" else nn.Sequential(UnitLinear(dim, dim), nn.ReLU(), last)
        self.kind: Literal["batch", "layer", "rms", "none"] = memory.query_norm
        self.norm: nn.Module = {
            "batch": lambda: QueryBatchNorm(features, momentum),
            "layer": lambda: nn.LayerNorm(memory.key_dim),
            "rms": lambda: nn.RMSNorm(memory.key_dim, eps=1e-6),
            "none": nn.Identity,
        }[self.kind]()

    def forward(self, x_ND: Tensor) -> Tensor:
        """Queries (N, H, q) in fp32 (fp64 for fp64 input); the maps run in the autocast's dtype, the norm in fp32."""
        q_NF = self.map(x_ND)
        with torch.autocast(x_ND.device.type, enabled=False):
            q_NF = at_least_fp32(q_NF)
            if self.kind == "batch":
                return self.norm(q_NF).view(-1, self.heads, self.key_dim)
            normed: Tensor = self.norm(q_NF.view(-1, self.heads, self.key_dim))
            return normed


class UnitLinear(Linear):
    """A linear map that keeps the size of a normalised input at the start: queries start alike under any norm."""

    def initial(self) -> dict[str, Initial]:
        return {"weight": Normal(self.in_features**-0.5), "bias": Constant(0.0)}
