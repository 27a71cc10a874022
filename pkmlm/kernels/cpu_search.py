"""The search for the best scores on the CPU, compiled by numba: fp32.

`top_k` and `product_top_k` are exact. A row is searched in three passes that a compiler turns into vector
instructions: the maxima of strided lanes; the k-th largest of these, a bound that at least k scores reach; and the rank
of each of the few scores that reach it, by counting those above it. Where the processor has AVX-512, one instruction
packs those of a vector that reach it. Scores are compared as integers in the order of the floats, with NaN above all.

N: tokens; R: rows of scores (queries); n: scores of a row; k: columns to select; l: lanes; m: scores that reach the
bound; c: pairs of ranks; H: heads; d: width of a query; f: d / 2.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import binding, ir
from numba import types
from numba.core.cgutils import alloca_once_value, for_range, get_or_insert_function
from numba.extending import intrinsic
from torch import Tensor

from pkmlm.kernels.jit import array_of, compiled, even_bounds, over_threads
from pkmlm.kernels.reference import candidate_pairs

LOWEST, HIGHEST = np.int32(-(1 << 31)), np.int32((1 << 31) - 1)
INFINITY = np.int32(0x7F800000)  # its bits; those of NaN are above
VECTOR = 16  # loops over scratch are padded to whole vectors
COMPRESSES = bool(binding.get_host_cpu_features().get("avx512f"))  # whether one instruction packs part of a vector


def top_k(scores_Rn: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`reference.top_k`."""
    rows, n = scores_Rn.shape
    column_Rk = torch.empty(rows, k, dtype=torch.int64)
    over_threads(_top_k_rows, even_bounds(rows, n), _bits(scores_Rn), k, column_Rk.numpy())
    return scores_Rn.gather(-1, column_Rk), column_Rk


def product_top_k(scores1_Rn: Tensor, scores2_Rn: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.product_top_k`."""
    rows, n = scores1_Rn.shape
    scores_Rk = scores1_Rn.new_empty(rows, k)
    i_Rk, j_Rk = (torch.empty(rows, k, dtype=torch.int64) for _ in range(2))
    halves, found = (_bits(scores1_Rn), _bits(scores2_Rn)), (scores_Rk.numpy(), i_Rk.numpy(), j_Rk.numpy())
    over_threads(_product_rows, even_bounds(rows, 2 * n), *halves, _pairs(n, k), k, *found)
    return scores_Rk, i_Rk, j_Rk


def product_key_search(q_NHd: Tensor, subkeys_H2nf: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`reference.product_key_search`, all of it in one call, for a few queries."""
    n, shape = subkeys_H2nf.shape[2], (*q_NHd.shape[:2], k)
    scores_NHk, slots_NHk = q_NHd.new_empty(shape), torch.empty(shape, dtype=torch.int64)
    _search_few(array_of(q_NHd), array_of(subkeys_H2nf), _pairs(n, k), k, scores_NHk.numpy(), slots_NHk.numpy())
    return scores_NHk, slots_NHk


@cache
def _pairs(n: int, k: int) -> Any:
    """`candidate_pairs` as an array: to make it takes as long as to search ten rows."""
    return np.array(candidate_pairs(n, k))


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
    lanes = max(32, (2 * k + VECTOR - 1) // VECTOR * VECTOR)
    room = max(n, lanes) + VECTOR
    x_n, lane_l, found_m, column_m = (
        np.empty(room, np.int32),
        np.empty(lanes, np.int32),
        np.empty(room, np.int32),
        np.empty(room, np.int32),
    )
    above_m, equal_m, sorted_m = np.empty(room, np.int32), np.empty(room, np.int32), np.empty(room, np.int32)
    return x_n, lane_l, found_m, column_m, above_m, equal_m, sorted_m


def _vector_at(context: Any, builder: Any, kind: Any, array: Any, place: Any, width: int) -> Any:
    """Where `width` integers of an array begin."""
    numbers = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(numbers, [place]), ir.VectorType(ir.IntType(32), width).as_pointer())


def _filled(builder: Any, number: Any, width: int) -> Any:
    """A vector of one number."""
    vector = ir.Constant(ir.VectorType(number.type, width), ir.Undefined)
    first = builder.insert_element(vector, number, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(ir.IntType(32), width), [0] * width))


def _counting(width: int) -> Any:
    """A function of x_m, start, size and above_m, which writes to above_m[start : start + width] how many of x[:size]
    are greater than each of x[start : start + width]. The counts stay in registers; a compiler would not see to that.
    """

    def count(typingctx: Any, x_m: Any, start: Any, size: Any, above_m: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _, start, size, _ = arguments
            own_x, own_above = (
                _vector_at(context, builder, signature.args[which], arguments[which], start, width) for which in (0, 3)
            )
            numbers = context.make_array(signature.args[0])(context, builder, arguments[0]).data
            x = builder.load(own_x, align=4)
            above = alloca_once_value(builder, ir.Constant(x.type, [0] * width))
            with for_range(builder, size) as loop:
                other = builder.load(builder.gep(numbers, [loop.index]))
                greater = builder.icmp_signed(">", _filled(builder, other, width), x)
                builder.store(builder.add(builder.load(above), builder.zext(greater, x.type)), above)
            builder.store(builder.load(above), own_above, align=4)
            return context.get_dummy_value()

        return types.void(x_m, types.int64, types.int64, above_m), generate

    return intrinsic(count)


_count_above_one, _count_above_four = _counting(VECTOR), _counting(4 * VECTOR)


@compiled
def _count_above(x_m: Any, size: int, above_m: Any) -> None:
    """above[i] = how many of x[:size] are greater than x[i]; the size is a multiple of `VECTOR`."""
    start = 0
    while start + 4 * VECTOR <= size:
        _count_above_four(x_m, start, size, above_m)
        start += 4 * VECTOR
    while start < size:
        _count_above_one(x_m, start, size, above_m)
        start += VECTOR


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


def _packing(typingctx: Any, x_n: Any, start: Any, bound: Any, found_m: Any, column_m: Any, found: Any) -> Any:
    """Append those of x[start : start + VECTOR] that reach the bound to found_m[:found], and their columns to column_m;
    return how many they are. Writes whole vectors.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start, bound, found = arguments[1], arguments[2], arguments[5]
        number = ir.IntType(32)

        def place(which: int, first: Any) -> Any:
            return _vector_at(context, builder, signature.args[which], arguments[which], first, VECTOR)

        x = builder.load(place(0, start), align=4)
        steps = ir.Constant(x.type, list(range(VECTOR)))
        columns = builder.add(_filled(builder, builder.trunc(start, number), VECTOR), steps)
        mask = builder.icmp_signed(">=", x, _filled(builder, bound, VECTOR))
        pack = get_or_insert_function(
            builder.module,
            ir.FunctionType(x.type, [x.type, mask.type, x.type]),
            f"llvm.experimental.vector.compress.v{VECTOR}i32",
        )
        for which, whole in ((3, x), (4, columns)):
            packed = builder.call(pack, [whole, mask, ir.Constant(x.type, ir.Undefined)])
            builder.store(packed, place(which, found), align=4)
        return builder.zext(builder.ctpop(builder.bitcast(mask, ir.IntType(VECTOR))), ir.IntType(64))

    return types.int64(x_n, types.int64, types.int32, found_m, column_m, types.int64), generate


_pack: Any = intrinsic(_packing)


@compiled
def _best(n: int, k: int, scratch: Any, column_k: Any) -> None:
    """The columns of the k highest of the n integers in scratch, highest first, equal ones by column."""
    x_n, lane_l, found_m, column_m, above_m, equal_m, sorted_m = scratch
    bound = _bound(x_n, n, k, lane_l, above_m)
    found, vectors = 0, n // VECTOR * VECTOR if COMPRESSES else 0
    for start in range(0, vectors, VECTOR):
        found += _pack(x_n, start, bound, found_m, column_m, found)
    if found > 2 * len(lane_l):  # many are equal to the bound, and count for nothing after the first k
        found = vectors = 0
    equal = 0
    for column in range(vectors, n):
        # Branch-free: always write; advance only if it is above the bound or among the first k equal to it.
        x = x_n[column]
        found_m[found], column_m[found] = x, column
        found += np.int64((x > bound) | ((x == bound) & (equal < k)))
        equal += np.int64(x == bound)
    padded = (found + VECTOR - 1) // VECTOR * VECTOR
    for m in range(found, padded):
        found_m[m] = LOWEST
    _count_above(found_m, padded, above_m)
    for m in range(found):
        equal_m[m] = 0
    for m in range(found):  # without a branch: of random ranks, a processor guesses many wrong
        rank = above_m[m]
        sorted_m[rank + equal_m[rank]] = column_m[m]
        equal_m[rank] += 1
    for place in range(k):
        column_k[place] = sorted_m[place]


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
    first: int, stop: int, bits1_Rn: Any, bits2_Rn: Any, pairs_2c: Any, k: int, sum_Rk: Any, i_Rk: Any, j_Rk: Any
) -> None:
    n, pairs = bits1_Rn.shape[1], pairs_2c.shape[1]
    most = min(n, k)
    half, whole = _scratch(n, most), _scratch(pairs, k)
    best1_k, best2_k, chosen_k = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(k, np.int64)
    score1_k, score2_k = np.empty(most, np.float32), np.empty(most, np.float32)
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
        for place in range(most):
            score1_k[place], score2_k[place] = score1_n[best1_k[place]], score2_n[best2_k[place]]
        for c in range(pairs):
            sum_c[c] = score1_k[pairs_2c[0, c]] + score2_k[pairs_2c[1, c]]
        for c in range(pairs):
            whole[0][c] = _ordered(sum_bits_c[c])
        _best(pairs, k, whole, chosen_k)
        for place in range(k):
            c = chosen_k[place]
            sum_Rk[row, place] = sum_c[c]
            i_Rk[row, place], j_Rk[row, place] = best1_k[pairs_2c[0, c]], best2_k[pairs_2c[1, c]]


@compiled
def _search_few(q_NHd: Any, subkeys_H2nf: Any, pairs_2c: Any, k: int, scores_NHk: Any, slots_NHk: Any) -> None:
    heads, _, n, f = subkeys_H2nf.shape
    score1_1n, score2_1n = np.empty((1, n), np.float32), np.empty((1, n), np.float32)
    sum_1k, i_1k, j_1k = np.empty((1, k), np.float32), np.empty((1, k), np.int64), np.empty((1, k), np.int64)
    for t in range(len(q_NHd)):
        for head in range(heads):
            q_d = q_NHd[t, head]
            _dot_rows(subkeys_H2nf[head, 0], q_d[:f], score1_1n[0])
            _dot_rows(subkeys_H2nf[head, 1], q_d[f:], score2_1n[0])
            halves = score1_1n.view(np.int32), score2_1n.view(np.int32)
            _product_rows(0, 1, *halves, pairs_2c, k, sum_1k, i_1k, j_1k)
            for place in range(k):
                scores_NHk[t, head, place] = sum_1k[0, place]
                slots_NHk[t, head, place] = i_1k[0, place] * n + j_1k[0, place]


@compiled
def _dot_rows(keys_nf: Any, q_f: Any, score_n: Any) -> None:
    for row in range(len(keys_nf)):
        key_f, score = keys_nf[row], np.float32(0)
        for d in range(len(q_f)):
            score += q_f[d] * key_f[d]
        score_n[row] = score
