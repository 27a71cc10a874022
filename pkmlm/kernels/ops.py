"""The memory's operations with their gradients.

Nothing of size k^2, n or reads x width is kept between forward and backward. `backend` chooses the implementation.

N: tokens; H: heads; d: width of a query; n: sub-keys of a half; f: width of a sub-key (d / 2); k: slots a head; r:
reads of a token; K: slots, or keys; D: width of a value; R: queries, or their halves; S: halves of queries (2 * N * H);
C: tokens searched at a time; T: hash tables; b: bits of a code.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pkmlm.kernels import backend, reference
from pkmlm.kernels.matmul import SCORES, cat, matmul_nt, row_chunks
from pkmlm.kernels.reference import Quantized
from pkmlm.kernels.row_gradient import RowGradient

# For up to so many queries or tokens, as in decoding, a CPU computes the softmax and the buckets in one call and one
# thread: starting several takes longer. (Larger batches give the same bits as training.)
FEW = 32


class _ProductKeys(torch.autograd.Function):
    """Selects without autograd. The gradients are those of the selected scores, k/n of the work of the dense products
    that gave all scores."""

    @staticmethod
    def forward(ctx: Any, q_NHd: Tensor, subkeys_H2nf: Tensor, k: int) -> tuple[Tensor, Tensor]:
        scores_NHk, slots_NHk = backend.of(q_NHd).product_key_search(q_NHd, subkeys_H2nf, k)
        ctx.save_for_backward(q_NHd, subkeys_H2nf, slots_NHk)
        ctx.mark_non_differentiable(slots_NHk)
        ctx.set_materialize_grads(False)  # zeros for the slots
        return scores_NHk, slots_NHk

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NHk: Tensor | None, _: None) -> tuple[Tensor | None, Tensor | None, None]:
        if grad_NHk is None:
            return None, None, None
        q_NHd, subkeys_H2nf, slots_NHk = ctx.saved_tensors
        q_grad, keys_grad = backend.of(q_NHd).score_gradients(q_NHd, subkeys_H2nf, slots_NHk, grad_NHk)
        return q_grad, keys_grad, None


def product_key_select(q_NHd: Tensor, subkeys_H2nf: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of all n^2 product keys for each query (Lample et al. 2019, sec. 3.1, eq. 1 and 4).

    Args:
        q_NHd: queries, floating; the first f entries are compared with the first half's sub-keys.
        subkeys_H2nf: two sets of n sub-keys for each head, in the same dtype.

    Returns:
        scores_NHk, in that dtype, differentiable in queries and sub-keys, highest first; slots_NHk = i * n + j, int64.

    Raises:
        ValueError: fewer than k product keys; queries and sub-keys do not match.
    """
    heads, _, _, f = subkeys_H2nf.shape
    if q_NHd.shape[1:] != (heads, 2 * f) or q_NHd.dtype != subkeys_H2nf.dtype:
        found = f"{q_NHd.dtype} {list(q_NHd.shape)} and {subkeys_H2nf.dtype} {list(subkeys_H2nf.shape)}"
        raise ValueError(f"queries and sub-keys: found {found} (expected [N, H, 2f] and [H, 2, n, f] of one dtype)")
    if not 1 <= k <= subkeys_H2nf.shape[2] ** 2:
        raise ValueError(f"cannot select {k} of {subkeys_H2nf.shape[2] ** 2} product keys")
    q_NHd = q_NHd.contiguous()
    if torch.is_grad_enabled():
        return _ProductKeys.apply(q_NHd, subkeys_H2nf, k)
    return backend.of(q_NHd).product_key_search(q_NHd, subkeys_H2nf, k)


def softmax(scores_NHk: Tensor) -> Tensor:
    """The weights of each query's k slots (eq. 2), in the dtype of the scores, which are given highest first."""
    few = scores_NHk.shape[0] * scores_NHk.shape[1] <= FEW
    if few and scores_NHk.device.type == "cpu" and not torch.is_grad_enabled():  # torch's exp would wake all threads
        scores = scores_NHk.detach().numpy()
        with np.errstate(invalid="ignore"):  # infinite scores give NaN, as elsewhere
            weights = np.exp(scores - scores[..., :1])
            return torch.from_numpy(weights / weights.sum(-1, keepdims=True))
    return scores_NHk.softmax(-1)


def flat_key_select(q_NHd: Tensor, keys_HKd: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of K plain keys for each query: the baseline of table 4. Returns as `product_key_select`.

    The search goes through chunks of tokens, so that no more than `SCORES` scores exist at a time.

    Args:
        q_NHd: queries, floating.
        keys_HKd: the keys of each head, in the same dtype.

    Raises:
        ValueError: fewer than k keys.
    """
    if not 1 <= k <= keys_HKd.shape[1]:
        raise ValueError(f"cannot select {k} of {keys_HKd.shape[1]} keys")
    chunk_size = max(1, SCORES[q_NHd.device.type] // keys_HKd.shape[1])
    scores, slots = [], []
    for q_Nd, keys_Kd in zip(q_NHd.unbind(1), keys_HKd.unbind(0), strict=True):  # one gradient of all heads' keys
        q_Nd = q_Nd.contiguous()
        with torch.no_grad():
            chunks = row_chunks(q_Nd, keys_Kd, chunk_size)
            slots_Nk = cat([backend.of(q_Nd).top_k(matmul_nt(q_Cd, keys_Kd), k)[1] for q_Cd in chunks])
        scores.append(row_products(keys_Kd, q_Nd, slots_Nk))
        slots.append(slots_Nk)
    return torch.stack(scores, 1), torch.stack(slots, 1)


class _WeightedRowSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values_KD: Tensor,
        slots_Nr: Tensor,
        weights_Nr: Tensor,
        gradient: RowGradient | None,
        copy_KD: Tensor | None,
    ) -> Tensor:
        read_KD = values_KD if copy_KD is None else copy_KD
        ctx.save_for_backward(read_KD, slots_Nr, weights_Nr)
        ctx.gradient = gradient
        return backend.of(read_KD).weighted_row_sum(read_KD, slots_Nr, weights_Nr)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None]:
        read_KD, slots_Nr, weights_Nr = ctx.saved_tensors
        grad_ND = grad_ND.to(read_KD.dtype).contiguous()
        values_grad = weights_grad = None
        if ctx.needs_input_grad[0]:
            gradient = ctx.gradient if ctx.gradient is not None else RowGradient(len(read_KD))
            gradient.add(grad_ND, slots_Nr, weights_Nr)
            values_grad = gradient.dense() if ctx.gradient is None else None
        if ctx.needs_input_grad[2]:
            weights_grad = backend.of(read_KD).row_products(read_KD, grad_ND, slots_Nr).to(weights_Nr.dtype)
        return values_grad, None, weights_grad, None, None


def weighted_row_sum(
    values_KD: Tensor,
    slots_Nr: Tensor,
    weights_Nr: Tensor,
    gradient: RowGradient | None = None,
    copy_KD: Tensor | None = None,
) -> Tensor:
    """out[t] = sum over r of weights[t, r] * values[slots[t, r]] (eq. 3), in the dtype of the rows that are read.

    Args:
        values_KD: the table.
        slots_Nr: int64, rows of the table; their range is not checked.
        weights_Nr: any floating dtype; converted to that of the values, or fp32 if that is wider.
        gradient: where the backward leaves the values' gradient; `values_KD.grad` then stays None. Without it, the
            gradient is a dense tensor, as is usual in autograd.
        copy_KD: the values in half precision, to be read in their place; sums are fp32.
    """
    weights_Nr = weights_Nr.to(torch.promote_types(values_KD.dtype, torch.float32))
    if torch.is_grad_enabled():
        return _WeightedRowSum.apply(values_KD, slots_Nr, weights_Nr, gradient, copy_KD)
    read_KD = values_KD if copy_KD is None else copy_KD  # without a Function, which takes 10 us more
    return backend.of(read_KD).weighted_row_sum(read_KD, slots_Nr, weights_Nr)


class _RowProducts(torch.autograd.Function):
    """The mirror of `_WeightedRowSum`: for the rows' gradient, x takes the place of the output's gradient, and the
    gradient of a product that of a weight."""

    @staticmethod
    def forward(
        ctx: Any,
        values_KD: Tensor,
        x_ND: Tensor,
        slots_Nr: Tensor,
        gradient: RowGradient | None,
        copy_KD: Tensor | None,
    ) -> Tensor:
        read_KD = values_KD if copy_KD is None else copy_KD
        ctx.save_for_backward(read_KD, x_ND, slots_Nr)
        ctx.gradient = gradient
        return backend.of(read_KD).row_products(read_KD, x_ND, slots_Nr).to(x_ND.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_Nr: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        read_KD, x_ND, slots_Nr = ctx.saved_tensors
        grad_Nr = grad_Nr.contiguous()
        values_grad = x_grad = None
        if ctx.needs_input_grad[0]:
            gradient = ctx.gradient if ctx.gradient is not None else RowGradient(len(read_KD), every_row=True)
            gradient.add(x_ND.to(read_KD.dtype), slots_Nr, grad_Nr)
            values_grad = gradient.dense() if ctx.gradient is None else None
        if ctx.needs_input_grad[1]:
            x_grad = backend.of(read_KD).weighted_row_sum(read_KD, slots_Nr, grad_Nr).to(x_ND.dtype)
        return values_grad, x_grad, None, None, None


def row_products(
    values_KD: Tensor,
    x_ND: Tensor,
    slots_Nr: Tensor,
    gradient: RowGradient | None = None,
    copy_KD: Tensor | None = None,
) -> Tensor:
    """out[t, r] = <x[t], values[slots[t, r]]>, in the dtype of the values, or fp32 if that is wider.

    Args:
        values_KD, slots_Nr, gradient, copy_KD: as for `weighted_row_sum`.
        x_ND: any floating dtype; converted to that of the result.
    """
    x_ND = x_ND.to(torch.promote_types(values_KD.dtype, torch.float32)).contiguous()
    if torch.is_grad_enabled():
        return _RowProducts.apply(values_KD, x_ND, slots_Nr, gradient, copy_KD)
    read_KD = values_KD if copy_KD is None else copy_KD
    return backend.of(read_KD).row_products(read_KD, x_ND, slots_Nr).to(x_ND.dtype)


def quantized_row_sum(table: Quantized, slots_Nr: Tensor, weights_Nr: Tensor) -> Tensor:
    """`weighted_row_sum` of a table in 8 or 4 bits, in fp32.

    Args:
        table, slots_Nr: the table, and rows of it (int64); their range is not checked.
        weights_Nr: any floating dtype; converted to fp32.

    Raises:
        ValueError: the weights require a gradient.
    """
    _check_frozen(weights_Nr)
    return backend.of(table.scale_K).quantized_row_sum(table, slots_Nr, weights_Nr.float())


def quantized_row_products(table: Quantized, x_ND: Tensor, slots_Nr: Tensor) -> Tensor:
    """`row_products` of a table in 8 or 4 bits, in fp32.

    Args:
        table, slots_Nr: as for `quantized_row_sum`.
        x_ND: any floating dtype; converted to fp32.

    Raises:
        ValueError: x requires a gradient.
    """
    _check_frozen(x_ND)
    return backend.of(table.scale_K).quantized_row_products(table, x_ND.float(), slots_Nr)


def _check_frozen(x: Tensor) -> None:
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError("a table in 8 or 4 bits has no gradient: load the run itself to train it")


class _BucketReads(torch.autograd.Function):
    """Keeps z alone. Torch's own graph would keep several tensors as large, and read and write each."""

    @staticmethod
    def forward(ctx: Any, z_NTb: Tensor, temperature: float, scaled: bool) -> tuple[Tensor, Tensor]:
        rows_NT, weights_NT = backend.of(z_NTb).bucket_reads(z_NTb, temperature, scaled=scaled)
        ctx.save_for_backward(z_NTb)
        ctx.temperature, ctx.scaled = temperature, scaled
        ctx.mark_non_differentiable(rows_NT)
        ctx.set_materialize_grads(False)  # zeros for the rows
        return rows_NT, weights_NT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: None, grad_NT: Tensor | None) -> tuple[Tensor | None, None, None]:
        if grad_NT is None:
            return None, None, None
        (z_NTb,) = ctx.saved_tensors
        kernels = backend.of(z_NTb)
        return kernels.bucket_gradient(z_NTb, grad_NT, ctx.temperature, scaled=ctx.scaled), None, None


def bucket_reads(z_NTb: Tensor, temperature: float, *, scaled: bool) -> tuple[Tensor, Tensor]:
    """`reference.bucket_reads`; the weights have a gradient if z has one.

    Args:
        z_NTb: chunks, floating.
        temperature: t, above 0.
        scaled: whether a weight is sum|z| * p(z), not p(z).
    """
    kernels = backend.of(z_NTb)
    if kernels.LEARNS_BUCKETS:
        return _BucketReads.apply(z_NTb, temperature, scaled)
    if len(z_NTb) <= FEW and not (z_NTb.requires_grad and torch.is_grad_enabled()):
        return kernels.bucket_reads(z_NTb, temperature, scaled=scaled)
    return reference.bucket_reads(z_NTb, temperature, scaled=scaled)
