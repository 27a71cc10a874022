"""From the residual stream to queries: a map and a normalisation.

N: tokens; D: model width; H: heads; q: width of a query; F: H * q.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm

from pkmlm.model.initial import Constant, Initial, Normal
from pkmlm.recipe.schema import Memory


def at_least_fp32(x: Tensor) -> Tensor:
    """Half precisions widened to fp32; fp64 kept."""
    return x if x.dtype == torch.float64 else x.float()


class QueryBatchNorm(nn.Module):
    """Batch normalisation of queries over the tokens of one forward, in fp32 (sec. 3.1, table 2).

    In training the statistics are those of the batch (biased variance), and running statistics follow with the unbiased
    variance, as `torch.nn.BatchNorm1d`; in evaluation the running statistics are used. In training, therefore, a query
    sees later tokens through two moments of the batch; in evaluation it sees none.

    Args:
        features: entries normalised one by one.
        momentum: weight of one forward in the running statistics.
    """

    def __init__(self, features: int, momentum: float = 0.1, eps: float = 1e-5):
        super().__init__()
        self.momentum, self.eps = momentum, eps
        self.weight = nn.Parameter(torch.empty(features))
        self.bias = nn.Parameter(torch.empty(features))
        self.running_mean: Tensor
        self.running_var: Tensor
        self.forwards: Tensor
        self.register_buffer("running_mean", torch.empty(features))
        self.register_buffer("running_var", torch.empty(features))
        self.register_buffer("forwards", torch.empty((), dtype=torch.int64))

    def initial(self) -> dict[str, Initial]:
        zero, one = Constant(0.0), Constant(1.0)
        return {
            "weight": one,
            "bias": zero,
            "running_mean": zero,
            "running_var": one,
            "forwards": Constant(0),
        }

    def forward(self, x_NF: Tensor) -> Tensor:
        if self.training:
            self.forwards += 1
        running = self.running_mean, self.running_var
        return batch_norm(x_NF, *running, self.weight, self.bias, self.training, self.momentum, self.eps)


class Query(nn.Module):
    """The query network: linear, or two maps with a ReLU between, then the normalisation of `memory.query_norm`.

    batch normalises all H * q entries by their statistics over tokens; layer and rms normalise each head's query.

    Args:
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
        """Queries (N, H, q) in fp32 (fp64 for fp64 input), whatever the autocast."""
        q_NF = self.map(x_ND)
        with torch.autocast(x_ND.device.type, enabled=False):
            q_NF = at_least_fp32(q_NF)
            if self.kind == "batch":
                return self.norm(q_NF).view(-1, self.heads, self.key_dim)
            normed: Tensor = self.norm(q_NF.view(-1, self.heads, self.key_dim))
            return normed


class UnitLinear(nn.Linear):
    """A linear map that keeps the size of a normalised input at the start: queries start alike under any norm."""

    def initial(self) -> dict[str, Initial]:
        return {"weight": Normal(self.in_features**-0.5), "bias": Constant(0.0)}
