"""Exact top-k and product-key top-k on the CPU, fp32.

A row is searched in three passes that a compiler turns into vector instructions: the maxima of strided lanes; the k-th
largest of these, a bound that at least k scores reach; and the rank of each of the few scores that reach it, by
counting those above it. Scores are compared as integers in the order of the floats, with NaN above all.

R: rows (queries); n: scores of a row; k: columns to select; l: lanes; m: scores that reach the bound; c: pairs.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pkmlm.kernels.compiled import compiled, even_bounds, over_threads
from pkmlm.kernels.reference import candidate_pairs

LOWEST, HIGHEST = np.int32(-(1 << 31)), np.int32((1 << 31) - 1)
INFINITY = np.int32(0x7F800000)  # its bits; those of NaN are above
VECTOR = 16  # loops over scratch are padded to whole vectors


def top_k(scores_Rn: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`reference.top_k`."""
    rows, n = scores_Rn.shape
    column_Rk = torch.empty(rows, k, dtype=torch.int64)
    over_threads(_top_k_rows, even_bounds(rows, n), _bits(scores_Rn), k, column_Rk.numpy())
    return scores_Rn.gather(-1, column_Rk), column_Rk


def product_top_k(scores1_Rn: Tensor, scores2_Rn: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`reference.product_top_k`."""
    rows, n = scores1_Rn.shape
    i_Rk, j_Rk = (torch.empty(rows, k, dtype=torch.int64) for _ in range(2))
    pairs_2c = np.array(candidate_pairs(n, k))
    halves = (_bits(scores1_Rn), _bits(scores2_Rn))
    over_threads(_product_rows, even_bounds(rows, 2 * n), *halves, pairs_2c, k, i_Rk.numpy(), j_Rk.numpy())
    return i_Rk, j_Rk


def _bits(scores_Rn: Tensor) -> Any:
    return scores_Rn.detach().contiguous().numpy().view(np.int32)


@compiled
def _ordered(bits: Any) -> Any:
    """An integer in the order of the float that has these bits; -0 and 0 are equal, NaN is above all."""
    if bits == LOWEST:
        bits = np.int32(0)
    if bits & HIGHEST > INFINITY:
        bits = HIGHEST
    return bits ^ ((bits >> np.int32(31)) & HIGHEST)


@compiled
def _scratch(n: int, k: int) -> Any:
    """Room for `_best` on rows of up to n scores."""
    lanes = max(64, (2 * k + VECTOR - 1) // VECTOR * VECTOR)
    room = max(n, lanes) + VECTOR
    found_m, column_m, above_m = np.empty(room, np.int32), np.empty(room, np.int32), np.empty(room, np.int32)
    return np.empty(room, np.int32), np.empty(lanes, np.int32), found_m, column_m, above_m, np.empty(k, np.int32)


@compiled
def _count_above(x_m: Any, size: int, above_m: Any) -> None:
    """above[i] = how many of x[:size] are greater than x[i]."""
    for i in range(size):
        above_m[i] = 0
    for j in range(size):
        x = x_m[j]
        for i in range(size):
            above_m[i] = np.int32(above_m[i] + np.int32(x > x_m[i]))


@compiled
def _bound(x_n: Any, n: int, k: int, lane_l: Any, above_m: Any) -> Any:
    """A number that at least k of x[:n] reach: the k-th largest of the maxima of strided lanes."""
    lanes = len(lane_l)
    if n <= lanes:
        return LOWEST
    for i in range(lanes):
        lane_l[i] = x_n[i]
    whole = n // lanes * lanes
    for start in range(lanes, whole, lanes):
        for i in range(lanes):
            lane_l[i] = max(lane_l[i], x_n[start + i])
    for i in range(n - whole):
        lane_l[i] = max(lane_l[i], x_n[whole + i])
    _count_above(lane_l, lanes, above_m)
    bound = HIGHEST
    for i in range(lanes):
        if above_m[i] < k:
            bound = min(bound, lane_l[i])
    return bound


@compiled
def _best(n: int, k: int, scratch: Any, column_k: Any) -> None:
    """The columns of the k highest of the n integers in scratch, highest first, equal ones by column."""
    x_n, lane_l, found_m, column_m, above_m, equal_k = scratch
    bound = _bound(x_n, n, k, lane_l, above_m)
    found = equal = 0
    for column in range(n):
        # Branch-free: always write; advance only if it is above the bound or among the first k equal to it.
        x = x_n[column]
        found_m[found], column_m[found] = x, column
        found += np.int64((x > bound) | ((x == bound) & (equal < k)))
        equal += np.int64(x == bound)
    padded = (found + VECTOR - 1) // VECTOR * VECTOR
    found_m[found:padded] = LOWEST
    _count_above(found_m, padded, above_m)
    equal_k[:] = 0
    for m in range(found):
        rank = above_m[m]
        if rank < k:
            place = rank + equal_k[rank]
            equal_k[rank] += 1
            if place < k:
                column_k[place] = column_m[m]


@compiled
def _top_k_rows(first: int, stop: int, bits_Rn: Any, k: int, column_Rk: Any) -> None:
    n = bits_Rn.shape[1]
    scratch = _scratch(n, k)
    for row in range(first, stop):
        for column in range(n):
            scratch[0][column] = _ordered(bits_Rn[row, column])
        _best(n, k, scratch, column_Rk[row])


@compiled
def _product_rows(
    first: int, stop: int, bits1_Rn: Any, bits2_Rn: Any, pairs_2c: Any, k: int, i_Rk: Any, j_Rk: Any
) -> None:
    n, pairs = bits1_Rn.shape[1], pairs_2c.shape[1]
    most = min(n, k)
    half, whole = _scratch(n, most), _scratch(pairs, k)
    best1_k, best2_k, chosen_k = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(k, np.int64)
    sum_c = np.empty(pairs, np.float32)
    sum_bits_c = sum_c.view(np.int32)
    for row in range(first, stop):
        for column in range(n):
            half[0][column] = _ordered(bits1_Rn[row, column])
        _best(n, most, half, best1_k)
        for column in range(n):
            half[0][column] = _ordered(bits2_Rn[row, column])
        _best(n, most, half, best2_k)
        score1_n, score2_n = bits1_Rn[row].view(np.float32), bits2_Rn[row].view(np.float32)
        for c in range(pairs):
            sum_c[c] = score1_n[best1_k[pairs_2c[0, c]]] + score2_n[best2_k[pairs_2c[1, c]]]
        for c in range(pairs):
            whole[0][c] = _ordered(sum_bits_c[c])
        _best(pairs, k, whole, chosen_k)
        for place in range(k):
            i_Rk[row, place] = best1_k[pairs_2c[0, chosen_k[place]]]
            j_Rk[row, place] = best2_k[pairs_2c[1, chosen_k[place]]]
