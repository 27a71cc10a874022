"""From the residual stream to queries: a linear map or a small network, then a normalisation. Batch normalisation takes
its statistics over the tokens of all ranks.

N: tokens (of this rank); D: model width; H: heads; q: width of a query; F: H * q; W: ranks.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import batch_norm

from pkmlm.distributed import World
from pkmlm.kernels.matmul import Linear, at_least_fp32, without_autocast
from pkmlm.memory.base import is_recomputing
from pkmlm.memory.init import Constant, InitSpec
from pkmlm.memory.key_spec import KeySpec

EPSILON = 1e-5  # of the batch normalisation
RMS_EPSILON = 1e-6


class Query(nn.Module):
    """The query network: linear, or two maps with a ReLU between, then the normalisation of `memory.query_norm`.

    batch normalises all H * q entries by their statistics over tokens; layer and rms normalise each head's query. All
    heads share the first of the two maps (D to D) and its ReLU; each has its own part of the second.

    Args:
        dim: model width.
        memory: its `query`, `query_norm`, `heads` and `key_dim`.
        momentum: of the batch normalisation's running statistics, for one forward.
    """

    def __init__(self, dim: int, memory: KeySpec, momentum: float):
        super().__init__()
        self.heads, self.key_dim = memory.heads, memory.key_dim
        features = memory.heads * memory.key_dim
        std = dim**-0.5  # keeps the size of a normalised input, so that queries start the same under any norm
        self.map: nn.Module = Linear(dim, features, initial_std=std)
        if memory.query == "mlp":
            self.map = nn.Sequential(Linear(dim, dim, initial_std=std), nn.ReLU(), self.map)
        self.norm: nn.Module = nn.Identity()
        match memory.query_norm:
            case "batch":
                self.norm = QueryBatchNorm(features, momentum)
            case "layer":
                self.norm = nn.LayerNorm(memory.key_dim)
            case "rms":
                self.norm = nn.RMSNorm(memory.key_dim, eps=RMS_EPSILON)

    def forward(self, x_ND: Tensor) -> Tensor:
        """(N, D) to queries (N, H, q), in fp32 (fp64 for fp64 input). The maps run in the autocast's dtype."""
        q_NF = self.map(x_ND)
        with without_autocast(x_ND.device):
            q_NF = at_least_fp32(q_NF)
            if isinstance(self.norm, QueryBatchNorm):
                return self.norm(q_NF).view(-1, self.heads, self.key_dim)
            return self.norm(q_NF.view(-1, self.heads, self.key_dim))


class QueryBatchNorm(nn.Module):
    """Batch normalisation of queries over the tokens of one forward, in fp32 (Lample et al. 2019, sec. 3.1, table 2).

    In training the statistics are those of the batch (biased variance), and running statistics are updated with the
    unbiased variance, as in `torch.nn.BatchNorm1d`, though not when activations are recomputed; in evaluation the
    running statistics are used. In training, a query therefore sees later tokens through two moments of the batch; in
    evaluation it sees none. If ranks train together, the statistics are those of all ranks' tokens (equally many on
    each), and all keep the same running statistics.

    Args:
        features: entries normalised one by one.
        momentum: weight of one forward in the running statistics.

    Attributes:
        running_mean, running_var: the running statistics (F), in fp32.
        ranks: those whose tokens are normalised together.
    """

    def __init__(self, features: int, momentum: float):
        super().__init__()
        self.momentum = momentum
        self.ranks = World()
        self.weight = nn.Parameter(torch.empty(features))
        self.bias = nn.Parameter(torch.empty(features))
        self.running_mean: Tensor
        self.running_var: Tensor
        self.register_buffer("running_mean", torch.empty(features))
        self.register_buffer("running_var", torch.empty(features))

    def init_spec(self) -> dict[str, InitSpec]:
        zero, one = Constant(0.0), Constant(1.0)
        return {"weight": one, "bias": zero, "running_mean": zero, "running_var": one}

    def forward(self, x_NF: Tensor) -> Tensor:
        """(N, F) to (N, F), in fp32. In training on several ranks, all of them call this."""
        if self.training and self.ranks.size > 1:
            return self._over_ranks(x_NF)
        mean_F, var_F = self.running_mean, self.running_var
        if self.training and is_recomputing():
            mean_F, var_F = mean_F.clone(), var_F.clone()
        return batch_norm(x_NF, mean_F, var_F, self.weight, self.bias, self.training, self.momentum, EPSILON)

    def _over_ranks(self, x_NF: Tensor) -> Tensor:
        mean_F, var_F = moments(x_NF.detach(), self.ranks)
        tokens = len(x_NF) * self.ranks.size
        if not is_recomputing():
            self.running_mean.lerp_(mean_F, self.momentum)
            self.running_var.lerp_(var_F * (tokens / (tokens - 1)), self.momentum)
        scale_F = (var_F + EPSILON).rsqrt()
        return _BatchNorm.apply(x_NF, self.weight, self.bias, mean_F, scale_F, self.ranks)


def moments(x_NF: Tensor, ranks: World) -> tuple[Tensor, Tensor]:
    """Mean and biased variance over the rows of all ranks, from each rank's mean and sum of squared deviations (the
    parallel form of Chan, Golub and LeVeque, which does not cancel as a difference of squares would)."""
    mean_F = x_NF.mean(0)
    own_12F = torch.stack([mean_F, (x_NF - mean_F).square().sum(0)])[None]
    mean_WF, square_WF = ranks.all_gather(own_12F).unbind(1)
    mean_F = mean_WF.mean(0)
    between_F = (mean_WF - mean_F).square().mean(0)
    return mean_F, square_WF.sum(0) / (len(x_NF) * ranks.size) + between_F


class _BatchNorm(torch.autograd.Function):
    """(x - mean) * scale * weight + bias. mean and scale = 1 / sqrt(var + eps) depend on all ranks' x; the backward
    accounts for it."""

    @staticmethod
    def forward(
        ctx: Any, x_NF: Tensor, weight_F: Tensor, bias_F: Tensor, mean_F: Tensor, scale_F: Tensor, ranks: World
    ) -> Tensor:
        ctx.ranks = ranks
        ctx.save_for_backward(x_NF, weight_F, mean_F, scale_F)
        return torch.addcmul(bias_F, x_NF - mean_F, scale_F * weight_F)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NF: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        x_NF, weight_F, mean_F, scale_F = ctx.saved_tensors
        normed_NF = (x_NF - mean_F) * scale_F
        bias_grad, weight_grad = grad_NF.sum(0), (grad_NF * normed_NF).sum(0)
        all_2F = ctx.ranks.all_sum(torch.stack([bias_grad, weight_grad])) / (len(x_NF) * ctx.ranks.size)
        x_grad = (grad_NF - all_2F[0] - normed_NF * all_2F[1]) * (weight_F * scale_F)
        return x_grad, weight_grad, bias_grad, None, None, None
