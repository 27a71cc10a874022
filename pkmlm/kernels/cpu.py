"""Rows of tables on the CPU: read, compared, summed by row, and updated. fp32.

Floors are bytes over the memory's bandwidth: `weighted_row_sum` and `row_products` read M rows, `segment_row_adam_`
reads and writes three rows of each touched slot. Rows lie at random: eight are in flight at a time, which is twice as
fast as one after the other.

N: tokens; r: reads of a token; M: N * r; K: rows of the table; D: width; U: distinct rows read; S: U + 1.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pkmlm.kernels.compiled import compiled, even_bounds, over_threads
from pkmlm.kernels.cpu_top_k import product_top_k, top_k
from pkmlm.kernels.segments import Segments

__all__ = [
    "product_top_k",
    "row_products",
    "segment_row_adam_",
    "segment_sum",
    "sort_reads",
    "squared_norm",
    "top_k",
    "weighted_row_sum",
]

RADIX = 11  # bits sorted by a pass


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


def sort_reads(slots_Nr: Tensor, weights_Nr: Tensor, rows: int, *, every_row: bool = False) -> Segments:
    """`reference.sort_reads`."""
    segments = Segments(*map(torch.from_numpy, _sort(_array(slots_Nr), _array(weights_Nr), rows)))
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
def _sort(slots_Nr: Any, weights_Nr: Any, rows: int) -> Any:
    """A stable radix sort, lowest digits first."""
    slots_M, weights_M, reads = slots_Nr.ravel(), weights_Nr.ravel(), slots_Nr.shape[1]
    order_M, other_M = np.arange(len(slots_M)), np.empty(len(slots_M), np.int64)
    digits = 1 << RADIX
    for shift in range(0, 63, RADIX):
        if rows <= 1 << shift:
            break
        place_d = np.zeros(digits + 1, np.int64)
        for m in range(len(slots_M)):
            place_d[((slots_M[m] >> shift) & (digits - 1)) + 1] += 1
        for digit in range(digits):
            place_d[digit + 1] += place_d[digit]
        for read in order_M:
            low = (slots_M[read] >> shift) & (digits - 1)
            other_M[place_d[low]] = read
            place_d[low] += 1
        order_M, other_M = other_M, order_M
    touched = 0
    rows_M, start_M = np.empty(len(order_M), np.int64), np.empty(len(order_M) + 1, np.int64)
    for m in range(len(order_M)):
        row = slots_M[order_M[m]]
        if touched == 0 or row != rows_M[touched - 1]:
            rows_M[touched], start_M[touched] = row, m
            touched += 1
    start_M[touched] = len(order_M)
    return rows_M[:touched].copy(), start_M[: touched + 1].copy(), order_M // reads, weights_M[order_M]


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
