"""The loss of a model's head, from hidden states, by chunks of tokens: the logits of all tokens never exist at once.

N: tokens; D: model width; V: vocabulary; C: tokens of a chunk.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pkmlm.kernels.matmul import at_least_fp32, matmul_nt, matmul_tn

# Logits at a time, by device: 8 MB in fp32 stay in a CPU's cache (vocabularies above 4,096 take more, see
# LEAST_TOKENS); a GPU wants few large calls (512 MB, not measured).
LOGITS = {"cpu": 1 << 21, "cuda": 1 << 27}
LEAST_TOKENS = 512  # with fewer at a time, adding up the head's gradient would cost time


def tokens_of_chunk(device: str, vocab_size: int) -> int:
    """Tokens of a chunk, whose logits exist at once.

    Args:
        device: the kind, "cpu" or "cuda".
        vocab_size: logits of a token.
    """
    return max(LEAST_TOKENS, LOGITS[device] // vocab_size)


class _SummedLoss(torch.autograd.Function):
    """Computes both gradients with the loss, while a chunk's logits exist."""

    @staticmethod
    def forward(
        ctx: Any, h_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, scale: float, dtype: torch.dtype
    ) -> Tensor:
        read_VD = weight_VD.to(dtype)
        total = at_least_fp32(h_ND.new_zeros(()))
        h_grad = torch.empty_like(h_ND) if ctx.needs_input_grad[0] else None
        weight_grad = None
        size = tokens_of_chunk(h_ND.device.type, len(weight_VD))
        for start in range(0, len(h_ND), size):
            chunk = slice(start, start + size)
            h_CD = h_ND[chunk].to(dtype)
            loss, slope_CV = loss_and_slope(matmul_nt(h_CD, read_VD), targets_N[chunk], scale)
            total = total + loss
            slope_CV = slope_CV.to(dtype)
            if h_grad is not None:
                h_grad[chunk] = matmul_nt(slope_CV, read_VD.t())
            if ctx.needs_input_grad[1]:  # summed in the layout of the products: adding two takes several times as long
                product_VD = matmul_tn(slope_CV, h_CD)
                weight_grad = product_VD.to(weight_VD.dtype) if weight_grad is None else weight_grad.add_(product_VD)
        ctx.save_for_backward(h_grad, None if weight_grad is None else weight_grad.contiguous())
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        h_grad, weight_grad = (None if part is None else part * grad for part in ctx.saved_tensors)
        return h_grad, weight_grad, None, None, None


def loss_and_slope(logits_CV: Tensor, targets_C: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Cross-entropy summed over scored targets, times `scale` (0-d), and its derivative by the logits (C, V): softmax
    minus one-hot. Both in fp32 (fp64 for fp64 logits); logits of at least that precision are overwritten.
    """
    x_CV = at_least_fp32(logits_CV)
    scored_C1 = (targets_C >= 0).to(x_CV.dtype)[:, None] * scale
    at_C1 = targets_C.clamp_min(0)[:, None]
    largest_C1, target_C1 = x_CV.amax(-1, keepdim=True), x_CV.gather(1, at_C1)
    sum_C1 = x_CV.sub_(largest_C1).exp_().sum(-1, keepdim=True)
    loss = ((sum_C1.log() + largest_C1 - target_C1) * scored_C1).sum()
    x_CV.mul_(scored_C1 / sum_C1)
    return loss, x_CV.scatter_(1, at_C1, x_CV.gather(1, at_C1) - scored_C1)  # one per row: the same bits every time


def summed_loss(h_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, scale: float = 1.0) -> Tensor:
    """Cross-entropy of the logits h W^T, summed over scored tokens, times `scale`: 0-d, nats, in fp32 (fp64 for fp64
    states), with gradients of both. The products run in the autocast's dtype; gradients of W add up in the dtype of W.

    Args:
        h_ND: hidden states, floating.
        weight_VD: the head's weights, floating.
        targets_N: int64; negative for a token that is not scored.
        scale: factor of the loss. The loss scale of fp16 training belongs here: the gradients are already computed now,
            in fp16, and could leave its range without it.
    """
    kind = h_ND.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight_VD.dtype
    if not torch.is_grad_enabled():  # which an autograd function does not see
        h_ND, weight_VD = h_ND.detach(), weight_VD.detach()
    return _SummedLoss.apply(h_ND, weight_VD, targets_N, scale, dtype)
