"""A table of rows whose columns are divided among ranks: the two collectives on its way, with their gradients.

N: a rank's tokens; M: ranks; r: reads of a token; D: width of the table; d: columns of one rank (D / M).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pkmlm.distributed import World


class _Gathered(torch.autograd.Function):
    """Rows of all ranks, on each; the gradient of a row is the sum of what all ranks make of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: World) -> Tensor:
        ctx.ranks = ranks
        return ranks.all_gather(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.reduce_scatter(grad), None


class _Exchanged(torch.autograd.Function):
    """Parts of each rank's rows, on the ranks that they belong to; gradients take the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: World) -> Tensor:
        ctx.ranks = ranks
        return ranks.all_to_all(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.all_to_all(grad), None


def gathered_reads(slots_Nr: Tensor, weights_Nr: Tensor, ranks: World) -> tuple[Tensor, Tensor]:
    """The reads of all ranks' tokens, on each: slots and weights (M * N, r). Slots, below 2^31, travel as int32."""
    weights: Tensor = _Gathered.apply(weights_Nr, ranks)
    return ranks.all_gather(slots_Nr.int()).long(), weights


def returned(out_Ad: Tensor, ranks: World) -> Tensor:
    """From this rank's columns for all ranks' tokens (M * N, d), all columns for this rank's tokens: (N, D)."""
    columns: Tensor = _Exchanged.apply(out_Ad, ranks)
    return side_by_side(columns, ranks.size)


def side_by_side(parts_Ad: Tensor, ranks: int) -> Tensor:
    """(M * N, d), the ranks' columns one after the other, as (N, D)."""
    return parts_Ad.view(ranks, -1, parts_Ad.shape[-1]).transpose(0, 1).flatten(1)
