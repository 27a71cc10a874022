"""Exact top-k and product-key top-k for CUDA, in Triton: a warp searches a row, in registers.

Score and column are packed into one int64, the score's bits in the order of the floats above the column's distance from
the end: all keys of a row differ, so their order is total, and of equal scores the lowest column is the highest key.
`tl.topk` sorts no more of them than it must (Shanbhag, Pirk and Madden 2018, bitonic top-k).

Unmeasured on a GPU. From the machine code for an H100 by Triton 3.9, at n = 1,024 and k = 32: 19 thousand instructions
a query for its warp, 3 thousand of them shuffles, 72 registers a thread; 0.7 ms for 8,192 tokens of 4 heads, were one
issued in every cycle. (Triton 3.7, which comes with torch 2.13: 90 registers, and code 18 % longer.) torch's own top-k
selects from int64 in 32 passes over each row, between a dozen elementwise operations.

R: rows (queries); n: scores of a row; k: columns to select; c: pairs of ranks; W, P: columns and pairs at a time; K, H:
k, and the smaller one of k and n, up to a power of two.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2
from triton.language import constexpr

from pkmlm.kernels.reference import candidate_pairs

COLUMNS = 256  # at a time: 8 a thread, in code that an SM's instruction cache holds (85 KB)
PART = 4096  # columns of a row that one program searches: flat keys come in rows of up to millions
MOST_WARPS = 32  # that a GPU gives a program
NONE = constexpr(-(1 << 63))  # below all scores
NAN = constexpr(0x7FFFFFFF)  # above all
PLACE = constexpr(0xFFFFFFFF)


@triton.jit
def _packed(scores_W: tl.tensor, behind_W: tl.tensor, some_W: tl.tensor) -> tl.tensor:
    """Integers in the order of the scores, equal ones by how many places lie behind theirs; NaN is above all."""
    scores_W = scores_W.to(tl.float32) + 0.0  # -0 and 0 are equal scores
    bits_W = tl.where(scores_W != scores_W, NAN, scores_W.to(tl.int32, bitcast=True))
    ordered_W = bits_W ^ ((bits_W >> 31) & NAN)
    return tl.where(some_W, (ordered_W.to(tl.int64) << 32) | behind_W, NONE)


@triton.jit
def _score(packed_K: tl.tensor) -> tl.tensor:
    ordered_K = (packed_K >> 32).to(tl.int32)
    return (ordered_K ^ ((ordered_K >> 31) & NAN)).to(tl.float32, bitcast=True)


@triton.jit
def _with(best_K: tl.tensor, packed_W: tl.tensor, K: constexpr) -> tl.tensor:
    """The K highest of the highest so far and of these, highest first."""
    return tl.topk(tl.join(best_K, tl.topk(packed_W, K)).reshape(2 * K), K)


@triton.jit
def _best(scores: tl.tensor, n: constexpr, W: constexpr, K: constexpr) -> tl.tensor:
    """The K highest of a row, packed."""
    best_K = tl.full((K,), NONE, tl.int64)
    for first in range(0, n, W):
        column_W = first + tl.arange(0, W)
        scores_W = tl.load(scores + column_W, mask=column_W < n, other=0)
        best_K = _with(best_K, _packed(scores_W, n - 1 - column_W, column_W < n), K)
    return best_K


@triton.jit
def _top_k_rows(scores: tl.tensor, columns: tl.tensor, n: constexpr, k: constexpr, W: constexpr, K: constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    best_K = _best(scores + row * n, n, W, K)
    place_K = tl.arange(0, K)
    tl.store(columns + row * k + place_K, n - 1 - (best_K & PLACE), mask=place_K < k)


@triton.jit
def _product_rows(
    scores1: tl.tensor,
    scores2: tl.tensor,
    pairs: tl.tensor,
    i: tl.tensor,
    j: tl.tensor,
    n: constexpr,
    k: constexpr,
    c: constexpr,
    W: constexpr,
    H: constexpr,
    P: constexpr,
    K: constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    best1_H, best2_H = _best(scores1 + row * n, n, W, H), _best(scores2 + row * n, n, W, H)
    score1_H, score2_H = _score(best1_H), _score(best2_H)
    best_K = tl.full((K,), NONE, tl.int64)
    for first in range(0, c, P):
        pair_P = first + tl.arange(0, P)
        a_P = tl.load(pairs + pair_P, mask=pair_P < c, other=0)
        b_P = tl.load(pairs + c + pair_P, mask=pair_P < c, other=0)
        sums_P = tl.gather(score1_H, a_P, 0) + tl.gather(score2_H, b_P, 0)
        best_K = _with(best_K, _packed(sums_P, c - 1 - pair_P, pair_P < c), K)
    place_K = tl.arange(0, K)
    pair_K = tl.where(place_K < k, c - 1 - (best_K & PLACE), 0)
    i_K = tl.gather(best1_H, tl.load(pairs + pair_K), 0)
    j_K = tl.gather(best2_H, tl.load(pairs + c + pair_K), 0)
    tl.store(i + row * k + place_K, n - 1 - (i_K & PLACE), mask=place_K < k)
    tl.store(j + row * k + place_K, n - 1 - (j_K & PLACE), mask=place_K < k)


def top_k(scores_Rn: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`reference.top_k`, for floats of up to 32 bits.

    Of few long rows each part is searched by a program of its own, and then the best of all parts, which stand in the
    order of their columns where they are equal.
    """
    rows, n = scores_Rn.shape
    if n > PART > k and n % PART == 0:
        parts = n // PART
        best, columns = top_k(scores_Rn.reshape(rows * parts, PART), k)
        columns = columns.view(rows, parts, k) + torch.arange(0, n, PART, device=columns.device)[:, None]
        best_Rk, chosen_Rk = top_k(best.view(rows, parts * k), k)
        return best_Rk, columns.flatten(1).gather(1, chosen_Rk)
    columns_Rk = torch.empty(rows, k, dtype=torch.int64, device=scores_Rn.device)
    _launch(_top_k_rows, scores_Rn.contiguous(), columns_Rk, n=n, k=k, W=_wide(n, k))
    return scores_Rn.gather(-1, columns_Rk), columns_Rk


def product_top_k(scores1_Rn: Tensor, scores2_Rn: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`reference.product_top_k`, for floats of up to 32 bits."""
    rows, n = scores1_Rn.shape
    i_Rk, j_Rk = (torch.empty(rows, k, dtype=torch.int64, device=scores1_Rn.device) for _ in range(2))
    pairs_2c = _pairs(n, k, scores1_Rn.device)
    c, most = pairs_2c.shape[1], min(n, k)
    arguments = scores1_Rn.contiguous(), scores2_Rn.contiguous(), pairs_2c, i_Rk, j_Rk
    _launch(_product_rows, *arguments, n=n, k=k, c=c, W=_wide(n, most), H=_power(most), P=_wide(c, k))
    return i_Rk, j_Rk


def _power(k: int) -> int:
    """The next power of two, but 2 for 1, which `tl.topk` took first in Triton 3.9."""
    return max(2, next_power_of_2(k))


def _wide(n: int, k: int) -> int:
    """How many of n numbers to take at a time, of which k are wanted."""
    return max(_power(k), min(COLUMNS, _power(n)))


def _launch(kernel: Any, scores_Rn: Tensor, *arguments: Tensor, k: int, **sizes: int) -> None:
    """Run a program for each row."""
    power = _power(k)
    warps = min(MOST_WARPS, max(1, power // COLUMNS))
    with torch.cuda.device_of(scores_Rn):
        kernel[(len(scores_Rn),)](scores_Rn, *arguments, k=k, K=power, **sizes, num_warps=warps, enable_fp_fusion=True)


@cache
def _pairs(n: int, k: int, device: torch.device) -> Tensor:
    """`candidate_pairs` (2, c), int32; from pinned memory, so that the host does not wait for the copy."""
    pairs_2c = torch.tensor(candidate_pairs(n, k), dtype=torch.int32, pin_memory=device.type == "cuda")
    return pairs_2c.to(device, non_blocking=True)
