"""Exact top-k by one integer top-k of torch, for GPUs: score and column packed into an int64.

The packing makes all keys of a row distinct, so the order is total and the same on every device.

R: rows (queries); n: scores of a row; k: columns to select.
"""

import torch
from torch import Tensor

from pkmlm.kernels import reference


def top_k(scores_Rn: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`reference.top_k`, for floats of up to 32 bits."""
    n = scores_Rn.shape[-1]
    bits_Rn = (scores_Rn.float() + 0.0).view(torch.int32)  # + 0.0: -0 and 0 are equal scores
    bits_Rn = bits_Rn.masked_fill(scores_Rn.isnan(), 0x7FFFFFFF)  # above all
    ordered_Rn = bits_Rn ^ ((bits_Rn >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    last_first_n = torch.arange(n - 1, -1, -1, device=scores_Rn.device)
    packed_Rk = torch.topk((ordered_Rn.long() << 32) | last_first_n, k, dim=-1).values
    column_Rk = n - 1 - (packed_Rk & 0xFFFFFFFF)
    return scores_Rn.gather(-1, column_Rk), column_Rk


def product_top_k(scores1_Rn: Tensor, scores2_Rn: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`reference.product_top_k`, on `top_k`."""
    return reference.product_top_k(scores1_Rn, scores2_Rn, k, top_k)
