"""What an export has in place of pkmlm's fast kernels (`pkmlm.kernels.backend`) and of its ranks (`pkmlm.distributed`):
kernels in plain torch, on any device, a few tokens at a time; and one process.

What a table in half precision holds is summed in fp32, and so are the products with it. The legend of letters is that
of `pkmlm.kernels.reference`.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from pkmlm.kernels.reference import (
    Quantized,
    Segments,
    candidate_pairs,
    dequantize,
)
from pkmlm.kernels.reference import bucket_reads as bucket_reads
from pkmlm.kernels.reference import score_gradients as score_gradients
from pkmlm.kernels.reference import sort_reads as sort_reads

LEARNS_BUCKETS = KEEPS_SUMS = False  # as in the reference
ENTRIES = 1 << 24  # of rows that exist at a time


@dataclass(frozen=True)
class World:
    """One process, alone."""

    rank: int = 0
    size: int = 1


def of(x: Tensor) -> ModuleType:
    """The module whose kernels take tensors like x: this one."""
    return sys.modules[__name__]


def top_k(scores_Rn: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k highest fp32 scores of each row and their columns, highest first; equal scores by column, lowest first."""
    n = scores_Rn.shape[-1]
    bits_Rn = (scores_Rn + 0.0).view(torch.int32)  # + 0.0: -0 and 0 are equal scores
    ordered_Rn = bits_Rn ^ ((bits_Rn >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    last_first_n = torch.arange(n - 1, -1, -1, device=scores_Rn.device)
    keys_Rk = torch.topk((ordered_Rn.long() << 32) | last_first_n, k, dim=-1).values
    column_Rk = n - 1 - (keys_Rk & 0xFFFFFFFF)
    return scores_Rn.gather(-1, column_Rk), column_Rk


def product_key_search(q_NHd: Tensor, subkeys_H2nf: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best product keys of each query, as in the reference: scores and slots (N, H, k)."""
    heads, _, n, f = subkeys_H2nf.shape
    scores_2Rn = torch.einsum("nhjf,hjkf->jnhk", q_NHd.view(-1, heads, 2, f), subkeys_H2nf).flatten(1, 2)
    (best1_Rk, i_Rk), (best2_Rk, j_Rk) = (top_k(scores_Rn, min(n, k)) for scores_Rn in scores_2Rn)
    a_c, b_c = torch.tensor(candidate_pairs(n, k), device=q_NHd.device)
    best_Rk, chosen_Rk = top_k(best1_Rk[:, a_c] + best2_Rk[:, b_c], k)
    slots_Rk = (i_Rk[:, a_c] * n + j_Rk[:, b_c]).gather(1, chosen_Rk)
    return best_Rk.view(-1, heads, k), slots_Rk.view(-1, heads, k)


def weighted_row_sum(values_KD: Tensor, slots_Nr: Tensor, weights_Nr: Tensor) -> Tensor:
    """out[t] = sum over r of weights[t, r] * values[slots[t, r]]: (N, D), fp32; on the weights' device."""
    if values_KD.dtype == torch.float32 and values_KD.device == slots_Nr.device:
        return embedding_bag(slots_Nr, values_KD, mode="sum", per_sample_weights=weights_Nr.float())
    return torch.cat([sums_of(rows_nrD, w_nr) for rows_nrD, w_nr in parts(of_table(values_KD), slots_Nr, weights_Nr)])


def row_products(values_KD: Tensor, x_ND: Tensor, slots_Nr: Tensor) -> Tensor:
    """<x[t], values[slots[t, r]]>: (N, r), fp32; on the device of x."""
    return torch.cat([products_of(rows_nrD, x_nD) for rows_nrD, x_nD in parts(of_table(values_KD), slots_Nr, x_ND)])


def quantized_row_sum(table: Quantized, slots_Nr: Tensor, weights_Nr: Tensor) -> Tensor:
    """`weighted_row_sum` of a table in few bits."""
    return torch.cat([sums_of(rows_nrD, w_nr) for rows_nrD, w_nr in parts(of_bits(table), slots_Nr, weights_Nr)])


def quantized_row_products(table: Quantized, x_ND: Tensor, slots_Nr: Tensor) -> Tensor:
    """`row_products` of a table in few bits."""
    return torch.cat([products_of(rows_nrD, x_nD) for rows_nrD, x_nD in parts(of_bits(table), slots_Nr, x_ND)])


def segment_sum(x_ND: Tensor, segments: Segments) -> Tensor:
    """out[u] = sum over the reads of row u of weight * x[token]: (U, D), in the dtype of the weights."""
    weight_M = segments.weight_M
    sums_UD = embedding_bag(
        segments.token_M, x_ND.float(), segments.start_S[:-1], mode="sum", per_sample_weights=weight_M.float()
    )
    return sums_UD.to(weight_M.dtype)


def segment_add_(out_KD: Tensor, x_ND: Tensor, segments: Segments, read_K: Tensor | None = None) -> None:
    """Add `segment_sum` to the rows of a table, in place, and mark these rows in `read_K` (bool)."""
    out_KD.index_add_(0, segments.rows_U, segment_sum(x_ND, segments))
    if read_K is not None:
        read_K[segments.rows_U] = True


def sums_of(rows_nrD: Tensor, weights_nr: Tensor) -> Tensor:
    return torch.einsum("nr,nrd->nd", weights_nr.float(), rows_nrD)


def products_of(rows_nrD: Tensor, x_nD: Tensor) -> Tensor:
    return torch.einsum("nd,nrd->nr", x_nD.float(), rows_nrD)


Rows = tuple[Callable[[Tensor], Tensor], int, torch.device]


def of_table(values_KD: Tensor) -> Rows:
    """What gives rows (S, D) of a table, in fp32, by their numbers; their width; where the table is."""
    return lambda rows_S: values_KD[rows_S].float(), values_KD.shape[1], values_KD.device


def of_bits(table: Quantized) -> Rows:
    """As `of_table`, of a table in few bits."""
    return lambda rows_S: dequantize(table.take(rows_S)), table.width, table.scale_K.device


def parts(rows: Rows, slots_Nr: Tensor, x_NX: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows (n, r, D) that a few tokens read, with these tokens' part of x, on the device of x."""
    take, width, device = rows
    size = max(1, ENTRIES // (slots_Nr.shape[1] * width))
    for slots_nr, x_nX in zip(slots_Nr.split(size), x_NX.split(size), strict=True):
        yield take(slots_nr.flatten().to(device)).view(*slots_nr.shape, width).to(x_NX.device), x_nX
