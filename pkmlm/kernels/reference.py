"""The definition of every kernel, in plain torch: slow, short, and to be checked by eye.

A fast kernel is right when it equals the function of the same name here, over random shapes, dtypes and ties.

R: rows (queries); n: sub-keys of a half; k: slots to select; N: tokens; r: reads of a token; K: slots; D: width of a
value; c: pairs of ranks; H: heads; d: width of a query; f: that of a sub-key (d / 2); T: hash tables; b: bits of a
code; M: all reads (N * r); U: distinct rows read; S: U + 1; C: bytes of a quantized row.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

LEARNS_BUCKETS = KEEPS_SUMS = False  # see `backend.of`


def top_k(scores_Rn: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k highest scores of each row and their columns, highest first; equal scores by column, lowest first."""
    best_Rn, column_Rn = torch.sort(scores_Rn, dim=-1, descending=True, stable=True)
    return best_Rn[..., :k], column_Rn[..., :k]


def candidate_pairs(n: int, k: int) -> tuple[list[int], list[int]]:
    """Pairs of ranks (a, b), from 0, that can be among the k best sums of two lists of n, each in descending order.

    A pair has (a + 1)(b + 1) - 1 others that score no lower and come before it (by score, then a, then b), so only
    pairs with (a + 1)(b + 1) <= k can be selected: 119 of 1,024 at k = 32. Listed by a, then b.
    """
    pairs = [(a, b) for a in range(min(n, k)) for b in range(min(n, k // (a + 1)))]
    return [a for a, _ in pairs], [b for _, b in pairs]


def product_top_k(scores1_Rn: Tensor, scores2_Rn: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Exact top-k over the n^2 sums scores1[i] + scores2[j], in fp32 or wider (Lample et al. 2019, eq. 4).

    Returns the sums (R, k) in the scores' dtype and the slots i * n + j, int64, in the order: sum, then rank of i in
    half 1, then rank of j in half 2, where ranks within a half are by score, then by index.
    """
    n, wide = scores1_Rn.shape[-1], torch.promote_types(scores1_Rn.dtype, torch.float32)
    best1_Rk, i_Rk = top_k(scores1_Rn.to(wide), min(n, k))
    best2_Rk, j_Rk = top_k(scores2_Rn.to(wide), min(n, k))
    a_c, b_c = torch.tensor(candidate_pairs(n, k), device=scores1_Rn.device)
    _, chosen_Rk = top_k(best1_Rk[:, a_c] + best2_Rk[:, b_c], k)
    i_Rk, j_Rk = i_Rk.gather(1, a_c[chosen_Rk]), j_Rk.gather(1, b_c[chosen_Rk])
    return scores1_Rn.gather(1, i_Rk) + scores2_Rn.gather(1, j_Rk), i_Rk * n + j_Rk


def product_key_search(q_NHd: Tensor, subkeys_H2nf: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best product keys of each query, by `product_top_k`: scores and slots (N, H, k)."""
    heads, _, _, f = subkeys_H2nf.shape
    scores_2Rn = torch.einsum("nhjf,hjkf->jnhk", q_NHd.view(-1, heads, 2, f), subkeys_H2nf).flatten(1, 2)
    scores_Rk, slots_Rk = product_top_k(scores_2Rn[0], scores_2Rn[1], k)
    return scores_Rk.view(-1, heads, k), slots_Rk.view(-1, heads, k)


def score_gradients(q_NHd: Tensor, subkeys_H2nf: Tensor, slots_NHk: Tensor, grad_NHk: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients, for q and for the sub-keys, of the scores that `product_key_search` found with these slots."""
    heads, _, n, f = subkeys_H2nf.shape
    chosen_NH2k = torch.stack([slots_NHk // n, slots_NHk % n], 2)
    slope_NH2n = grad_NHk.new_zeros(len(q_NHd), heads, 2, n)
    slope_NH2n.scatter_add_(3, chosen_NH2k, grad_NHk[:, :, None].expand_as(chosen_NH2k))
    keys_grad = torch.einsum("thsn,thsf->hsnf", slope_NH2n, q_NHd.view(-1, heads, 2, f))
    return torch.einsum("thsn,hsnf->thsf", slope_NH2n, subkeys_H2nf).flatten(2), keys_grad


class Segments(NamedTuple):
    """The reads of a table, sorted by row (stably: reads of one row stay in the order of their tokens).

    Attributes:
        rows_U: int64, the rows that are read, ascending.
        start_S: int64 (U + 1): the reads of rows_U[u] are start_S[u] ... start_S[u + 1] - 1.
        token_M: int64, the token of each read.
        weight_M: its weight.
    """

    rows_U: Tensor
    start_S: Tensor
    token_M: Tensor
    weight_M: Tensor

    def every_row(self, rows: int) -> "Segments":
        """The same reads with a segment, perhaps empty, for each row of the table."""
        count_K = self.start_S.new_zeros(rows)
        count_K[self.rows_U] = self.start_S.diff()
        start_S = torch.cat([count_K.new_zeros(1), count_K.cumsum(0)])
        return self._replace(rows_U=torch.arange(rows, device=start_S.device), start_S=start_S)


def only(segments: Segments, chosen_K: Tensor) -> Segments:
    """The segments of the chosen rows only (bool, by row of the table)."""
    count_U, chosen_U = segments.start_S.diff(), chosen_K[segments.rows_U]
    chosen_M = chosen_U.repeat_interleave(count_U)
    start_S = torch.cat([count_U.new_zeros(1), count_U[chosen_U].cumsum(0)])
    return Segments(segments.rows_U[chosen_U], start_S, segments.token_M[chosen_M], segments.weight_M[chosen_M])


def weighted_row_sum(values_KD: Tensor, slots_Nr: Tensor, weights_Nr: Tensor) -> Tensor:
    """out[t] = sum over r of weights[t, r] * values[slots[t, r]] (eq. 3); (N, D), in the dtype of the values."""
    return (values_KD[slots_Nr] * weights_Nr[..., None]).sum(1).to(values_KD.dtype)


def row_products(values_KD: Tensor, x_ND: Tensor, slots_Nr: Tensor) -> Tensor:
    """<x[t], values[slots[t, r]]>: the gradient of `weighted_row_sum` for its weights, if x is that of its output.

    (N, r), in the dtype of x, which is no narrower than the values'.
    """
    return (values_KD[slots_Nr] * x_ND[:, None]).sum(-1)


def sort_reads(slots_Nr: Tensor, weights_Nr: Tensor, rows: int, *, every_row: bool = False) -> Segments:
    """The reads of a table of `rows` rows, by row; `every_row`: with a segment for each row (U = rows), read or not."""
    slot_M, order_M = slots_Nr.flatten().sort(stable=True)
    rows_U, count_U = torch.unique_consecutive(slot_M, return_counts=True)
    start_S = torch.cat([count_U.new_zeros(1), count_U.cumsum(0)])
    segments = Segments(rows_U, start_S, order_M // slots_Nr.shape[1], weights_Nr.flatten()[order_M])
    return segments.every_row(rows) if every_row else segments


def segment_sum(x_ND: Tensor, segments: Segments) -> Tensor:
    """out[u] = sum over the reads of row u of weight * x[token]: the gradient of `weighted_row_sum` for the rows that
    it read, if x is that of its output; (U, D), in the dtype of the weights, which is the table's. x is in half
    precision if the table's copy in half precision was read."""
    starts = zip(segments.start_S[:-1].tolist(), segments.start_S[1:].tolist(), strict=True)
    x_ND = x_ND.to(segments.weight_M.dtype)
    sums = [segments.weight_M[a:b] @ x_ND[segments.token_M[a:b]] for a, b in starts]
    return torch.stack(sums) if sums else x_ND.new_empty(0, x_ND.shape[1])


def segment_add_(out_KD: Tensor, x_ND: Tensor, segments: Segments, read_K: Tensor | None = None) -> None:
    """Add `segment_sum` to the rows of a table, in place, and mark these rows in `read_K` (bool)."""
    out_KD.index_add_(0, segments.rows_U, segment_sum(x_ND, segments).to(out_KD.dtype))
    if read_K is not None:
        read_K[segments.rows_U] = True


def squared_norm(x_ND: Tensor, segments: Segments) -> Tensor:
    """The squared 2-norm of `segment_sum`: 0-d, float64."""
    return segment_sum(x_ND, segments).double().square().sum()


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
    """One Adam update, in place, of the rows that were read (Kingma and Ba 2015, algorithm 1; decay decoupled).

    Args:
        values_KD, mean_KD, square_KD: the table and its moments.
        x_ND, segments: those of `segment_sum`, whose result times `scale` is the gradient.
        step: of the table, counted from 1, for the bias correction; a tensor is 0-d, as `scale` may be.
        copy_KD: the values in half precision; the new rows are written to it, too, rounded.
        skip: 0-d; above 0, nothing is done. None: the update is wanted.
    """
    if skip is not None and skip > 0:
        return
    rows_U, (beta1, beta2) = segments.rows_U, betas
    step = step.double() if isinstance(step, Tensor) else step
    grad_UD = scale * segment_sum(x_ND, segments)
    mean_KD[rows_U] += (1 - beta1) * (grad_UD - mean_KD[rows_U])
    square_KD[rows_U] = (beta2 * square_KD[rows_U] + (1 - beta2) * grad_UD**2).to(square_KD.dtype)
    mean_UD, square_UD = mean_KD[rows_U] / (1 - beta1**step), square_KD[rows_U] / (1 - beta2**step)
    moved_UD = (1 - lr * weight_decay) * values_KD[rows_U] - lr * mean_UD / (square_UD.sqrt() + eps)
    values_KD[rows_U] = moved_UD.to(values_KD.dtype)
    if copy_KD is not None:
        copy_KD[rows_U] = values_KD[rows_U].to(copy_KD.dtype)


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
    """One update by gradient descent, in place, of the rows that were read; the arguments are those of
    `segment_row_adam_`."""
    if skip is not None and skip > 0:
        return
    sgd_rows_(values_KD, segments.rows_U, lr * scale * segment_sum(x_ND, segments), lr * weight_decay, copy_KD)


def sgd_rows_(values_KD: Tensor, rows_U: Tensor, move_UD: Tensor, decay: float, copy_KD: Tensor | None) -> None:
    """Decay some rows, then move them."""
    values_KD[rows_U] = ((1 - decay) * values_KD[rows_U] - move_UD).to(values_KD.dtype)
    if copy_KD is not None:
        copy_KD[rows_U] = values_KD[rows_U].to(copy_KD.dtype)


class Quantized(NamedTuple):
    """A table in 8 or 4 bits: an entry is scale * (code / most), where `most` is the largest code, 127 or 7.

    Codes are symmetric, from -most to most, and each row's largest entry is exact.

    Attributes:
        codes_KC: 8 bits: int8 (K, D). 4 bits: uint8 (K, D / 2 rounded up); byte c has the code of column c in its low
            half and that of column C + c in its high half, in two's complement.
        scale_K: fp32, the largest absolute entry of each row.
        width: of a row (D).
    """

    codes_KC: Tensor
    scale_K: Tensor
    width: int

    @property
    def most(self) -> int:
        """The largest code."""
        return 127 if self.codes_KC.dtype == torch.int8 else 7

    def take(self, rows_S: Tensor) -> "Quantized":
        """Some of its rows."""
        return self._replace(codes_KC=self.codes_KC[rows_S], scale_K=self.scale_K[rows_S])


def quantize(values_KD: Tensor, bits: int) -> Quantized:
    """A table (floating) in 8 or 4 bits, each entry within half a step, scale / most / 2, of what it was."""
    width = values_KD.shape[1]
    scale_K = values_KD.float().abs().amax(1)
    unit_KD = values_KD.float() / torch.where(scale_K == 0, 1, scale_K)[:, None]
    codes_KD = (unit_KD * (2 ** (bits - 1) - 1)).round().to(torch.int8)
    if bits == 8:
        return Quantized(codes_KD, scale_K, width)
    columns = (width + 1) // 2
    low_KC, high_KC = codes_KD[:, :columns], pad(codes_KD[:, columns:], (0, 2 * columns - width))
    return Quantized((low_KC & 15 | high_KC << 4).view(torch.uint8), scale_K, width)


def dequantize(table: Quantized) -> Tensor:
    """The entries (K, D), fp32."""
    codes_KD = table.codes_KC
    if codes_KD.dtype == torch.uint8:
        signed_KC = codes_KD.view(torch.int8)
        codes_KD = torch.cat([signed_KC << 4 >> 4, signed_KC >> 4], 1)[:, : table.width]
    return table.scale_K[:, None] * (codes_KD.float() / table.most)


def quantized_row_sum(table: Quantized, slots_Nr: Tensor, weights_Nr: Tensor) -> Tensor:
    """`weighted_row_sum` of the entries, dequantizing only the rows that are read; fp32, like the weights."""
    rows_NrD = dequantize(table.take(slots_Nr.flatten())).view(*slots_Nr.shape, table.width)
    return (rows_NrD * weights_Nr[..., None]).sum(1)


def quantized_row_products(table: Quantized, x_ND: Tensor, slots_Nr: Tensor) -> Tensor:
    """`row_products` of the entries, dequantizing only the rows that are read; fp32, like x."""
    rows_NrD = dequantize(table.take(slots_Nr.flatten())).view(*slots_Nr.shape, table.width)
    return (rows_NrD * x_ND[:, None]).sum(-1)


def bucket_codes(z_NTb: Tensor) -> Tensor:
    """h(z) = sum over i of [z_i >= 0] * 2^i, i from 0 (Ding et al. 2024, eq. 2 to 6); int64 (N, T)."""
    return ((z_NTb >= 0).long() << torch.arange(z_NTb.shape[-1], device=z_NTb.device)).sum(-1)


def bucket_scores(z_NTb: Tensor, temperature: float) -> Tensor:
    """p(z) = 1 / prod over i of (1 + exp(-2|z_i|/t)) (eq. 12): the softmax over all sign patterns of <z, pattern>/t;
    (N, T), in the dtype of z. Logarithms, softplus(x) = log(1 + exp(x)), keep gradients finite for any z."""
    return torch.exp(-softplus(-2 / temperature * z_NTb.abs()).sum(-1))


def bucket_reads(z_NTb: Tensor, temperature: float, *, scaled: bool) -> tuple[Tensor, Tensor]:
    """What a token reads of T tables of 2^b rows, one below the other: the row of each bucket, int64 (N, T), and its
    weight p(z), or, if `scaled`, sum|z| * p(z), (N, T), in the dtype of z."""
    rows_NT = bucket_codes(z_NTb) + (torch.arange(z_NTb.shape[1], device=z_NTb.device) << z_NTb.shape[2])
    scores_NT = bucket_scores(z_NTb, temperature)
    return rows_NT, scores_NT * z_NTb.abs().sum(-1) if scaled else scores_NT


def bucket_gradient(z_NTb: Tensor, grad_NT: Tensor, temperature: float, *, scaled: bool) -> Tensor:
    """The gradient for z (N, T, b), if `grad_NT` is that of the weights of `bucket_reads`."""
    with torch.enable_grad():
        z_NTb = z_NTb.detach().requires_grad_()
        _, weights_NT = bucket_reads(z_NTb, temperature, scaled=scaled)
    return torch.autograd.grad(weights_NT, z_NTb, grad_NT)[0]
