"""The memory's kernels for CUDA, in Triton. `reference` defines their results; `backend` chooses them for CUDA tensors.

All are bound by memory. Bytes moved, with s bytes per number in the table and g in the gradients:

    weighted_row_sum     N r D s read, N D s written
    row_products         N r D s read, N r g written
    segment_sum          M D g read, from L2 if N D g fits; 4 U D written
    squared_norm         M D g read, likewise; 4 U written
    segment_row_adam_    M D g read, likewise; 24 U D of values and moments, 2 U D of a copy in half precision written

A copy on an H200 moves 4.15 TB/s. The weighted sum reads at 83 to 105 % of that in fp32 (some rows come from the
cache), the products at 61 % in bf16 (32,768 tokens, r = 128, D = 512). pkmlm/manual/speed.md has whole steps.

A program computes one bag or one row, in a block of columns; each thread holds 16 bytes of each row, a tile of `READS`
rows is in flight, and sums over reads stay inside a thread (for rows under 512 bytes: inside a warp). A row that many
tokens read would keep one program busy long after all others. Aligned chunks of the sorted reads that belong to a
single row are therefore summed first, each by its own program, and the row's program adds those sums in order. The
order of every sum is set by the input alone, without atomics, so the result is always the same to the bit. Sums are
fp32, offsets 64-bit. Tables are contiguous; tables, gradients and weights may each be fp16, bf16 or fp32; slots and
segments are int64.

Top-k and product-key top-k are exact; a warp (for k above 256: several) searches a row, in registers. Score and column
are packed into one int64 key: the upper half is the score's bits, in the order of the floats; the lower half is the
column's distance from the end. All keys of a row differ, so their order is total, and among equal scores the lowest
column has the highest key. `tl.topk` sorts no more of them than it must (Shanbhag, Pirk and Madden 2018, bitonic
top-k).

On an H200, 8,192 tokens of 4 heads take 0.77 ms at n = 512 and k = 32 (Triton 3.6). Triton 3.9's machine code for an
H100 has, at n = 1,024, 19 thousand instructions a query for its warp, 3 thousand of them shuffles, and 72 registers a
thread. (Triton 3.7, which comes with torch 2.13: 90 registers, and code 18 % longer.) torch's own top-k selects from
int64 in 32 passes over each row, among a dozen elementwise operations.

N: tokens; r: reads of a token; M: N * r; K: slots; D: width; U: rows read; S: U + 1; B: chunks; R: reads of a tile;
C: columns of a program. In searches, R: rows (queries); n: scores of a row; k: columns to select; c: pairs of ranks; W,
P: columns and pairs at a time; K, H: k, and the smaller one of k and n, up to a power of two.
"""

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

READS = constexpr(8)  # 128 bytes in flight a thread: with 8 programs on an SM several times latency x bandwidth
COLUMNS = 1024  # of a program at most
CHUNK = 128  # sorted reads: 16 tiles for its program; a slot read by 8,192 tokens leaves 64 sums for the row's
# Few bags leave the GPU idle: the 16 tiles of 128 reads run one after the other, at about 1.3 us each. Torch reads them
# all at once, in three launches. Estimated from latencies, not measured on a GPU.
SMALL_BYTES = 1 << 20

SEARCH_COLUMNS = 256  # scores at a time: 8 a thread, in code that an SM's instruction cache holds (85 KB)
SEARCH_PART = 4096  # columns of a row that one program searches: flat keys come in rows of up to millions
MOST_WARPS = 32  # that a program can have
NONE = constexpr(-(1 << 63))  # below all scores
NAN = constexpr(0x7FFFFFFF)  # above all
PLACE = constexpr(0xFFFFFFFF)


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


@triton.jit
def _sum_chunks(reads: tl.tuple, row_B: tl.tensor, D: constexpr, C: constexpr, chunk_size: constexpr) -> None:
    """The sum of each chunk whose reads are all of one row; row_B[b] is the row of the chunk's first read."""
    _, start, _, _, chunks = reads
    chunk = tl.program_id(0).to(tl.int64)
    columns_C = tl.program_id(1) * C + tl.arange(0, C)
    end = (chunk + 1) * chunk_size
    if tl.load(start + tl.load(row_B + chunk) + 1) >= end:
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
    row = tl.program_id(0).to(tl.int64)
    columns_C = tl.program_id(1) * C + tl.arange(0, C)
    sum_C = _row_gradient(reads, row, columns_C, D, chunk_size)
    tl.store(out + row * D + columns_C, sum_C, mask=columns_C < D)


@triton.jit
def _squared_norms(reads: tl.tuple, squared: tl.tensor, D: constexpr, C: constexpr, chunk_size: constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns_C = tl.program_id(1) * C + tl.arange(0, C)
    sum_C = _row_gradient(reads, row, columns_C, D, chunk_size)
    sum_C = sum_C.to(tl.float64)  # so that squares do not overflow
    tl.store(squared + row * tl.num_programs(1) + tl.program_id(1), tl.sum(sum_C * sum_C, 0))


@triton.jit
def _row_adam(
    table: tl.tuple,
    rows: tl.tensor,
    reads: tl.tuple,
    rates: tl.tuple,
    D: constexpr,
    C: constexpr,
    chunk_size: constexpr,
) -> None:
    values, mean, square, copy = table
    scale, to_mean, beta2, to_square, decay, rate, correction, eps = rates
    row = tl.program_id(0).to(tl.int64)
    columns_C = tl.program_id(1) * C + tl.arange(0, C)
    inside_C = columns_C < D
    places_C = tl.load(rows + row) * D + columns_C
    # Loaded before the gradient is summed, so that both overlap; needed once, so the first to leave the cache.
    mean_C = tl.load(mean + places_C, mask=inside_C, eviction_policy="evict_first").to(tl.float32)
    square_C = tl.load(square + places_C, mask=inside_C, eviction_policy="evict_first").to(tl.float32)
    values_C = tl.load(values + places_C, mask=inside_C, eviction_policy="evict_first").to(tl.float32)
    grad_C = _row_gradient(reads, row, columns_C, D, chunk_size) * scale
    mean_C += to_mean * (grad_C - mean_C)
    square_C = beta2 * square_C + to_square * grad_C * grad_C
    values_C -= decay * values_C
    values_C -= rate * tl.div_rn(mean_C, tl.sqrt_rn(tl.div_rn(square_C, correction)) + eps)
    tl.store(mean + places_C, mean_C, mask=inside_C, eviction_policy="evict_first")
    tl.store(square + places_C, square_C, mask=inside_C, eviction_policy="evict_first")
    tl.store(values + places_C, values_C, mask=inside_C, eviction_policy="evict_first")
    if copy is not None:
        tl.store(copy + places_C, values_C, mask=inside_C)


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
    """`reference.row_products`, summed in fp32."""
    _check(values_KD)
    tokens, r = slots_Nr.shape
    width = values_KD.shape[1]
    products_Nr = x_ND.new_empty(tokens, r)
    arguments = values_KD, x_ND.contiguous(), slots_Nr.contiguous(), products_Nr
    # One warp, 16 bytes a thread: sums over columns need no barrier.
    columns = min(512 // values_KD.element_size(), next_power_of_2(width))
    with torch.cuda.device_of(values_KD):
        _row_products[tokens, triton.cdiv(r, READS.value)](
            *arguments, r=r, D=width, C=columns, num_warps=1, enable_fp_fusion=True
        )
    return products_Nr


def quantized_row_sum(table: Quantized, slots_Nr: Tensor, weights_Nr: Tensor) -> Tensor:
    """`reference.quantized_row_sum`, for some tokens at a time: there is no kernel for it."""
    chunks = (each.split(_tokens_at_once(table, slots_Nr)) for each in (slots_Nr, weights_Nr))
    return torch.cat([reference.quantized_row_sum(table, *chunk) for chunk in zip(*chunks, strict=True)])


def quantized_row_products(table: Quantized, x_ND: Tensor, slots_Nr: Tensor) -> Tensor:
    """`reference.quantized_row_products`, for some tokens at a time."""
    chunks = (each.split(_tokens_at_once(table, slots_Nr)) for each in (x_ND, slots_Nr))
    return torch.cat([reference.quantized_row_products(table, *chunk) for chunk in zip(*chunks, strict=True)])


def _tokens_at_once(table: Quantized, slots_Nr: Tensor) -> int:
    """How many tokens read 128 MB of entries, in fp32."""
    return max(1, (1 << 25) // (slots_Nr.shape[1] * table.width))


def sort_reads(slots_Nr: Tensor, weights_Nr: Tensor, rows: int, *, every_row: bool = False) -> Segments:
    """`reference.sort_reads`. Without `every_row`, the host waits in each call for the number of distinct rows.

    Fewer rows have shorter keys, and the time of a radix sort is proportional to their length.
    """
    key = torch.int16 if rows <= 1 << 15 else torch.int32 if rows <= 1 << 31 else torch.int64
    sorted_M, order_M = torch.sort(slots_Nr.flatten().to(key), stable=True)
    if every_row:
        rows_U = torch.arange(rows, device=sorted_M.device)
        first_U = torch.searchsorted(sorted_M, rows_U.to(key))
    else:
        first_U = torch.diff(sorted_M, prepend=sorted_M.new_full((1,), -1)).nonzero()[:, 0]
        rows_U = sorted_M[first_U].long()
    start_S = pad(first_U, (0, 1), value=len(sorted_M))
    return Segments(rows_U, start_S, order_M // slots_Nr.shape[1], weights_Nr.flatten()[order_M])


def _sum_of_chunks(x_ND: Tensor, segments: Segments) -> tuple[Tensor, ...]:
    """Sum each chunk that belongs to a single row. Returns what `_row_gradient` reads."""
    chunks = len(segments.token_M) // CHUNK
    chunks_BD = torch.empty(chunks, x_ND.shape[1], dtype=torch.float32, device=x_ND.device)
    first_B = torch.arange(chunks, device=x_ND.device) * CHUNK
    row_B = torch.searchsorted(segments.start_S, first_B, right=True) - 1
    reads = x_ND.contiguous(), segments.start_S, segments.token_M, segments.weight_M, chunks_BD
    _launch(_sum_chunks, chunks, x_ND, reads, row_B, chunk_size=CHUNK)
    return reads


def segment_sum(x_ND: Tensor, segments: Segments) -> Tensor:
    """`reference.segment_sum`, summed in fp32."""
    reads = _sum_of_chunks(x_ND, segments)
    out_UD = segments.weight_M.new_empty(len(segments.rows_U), x_ND.shape[1])
    _launch(_segment_sum, len(out_UD), x_ND, reads, out_UD, chunk_size=CHUNK)
    return out_UD


def squared_norm(x_ND: Tensor, segments: Segments) -> Tensor:
    """`reference.squared_norm`; no row of the sum is stored."""
    reads = _sum_of_chunks(x_ND, segments)
    blocks = triton.cdiv(x_ND.shape[1], COLUMNS)
    squared_UB = torch.empty(len(segments.rows_U), blocks, dtype=torch.float64, device=x_ND.device)
    _launch(_squared_norms, len(squared_UB), x_ND, reads, squared_UB, chunk_size=CHUNK)
    return squared_UB.sum()


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
    """`reference.segment_row_adam_`: each row's gradient goes straight into its update and is never stored."""
    table = values_KD, mean_KD, square_KD, copy_KD
    _check(*table)
    reads, (beta1, beta2) = _sum_of_chunks(x_ND, segments), betas
    rates = scale, 1 - beta1, beta2, 1 - beta2, lr * weight_decay, lr / (1 - beta1**step), 1 - beta2**step, eps
    floats = tuple(map(float, rates))  # never integers: Triton specialises on some of them and would recompile
    _launch(_row_adam, len(segments.rows_U), x_ND, table, segments.rows_U, reads, floats, chunk_size=CHUNK)


@triton.jit
def _packed(scores_W: tl.tensor, behind_W: tl.tensor, some_W: tl.tensor) -> tl.tensor:
    """Integers in the order of the scores; among equal scores, more places behind is higher. NaN is above all."""
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
    """The K highest of `best_K` and `packed_W` together, highest first."""
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
    sums: tl.tensor,
    slots: tl.tensor,
    tokens: int,
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
    a_K, b_K = tl.load(pairs + pair_K), tl.load(pairs + c + pair_K)
    i_K = n - 1 - (tl.gather(best1_H, a_K, 0) & PLACE)
    j_K = n - 1 - (tl.gather(best2_H, b_K, 0) & PLACE)
    # Rows are ordered by head, then token; the results by token, then head.
    first = (row % tokens * (tl.num_programs(0) // tokens) + row // tokens) * k
    sums_K = tl.gather(score1_H, a_K, 0) + tl.gather(score2_H, b_K, 0)
    tl.store(sums + first + place_K, sums_K, mask=place_K < k)
    tl.store(slots + first + place_K, i_K * n + j_K, mask=place_K < k)


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
    _launch_search(_top_k_rows, scores_Rn.contiguous(), columns_Rk, n=n, k=k, W=_wide(n, k))
    return scores_Rn.gather(-1, columns_Rk), columns_Rk


def product_top_k(scores1_Rn: Tensor, scores2_Rn: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`reference.product_top_k`, for floats of up to 32 bits."""
    sums_R1k, slots_R1k = _product_top_k(scores1_Rn[None], scores2_Rn[None], k)
    return sums_R1k[:, 0], slots_R1k[:, 0]


def _product_top_k(scores1_HCn: Tensor, scores2_HCn: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Sums and slots (C, H, k)."""
    heads, tokens, n = scores1_HCn.shape
    sums_CHk = scores1_HCn.new_empty(tokens, heads, k)
    slots_CHk = torch.empty(tokens, heads, k, dtype=torch.int64, device=sums_CHk.device)
    pairs_2c = _pairs(n, k, sums_CHk.device)
    c, most = pairs_2c.shape[1], min(n, k)
    scores1_Rn, scores2_Rn = (scores_HCn.reshape(-1, n) for scores_HCn in (scores1_HCn, scores2_HCn))
    arguments = scores1_Rn, scores2_Rn, pairs_2c, sums_CHk, slots_CHk, tokens
    _launch_search(_product_rows, *arguments, n=n, k=k, c=c, W=_wide(n, most), H=_power(most), P=_wide(c, k))
    return sums_CHk, slots_CHk


def product_key_search(q_NHd: Tensor, subkeys_H2nf: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`reference.product_key_search`, for all heads of some tokens at a time."""
    heads, _, n, f = subkeys_H2nf.shape
    found = []
    for q_CHd in q_NHd.split(max(1, SCORES[q_NHd.device.type] // (2 * heads * n))):
        q_2HCf = q_CHd.unflatten(2, (2, f)).permute(2, 1, 0, 3)
        scores1_HCn, scores2_HCn = (torch.bmm(q_2HCf[s], subkeys_H2nf[:, s].transpose(1, 2)) for s in (0, 1))
        found.append(_product_top_k(scores1_HCn, scores2_HCn, k))
    scores_NHk, slots_NHk = (cat(parts) for parts in zip(*found, strict=True))
    return scores_NHk, slots_NHk


def score_gradients(q_NHd: Tensor, subkeys_H2nf: Tensor, slots_NHk: Tensor, grad_NHk: Tensor) -> tuple[Tensor, Tensor]:
    """`reference.score_gradients`, as weighted row sums: of sub-keys by query, and of queries by sub-key."""
    heads, _, n, f = subkeys_H2nf.shape
    chosen_NH2k = torch.stack([slots_NHk // n, slots_NHk % n], 2)
    first_row_H2 = torch.arange(2 * heads, device=slots_NHk.device).view(heads, 2) * n
    rows_Sk = (chosen_NH2k + first_row_H2[..., None]).flatten(0, 2)
    grad_Sk = grad_NHk[:, :, None].expand_as(chosen_NH2k).flatten(0, 2)
    segments = sort_reads(rows_Sk, grad_Sk, 2 * heads * n, every_row=True)
    keys_grad = segment_sum(q_NHd.reshape(-1, f), segments)
    q_grad = weighted_row_sum(subkeys_H2nf.reshape(-1, f), rows_Sk, grad_Sk)
    return q_grad.view_as(q_NHd), keys_grad.view_as(subkeys_H2nf)


def _power(k: int) -> int:
    """The next power of two, but at least 2: `tl.topk` accepts 1 only since Triton 3.9."""
    return max(2, next_power_of_2(k))


def _wide(n: int, k: int) -> int:
    """How many of n numbers to search at a time for the k highest."""
    return max(_power(k), min(SEARCH_COLUMNS, _power(n)))


def _launch_search(kernel: Any, scores_Rn: Tensor, *arguments: Tensor | int, k: int, **sizes: int) -> None:
    """Run a program for each row."""
    power = _power(k)
    warps = min(MOST_WARPS, max(1, power // SEARCH_COLUMNS))
    with torch.cuda.device_of(scores_Rn):
        kernel[(len(scores_Rn),)](scores_Rn, *arguments, k=k, K=power, **sizes, num_warps=warps, enable_fp_fusion=True)


@cache
def _pairs(n: int, k: int, device: torch.device) -> Tensor:
    """`candidate_pairs` (2, c), int32; from pinned memory, so that the host does not wait for the copy."""
    pairs_2c = torch.tensor(candidate_pairs(n, k), dtype=torch.int32, pin_memory=device.type == "cuda")
    return pairs_2c.to(device, non_blocking=True)
