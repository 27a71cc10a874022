"""The memory's kernels for the CPU, compiled by numba: fp32.

Rows of tables are read, compared, summed by row, and updated. Floors are bytes over the memory's bandwidth:
`weighted_row_sum` and `row_products` read M rows, `segment_row_adam_` reads and writes three rows of each touched slot.
Rows lie at random: eight are in flight at a time, which is twice as fast as one after the other.

`top_k` and `product_top_k` are exact. A row is searched in three passes that a compiler turns into vector
instructions: the maxima of strided lanes; the k-th largest of these, a bound that at least k scores reach; and the rank
of each of the few scores that reach it, by counting those above it. Where the processor has AVX-512, one instruction
packs those of a vector that reach it. Scores are compared as integers in the order of the
floats, with NaN above all.

Rows in 8 or 4 bits are read as codes; those of 4 bits are unpacked, a token's at a time. Scales go into the weights.

N: tokens; r: reads of a token; M: N * r; K: rows of the table; D: width; U: distinct rows read; S: U + 1; R: rows of
scores (queries); n: scores of a row; k: columns to select; l: lanes; m: reads, or scores that reach the bound; c: pairs
of ranks; H: heads; d: width of a query; f: d / 2; C: bytes of a quantized row; T: hash tables; b: bits of a bucket's
code.
"""

import hashlib
import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import binding, ir
from numba import njit, types
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.cgutils import alloca_once_value, for_range, get_or_insert_function
from numba.extending import intrinsic
from torch import Tensor

from pkmlm.kernels.reference import Quantized, Segments, candidate_pairs

RADIX = 15  # the most bits that a pass of `_sort` sorts by: its counters stay in the second cache
LOWEST, HIGHEST = np.int32(-(1 << 31)), np.int32((1 << 31) - 1)
INFINITY = np.int32(0x7F800000)  # its bits; those of NaN are above
VECTOR = 16  # loops over scratch are padded to whole vectors
COMPRESSES = bool(binding.get_host_cpu_features().get("avx512f"))  # whether one instruction packs part of a vector


# Sums may be reordered and multiply-adds fused, so that loops become vector instructions; the order is the same on
# every run and for any number of threads. Infinities and NaN keep their meaning: a step must see them.
ARITHMETIC = ("reassoc", "contract", "nsz")
# The "numpy" model divides by zero as the hardware does; Python's would test each divisor, in scalar code.
OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": {*ARITHMETIC}, "error_model": "numpy"}
LEAST_WORK = 1 << 17  # numbers a thread, under which starting it costs more than it does


def compiled(function: Callable[..., Any]) -> Any:
    """Compile for the types of the first call, without the interpreter's lock, and keep the result on disk.

    The cache lies beside the source or in the user's cache folder; where neither can be written, or numba's cache is
    another than is known here, each process compiles for itself.
    """
    dispatcher: Any = njit(function, **OPTIONS)
    with suppress(RuntimeError, AttributeError, TypeError):  # no folder to cache in, or another cache
        dispatcher._cache = KernelCache(function)
    return dispatcher


class KernelCache(FunctionCache):
    """numba's cache of one function, in which the name of a file says for which source, options, types and processor
    its code is. Where reading or writing fails (a full disk, a file cut short), the function is compiled anew.

    numba's own files are numbered, and an index says which is which. Processes that save code for different types at
    the same time can leave one's code under the other's types (sums of float64 were taken by the code for int64), and
    one that is killed between its two writes leaves the code of an older source. A lock would prevent only the former.
    """

    def __init__(self, function: Callable[..., Any]):
        super().__init__(function)
        self._stamp = self._impl.locator.get_source_stamp()
        self._files: Any = IndexDataCacheFile(self.cache_path, self._impl.filename_base, self._stamp)
        self._cache_file: Any = self  # of which numba's cache calls `load` and `save`

    def load_overload(self, *arguments: Any) -> Any:
        """The code for these types, or None."""
        with suppress(Exception):
            return super().load_overload(*arguments)
        return None

    def save_overload(self, *arguments: Any) -> None:
        """Save the code for these types, if that is possible."""
        with suppress(Exception):
            super().save_overload(*arguments)

    def load(self, key: Any) -> Any:
        """What the file of a key holds, or None."""
        with suppress(FileNotFoundError):
            return self._files._load_data(self._file_name(key))
        return None

    def save(self, key: Any, data: Any) -> None:
        """Write the file of a key."""
        self._files._save_data(self._file_name(key), data)

    def _file_name(self, key: Any) -> str:
        whose = repr((self._files._version, ARITHMETIC, OPTIONS["error_model"], self._stamp, key))
        return f"{self._impl.filename_base}.{hashlib.sha256(whose.encode()).hexdigest()[:32]}.nbc"


def over_threads(kernel: Callable[..., None], bounds: Sequence[int], *arguments: Any) -> None:
    """Run kernel(first, stop, *arguments) for each pair of neighbours in `bounds`, each on a thread.

    The threads live for one call (some 50 us each): no pool that a fork could tear, none that spins beside torch's.

    Raises:
        Exception: what a part raised, once all have ended.
    """
    if len(bounds) == 2:
        kernel(*bounds, *arguments)
        return
    errors: list[BaseException] = []

    def run(first: int, stop: int) -> None:
        try:
            kernel(first, stop, *arguments)
        except BaseException as error:
            errors.append(error)

    parts = list(itertools.pairwise(bounds))
    threads = [threading.Thread(target=run, args=part) for part in parts[1:]]
    for thread in threads:
        thread.start()
    run(*parts[0])
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def even_bounds(items: int, work: int) -> list[int]:
    """Split `items` evenly over torch's threads; on one thread where all of them together are little `work`.

    Args:
        work: numbers that an item handles.
    """
    threads = max(1, min(torch.get_num_threads(), items, items * work // LEAST_WORK))
    return [items * part // threads for part in range(threads + 1)]


def weighted_row_sum(values_KD: Tensor, slots_Nr: Tensor, weights_Nr: Tensor) -> Tensor:
    """`reference.weighted_row_sum`."""
    out_ND = values_KD.new_empty(len(slots_Nr), values_KD.shape[1])
    bounds = even_bounds(len(slots_Nr), slots_Nr.shape[1] * values_KD.shape[1])
    over_threads(_bags, bounds, _array(values_KD), _array(slots_Nr), _array(weights_Nr), out_ND.numpy())
    return out_ND


def row_products(values_KD: Tensor, x_ND: Tensor, slots_Nr: Tensor) -> Tensor:
    """`reference.row_products`."""
    out_Nr = x_ND.new_empty(slots_Nr.shape)
    bounds = even_bounds(len(slots_Nr), slots_Nr.shape[1] * values_KD.shape[1])
    over_threads(_products, bounds, _array(values_KD), _array(x_ND), _array(slots_Nr), out_Nr.numpy())
    return out_Nr


def quantized_row_sum(table: Quantized, slots_Nr: Tensor, weights_Nr: Tensor) -> Tensor:
    """`reference.quantized_row_sum`."""
    scaled_Nr = weights_Nr * (table.scale_K[slots_Nr] / table.most)
    out_ND = scaled_Nr.new_empty(len(slots_Nr), table.width)
    kernel = _bags if table.codes_KC.dtype == torch.int8 else _packed_bags
    bounds = even_bounds(len(slots_Nr), slots_Nr.shape[1] * table.width)
    over_threads(kernel, bounds, _array(table.codes_KC), _array(slots_Nr), _array(scaled_Nr), out_ND.numpy())
    return out_ND


def quantized_row_products(table: Quantized, x_ND: Tensor, slots_Nr: Tensor) -> Tensor:
    """`reference.quantized_row_products`."""
    out_Nr = x_ND.new_empty(slots_Nr.shape)
    kernel = _products if table.codes_KC.dtype == torch.int8 else _packed_products
    bounds = even_bounds(len(slots_Nr), slots_Nr.shape[1] * table.width)
    over_threads(kernel, bounds, _array(table.codes_KC), _array(x_ND), _array(slots_Nr), out_Nr.numpy())
    return out_Nr * (table.scale_K[slots_Nr] / table.most)


def sort_reads(slots_Nr: Tensor, weights_Nr: Tensor, rows: int, *, every_row: bool = False) -> Segments:
    """`reference.sort_reads`."""
    numbers = np.int32 if max(slots_Nr.numel(), rows) < 1 << 31 else np.int64
    order_M = np.arange(slots_Nr.numel(), dtype=numbers)
    segments = Segments(*map(torch.from_numpy, _sort(_array(slots_Nr), _array(weights_Nr), rows, order_M)))
    return segments.every_row(rows) if every_row else segments


def segment_sum(x_ND: Tensor, segments: Segments) -> Tensor:
    """`reference.segment_sum`."""
    out_UD = x_ND.new_empty(len(segments.rows_U), x_ND.shape[1])
    bounds = _segment_bounds(segments, x_ND.shape[1])
    over_threads(_segment_sums, bounds, _array(x_ND), *map(_array, segments[1:]), out_UD.numpy())
    return out_UD


def squared_norm(x_ND: Tensor, segments: Segments) -> Tensor:
    """`reference.squared_norm`; no row of the sum is stored."""
    square_U = np.empty(len(segments.rows_U))
    bounds = _segment_bounds(segments, x_ND.shape[1])
    over_threads(_segment_squares, bounds, _array(x_ND), *map(_array, segments[1:]), square_U)
    return torch.tensor(square_U.sum())  # numpy's order of summing does not depend on threads


def segment_row_adam_(
    values_KD: Tensor,
    mean_KD: Tensor,
    square_KD: Tensor,
    x_ND: Tensor,
    segments: Segments,
    *,
    scale: float,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    copy_KD: Tensor | None = None,
) -> None:
    """`reference.segment_row_adam_`: each row's gradient goes straight into its update.

    Raises:
        ValueError: a table is not contiguous: what is written to a contiguous copy of it would be lost.
    """
    if not all(table.is_contiguous() for table in (values_KD, mean_KD, square_KD)):
        raise ValueError("the kernels need contiguous tables")
    beta1, beta2 = betas
    scalars = (
        scale,
        1 - beta1,
        beta2,
        1 - beta2,
        lr / (1 - beta1**step),
        1 / (1 - beta2**step),
        eps,
        1 - lr * weight_decay,
    )
    over_threads(
        _segment_row_adam,
        _segment_bounds(segments, 4 * x_ND.shape[1]),
        *map(_array, (values_KD, mean_KD, square_KD, x_ND, *segments)),
        *map(np.float32, scalars),
    )
    if copy_KD is not None:
        copy_KD[segments.rows_U] = values_KD[segments.rows_U].to(copy_KD.dtype)


def _array(x: Tensor) -> Any:
    return x.detach().contiguous().numpy()


def _segment_bounds(segments: Segments, width: int) -> list[int]:
    """Bounds between rows such that threads get as many reads each."""
    reads = even_bounds(len(segments.token_M), width)
    inner = torch.searchsorted(segments.start_S, torch.tensor(reads[1:-1], dtype=torch.int64)).tolist()
    return [0, *inner, len(segments.rows_U)]


@compiled
def _add_rows(out_D: Any, table_KD: Any, rows_m: Any, weights_m: Any, first: int, stop: int) -> None:
    """out = sum over m in first ... stop - 1 of weights[m] * table[rows[m]]."""
    width = out_D.shape[0]
    for d in range(width):
        out_D[d] = 0
    m = first
    while m + 8 <= stop:
        r0, r1, r2, r3 = rows_m[m], rows_m[m + 1], rows_m[m + 2], rows_m[m + 3]
        r4, r5, r6, r7 = rows_m[m + 4], rows_m[m + 5], rows_m[m + 6], rows_m[m + 7]
        v0, v1, v2, v3 = table_KD[r0], table_KD[r1], table_KD[r2], table_KD[r3]
        v4, v5, v6, v7 = table_KD[r4], table_KD[r5], table_KD[r6], table_KD[r7]
        w0, w1, w2, w3 = weights_m[m], weights_m[m + 1], weights_m[m + 2], weights_m[m + 3]
        w4, w5, w6, w7 = weights_m[m + 4], weights_m[m + 5], weights_m[m + 6], weights_m[m + 7]
        for d in range(width):
            low = w0 * v0[d] + w1 * v1[d] + w2 * v2[d] + w3 * v3[d]
            out_D[d] += low + (w4 * v4[d] + w5 * v5[d] + w6 * v6[d] + w7 * v7[d])
        m += 8
    while m < stop:
        v0, w0 = table_KD[rows_m[m]], weights_m[m]
        for d in range(width):
            out_D[d] += w0 * v0[d]
        m += 1


@compiled
def _bags(first: int, stop: int, values_KD: Any, slots_Nr: Any, weights_Nr: Any, out_ND: Any) -> None:
    for t in range(first, stop):
        _add_rows(out_ND[t], values_KD, slots_Nr[t], weights_Nr[t], 0, slots_Nr.shape[1])


@compiled
def _products(first: int, stop: int, values_KD: Any, x_ND: Any, slots_Nr: Any, out_Nr: Any) -> None:
    width, reads, zero = values_KD.shape[1], slots_Nr.shape[1], np.float32(0)
    for t in range(first, stop):
        x_D, slots_r, out_r = x_ND[t], slots_Nr[t], out_Nr[t]
        j = 0
        while j + 8 <= reads:
            r0, r1, r2, r3 = slots_r[j], slots_r[j + 1], slots_r[j + 2], slots_r[j + 3]
            r4, r5, r6, r7 = slots_r[j + 4], slots_r[j + 5], slots_r[j + 6], slots_r[j + 7]
            v0, v1, v2, v3 = values_KD[r0], values_KD[r1], values_KD[r2], values_KD[r3]
            v4, v5, v6, v7 = values_KD[r4], values_KD[r5], values_KD[r6], values_KD[r7]
            p0, p1, p2, p3, p4, p5, p6, p7 = zero, zero, zero, zero, zero, zero, zero, zero
            for d in range(width):
                x = x_D[d]
                p0 += x * v0[d]
                p1 += x * v1[d]
                p2 += x * v2[d]
                p3 += x * v3[d]
                p4 += x * v4[d]
                p5 += x * v5[d]
                p6 += x * v6[d]
                p7 += x * v7[d]
            out_r[j], out_r[j + 1], out_r[j + 2], out_r[j + 3] = p0, p1, p2, p3
            out_r[j + 4], out_r[j + 5], out_r[j + 6], out_r[j + 7] = p4, p5, p6, p7
            j += 8
        while j < reads:
            v0, p0 = values_KD[slots_r[j]], zero
            for d in range(width):
                p0 += x_D[d] * v0[d]
            out_r[j] = p0
            j += 1


@compiled
def _unpack(packed_KC: Any, slots_r: Any, codes_rD: Any) -> None:
    """Some rows of codes of 4 bits, as bytes."""
    columns, width = packed_KC.shape[1], codes_rD.shape[1]
    for j in range(len(slots_r)):
        packed_C, low_C, high_C = packed_KC[slots_r[j]], codes_rD[j, :columns], codes_rD[j, columns:]
        for c in range(columns):
            low_C[c] = ((packed_C[c] & 15) ^ 8) - 8
        for c in range(width - columns):
            high_C[c] = ((packed_C[c] >> 4) ^ 8) - 8


@compiled
def _packed_bags(first: int, stop: int, packed_KC: Any, slots_Nr: Any, weights_Nr: Any, out_ND: Any) -> None:
    reads = slots_Nr.shape[1]
    codes_rD, every_r = np.empty((reads, out_ND.shape[1]), np.int8), np.arange(reads)
    for t in range(first, stop):
        _unpack(packed_KC, slots_Nr[t], codes_rD)
        _add_rows(out_ND[t], codes_rD, every_r, weights_Nr[t], 0, reads)


@compiled
def _packed_products(first: int, stop: int, packed_KC: Any, x_ND: Any, slots_Nr: Any, out_Nr: Any) -> None:
    reads = slots_Nr.shape[1]
    codes_rD, every_1r = np.empty((reads, x_ND.shape[1]), np.int8), np.arange(reads).reshape(1, -1)
    for t in range(first, stop):
        _unpack(packed_KC, slots_Nr[t], codes_rD)
        _products(0, 1, codes_rD, x_ND[t : t + 1], every_1r, out_Nr[t : t + 1])


@compiled
def _sort(slots_Nr: Any, weights_Nr: Any, rows: int, order_M: Any) -> Any:
    """A stable radix sort, lowest digits first, in passes of as many bits each.

    Args:
        order_M: 0, 1, ...; int32 where these and the rows' numbers fit, of which more stay in the caches.
    """
    slots_M, weights_M, reads = slots_Nr.ravel(), weights_Nr.ravel(), slots_Nr.shape[1]
    size = len(slots_M)
    bits = 1
    while rows > 1 << bits:
        bits += 1
    passes = (bits + RADIX - 1) // RADIX
    width = (bits + passes - 1) // passes
    digits = 1 << width
    other_M = np.empty_like(order_M)
    row_M, token_M, weight_M = np.empty_like(order_M), np.empty(size, np.int64), np.empty(size, weights_M.dtype)
    for shift in range(0, passes * width, width):
        place_d = np.zeros(digits + 1, np.int64)
        for m in range(size):
            place_d[((slots_M[m] >> shift) & (digits - 1)) + 1] += 1
        for digit in range(digits):
            place_d[digit + 1] += place_d[digit]
        for read in order_M:
            row = slots_M[read]
            low = (row >> shift) & (digits - 1)
            place = place_d[low]
            place_d[low] += 1
            if shift < (passes - 1) * width:
                other_M[place] = read
            else:  # at once what is wanted of the reads, which are looked up in the order of the pass before
                # Below 2^53 this is read // reads; a division of integers takes several times as long.
                row_M[place], token_M[place], weight_M[place] = row, np.int64(read / reads), weights_M[read]
        order_M, other_M = other_M, order_M
    touched = 0
    most = min(size, rows)
    rows_U, start_S = np.empty(most, np.int64), np.empty(most + 1, np.int64)
    for m in range(size):
        if touched == 0 or row_M[m] != rows_U[touched - 1]:
            rows_U[touched], start_S[touched] = row_M[m], m
            touched += 1
    start_S[touched] = size
    return rows_U[:touched].copy(), start_S[: touched + 1].copy(), token_M, weight_M


@compiled
def _segment_sums(first: int, stop: int, x_ND: Any, start_S: Any, token_M: Any, weight_M: Any, out_UD: Any) -> None:
    for u in range(first, stop):
        _add_rows(out_UD[u], x_ND, token_M, weight_M, start_S[u], start_S[u + 1])


@compiled
def _segment_squares(first: int, stop: int, x_ND: Any, start_S: Any, token_M: Any, weight_M: Any, out_U: Any) -> None:
    row_D = np.empty(x_ND.shape[1], np.float32)
    for u in range(first, stop):
        _add_rows(row_D, x_ND, token_M, weight_M, start_S[u], start_S[u + 1])
        square = np.float64(0)
        for d in range(len(row_D)):
            square += np.float64(row_D[d]) * np.float64(row_D[d])
        out_U[u] = square


@compiled
def _segment_row_adam(
    first: int,
    stop: int,
    values_KD: Any,
    mean_KD: Any,
    square_KD: Any,
    x_ND: Any,
    rows_U: Any,
    start_S: Any,
    token_M: Any,
    weight_M: Any,
    scale: Any,
    follow1: Any,
    beta2: Any,
    follow2: Any,
    rate: Any,
    correction2: Any,
    eps: Any,
    keep: Any,
) -> None:
    grad_D = np.empty(x_ND.shape[1], np.float32)
    for u in range(first, stop):
        _add_rows(grad_D, x_ND, token_M, weight_M, start_S[u], start_S[u + 1])
        value_D, mean_D, square_D = values_KD[rows_U[u]], mean_KD[rows_U[u]], square_KD[rows_U[u]]
        for d in range(len(grad_D)):
            grad = scale * grad_D[d]
            mean = mean_D[d] + follow1 * (grad - mean_D[d])
            square = beta2 * square_D[d] + follow2 * (grad * grad)
            mean_D[d], square_D[d] = mean, square
            value_D[d] = keep * value_D[d] - rate * mean / (np.sqrt(correction2 * square) + eps)


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
    _search_few(_array(q_NHd), _array(subkeys_H2nf), _pairs(n, k), k, scores_NHk.numpy(), slots_NHk.numpy())
    return scores_NHk, slots_NHk


def score_gradients(
    q_NH2f: Tensor, subkeys_H2nf: Tensor, chosen_NH2k: Tensor, grad_NHk: Tensor
) -> tuple[Tensor, Tensor]:
    """`reference.score_gradients`. The sub-keys of a half stay in a core's cache, so that one thread adds up their
    gradients read by read: to sort the reads first would take longer than the sums do."""
    tokens, heads, _, k = chosen_NH2k.shape
    q_grad, keys_grad = q_NH2f.new_empty(q_NH2f.shape), torch.zeros_like(subkeys_H2nf)
    bounds = even_bounds(2 * heads, tokens * k * q_NH2f.shape[3])
    given = (q_NH2f, subkeys_H2nf, chosen_NH2k, grad_NHk)
    over_threads(_score_gradients, bounds, *map(_array, given), q_grad.numpy(), keys_grad.numpy())
    return q_grad, keys_grad


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


@compiled
def _score_gradients(
    first: int,
    stop: int,
    q_NH2f: Any,
    subkeys_H2nf: Any,
    chosen_NH2k: Any,
    grad_NHk: Any,
    q_grad_NH2f: Any,
    keys_grad_H2nf: Any,
) -> None:
    for part in range(first, stop):
        head, half = part // 2, part % 2
        keys_nf, sum_nf = subkeys_H2nf[head, half], keys_grad_H2nf[head, half]
        for t in range(len(q_NH2f)):
            q_f, chosen_k, grad_k = q_NH2f[t, head, half], chosen_NH2k[t, head, half], grad_NHk[t, head]
            _add_rows(q_grad_NH2f[t, head, half], keys_nf, chosen_k, grad_k, 0, len(chosen_k))
            for place in range(len(chosen_k)):
                sum_f, grad = sum_nf[chosen_k[place]], grad_k[place]
                for d in range(len(q_f)):
                    sum_f[d] += grad * q_f[d]


def bucket_reads(z_NTb: Tensor, temperature: float, *, scaled: bool) -> tuple[Tensor, Tensor]:
    """`reference.bucket_reads`, without a gradient, for a few tokens."""
    shape = z_NTb.shape[:2]
    rows_NT, weights_NT = torch.empty(shape, dtype=torch.int64), z_NTb.new_empty(shape)
    rate, out = np.float32(-2 / temperature), (rows_NT.numpy(), weights_NT.numpy())
    _buckets(_array(z_NTb), rate, scaled, *out)
    return rows_NT, weights_NT


@compiled
def _buckets(z_NTb: Any, rate: Any, scaled: bool, rows_NT: Any, weights_NT: Any) -> None:
    one = np.float32(1)
    for n in range(z_NTb.shape[0]):
        for table in range(z_NTb.shape[1]):
            code, inverse, size = np.int64(0), one, np.float32(0)
            for i in range(z_NTb.shape[2]):
                z = z_NTb[n, table, i]
                code |= np.int64(z >= 0) << i
                inverse *= one + np.exp(rate * abs(z))
                size += abs(z)
            rows_NT[n, table] = (table << z_NTb.shape[2]) + code
            weights_NT[n, table] = size / inverse if scaled else one / inverse
