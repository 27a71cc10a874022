"""The memory's operations with their gradients; the one place that chooses an implementation.

Nothing of size k^2, n or reads x width is kept between forward and backward, and the gradient of a value table has one
row for each slot that was read, never one for each slot or each read.

N: tokens; H: heads; n: sub-keys of a half; f: width of a sub-key; k: slots a head; r: reads of a token; K: slots; D:
width of a value; R: rows (N * H).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding_bag, softplus

from pkmlm.kernels import reference

ENTRIES = 1 << 24  # scores or gathered entries that exist at a time: 64 MB in fp32


def top_k(scores_Rn: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`reference.top_k`, for up to 32-bit floats through one integer top-k: score and column packed into an int64.

    The packing makes all keys of a row distinct, so the order is total and the same on every device.
    """
    if scores_Rn.dtype == torch.float64:
        return reference.top_k(scores_Rn, k)
    n = scores_Rn.shape[-1]
    bits_Rn = (scores_Rn.float() + 0.0).view(torch.int32)  # + 0.0: -0 and 0 are equal scores
    ordered_Rn = bits_Rn ^ ((bits_Rn >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    last_first_n = torch.arange(n - 1, -1, -1, device=scores_Rn.device)
    packed_Rk = torch.topk((ordered_Rn.long() << 32) | last_first_n, k, dim=-1).values
    column_Rk = n - 1 - (packed_Rk & 0xFFFFFFFF)
    return scores_Rn.gather(-1, column_Rk), column_Rk


def product_top_k(scores1_Rn: Tensor, scores2_Rn: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`reference.product_top_k`, on `top_k`."""
    n = scores1_Rn.shape[-1]
    best1_Rk, i_Rk = top_k(scores1_Rn, min(n, k))
    best2_Rk, j_Rk = top_k(scores2_Rn, min(n, k))
    pairs = torch.tensor(reference.candidate_pairs(n, k), device=scores1_Rn.device)
    sums_Rc = best1_Rk.index_select(1, pairs[0]) + best2_Rk.index_select(1, pairs[1])
    chosen_Rk = top_k(sums_Rc, k)[1]
    a_Rk, b_Rk = pairs[0].take(chosen_Rk), pairs[1].take(chosen_Rk)
    return i_Rk.gather(1, a_Rk), j_Rk.gather(1, b_Rk)


class _KeyScores(torch.autograd.Function):
    """Scores of chosen sub-keys of one half. The backward scatters into (H, N, n), multiplies, and forgets it."""

    @staticmethod
    def forward(ctx: Any, scores_HNn: Tensor, q_HNf: Tensor, keys_Hnf: Tensor, chosen_HNk: Tensor) -> Tensor:
        ctx.save_for_backward(q_HNf, keys_Hnf, chosen_HNk)
        return scores_HNn.gather(-1, chosen_HNk)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_HNk: Tensor) -> tuple[None, Tensor, Tensor, None]:
        q_HNf, keys_Hnf, chosen_HNk = ctx.saved_tensors
        grad_HNn = grad_HNk.new_zeros(*chosen_HNk.shape[:2], keys_Hnf.shape[1])
        grad_HNn.scatter_add_(-1, chosen_HNk, grad_HNk)
        return None, grad_HNn @ keys_Hnf, grad_HNn.transpose(1, 2) @ q_HNf, None


def product_key_select(q_NHd: Tensor, subkeys_H2nf: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of all n^2 product keys for each query (Lample et al. 2019, sec. 3.1, eq. 1 and 4).

    Args:
        q_NHd: queries, d = 2f; the first f entries meet the first half's sub-keys.
        subkeys_H2nf: two sets of n sub-keys for each head.

    Returns:
        scores_NHk, differentiable in queries and sub-keys, highest first; slots_NHk = i * n + j, int64.
    """
    heads, _, n, f = subkeys_H2nf.shape
    tokens = q_NHd.shape[0]
    q_2HNf = q_NHd.view(tokens, heads, 2, f).permute(2, 1, 0, 3).contiguous()
    keys_2Hnf = subkeys_H2nf.transpose(0, 1)
    with torch.no_grad():
        scores_2HNn = q_2HNf @ keys_2Hnf.transpose(-1, -2)
        i_Rk, j_Rk = product_top_k(scores_2HNn[0].flatten(0, 1), scores_2HNn[1].flatten(0, 1), k)
        i_HNk, j_HNk = i_Rk.view(heads, tokens, k), j_Rk.view(heads, tokens, k)
    scores_HNk = _KeyScores.apply(scores_2HNn[0], q_2HNf[0], keys_2Hnf[0], i_HNk)
    scores_HNk = scores_HNk + _KeyScores.apply(scores_2HNn[1], q_2HNf[1], keys_2Hnf[1], j_HNk)
    return scores_HNk.transpose(0, 1), (i_HNk * n + j_HNk).transpose(0, 1)


def row_products(values_KD: Tensor, x_ND: Tensor, slots_Nr: Tensor) -> Tensor:
    """<x[t], values[slots[t, r]]> (N, r), a few tokens at a time so that reads x width never exists as a whole."""
    tokens, reads = slots_Nr.shape
    width = values_KD.shape[1]
    step = max(1, ENTRIES // (reads * width))
    pieces = []
    for start in range(0, tokens, step):
        slots_Cr, x_CD = slots_Nr[start : start + step], x_ND[start : start + step]
        rows_CrD = values_KD.index_select(0, slots_Cr.flatten()).view(*slots_Cr.shape, width)
        pieces.append(torch.bmm(rows_CrD, x_CD[..., None])[..., 0])
    return torch.cat(pieces) if pieces else x_ND.new_zeros(slots_Nr.shape)


class _RowScores(torch.autograd.Function):
    """`row_products` of queries and keys; its gradients are weighted row sums: of keys by slot, of queries by token."""

    @staticmethod
    def forward(ctx: Any, q_ND: Tensor, keys_KD: Tensor, slots_Nr: Tensor) -> Tensor:
        ctx.save_for_backward(q_ND, keys_KD, slots_Nr)
        return row_products(keys_KD, q_ND, slots_Nr)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_Nr: Tensor) -> tuple[Tensor, Tensor, None]:
        q_ND, keys_KD, slots_Nr = ctx.saved_tensors
        grad_Nr = grad_Nr.contiguous()
        q_grad = embedding_bag(slots_Nr, keys_KD, mode="sum", per_sample_weights=grad_Nr)
        touched_U, grad_UD = row_gradients(q_ND, slots_Nr, grad_Nr)
        return q_grad, torch.zeros_like(keys_KD).index_copy_(0, touched_U, grad_UD), None


def flat_key_select(q_NHd: Tensor, keys_HKd: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of K plain keys for each query: the baseline of table 4. Returns as `product_key_select`.

    The search takes a few tokens at a time, so that no more than `ENTRIES` scores exist at once.
    """
    step = max(1, ENTRIES // keys_HKd.shape[1])
    scores, slots = [], []
    for head in range(len(keys_HKd)):
        q_Nd, keys_Kd = q_NHd[:, head].contiguous(), keys_HKd[head]
        with torch.no_grad():
            slots_Nk = torch.cat([top_k(q_Cd @ keys_Kd.T, k)[1] for q_Cd in q_Nd.split(step)])
        scores.append(_RowScores.apply(q_Nd, keys_Kd, slots_Nk))
        slots.append(slots_Nk)
    return torch.stack(scores, 1), torch.stack(slots, 1)


def row_gradients(grad_ND: Tensor, slots_Nr: Tensor, weights_Nr: Tensor) -> tuple[Tensor, Tensor]:
    """`reference.row_gradients`: reads sorted by slot (stable), then each slot's segment summed once.

    The sum over a segment is itself a weighted row sum: of output gradients, by token. No atomics: the same bits
    always.
    """
    reads = slots_Nr.shape[1]
    sorted_M, order_M = torch.sort(slots_Nr.flatten(), stable=True)
    touched_U, count_U = torch.unique_consecutive(sorted_M, return_counts=True)
    grad_UD = embedding_bag(
        order_M // reads,
        grad_ND,
        count_U.cumsum(0) - count_U,
        mode="sum",
        per_sample_weights=weights_Nr.flatten()[order_M],
    )
    return touched_U, grad_UD


class _WeightedRowSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_KD: Tensor, slots_Nr: Tensor, weights_Nr: Tensor, compact: bool) -> Tensor:
        ctx.save_for_backward(values_KD, slots_Nr, weights_Nr)
        ctx.compact = compact
        return embedding_bag(slots_Nr, values_KD, mode="sum", per_sample_weights=weights_Nr)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        values_KD, slots_Nr, weights_Nr = ctx.saved_tensors
        grad_ND = grad_ND.to(values_KD.dtype).contiguous()
        values_grad = weights_grad = None
        if ctx.needs_input_grad[0]:
            touched_U, grad_UD = row_gradients(grad_ND, slots_Nr, weights_Nr)
            if ctx.compact:
                values_grad = torch.sparse_coo_tensor(
                    touched_U[None], grad_UD, values_KD.shape, is_coalesced=True, check_invariants=False
                )
            else:
                values_grad = torch.zeros_like(values_KD).index_copy_(0, touched_U, grad_UD)
        if ctx.needs_input_grad[2]:
            weights_grad = row_products(values_KD, grad_ND, slots_Nr)
        return values_grad, None, weights_grad, None


def weighted_row_sum(values_KD: Tensor, slots_Nr: Tensor, weights_Nr: Tensor, *, compact: bool) -> Tensor:
    """out[t] = sum over r of weights[t, r] * values[slots[t, r]] (eq. 3), in the dtype of the values.

    Args:
        compact: the values' gradient comes as a coalesced sparse tensor of the rows that were read (for row Adam);
            otherwise as a dense one (for Adam, and where nearly all rows are read in a step).
    """
    out_ND: Tensor = _WeightedRowSum.apply(values_KD, slots_Nr, weights_Nr.to(values_KD.dtype), compact)
    return out_ND


def bucket_codes(z_NTb: Tensor) -> Tensor:
    """`reference.bucket_codes`: integer arithmetic, exact in every dtype."""
    return reference.bucket_codes(z_NTb)


def bucket_scores(z_NTb: Tensor, temperature: float) -> Tensor:
    """`reference.bucket_scores`, through logarithms: no overflow, and finite gradients, for any z."""
    return torch.exp(-softplus(-2 / temperature * z_NTb.abs()).sum(-1))
