"""The memory's kernels for CUDA, in Triton. `reference` defines their results; `backend` chooses them for CUDA tensors.

All are bound by memory. Bytes moved, with s bytes per number in the table and g in the gradients:

    weighted_row_sum     N r D s read, N D s written
    row_products         N r D s read, 4 N r written
    of tables in 8 bits  N r (D + 4) read, in 4 bits N r (D / 2 + 4); 4 N D or 4 N r written
    segment_sum          M D g read, from L2 if N D g fits; 4 U D written
    squared_norm         M D g read, likewise; 4 U written
    segment_row_adam_    M D g read, likewise; 24 U D of values and moments, 2 U D of a copy in half precision written
    bucket_reads         4 N T b read, 12 N T written
    bucket_gradient      4 N T (b + 1) read, 4 N T b written

A copy on an H200 moves 4.15 TB/s. The weighted sum reads at 83 to 105 % of that in fp32 (some rows come from the
cache), the products at 61 % in bf16 (32,768 tokens, r = 128, D = 512). pkmlm/manual/speed.md has whole steps.

A program computes one bag or one row, in a block of columns; each thread holds 16 bytes of each row, a tile of `READS`
rows is in flight, and sums over reads stay inside a thread (for rows under 512 bytes: inside a warp). A row that many
tokens read would keep one program busy long after all others. Aligned chunks of the sorted reads that belong to a
single row are therefore summed first, each by its own program, and the row's program adds those sums in order. The
order of every sum is set by the input alone, without atomics, so the result is always the same to the bit. Sums are
fp32, offsets 64-bit. Tables are contiguous; tables, gradients and weights may each be fp16, bf16 or fp32; slots and
segments are int64.

The host never reads a number from the device: it would wait until all that is queued is done. So it does not know how
many rows were read. There are as many segments as there can be; those that are too many, or that `only` leaves out,
have the row -1, for which a program returns at once. How far an update goes, and whether there is one, may also be
known to the device alone.

Top-k and product-key top-k are exact; a warp (for k above 256: several) searches a row, in registers. Score and column
are packed into one integer, of 64 bits, or of 32 for scores in half precision: the upper half is the score's bits, in
the order of the floats; the lower half is the column's distance from the end. All keys of a row differ, so their order
is total, and among equal scores the lowest column has the highest key. `tl.topk` sorts no more of them than it must
(Shanbhag, Pirk and Madden 2018, bitonic top-k). The highest scores of groups of neighbouring columns tell which k
groups hold the k best, so that of 512 columns 128 groups, then the 128 columns of 32 of them are sorted (Gaihre et al.
2021, Dr. Top-k: delegates).

On an H200, 8,192 tokens of 4 heads took 0.77 ms at n = 512 and k = 32 (Triton 3.6) before there were groups; it was not
measured since. A query took 12,400 instructions of its warp, 2,110 of them shuffles, and 91 registers a thread; now it
takes 3,600, 720 and 56, or in half precision 2,700, 420 and 43 (machine code for an H100 by Triton 3.7, which comes
with torch 2.13). torch's own top-k selects from int64 in 32 passes over each row, among a dozen elementwise operations.

N: tokens; r: reads of a token; M: N * r; K: slots; D: width; U: rows read; L: segments, M or K, whichever is less; S:
L + 1; B: chunks; R: reads of a tile; C: columns, or bytes, of a program; Q: bytes of a row in 8 or 4 bits; P: reads of
a program. In searches, R: rows (queries); n: scores of a row; k: columns to select; c: pairs of ranks; E: columns of a
group; W, P: groups and pairs at a time; K, H: k, and the smaller one of k and n, up to a power of two; S: halves. In
their gradients, H: heads; n: sub-keys of a half; S: halves of queries. In hash tables, T: tables; b, B: bits of a code,
and up to a power of two; M: chunks (N * T); P: those of a program.
"""

import math
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad
from triton import next_power_of_2
from triton.language import constexpr

from pkmlm.kernels import reference
from pkmlm.kernels.matmul import SCORES, cat
from pkmlm.kernels.reference import Quantized, Segments, candidate_pairs

LEARNS_BUCKETS = KEEPS_SUMS = True  # see `backend.of`

READS = constexpr(8)  # 128 bytes in flight a thread: with 8 programs on an SM several times latency x bandwidth
COLUMNS = 1024  # of a program at most
CHUNK = 128  # sorted reads: 16 tiles for its program; a slot read by 8,192 tokens leaves 64 sums for the row's
# Few bags leave the GPU idle: the 16 tiles of 128 reads run one after the other, at about 1.3 us each. Torch reads them
# all at once, in three launches. Estimated from latencies, not measured on a GPU.
SMALL_BYTES = 1 << 20
PLACES = 1024  # numbers of a program that only moves them, such as sorted reads, or a few times computes

SEARCH_COLUMNS = 256  # scores at a time: 8 a thread, in code that an SM's instruction cache holds (85 KB)
SEARCH_PART = 4096  # columns of a row that one program searches: flat keys come in rows of up to millions
MOST_WARPS = 32  # that a program can have


@triton.jit
def _sum_rows(
    table: tl.tensor, rows_R: tl.tensor, weights_R: tl.tensor, some_R: tl.tensor, columns_C: tl.tensor, D: constexpr
) -> tl.tensor:
    """The weighted sum of some of these rows of a table."""
    mask_RC = some_R[:, None] & (columns_C < D)[None, :]
    rows_RC = tl.load(table + rows_R[:, None] * D + columns_C[None, :], mask=mask_RC, other=0)
    return tl.sum(weights_R.to(tl.float32)[:, None] * rows_RC.to(tl.float32), 0)


@triton.jit
def _weighted_row_sum(
    values: tl.tensor, slots: tl.tensor, weights: tl.tensor, out: tl.tensor, r: constexpr, D: constexpr, C: constexpr
) -> None:
    token = tl.program_id(0).to(tl.int64)
    columns_C = tl.program_id(1) * C + tl.arange(0, C)
    sum_C = tl.zeros((C,), tl.float32)
    for first in range(0, r, READS):
        reads_R = first + tl.arange(0, READS)
        some_R = reads_R < r
        slots_R = tl.load(slots + token * r + reads_R, mask=some_R, other=0)
        weights_R = tl.load(weights + token * r + reads_R, mask=some_R, other=0)
        sum_C += _sum_rows(values, slots_R, weights_R, some_R, columns_C, D)
    tl.store(out + token * D + columns_C, sum_C, mask=columns_C < D)


@triton.jit
def _row_products(
    values: tl.tensor, x: tl.tensor, slots: tl.tensor, products: tl.tensor, r: constexpr, D: constexpr, C: constexpr
) -> None:
    token = tl.program_id(0).to(tl.int64)
    reads_R = tl.program_id(1) * READS + tl.arange(0, READS)
    some_R = reads_R < r
    slots_R = tl.load(slots + token * r + reads_R, mask=some_R, other=0)
    sum_RC = tl.zeros((READS, C), tl.float32)
    for first in range(0, D, C):
        columns_C = first + tl.arange(0, C)
        mask_RC = some_R[:, None] & (columns_C < D)[None, :]
        rows_RC = tl.load(values + slots_R[:, None] * D + columns_C[None, :], mask=mask_RC, other=0)
        x_C = tl.load(x + token * D + columns_C, mask=columns_C < D, other=0)
        sum_RC += rows_RC.to(tl.float32) * x_C.to(tl.float32)[None, :]
    tl.store(products + token * r + reads_R, tl.sum(sum_RC, 1), mask=some_R)


@triton.jit
def _low(codes_RC: tl.tensor, most: constexpr) -> tl.tensor:
    """The codes of 8 bits, or those of 4 in the low halves of the bytes, as floats."""
    signed_RC = codes_RC.to(tl.int8, bitcast=True)
    return (signed_RC << 4 >> 4 if most == 7 else signed_RC).to(tl.float32)


@triton.jit
def _high(codes_RC: tl.tensor) -> tl.tensor:
    """The codes in the high halves of the bytes, as floats."""
    return (codes_RC.to(tl.int8, bitcast=True) >> 4).to(tl.float32)


@triton.jit
def _quantized_row_sum(
    table: tl.tuple,
    slots: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    r: constexpr,
    D: constexpr,
    Q: constexpr,
    C: constexpr,
    most: constexpr,
) -> None:
    codes, scale = table
    token = tl.program_id(0).to(tl.int64)
    bytes_C = tl.program_id(1) * C + tl.arange(0, C)
    low_C, high_C = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32)
    for first in range(0, r, READS):
        reads_R = first + tl.arange(0, READS)
        some_R = reads_R < r
        slots_R = tl.load(slots + token * r + reads_R, mask=some_R, other=0)
        weights_R = tl.load(weights + token * r + reads_R, mask=some_R, other=0)
        weights_R *= tl.load(scale + slots_R, mask=some_R, other=0) * (1 / most)
        mask_RC = some_R[:, None] & (bytes_C < Q)[None, :]
        codes_RC = tl.load(codes + slots_R[:, None] * Q + bytes_C[None, :], mask=mask_RC, other=0)
        low_C += tl.sum(weights_R[:, None] * _low(codes_RC, most), 0)
        if most == 7:
            high_C += tl.sum(weights_R[:, None] * _high(codes_RC), 0)
    tl.store(out + token * D + bytes_C, low_C, mask=bytes_C < Q)
    if most == 7:
        tl.store(out + token * D + Q + bytes_C, high_C, mask=Q + bytes_C < D)


@triton.jit
def _quantized_row_products(
    table: tl.tuple,
    x: tl.tensor,
    slots: tl.tensor,
    products: tl.tensor,
    r: constexpr,
    D: constexpr,
    Q: constexpr,
    C: constexpr,
    most: constexpr,
) -> None:
    codes, scale = table
    token = tl.program_id(0).to(tl.int64)
    reads_R = tl.program_id(1) * READS + tl.arange(0, READS)
    some_R = reads_R < r
    slots_R = tl.load(slots + token * r + reads_R, mask=some_R, other=0)
    sum_RC = tl.zeros((READS, C), tl.float32)
    for first in range(0, Q, C):
        bytes_C = first + tl.arange(0, C)
        mask_RC = some_R[:, None] & (bytes_C < Q)[None, :]
        codes_RC = tl.load(codes + slots_R[:, None] * Q + bytes_C[None, :], mask=mask_RC, other=0)
        x_C = tl.load(x + token * D + bytes_C, mask=bytes_C < Q, other=0)
        sum_RC += _low(codes_RC, most) * x_C[None, :]
        if most == 7:
            x_C = tl.load(x + token * D + Q + bytes_C, mask=Q + bytes_C < D, other=0)
            sum_RC += _high(codes_RC) * x_C[None, :]
    scale_R = tl.load(scale + slots_R, mask=some_R, other=0) * (1 / most)
    tl.store(products + token * r + reads_R, tl.sum(sum_RC, 1) * scale_R, mask=some_R)


@triton.jit
def _sum_reads(reads: tl.tuple, first: tl.tensor, end: tl.tensor, columns_C: tl.tensor, D: constexpr) -> tl.tensor:
    """The weighted sum of x over the reads from `first` to before `end`."""
    x, _, token, weight, _ = reads
    sum_C = tl.zeros(columns_C.shape, tl.float32)
    for start in range(first, end, READS):
        reads_R = start + tl.arange(0, READS)
        some_R = reads_R < end
        tokens_R = tl.load(token + reads_R, mask=some_R, other=0)
        weights_R = tl.load(weight + reads_R, mask=some_R, other=0)
        sum_C += _sum_rows(x, tokens_R, weights_R, some_R, columns_C, D)
    return sum_C


@triton.jit(do_not_specialize=["segments"])  # whose sizes vary: not compiled for some
def _sum_chunks(reads: tl.tuple, segments: int, D: constexpr, C: constexpr, chunk_size: constexpr) -> None:
    """The sum of each chunk whose reads are all of one segment."""
    _, start, _, _, chunks = reads
    chunk = tl.program_id(0).to(tl.int64)
    columns_C = tl.program_id(1) * C + tl.arange(0, C)
    end = (chunk + 1) * chunk_size
    segment, behind = chunk * 0, chunk * 0 + segments  # that of the first read is the former, or between the two
    while behind - segment > 1:
        middle = (segment + behind) // 2
        begun = tl.load(start + middle) <= end - chunk_size
        segment, behind = tl.where(begun, middle, segment), tl.where(begun, behind, middle)
    if tl.load(start + segment + 1) >= end:
        sum_C = _sum_reads(reads, end - chunk_size, end, columns_C, D)
        tl.store(chunks + chunk * D + columns_C, sum_C, mask=columns_C < D)


@triton.jit
def _row_gradient(
    reads: tl.tuple, row: tl.tensor, columns_C: tl.tensor, D: constexpr, chunk_size: constexpr
) -> tl.tensor:
    """The sum over a row's reads: those before its whole chunks, the sums of these chunks, and those after."""
    _, start, _, _, chunks = reads
    first, end = tl.load(start + row), tl.load(start + row + 1)
    chunk, last = (first + chunk_size - 1) // chunk_size, end // chunk_size
    whole = chunk < last
    sum_C = _sum_reads(reads, first, tl.where(whole, chunk * chunk_size, end), columns_C, D)
    for next_chunk in range(chunk, last, READS):
        chunks_R = next_chunk + tl.arange(0, READS)
        sum_C += _sum_rows(chunks, chunks_R, chunks_R < last, chunks_R < last, columns_C, D)
    return sum_C + _sum_reads(reads, tl.where(whole, last * chunk_size, end), end, columns_C, D)


@triton.jit
def _segment_sum(reads: tl.tuple, out: tl.tensor, D: constexpr, C: constexpr, chunk_size: constexpr) -> None:
    segment = tl.program_id(0).to(tl.int64)
    columns_C = tl.program_id(1) * C + tl.arange(0, C)
    sum_C = _row_gradient(reads, segment, columns_C, D, chunk_size)
    tl.store(out + segment * D + columns_C, sum_C, mask=columns_C < D)


@triton.jit
def _segment_add(
    table: tl.tuple, rows: tl.tensor, reads: tl.tuple, D: constexpr, C: constexpr, chunk_size: constexpr
) -> None:
    out, read = table
    segment = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + segment)
    if row < 0:
        return
    columns_C = tl.program_id(1) * C + tl.arange(0, C)
    places_C = row * D + columns_C
    before_C = tl.load(out + places_C, mask=columns_C < D, other=0)
    sum_C = _row_gradient(reads, segment, columns_C, D, chunk_size)
    tl.store(out + places_C, before_C + sum_C, mask=columns_C < D)
    if read is not None:
        tl.store(read + row, True)


@triton.jit
def _squared_norms(
    reads: tl.tuple, rows: tl.tensor, squared: tl.tensor, D: constexpr, C: constexpr, chunk_size: constexpr
) -> None:
    segment = tl.program_id(0).to(tl.int64)
    columns_C = tl.program_id(1) * C + tl.arange(0, C)
    square = tl.zeros((), tl.float64)
    if tl.load(rows + segment) >= 0:
        sum_C = _row_gradient(reads, segment, columns_C, D, chunk_size)
        sum_C = sum_C.to(tl.float64)  # so that squares do not overflow
        square = tl.sum(sum_C * sum_C, 0)
    tl.store(squared + segment * tl.num_programs(1) + tl.program_id(1), square)


@triton.jit
def _adam_rates(
    rates: tl.tensor,
    known: tl.tuple,
    scale: float,
    lr: float,
    weight_decay: float,
    log_beta1: float,
    log_beta2: float,
) -> None:
    """What `_row_adam` must know and the host does not: the gradient's scale, the decay, the rate, the correction of
    the second moment, and whether (above 0) to do nothing.
    """
    step, factor, skip = known
    count = tl.load(step).to(tl.float64)
    correction1 = 1 - tl.exp(count * log_beta1)  # in fp64: in fp32 the first steps would lose digits
    correction2 = 1 - tl.exp(count * log_beta2)
    if factor is not None:
        scale *= tl.load(factor).to(tl.float32)
    tl.store(rates, scale)
    tl.store(rates + 1, lr * weight_decay)
    tl.store(rates + 2, (lr / correction1).to(tl.float32))
    tl.store(rates + 3, correction2.to(tl.float32))
    nothing = 0.0
    if skip is not None:
        nothing = tl.load(skip).to(tl.float32)
    tl.store(rates + 4, nothing)


@triton.jit
def _row_adam(
    table: tl.tuple,
    rows: tl.tensor,
    reads: tl.tuple,
    rates: tl.tensor,
    betas: tl.tuple,
    D: constexpr,
    C: constexpr,
    chunk_size: constexpr,
) -> None:
    values, mean, square, copy = table
    to_mean, beta2, to_square, eps = betas
    segment = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + segment)
    if (row < 0) | (tl.load(rates + 4) > 0):
        return
    scale, decay, rate, correction = tl.load(rates), tl.load(rates + 1), tl.load(rates + 2), tl.load(rates + 3)
    columns_C = tl.program_id(1) * C + tl.arange(0, C)
    inside_C = columns_C < D
    places_C = row * D + columns_C
    # Loaded before the gradient is summed, so that both overlap; needed once, so the first to leave the cache.
    mean_C = tl.load(mean + places_C, mask=inside_C, eviction_policy="evict_first").to(tl.float32)
    square_C = tl.load(square + places_C, mask=inside_C, eviction_policy="evict_first").to(tl.float32)
    values_C = tl.load(values + places_C, mask=inside_C, eviction_policy="evict_first").to(tl.float32)
    grad_C = _row_gradient(reads, segment, columns_C, D, chunk_size) * scale
    mean_C += to_mean * (grad_C - mean_C)
    square_C = beta2 * square_C + to_square * grad_C * grad_C
    values_C -= decay * values_C
    values_C -= rate * tl.div_rn(mean_C, tl.sqrt_rn(tl.div_rn(square_C, correction)) + eps)
    tl.store(mean + places_C, mean_C, mask=inside_C, eviction_policy="evict_first")
    tl.store(square + places_C, square_C, mask=inside_C, eviction_policy="evict_first")
    tl.store(values + places_C, values_C, mask=inside_C, eviction_policy="evict_first")
    if copy is not None:
        tl.store(copy + places_C, values_C, mask=inside_C)


@triton.jit
def _row_sgd(
    table: tl.tuple,
    rows: tl.tensor,
    reads: tl.tuple,
    known: tl.tuple,
    rate: float,
    decay: float,
    D: constexpr,
    C: constexpr,
    chunk_size: constexpr,
) -> None:
    values, copy = table
    factor, skip = known
    segment = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + segment)
    if skip is not None:
        row = tl.where(tl.load(skip) > 0, -1, row)
    if row < 0:
        return
    if factor is not None:
        rate *= tl.load(factor).to(tl.float32)
    columns_C = tl.program_id(1) * C + tl.arange(0, C)
    places_C = row * D + columns_C
    values_C = tl.load(values + places_C, mask=columns_C < D, other=0).to(tl.float32)
    values_C -= decay * values_C
    values_C -= rate * _row_gradient(reads, segment, columns_C, D, chunk_size)
    tl.store(values + places_C, values_C, mask=columns_C < D)
    if copy is not None:
        tl.store(copy + places_C, values_C, mask=columns_C < D)


@triton.jit(do_not_specialize=["M", "L"])
def _mark_segments(
    reads: tl.tuple, found: tl.tuple, change: tl.tensor, M: int, L: int, r: constexpr, P: constexpr
) -> None:
    """Token and weight of each sorted read; then, with `change`, the segments. It counts, up to each read but the
    first, how often the row has changed.
    """
    key, order, weights = reads
    rows, start, token, weight = found
    at_P = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)
    read_P = at_P < M
    order_P = tl.load(order + at_P, mask=read_P, other=0)
    tl.store(token + at_P, order_P // r, mask=read_P)
    tl.store(weight + at_P, tl.load(weights + order_P, mask=read_P), mask=read_P)
    if change is not None:
        segment_P = tl.load(change + at_P - 1, mask=read_P & (at_P > 0), other=0)
        before_P = tl.load(change + at_P - 2, mask=read_P & (at_P > 1), other=0)
        first_P = read_P & ((segment_P != before_P) | (at_P == 0))
        tl.store(rows + segment_P, tl.load(key + at_P, mask=first_P, other=0).to(tl.int64), mask=first_P)
        tl.store(start + segment_P, at_P, mask=first_P)
        segments = tl.load(change + M - 2, mask=M > 1, other=0) + tl.where(M > 0, 1, 0)
        tl.store(rows + at_P, -1, mask=(at_P >= segments) & (at_P < L))
        tl.store(start + at_P, M, mask=(at_P >= segments) & (at_P <= L))


@triton.jit
def _product(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    return x * y


@triton.jit
def _chunks(z: tl.tensor, M: tl.tensor, rate: tl.tensor, b: constexpr, P: constexpr, B: constexpr) -> tl.tuple:
    """P of the chunks, and where their entries are and which there are: entries, exp(-2|z|/t), and p(z)."""
    chunk_P = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)
    bit_B = tl.arange(0, B)
    some_PB = (chunk_P < M)[:, None] & (bit_B < b)[None, :]
    places_PB = chunk_P[:, None] * b + bit_B[None, :]
    z_PB = tl.load(z + places_PB, mask=some_PB, other=0).to(tl.float32)
    small_PB = tl.where(some_PB, tl.exp(rate * tl.abs(z_PB)), 0)
    return chunk_P, places_PB, some_PB, z_PB, small_PB, 1 / tl.reduce(1 + small_PB, 1, _product)


@triton.jit(do_not_specialize=["M"])
def _bucket_reads(
    z: tl.tensor,
    rows: tl.tensor,
    weights: tl.tensor,
    M: int,
    rate: float,
    scaled: constexpr,
    T: constexpr,
    b: constexpr,
    P: constexpr,
    B: constexpr,
) -> None:
    chunk_P, _, some_PB, z_PB, _, weight_P = _chunks(z, M, rate, b, P, B)
    code_P = tl.sum(tl.where(some_PB & (z_PB >= 0), 1 << tl.arange(0, B)[None, :], 0), 1)
    if scaled:
        weight_P *= tl.sum(tl.abs(z_PB), 1)
    tl.store(rows + chunk_P, (chunk_P % T << b) + code_P, mask=chunk_P < M)
    tl.store(weights + chunk_P, weight_P, mask=chunk_P < M)


@triton.jit(do_not_specialize=["M"])
def _bucket_gradient(
    z: tl.tensor,
    grads: tl.tensor,
    out: tl.tensor,
    M: int,
    rate: float,
    scaled: constexpr,
    b: constexpr,
    P: constexpr,
    B: constexpr,
) -> None:
    """That of p(z) for z_i is sign(z_i) * p(z) * 2/t * sigmoid(-2|z_i|/t)."""
    chunk_P, places_PB, some_PB, z_PB, small_PB, score_P = _chunks(z, M, rate, b, P, B)
    slope_PB = small_PB / (1 + small_PB) * -rate
    if scaled:
        slope_PB = 1 + slope_PB * tl.sum(tl.abs(z_PB), 1)[:, None]
    sign_PB = tl.where(z_PB > 0, 1.0, tl.where(z_PB < 0, -1.0, 0.0))
    grad_P = tl.load(grads + chunk_P, mask=chunk_P < M, other=0).to(tl.float32)
    tl.store(out + places_PB, (grad_P * score_P)[:, None] * slope_PB * sign_PB, mask=some_PB)


def _launch(kernel: Any, rows: int, table: Tensor, *arguments: Any, **constants: int) -> None:
    """Run a program for each row and block of columns; a thread reads 16 bytes of a row of `table`, its main input."""
    width = table.shape[1]
    columns = min(COLUMNS, next_power_of_2(width))
    warps = max(1, columns * table.element_size() // 512)
    with torch.cuda.device_of(table):
        kernel[rows, triton.cdiv(width, columns)](
            *arguments, D=width, C=columns, num_warps=warps, enable_fp_fusion=True, **constants
        )


def _check(*tables: Tensor | None) -> None:
    """Refuse tables that are not contiguous: a copy would cost as much as a table, and lose an update in place."""
    if not all(table is None or table.is_contiguous() for table in tables):
        raise ValueError("the kernels need contiguous tables")


def weighted_row_sum(values_KD: Tensor, slots_Nr: Tensor, weights_Nr: Tensor) -> Tensor:
    """`reference.weighted_row_sum`, summed in fp32.

    Raises:
        ValueError: the table is not contiguous, here and below.
    """
    _check(values_KD)
    (tokens, r), width = slots_Nr.shape, values_KD.shape[1]
    if slots_Nr.numel() * width * values_KD.element_size() <= SMALL_BYTES:
        return reference.weighted_row_sum(values_KD, slots_Nr, weights_Nr.float()).to(values_KD.dtype)
    out_ND = values_KD.new_empty(tokens, width)
    _launch(
        _weighted_row_sum, tokens, values_KD, values_KD, slots_Nr.contiguous(), weights_Nr.contiguous(), out_ND, r=r
    )
    return out_ND


def row_products(values_KD: Tensor, x_ND: Tensor, slots_Nr: Tensor) -> Tensor:
    """`reference.row_products`, in fp32."""
    _check(values_KD)
    tokens, r = slots_Nr.shape
    width = values_KD.shape[1]
    products_Nr = x_ND.new_empty(tokens, r, dtype=torch.float32)
    arguments = values_KD, x_ND.contiguous(), slots_Nr.contiguous(), products_Nr
    # One warp, 16 bytes a thread: sums over columns need no barrier.
    columns = min(512 // values_KD.element_size(), next_power_of_2(width))
    with torch.cuda.device_of(values_KD):
        _row_products[tokens, triton.cdiv(r, READS.value)](
            *arguments, r=r, D=width, C=columns, num_warps=1, enable_fp_fusion=True
        )
    return products_Nr


def quantized_row_sum(table: Quantized, slots_Nr: Tensor, weights_Nr: Tensor) -> Tensor:
    """`reference.quantized_row_sum`; of few bags, too, for which torch would take some ten launches.

    Args:
        table: codes (K, Q) and scales, contiguous.
        slots_Nr: int64.
        weights_Nr: fp32, as the result (N, D) is.
    """
    _check(table.codes_KC, table.scale_K)
    out_ND = weights_Nr.new_empty(len(slots_Nr), table.width)
    of_reads = slots_Nr.contiguous(), weights_Nr.contiguous()
    width = table.codes_KC.shape[1]
    columns = min(COLUMNS, next_power_of_2(width))
    with torch.cuda.device_of(out_ND):
        _quantized_row_sum[len(slots_Nr), triton.cdiv(width, columns)](
            table[:2], *of_reads, out_ND, **_sizes(table, slots_Nr, columns), num_warps=max(1, columns // 512)
        )
    return out_ND


def quantized_row_products(table: Quantized, x_ND: Tensor, slots_Nr: Tensor) -> Tensor:
    """`reference.quantized_row_products`; table and slots as above; x (N, D) and the result (N, r) are fp32."""
    _check(table.codes_KC, table.scale_K)
    tokens, r = slots_Nr.shape
    products_Nr = x_ND.new_empty(tokens, r)
    arguments = x_ND.contiguous(), slots_Nr.contiguous(), products_Nr
    # One warp, 4 bytes a thread: x is fp32.
    columns = min(128, next_power_of_2(table.codes_KC.shape[1]))
    with torch.cuda.device_of(x_ND):
        _quantized_row_products[tokens, triton.cdiv(r, READS.value)](
            table[:2], *arguments, **_sizes(table, slots_Nr, columns), num_warps=1
        )
    return products_Nr


def _sizes(table: Quantized, slots_Nr: Tensor, columns: int) -> dict[str, int]:
    """What both kernels are compiled for."""
    return {
        "r": slots_Nr.shape[1],
        "D": table.width,
        "Q": table.codes_KC.shape[1],
        "C": columns,
        "most": table.most,
        "enable_fp_fusion": True,
    }


def sort_reads(slots_Nr: Tensor, weights_Nr: Tensor, rows: int, *, every_row: bool = False) -> Segments:
    """`reference.sort_reads`, but with as many segments as there can be (L). Those too many are empty, come after all
    others, and have the row -1.

    Fewer rows have shorter keys, and the time of a radix sort is proportional to their length.
    """
    key = torch.int16 if rows < 1 << 15 else torch.int32 if rows < 1 << 31 else torch.int64
    sorted_M, order_M = torch.sort(slots_Nr.flatten().to(key), stable=True)
    reads, device, change = len(sorted_M), sorted_M.device, None
    if every_row:
        segments, rows_L = rows, torch.arange(rows, device=device)
        start_S = torch.searchsorted(sorted_M, torch.arange(rows + 1, dtype=key, device=device))
    else:
        segments = min(reads, rows)
        rows_L, start_S = order_M.new_empty(segments), order_M.new_empty(segments + 1)
        change = (sorted_M[1:] != sorted_M[:-1]).cumsum(0)
    found = Segments(rows_L, start_S, torch.empty_like(order_M), weights_Nr.new_empty(reads))
    given = sorted_M, order_M, weights_Nr.contiguous()
    with torch.cuda.device_of(sorted_M):
        _mark_segments[(triton.cdiv(reads + 1, PLACES),)](
            given, tuple(found), change, reads, segments, r=slots_Nr.shape[1], P=PLACES, enable_fp_fusion=True
        )
    return found


def only(segments: Segments, chosen_K: Tensor) -> Segments:
    """`reference.only`: the segments of all other rows get the row -1."""
    rows_L = segments.rows_U
    return segments._replace(rows_U=rows_L.where((rows_L >= 0) & chosen_K[rows_L], -1))


def _sum_of_chunks(x_ND: Tensor, segments: Segments) -> tuple[Tensor, ...]:
    """Sum each chunk that belongs to a single row. Returns what `_row_gradient` reads."""
    chunks = len(segments.token_M) // CHUNK
    chunks_BD = torch.empty(chunks, x_ND.shape[1], dtype=torch.float32, device=x_ND.device)
    reads = x_ND.contiguous(), segments.start_S, segments.token_M, segments.weight_M, chunks_BD
    _launch(_sum_chunks, chunks, x_ND, reads, len(segments.rows_U), chunk_size=CHUNK)
    return reads


def segment_sum(x_ND: Tensor, segments: Segments) -> Tensor:
    """`reference.segment_sum`, summed in fp32."""
    reads = _sum_of_chunks(x_ND, segments)
    out_LD = segments.weight_M.new_empty(len(segments.rows_U), x_ND.shape[1])
    _launch(_segment_sum, len(out_LD), x_ND, reads, out_LD, chunk_size=CHUNK)
    return out_LD


def segment_add_(out_KD: Tensor, x_ND: Tensor, segments: Segments, read_K: Tensor | None = None) -> None:
    """`reference.segment_add_`, summed in fp32."""
    _check(out_KD)
    arguments = (out_KD, read_K), segments.rows_U, _sum_of_chunks(x_ND, segments)
    _launch(_segment_add, len(segments.rows_U), x_ND, *arguments, chunk_size=CHUNK)


def squared_norm(x_ND: Tensor, segments: Segments) -> Tensor:
    """`reference.squared_norm`; no row of the sum is stored."""
    reads = _sum_of_chunks(x_ND, segments)
    blocks = triton.cdiv(x_ND.shape[1], COLUMNS)
    squared_LB = torch.empty(len(segments.rows_U), blocks, dtype=torch.float64, device=x_ND.device)
    _launch(_squared_norms, len(squared_LB), x_ND, reads, segments.rows_U, squared_LB, chunk_size=CHUNK)
    return squared_LB.sum()


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
    """`reference.segment_row_adam_`: each row's gradient goes straight into its update and is never stored."""
    table = values_KD, mean_KD, square_KD, copy_KD
    _check(*table)
    (number, factor), (beta1, beta2) = _number_and_factor(scale), betas
    count = step if isinstance(step, Tensor) else torch.full((), step, device=x_ND.device)
    rates_5 = torch.empty(5, device=x_ND.device)
    # Floats are never integers here and below: Triton specialises on some of these and would recompile.
    numbers = map(float, (number, lr, weight_decay, *(math.log(beta) if beta else -math.inf for beta in betas)))
    with torch.cuda.device_of(x_ND):
        _adam_rates[(1,)](rates_5, (count, factor, skip), *numbers, num_warps=1, enable_fp_fusion=True)
    of_moments = tuple(map(float, (1 - beta1, beta2, 1 - beta2, eps)))
    reads = _sum_of_chunks(x_ND, segments)
    arguments = table, segments.rows_U, reads, rates_5, of_moments
    _launch(_row_adam, len(segments.rows_U), x_ND, *arguments, chunk_size=CHUNK)


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
    _check(values_KD, copy_KD)
    number, factor = _number_and_factor(scale)
    reads = _sum_of_chunks(x_ND, segments)
    arguments = (
        (values_KD, copy_KD),
        segments.rows_U,
        reads,
        (factor, skip),
        float(lr * number),
        float(lr * weight_decay),
    )
    _launch(_row_sgd, len(segments.rows_U), x_ND, *arguments, chunk_size=CHUNK)


def bucket_reads(z_NTb: Tensor, temperature: float, *, scaled: bool) -> tuple[Tensor, Tensor]:
    """`reference.bucket_reads`, computed in fp32."""
    rows_NT = torch.empty(z_NTb.shape[:2], dtype=torch.int64, device=z_NTb.device)
    weights_NT = z_NTb.new_empty(rows_NT.shape)
    _launch_chunks(_bucket_reads, z_NTb, rows_NT, weights_NT, temperature, scaled=scaled, T=z_NTb.shape[1])
    return rows_NT, weights_NT


def bucket_gradient(z_NTb: Tensor, grad_NT: Tensor, temperature: float, *, scaled: bool) -> Tensor:
    """`reference.bucket_gradient`, computed in fp32, scores again."""
    out_NTb = z_NTb.new_empty(z_NTb.shape)
    _launch_chunks(_bucket_gradient, z_NTb, grad_NT.contiguous(), out_NTb, temperature, scaled=scaled)
    return out_NTb


def _launch_chunks(
    kernel: Any, z_NTb: Tensor, first: Tensor, second: Tensor, temperature: float, **constants: int
) -> None:
    """Run a program for some chunks: `PLACES` entries, or places for them."""
    tokens, tables, b = z_NTb.shape
    chunks, power = tokens * tables, next_power_of_2(b)
    sizes = {"b": b, "B": power, "P": max(1, PLACES // power), **constants}
    with torch.cuda.device_of(z_NTb):
        kernel[(triton.cdiv(chunks, sizes["P"]),)](
            z_NTb.contiguous(), first, second, chunks, -2 / temperature, **sizes, enable_fp_fusion=True
        )


def _number_and_factor(scale: float | Tensor) -> tuple[float, Tensor | None]:
    """A number as the product of what the host knows and what the device alone does."""
    return (1.0, scale) if isinstance(scale, Tensor) else (scale, None)


@triton.jit
def _ordered(scores: tl.tensor) -> tl.tensor:
    """Integers, of as many bits, in the order of the scores. NaN is above all; -0 and 0 are equal."""
    bits: constexpr = scores.dtype.primitive_bitwidth
    highest: constexpr = (1 << (bits - 1)) - 1
    wide = scores.to(tl.float32)
    integers = scores.to(tl.core.get_int_dtype(bits, True), bitcast=True)
    integers = tl.where(wide == 0, 0, tl.where(wide != wide, highest, integers))
    return integers ^ ((integers >> (bits - 1)) & highest)


@triton.jit
def _packed(ordered: tl.tensor, place: tl.tensor, places: constexpr) -> tl.tensor:
    """Integers of twice the bits, in the order of the given ones and, among equal ones, from the last place to the
    first. Those of no place are below all."""
    bits: constexpr = ordered.dtype.primitive_bitwidth
    packed = (ordered.to(tl.core.get_int_dtype(2 * bits, True)) << bits) | (places - 1 - place)
    return tl.where(place < places, packed, -(1 << (2 * bits - 1)))


@triton.jit
def _place(packed_K: tl.tensor, places: constexpr) -> tl.tensor:
    mask: constexpr = (1 << (packed_K.dtype.primitive_bitwidth // 2)) - 1
    return places - 1 - (packed_K & mask).to(tl.int32)


@triton.jit
def _score(packed_K: tl.tensor, dtype: constexpr) -> tl.tensor:
    bits: constexpr = dtype.primitive_bitwidth
    ordered_K = (packed_K >> bits).to(tl.core.get_int_dtype(bits, True))
    integers_K = ordered_K ^ ((ordered_K >> (bits - 1)) & ((1 << (bits - 1)) - 1))
    return integers_K.to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _with(best_K: tl.tensor, packed_W: tl.tensor, K: constexpr) -> tl.tensor:
    """The K highest of `best_K` and `packed_W` together, highest first."""
    return tl.topk(tl.join(best_K, tl.topk(packed_W, K)).reshape(2 * K), K)


@triton.jit
def _groups(scores: tl.tensor, first: int, n: constexpr, E: constexpr, W: constexpr) -> tl.tensor:
    """The highest score of each of W groups of E columns, packed with the group's number."""
    group_W = first + tl.arange(0, W)
    if E == 1:
        return _packed(_ordered(tl.load(scores + group_W, mask=group_W < n, other=0)), group_W, n)
    column_WE = group_W[:, None] * E + tl.arange(0, E)[None, :]
    ordered_WE = _ordered(tl.load(scores + column_WE, mask=column_WE < n, other=float("-inf")))
    return _packed(tl.max(ordered_WE, 1).to(ordered_WE.dtype), group_W, (n + E - 1) // E)


@triton.jit
def _best(scores: tl.tensor, n: constexpr, E: constexpr, W: constexpr, K: constexpr) -> tl.tensor:
    """The K highest of a row, packed.

    They lie in the K best groups, by their highest scores and then by their numbers. For if a group is not one of
    these, each of these has a score that is higher than all of its own, or as high and in a lower column.
    """
    groups: constexpr = (n + E - 1) // E
    best_K = tl.topk(_groups(scores, 0, n, E, W), K)
    for first in range(W, groups, W):
        best_K = _with(best_K, _groups(scores, first, n, E, W), K)
    if E > 1:
        column_KE = _place(best_K, groups)[:, None] * E + tl.arange(0, E)[None, :]
        scores_KE = tl.load(scores + column_KE, mask=column_KE < n, other=0)
        # The order is free. With each thread's columns far apart, those that drop out soon free their registers.
        best_K = tl.topk(_packed(_ordered(scores_KE), column_KE, n).trans().reshape(K * E), K)
    return best_K


@triton.jit
def _top_k_rows(
    scores: tl.tensor, columns: tl.tensor, n: constexpr, k: constexpr, E: constexpr, W: constexpr, H: constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    best_H = _best(scores + row * n, n, E, W, H)
    place_H = tl.arange(0, H)
    tl.store(columns + row * k + place_H, _place(best_H, n), mask=place_H < k)


@triton.jit
def _sums(
    score1_H: tl.tensor, score2_H: tl.tensor, pairs: tl.tensor, first: int, c: constexpr, P: constexpr
) -> tl.tensor:
    """The sums of P pairs of ranks, packed with the number of their pair."""
    pair_P = first + tl.arange(0, P)
    a_P = tl.load(pairs + pair_P, mask=pair_P < c, other=0)
    b_P = tl.load(pairs + c + pair_P, mask=pair_P < c, other=0)
    return _packed(_ordered(tl.gather(score1_H, a_P, 0) + tl.gather(score2_H, b_P, 0)), pair_P, c)


@triton.jit
def _product_rows(
    scores: tl.tensor,
    pairs: tl.tensor,
    sums: tl.tensor,
    slots: tl.tensor,
    n: constexpr,
    k: constexpr,
    c: constexpr,
    E: constexpr,
    W: constexpr,
    H: constexpr,
    P: constexpr,
    K: constexpr,
) -> None:
    token, head, tokens = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    row = 2 * head * tokens + token
    best1_H, best2_H = _best(scores + row * n, n, E, W, H), _best(scores + (row + tokens) * n, n, E, W, H)
    dtype: constexpr = scores.dtype.element_ty
    score1_H, score2_H = _score(best1_H, dtype), _score(best2_H, dtype)
    best_K = tl.topk(_sums(score1_H, score2_H, pairs, 0, c, P), K)
    for first in range(P, c, P):
        best_K = _with(best_K, _sums(score1_H, score2_H, pairs, first, c, P), K)
    place_K = tl.arange(0, K)
    pair_K = tl.where(place_K < k, _place(best_K, c), 0)
    a_K, b_K = tl.load(pairs + pair_K), tl.load(pairs + c + pair_K)
    i_K, j_K = _place(tl.gather(best1_H, a_K, 0), n), _place(tl.gather(best2_H, b_K, 0), n)
    first = (token * tl.num_programs(1) + head) * k
    sums_K = tl.gather(score1_H, a_K, 0) + tl.gather(score2_H, b_K, 0)
    tl.store(sums + first + place_K, sums_K, mask=place_K < k)
    tl.store(slots + first + place_K, i_K.to(tl.int64) * n + j_K, mask=place_K < k)


def top_k(scores_Rn: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`reference.top_k`, for floats of up to 32 bits.

    Long rows are searched in parts, each by its own program; then the best of all parts are searched, in which equal
    scores are in the order of their columns. The last part is padded with scores that rank behind all others.
    """
    rows, n = scores_Rn.shape
    parts = triton.cdiv(n, SEARCH_PART)
    if n > SEARCH_PART > k and parts * k < n:
        fill = -n % SEARCH_PART
        filled = pad(scores_Rn, (0, fill), value=-torch.inf) if fill else scores_Rn
        best, columns = top_k(filled.reshape(rows * parts, SEARCH_PART), k)
        columns = columns.view(rows, parts, k) + torch.arange(0, n, SEARCH_PART, device=columns.device)[:, None]
        best_Rk, chosen_Rk = top_k(best.view(rows, parts * k), k)
        return best_Rk, columns.flatten(1).gather(1, chosen_Rk)
    columns_Rk = torch.empty(rows, k, dtype=torch.int64, device=scores_Rn.device)
    _launch_search(_top_k_rows, (rows,), scores_Rn.contiguous(), columns_Rk, n=n, k=k)
    return scores_Rn.gather(-1, columns_Rk), columns_Rk


def product_top_k(scores1_Rn: Tensor, scores2_Rn: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`reference.product_top_k`, for floats of up to 32 bits."""
    sums_R1k, slots_R1k = _product_top_k(torch.stack([scores1_Rn, scores2_Rn]), k)
    return sums_R1k[:, 0], slots_R1k[:, 0]


def _product_top_k(scores_SCn: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Sums and slots (C, H, k) of both halves' scores, head by head (S = 2 * H)."""
    halves, tokens, n = scores_SCn.shape
    sums_CHk = scores_SCn.new_empty(tokens, halves // 2, k)
    slots_CHk = torch.empty(sums_CHk.shape, dtype=torch.int64, device=sums_CHk.device)
    pairs_2c = _pairs(n, k, sums_CHk.device)
    c = pairs_2c.shape[1]
    arguments = scores_SCn, pairs_2c, sums_CHk, slots_CHk
    _launch_search(_product_rows, sums_CHk.shape[:2], *arguments, n=n, k=k, c=c, P=_wide(c, _power(k)), K=_power(k))
    return sums_CHk, slots_CHk


def product_key_search(q_NHd: Tensor, subkeys_H2nf: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`reference.product_key_search`, for all heads of some tokens at a time."""
    heads, _, n, f = subkeys_H2nf.shape
    subkeys_Snf = subkeys_H2nf.flatten(0, 1)
    found = []
    for q_CHd in q_NHd.split(max(1, SCORES[q_NHd.device.type] // (2 * heads * n))):
        q_SCf = q_CHd.reshape(-1, 2 * heads, f).transpose(0, 1)
        found.append(_product_top_k(torch.bmm(q_SCf, subkeys_Snf.transpose(1, 2)), k))
    scores_NHk, slots_NHk = (cat(parts) for parts in zip(*found, strict=True))
    return scores_NHk, slots_NHk


@triton.jit(do_not_specialize=["M"])
def _split_slots(
    slots: tl.tensor,
    grads: tl.tensor,
    rows: tl.tensor,
    weights: tl.tensor,
    M: int,
    H: constexpr,
    n: constexpr,
    k: constexpr,
    P: constexpr,
) -> None:
    """Each read of a slot as two reads of sub-keys, among all halves' sub-keys of all heads one below the other."""
    at_P = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)
    query_P = at_P // k
    slot_P = tl.load(slots + at_P, mask=at_P < M, other=0)
    grad_P = tl.load(grads + at_P, mask=at_P < M, other=0)
    first_P, to_P = query_P % H * 2 * n, query_P * 2 * k + at_P % k
    tl.store(rows + to_P, first_P + slot_P // n, mask=at_P < M)
    tl.store(rows + to_P + k, first_P + n + slot_P % n, mask=at_P < M)
    tl.store(weights + to_P, grad_P, mask=at_P < M)
    tl.store(weights + to_P + k, grad_P, mask=at_P < M)


def score_gradients(q_NHd: Tensor, subkeys_H2nf: Tensor, slots_NHk: Tensor, grad_NHk: Tensor) -> tuple[Tensor, Tensor]:
    """`reference.score_gradients`, as weighted row sums: of sub-keys by query, and of queries by sub-key."""
    heads, _, n, f = subkeys_H2nf.shape
    tokens, _, k = slots_NHk.shape
    rows_Sk = slots_NHk.new_empty(2 * tokens * heads, k)
    grad_Sk = grad_NHk.new_empty(rows_Sk.shape)
    arguments = slots_NHk.contiguous(), grad_NHk.contiguous(), rows_Sk, grad_Sk, slots_NHk.numel()
    with torch.cuda.device_of(q_NHd):
        grid = (triton.cdiv(slots_NHk.numel(), PLACES),)
        _split_slots[grid](*arguments, H=heads, n=n, k=k, P=PLACES, enable_fp_fusion=True)
    segments = sort_reads(rows_Sk, grad_Sk, 2 * heads * n, every_row=True)
    keys_grad = segment_sum(q_NHd.reshape(-1, f), segments)
    q_grad = weighted_row_sum(subkeys_H2nf.reshape(-1, f), rows_Sk, grad_Sk)
    return q_grad.view_as(q_NHd), keys_grad.view_as(subkeys_H2nf)


def _power(k: int) -> int:
    """The next power of two, but at least 2: `tl.topk` accepts 1 only since Triton 3.9."""
    return max(2, next_power_of_2(k))


def _wide(n: int, power: int) -> int:
    """How many of n numbers to search at a time for the highest."""
    return max(power, min(SEARCH_COLUMNS, _power(n)))


def _launch_search(
    kernel: Any, grid: tuple[int, ...], scores: Tensor, *arguments: Tensor, n: int, k: int, **sizes: int
) -> None:
    """Run a program for each row of n scores, or for a row of each half."""
    if n > 1 << 16:  # columns, too many to be packed with scores of 16 bits
        scores = scores.float()
    power = _power(min(n, k))
    # Of n / E groups and E K columns, sorted one after the other, there are together the fewest if there are as many. A
    # thread loads a group, of 16 bytes at most.
    most = min(16 // scores.element_size(), max(1, SEARCH_COLUMNS // power))
    group = min(most, 1 << (max(1, n // power).bit_length() - 1) // 2)
    sizes = {"E": group, "W": _wide(triton.cdiv(n, group), power), "H": power, **sizes}
    warps = min(MOST_WARPS, max(1, _power(k) // SEARCH_COLUMNS))
    with torch.cuda.device_of(scores):
        kernel[grid](scores, *arguments, n=n, k=k, **sizes, num_warps=warps, enable_fp_fusion=True)


@cache
def _pairs(n: int, k: int, device: torch.device) -> Tensor:
    """`candidate_pairs` (2, c), int32; from pinned memory, so that the host does not wait for the copy."""
    pairs_2c = torch.tensor(candidate_pairs(n, k), dtype=torch.int32, pin_memory=device.type == "cuda")
    return pairs_2c.to(device, non_blocking=True)
