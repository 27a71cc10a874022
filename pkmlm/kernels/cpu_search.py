"""Searches for the best scores on the CPU, compiled by numba, in fp32.

All are exact. A row is searched in three steps: take the maxima of strided lanes; find, by bisection, a bound that k or
a few more of these maxima reach; rank the few scores that reach the bound, by counting those above each. Scores are
compared as integers in the order of the floats, with NaN above all.

N: tokens; C: tokens at a time; R: rows of scores (queries); n: scores of a row; k: columns to select; l: lanes; m:
scores that reach the bound; c: pairs of ranks; H: heads; d: width of a query; f: d / 2.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pkmlm.kernels.jit import array_of, call, compiled, even_bounds, kernel, over_threads
from pkmlm.kernels.matmul import matmul_nt, row_chunks
from pkmlm.kernels.reference import candidate_pairs

LOWEST, HIGHEST = np.int32(-(1 << 31)), np.int32((1 << 31) - 1)
INFINITY = np.int32(0x7F800000)  # its bits; those of NaN are above
HALVINGS = 8  # of the range as floats; then it is halved as integers, for floats of very different sizes
FEW = 32  # up to so many queries, as in decoding, are searched in one call and thread: starting several takes longer
CHUNK = 1 << 19  # scores of a head at a time: 2 MB, which a core's caches keep from the product to the search


def top_k(scores_Rn: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`reference.top_k`."""
    rows, n = scores_Rn.shape
    column_Rk = torch.empty(rows, k, dtype=torch.int64)
    over_threads(_top_k_rows, even_bounds(rows, n), array_of(scores_Rn).view(np.int32), k, column_Rk.numpy())
    return scores_Rn.gather(-1, column_Rk), column_Rk


def product_top_k(scores1_Rn: Tensor, scores2_Rn: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`reference.product_top_k`."""
    rows = len(scores1_Rn)
    sums_R1k, slots_R1k = scores1_Rn.new_empty(rows, 1, k), torch.empty(rows, 1, k, dtype=torch.int64)
    _search(scores1_Rn, scores2_Rn, k, 0, 0, sums_R1k, slots_R1k)
    return sums_R1k[:, 0], slots_R1k[:, 0]


def product_key_search(q_NHd: Tensor, subkeys_H2nf: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`reference.product_key_search`, for some tokens of one head at a time."""
    tokens, heads, _ = q_NHd.shape
    n, f = subkeys_H2nf.shape[2:]
    scores_NHk, slots_NHk = q_NHd.new_empty(tokens, heads, k), torch.empty(tokens, heads, k, dtype=torch.int64)
    if tokens * heads <= FEW:
        found = scores_NHk.numpy(), slots_NHk.numpy()
        call(_search_few, array_of(q_NHd), array_of(subkeys_H2nf), _pairs(n, k), k, *found)
        return scores_NHk, slots_NHk
    for head, keys_2nf in enumerate(subkeys_H2nf):
        start = 0
        for q_Cd in row_chunks(q_NHd[:, head], keys_2nf[0], max(1, CHUNK // (2 * n))):
            scores1_Cn, scores2_Cn = (matmul_nt(*of_half) for of_half in zip(q_Cd.split(f, 1), keys_2nf, strict=True))
            _search(scores1_Cn, scores2_Cn, k, start, head, scores_NHk, slots_NHk)
            start += len(q_Cd)
    return scores_NHk, slots_NHk


def _search(
    scores1_Cn: Tensor, scores2_Cn: Tensor, k: int, start: int, head: int, sums_NHk: Tensor, slots_NHk: Tensor
) -> None:
    """`reference.product_top_k`, written to the places of one head, for the tokens from `start` on."""
    rows, n = scores1_Cn.shape
    halves = (array_of(scores_Cn).view(np.int32) for scores_Cn in (scores1_Cn, scores2_Cn))
    found = sums_NHk.numpy(), slots_NHk.numpy()
    over_threads(_product_rows, even_bounds(rows, 2 * n), *halves, _pairs(n, k), k, start, head, *found)


@cache
def _pairs(n: int, k: int) -> Any:
    """`candidate_pairs` as an array: making it takes as long as searching ten rows."""
    return np.array(candidate_pairs(n, k))


@compiled
def _in_order(bits: Any) -> Any:
    """The bits of a float as an integer in the order of the floats, and back again."""
    return bits ^ ((bits >> np.int32(31)) & HIGHEST)


@compiled
def _ordered(bits: Any) -> Any:
    """An integer in the order of the float that has these bits; -0 and 0 are equal, NaN is above all."""
    if bits == LOWEST:
        bits = np.int32(0)
    if bits & HIGHEST > INFINITY:
        bits = HIGHEST
    return _in_order(bits)


@compiled
def _scratch(n: int, k: int) -> Any:
    """Room for `_best` on rows of up to n scores."""
    x_n, found_m, column_m = np.empty(n, np.int32), np.empty(n, np.int32), np.empty(n, np.int32)
    above_m, equal_m, sorted_m = np.empty(n, np.int32), np.empty(n, np.int32), np.empty(n, np.int32)
    return x_n, np.empty(4 * k, np.int32), found_m, column_m, above_m, equal_m, sorted_m


@compiled
def _bound(x_n: Any, n: int, k: int, lane_l: Any) -> Any:
    """A number that at least k of x[:n] reach: one that k, or up to an eighth more, of the maxima of strided lanes
    reach, or, if there is none, the k-th largest of these. Each number of a short x is a lane."""
    lanes = len(lane_l)
    if n <= lanes:
        lane_l, lanes = x_n, n
    else:
        for i in range(lanes):
            lane_l[i] = x_n[i]
        whole = n // lanes * lanes
        for start in range(lanes, whole, lanes):
            for i in range(lanes):
                lane_l[i] = max(lane_l[i], x_n[start + i])
        for i in range(n - whole):
            lane_l[i] = max(lane_l[i], x_n[whole + i])
    low, high = HIGHEST, LOWEST
    for i in range(lanes):
        low, high = min(low, lane_l[i]), max(high, lane_l[i])
    middle = high  # tried first: many may be equal to it
    for step in range(HALVINGS + 32):
        reach = np.int32(0)
        for i in range(lanes):
            reach += np.int32(lane_l[i] >= middle)
        if reach < k:
            high = middle
        else:
            low = middle
            if reach <= k + k // 8:
                break
        middle = _between(low, high)
        if step >= HALVINGS or not low < middle < high:
            middle = np.int32((np.int64(low) + np.int64(high)) >> 1)
        if middle == low:
            break
    return low


@compiled
def _between(low: Any, high: Any) -> Any:
    """The midpoint of two floats, all three as integers in the order of the floats."""
    low, high = np.int32(_in_order(low)).view(np.float32), np.int32(_in_order(high)).view(np.float32)
    return _in_order(np.float32(low * np.float32(0.5) + high * np.float32(0.5)).view(np.int32))


@compiled
def _best(n: int, k: int, scratch: Any, column_k: Any) -> None:
    """Write the columns of the k highest of the n integers in scratch, highest first, equal ones by column."""
    x_n, lane_l, found_m, column_m, above_m, equal_m, sorted_m = scratch
    bound = _bound(x_n, n, k, lane_l)
    found = equal = 0
    for column in range(n):
        # Branch-free: always write; advance only if it is above the bound or among the first k equal to it.
        x = x_n[column]
        found_m[found], column_m[found] = x, column
        found += np.int64((x > bound) | ((x == bound) & (equal < k)))
        equal += np.int64(x == bound)
    for m in range(found):
        above_m[m] = equal_m[m] = 0
    for other in range(found):
        for m in range(found):
            above_m[m] += np.int32(found_m[other] > found_m[m])
    for m in range(found):  # without a branch: with random ranks, many would be mispredicted
        rank = above_m[m]
        sorted_m[rank + equal_m[rank]] = column_m[m]
        equal_m[rank] += 1
    for place in range(k):
        column_k[place] = sorted_m[place]


@kernel
def _top_k_rows(first: int, stop: int, bits_Rn: Any, k: int, column_Rk: Any) -> None:
    n = bits_Rn.shape[1]
    scratch = _scratch(n, k)
    for row in range(first, stop):
        for column in range(n):
            scratch[0][column] = _ordered(bits_Rn[row, column])
        _best(n, k, scratch, column_Rk[row])


@kernel
def _product_rows(
    first: int,
    stop: int,
    bits1_Cn: Any,
    bits2_Cn: Any,
    pairs_2c: Any,
    k: int,
    start: int,
    head: int,
    sums_NHk: Any,
    slots_NHk: Any,
) -> None:
    n, pairs = bits1_Cn.shape[1], pairs_2c.shape[1]
    most = min(n, k)
    half, whole = _scratch(n, most), _scratch(pairs, k)
    best1_k, best2_k, chosen_k = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(k, np.int64)
    score1_k, score2_k = np.empty(most, np.float32), np.empty(most, np.float32)
    sum_c = np.empty(pairs, np.float32)
    sum_bits_c = sum_c.view(np.int32)
    pairs_k = np.array([min(n, k // (a + 1)) for a in range(most)])  # for each rank of half 1, as in `candidate_pairs`
    for row in range(first, stop):
        for column in range(n):
            half[0][column] = _ordered(bits1_Cn[row, column])
        _best(n, most, half, best1_k)
        for column in range(n):
            half[0][column] = _ordered(bits2_Cn[row, column])
        _best(n, most, half, best2_k)
        score1_n, score2_n = bits1_Cn[row].view(np.float32), bits2_Cn[row].view(np.float32)
        for place in range(most):
            score1_k[place], score2_k[place] = score1_n[best1_k[place]], score2_n[best2_k[place]]
        start_c = 0
        for a in range(most):
            for b in range(pairs_k[a]):
                sum_c[start_c + b] = score1_k[a] + score2_k[b]
            start_c += pairs_k[a]
        for c in range(pairs):
            whole[0][c] = _ordered(sum_bits_c[c])
        _best(pairs, k, whole, chosen_k)
        sums_k, slots_k = sums_NHk[start + row, head], slots_NHk[start + row, head]
        for place in range(k):
            c = chosen_k[place]
            sums_k[place], slots_k[place] = sum_c[c], best1_k[pairs_2c[0, c]] * n + best2_k[pairs_2c[1, c]]


@kernel
def _search_few(q_NHd: Any, subkeys_H2nf: Any, pairs_2c: Any, k: int, scores_NHk: Any, slots_NHk: Any) -> None:
    heads, _, n, f = subkeys_H2nf.shape
    score1_1n, score2_1n = np.empty((1, n), np.float32), np.empty((1, n), np.float32)
    for t in range(len(q_NHd)):
        for head in range(heads):
            q_d = q_NHd[t, head]
            _dot_rows(subkeys_H2nf[head, 0], q_d[:f], score1_1n[0])
            _dot_rows(subkeys_H2nf[head, 1], q_d[f:], score2_1n[0])
            halves = score1_1n.view(np.int32), score2_1n.view(np.int32)
            _product_rows(0, 1, *halves, pairs_2c, k, t, head, scores_NHk, slots_NHk)


@compiled
def _dot_rows(keys_nf: Any, q_f: Any, score_n: Any) -> None:
    for row in range(len(keys_nf)):
        key_f, score = keys_nf[row], np.float32(0)
        for d in range(len(q_f)):
            score += q_f[d] * key_f[d]
        score_n[row] = score
