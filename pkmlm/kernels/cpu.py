"""The memory's kernels for the CPU, compiled by numba, in fp32. They read, multiply, sum and update the rows of tables;
`cpu_search` finds which rows.

Their least times are bytes over the memory's bandwidth: `weighted_row_sum` and `row_products` read M rows,
`segment_row_adam_` reads and writes three rows of each touched slot. Rows lie at random: eight are in flight at a time,
which is twice as fast as one after the other.

Rows in 8 or 4 bits are read as codes; those of 4 bits are unpacked, a token's at a time. The scales are multiplied into
the weights or the products.

N: tokens; r: reads of a token; M: N * r; K: rows of the table; D: width; U: distinct rows read; S: U + 1; m: some of
the reads; H: heads; n: sub-keys of a half; f: width of a sub-key; k: slots a head reads; C: bytes of a quantized row;
T: hash tables; b: bits of a bucket's code.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pkmlm.kernels import reference
from pkmlm.kernels.cpu_search import product_key_search, product_top_k, top_k  # noqa: F401 (`backend` looks here)
from pkmlm.kernels.jit import array_of, call, compiled, even_bounds, kernel, over_threads
from pkmlm.kernels.reference import Quantized, Segments, only, sgd_rows_  # noqa: F401

LEARNS_BUCKETS = KEEPS_SUMS = False  # see `backend.of`
RADIX = 15  # the most bits that a pass of `_sort` sorts by: its counters stay in the L2 cache


def weighted_row_sum(values_KD: Tensor, slots_Nr: Tensor, weights_Nr: Tensor) -> Tensor:
    """`reference.weighted_row_sum`."""
    out_ND = values_KD.new_empty(len(slots_Nr), values_KD.shape[1])
    bounds = even_bounds(len(slots_Nr), slots_Nr.shape[1] * values_KD.shape[1])
    over_threads(_bags, bounds, array_of(values_KD), array_of(slots_Nr), array_of(weights_Nr), out_ND.numpy())
    return out_ND


def row_products(values_KD: Tensor, x_ND: Tensor, slots_Nr: Tensor) -> Tensor:
    """`reference.row_products`."""
    out_Nr = x_ND.new_empty(slots_Nr.shape)
    bounds = even_bounds(len(slots_Nr), slots_Nr.shape[1] * values_KD.shape[1])
    over_threads(_products, bounds, array_of(values_KD), array_of(x_ND), array_of(slots_Nr), out_Nr.numpy())
    return out_Nr


def quantized_row_sum(table: Quantized, slots_Nr: Tensor, weights_Nr: Tensor) -> Tensor:
    """`reference.quantized_row_sum`."""
    scaled_Nr = weights_Nr * (table.scale_K[slots_Nr] / table.most)
    out_ND = scaled_Nr.new_empty(len(slots_Nr), table.width)
    bags = _byte_bags if table.codes_KC.dtype == torch.int8 else _packed_bags
    bounds = even_bounds(len(slots_Nr), slots_Nr.shape[1] * table.width)
    over_threads(bags, bounds, array_of(table.codes_KC), array_of(slots_Nr), array_of(scaled_Nr), out_ND.numpy())
    return out_ND


def quantized_row_products(table: Quantized, x_ND: Tensor, slots_Nr: Tensor) -> Tensor:
    """`reference.quantized_row_products`."""
    out_Nr = x_ND.new_empty(slots_Nr.shape)
    products = _byte_products if table.codes_KC.dtype == torch.int8 else _packed_products
    bounds = even_bounds(len(slots_Nr), slots_Nr.shape[1] * table.width)
    over_threads(products, bounds, array_of(table.codes_KC), array_of(x_ND), array_of(slots_Nr), out_Nr.numpy())
    return out_Nr * (table.scale_K[slots_Nr] / table.most)


def sort_reads(slots_Nr: Tensor, weights_Nr: Tensor, rows: int, *, every_row: bool = False) -> Segments:
    """`reference.sort_reads`."""
    if max(slots_Nr.numel(), rows) > 1 << 31:
        return reference.sort_reads(slots_Nr, weights_Nr, rows, every_row=every_row)
    segments = Segments(*map(torch.from_numpy, call(_sort, array_of(slots_Nr), array_of(weights_Nr), rows)))
    return segments.every_row(rows) if every_row else segments


def segment_sum(x_ND: Tensor, segments: Segments) -> Tensor:
    """`reference.segment_sum`."""
    out_UD = x_ND.new_empty(len(segments.rows_U), x_ND.shape[1])
    bounds = _segment_bounds(segments, x_ND.shape[1])
    over_threads(_segment_sums, bounds, array_of(x_ND), *map(array_of, segments[1:]), out_UD.numpy())
    return out_UD


def segment_add_(out_KD: Tensor, x_ND: Tensor, segments: Segments, read_K: Tensor | None = None) -> None:
    """`reference.segment_add_`."""
    out_KD.index_add_(0, segments.rows_U, segment_sum(x_ND, segments))
    if read_K is not None:
        read_K[segments.rows_U] = True


def squared_norm(x_ND: Tensor, segments: Segments) -> Tensor:
    """`reference.squared_norm`; no row of the sum is stored."""
    square_U = np.empty(len(segments.rows_U))
    bounds = _segment_bounds(segments, x_ND.shape[1])
    over_threads(_segment_squares, bounds, array_of(x_ND), *map(array_of, segments[1:]), square_U)
    return torch.tensor(square_U.sum())  # numpy's order of summing does not depend on threads


def segment_row_adam_(
    values_KD: Tensor,
    mean_KD: Tensor,
    square_KD: Tensor,
    x_ND: Tensor,
    segments: Segments,
    *,
    scale: float | Tensor,
    step: int | Tensor,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    copy_KD: Tensor | None = None,
    skip: Tensor | None = None,
) -> None:
    """`reference.segment_row_adam_`: each row's gradient goes straight into its update.

    Raises:
        ValueError: a table is not contiguous: what is written to a contiguous copy of it would be lost.
    """
    if not all(table.is_contiguous() for table in (values_KD, mean_KD, square_KD)):
        raise ValueError("the kernels need contiguous tables")
    if skip is not None and skip > 0:
        return
    (beta1, beta2), step = betas, int(step)
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
        *map(array_of, (values_KD, mean_KD, square_KD, x_ND, *segments)),
        *map(np.float32, scalars),
    )
    if copy_KD is not None:
        copy_KD[segments.rows_U] = values_KD[segments.rows_U].to(copy_KD.dtype)


def segment_row_sgd_(
    values_KD: Tensor,
    x_ND: Tensor,
    segments: Segments,
    *,
    scale: float | Tensor,
    lr: float,
    weight_decay: float,
    copy_KD: Tensor | None = None,
    skip: Tensor | None = None,
) -> None:
    """`reference.segment_row_sgd_`."""
    if skip is None or not skip > 0:
        sgd_rows_(values_KD, segments.rows_U, lr * scale * segment_sum(x_ND, segments), lr * weight_decay, copy_KD)


def _segment_bounds(segments: Segments, width: int) -> list[int]:
    """Bounds between rows that give all threads about the same number of reads."""
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


@kernel
def _bags(first: int, stop: int, values_KD: Any, slots_Nr: Any, weights_Nr: Any, out_ND: Any) -> None:
    for t in range(first, stop):
        _add_rows(out_ND[t], values_KD, slots_Nr[t], weights_Nr[t], 0, slots_Nr.shape[1])


@kernel
def _byte_bags(first: int, stop: int, codes_KD: Any, slots_Nr: Any, weights_Nr: Any, out_ND: Any) -> None:
    for t in range(first, stop):
        _add_rows(out_ND[t], codes_KD, slots_Nr[t], weights_Nr[t], 0, slots_Nr.shape[1])


@compiled
def _multiply_rows(first: int, stop: int, values_KD: Any, x_ND: Any, slots_Nr: Any, out_Nr: Any) -> None:
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


@kernel
def _products(first: int, stop: int, values_KD: Any, x_ND: Any, slots_Nr: Any, out_Nr: Any) -> None:
    _multiply_rows(first, stop, values_KD, x_ND, slots_Nr, out_Nr)


@kernel
def _byte_products(first: int, stop: int, codes_KD: Any, x_ND: Any, slots_Nr: Any, out_Nr: Any) -> None:
    _multiply_rows(first, stop, codes_KD, x_ND, slots_Nr, out_Nr)


@compiled
def _unpack(packed_KC: Any, slots_r: Any, codes_rD: Any) -> None:
    """Unpack some rows of 4-bit codes into bytes."""
    columns, width = packed_KC.shape[1], codes_rD.shape[1]
    for j in range(len(slots_r)):
        packed_C, low_C, high_C = packed_KC[slots_r[j]], codes_rD[j, :columns], codes_rD[j, columns:]
        for c in range(columns):
            low_C[c] = ((packed_C[c] & 15) ^ 8) - 8
        for c in range(width - columns):
            high_C[c] = ((packed_C[c] >> 4) ^ 8) - 8


@kernel
def _packed_bags(first: int, stop: int, packed_KC: Any, slots_Nr: Any, weights_Nr: Any, out_ND: Any) -> None:
    reads = slots_Nr.shape[1]
    codes_rD, every_r = np.empty((reads, out_ND.shape[1]), np.int8), np.arange(reads)
    for t in range(first, stop):
        _unpack(packed_KC, slots_Nr[t], codes_rD)
        _add_rows(out_ND[t], codes_rD, every_r, weights_Nr[t], 0, reads)


@kernel
def _packed_products(first: int, stop: int, packed_KC: Any, x_ND: Any, slots_Nr: Any, out_Nr: Any) -> None:
    reads = slots_Nr.shape[1]
    codes_rD, every_1r = np.empty((reads, x_ND.shape[1]), np.int8), np.arange(reads).reshape(1, -1)
    for t in range(first, stop):
        _unpack(packed_KC, slots_Nr[t], codes_rD)
        _multiply_rows(0, 1, codes_rD, x_ND[t : t + 1], every_1r, out_Nr[t : t + 1])


@kernel
def _sort(slots_Nr: Any, weights_Nr: Any, rows: int) -> Any:
    """A stable radix sort, lowest digits first, in passes of equally many bits."""
    slots_M, weights_M, reads = slots_Nr.ravel(), weights_Nr.ravel(), slots_Nr.shape[1]
    size = len(slots_M)
    order_M = np.arange(size).astype(np.int32)  # half the bytes: more of them stay in the caches
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
            else:  # the last pass: write the results themselves, not the order of the reads
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


@kernel
def _segment_sums(first: int, stop: int, x_ND: Any, start_S: Any, token_M: Any, weight_M: Any, out_UD: Any) -> None:
    for u in range(first, stop):
        _add_rows(out_UD[u], x_ND, token_M, weight_M, start_S[u], start_S[u + 1])


@kernel
def _segment_squares(first: int, stop: int, x_ND: Any, start_S: Any, token_M: Any, weight_M: Any, out_U: Any) -> None:
    row_D = np.empty(x_ND.shape[1], np.float32)
    for u in range(first, stop):
        square = np.float64(0)
        if start_S[u] == start_S[u + 1]:  # as for most rows, if every row of the table is updated
            out_U[u] = square
            continue
        _add_rows(row_D, x_ND, token_M, weight_M, start_S[u], start_S[u + 1])
        for d in range(len(row_D)):
            square += np.float64(row_D[d]) * np.float64(row_D[d])
        out_U[u] = square


@kernel
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


def score_gradients(q_NHd: Tensor, subkeys_H2nf: Tensor, slots_NHk: Tensor, grad_NHk: Tensor) -> tuple[Tensor, Tensor]:
    """`reference.score_gradients`. The sub-keys of a half stay in a core's cache, so one thread adds up their gradients
    read by read: sorting the reads first would take longer than the sums."""
    tokens, heads, k = slots_NHk.shape
    # Contiguous, as the kernel needs them: `zeros_like` would keep the strides of sub-keys that are not.
    q_grad, keys_grad = q_NHd.new_empty(q_NHd.shape), subkeys_H2nf.new_zeros(subkeys_H2nf.shape)
    bounds = even_bounds(2 * heads, tokens * k * subkeys_H2nf.shape[3])
    given = (q_NHd, subkeys_H2nf, slots_NHk, grad_NHk)
    over_threads(_score_gradients, bounds, *map(array_of, given), q_grad.numpy(), keys_grad.numpy())
    return q_grad, keys_grad


@kernel
def _score_gradients(
    first: int,
    stop: int,
    q_NHd: Any,
    subkeys_H2nf: Any,
    slots_NHk: Any,
    grad_NHk: Any,
    q_grad_NHd: Any,
    keys_grad_H2nf: Any,
) -> None:
    n, f = subkeys_H2nf.shape[2:]
    chosen_k = np.empty(slots_NHk.shape[2], np.int64)
    for part in range(first, stop):
        head, half = part // 2, part % 2
        keys_nf, sum_nf = subkeys_H2nf[head, half], keys_grad_H2nf[head, half]
        for t in range(len(q_NHd)):
            slots_k, grad_k = slots_NHk[t, head], grad_NHk[t, head]
            q_f, q_grad_f = q_NHd[t, head, half * f : (half + 1) * f], q_grad_NHd[t, head, half * f : (half + 1) * f]
            for place in range(len(chosen_k)):
                i = np.int64(slots_k[place] / n)  # as in `_sort`
                chosen_k[place] = i if half == 0 else slots_k[place] - i * n
            for d in range(f):
                q_grad_f[d] = 0
            for place in range(len(chosen_k)):
                slope, key_f, sum_f = grad_k[place], keys_nf[chosen_k[place]], sum_nf[chosen_k[place]]
                for d in range(f):
                    q_grad_f[d] += slope * key_f[d]
                    sum_f[d] += slope * q_f[d]


def bucket_reads(z_NTb: Tensor, temperature: float, *, scaled: bool) -> tuple[Tensor, Tensor]:
    """`reference.bucket_reads`, without a gradient, for a few tokens."""
    shape = z_NTb.shape[:2]
    rows_NT, weights_NT = torch.empty(shape, dtype=torch.int64), z_NTb.new_empty(shape)
    rate, out = np.float32(-2 / temperature), (rows_NT.numpy(), weights_NT.numpy())
    call(_buckets, array_of(z_NTb), rate, scaled, *out)
    return rows_NT, weights_NT


@kernel
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
