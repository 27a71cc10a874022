"""Matrix products and the linear layer; in fp32 on a CPU, with the faster of the two libraries that torch contains.

torch uses MKL, which on an AMD CPU leaves half the width of AVX-512 unused. oneDNN, torch's choice for half precision,
uses all of it and is 1.7 to 2.3 times as fast (pkmlm/manual/speed.md). In all other cases torch chooses.

N: rows; I, O: widths of the input and of the output.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

ONEDNN_WORK = 1 << 20  # multiplications; with fewer, oneDNN's 15 us a call cost more than it saves
# Scores that a search computes at a time, by device. On a CPU 16 MB of them may stay in the cache between the product
# and the search. A GPU wants few large calls (not measured): with 262,144 flat keys, 128 MB are the scores of 128
# queries, and 16 MB would take eight times the launches.
SCORES = {"cpu": 1 << 22, "cuda": 1 << 25}
ONEDNN_WIDTH = 32  # of a map's narrower side; below it, oneDNN's copies of the matrices cost more than it saves


def prefers_onednn() -> bool:
    """Whether this is an AMD CPU with AVX-512, and torch offers oneDNN."""
    cpu = torch.cpu.get_capabilities()
    wide = bool(cpu.get("avx512_f")) and str(cpu.get("cpu_name")).startswith("AMD")
    return wide and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


PREFER_ONEDNN = prefers_onednn()


def uses_onednn(x: Tensor, y: Tensor) -> bool:
    """Whether oneDNN computes the products of x (..., I) with the rows of y (O, I)."""
    # Size first: this is called for every product of every token that is decoded.
    if not PREFER_ONEDNN or x.numel() * y.shape[0] < ONEDNN_WORK or min(y.shape) < ONEDNN_WIDTH:
        return False
    plain = x.dtype == y.dtype == torch.float32 and x.device.type == y.device.type == "cpu"
    return plain and not torch.is_autocast_enabled("cpu")


def row_chunks(x: Tensor, y_OI: Tensor, most: int) -> list[Tensor]:
    """Chunks of the rows of x (N, ...) for their products with y.

    oneDNN keeps a megabyte or more for each new shape, and the size of batches may keep changing. The number of rows in
    a chunk for oneDNN is therefore a power of two; the last chunk, if too small for oneDNN, is left to torch.

    Args:
        x: the rows; y_OI: the matrix that each is multiplied with.
        most: the most rows of a chunk.
    """
    if len(x) <= most and not uses_onednn(x, y_OI):
        return [x]
    return [chunk for part in x.split(most) for chunk in part.split(_chunk_sizes(part, y_OI))]


def cat(parts: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    """`torch.cat`, but without the copy that it makes of a single part."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _chunk_sizes(x: Tensor, y_OI: Tensor) -> list[int]:
    rows, sizes = len(x), []
    while uses_onednn(x[:rows], y_OI):
        sizes.append(1 << (rows.bit_length() - 1))
        rows -= sizes[-1]
    return [*sizes, rows] if rows or not sizes else sizes


def at_least_fp32(x: Tensor) -> Tensor:
    """Half precisions widened to fp32; fp64 kept."""
    return x if x.dtype == torch.float64 else x.float()


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """The context in which operations keep the dtypes of their inputs; it costs nothing where they do so anyway."""
    on = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else nullcontext()


def matmul_nt(x_NI: Tensor, y_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x y^T + bias (N, O), without a gradient."""
    if not uses_onednn(x_NI, y_OI):
        return functional.linear(x_NI, y_OI, bias_O)
    return (_onednn_op if torch.compiler.is_compiling() else _onednn)(x_NI, y_OI, bias_O)


def _onednn(x_NI: Tensor, y_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """By torch's private operation: no public one takes fp32 to oneDNN."""
    bias_O = None if bias_O is None else bias_O.contiguous()  # oneDNN ignores its stride
    if not (y_OI.is_contiguous() or y_OI.t().is_contiguous()):  # a slice would take up to a thousand times as long
        y_OI = y_OI.contiguous()
    return torch.ops.mkldnn._linear_pointwise(x_NI, y_OI, bias_O, "none", [], "")


# torch.compile's own rules for oneDNN's operation fail here, so it gets one that it cannot look into.
_onednn_op = torch.library.custom_op("pkmlm::matmul_nt", _onednn, mutates_args=())
_onednn_op.register_fake(lambda x_NI, y_OI, bias_O: x_NI.new_empty(len(x_NI), len(y_OI)))


def matmul_tn(y_NO: Tensor, x_NI: Tensor) -> Tensor:
    """y^T x (O, I), without a gradient. oneDNN copies the first of two transposed matrices: the smaller comes first."""
    if y_NO.shape[1] <= x_NI.shape[1]:
        return matmul_nt(y_NO.t(), x_NI.t())
    return matmul_nt(x_NI.t(), y_NO.t()).t()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        needs_x, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x_NI if needs_weight else None, weight_OI if needs_x else None)
        return matmul_nt(x_NI, weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x_NI, weight_OI = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            matmul_nt(grad_NO, weight_OI.t()) if needs_x else None,
            matmul_tn(grad_NO, x_NI) if needs_weight else None,
            grad_NO.sum(0) if needs_bias else None,
        )


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear` of x (..., I), with its gradients."""
    if not uses_onednn(x, weight_OI):
        return functional.linear(x, weight_OI, bias_O)
    x_NI = x.reshape(-1, x.shape[-1])
    product = _Linear.apply if torch.is_grad_enabled() else matmul_nt
    out_NO = cat([product(x_CI, weight_OI, bias_O) for x_CI in row_chunks(x_NI, weight_OI, len(x_NI))])
    return out_NO.view(*x.shape[:-1], len(weight_OI))


class Linear(nn.Linear):
    """`torch.nn.Linear` that computes with `linear`.

    Args:
        dim_in, dim_out: widths of the input and of the output.
        bias: whether a bias is added.
        initial_std: the standard deviation of the initial weights; None: `linear_std` of `pkmlm.memory.init`.
    """

    def __init__(self, dim_in: int, dim_out: int, bias: bool = True, initial_std: float | None = None):
        super().__init__(dim_in, dim_out, bias)
        self.initial_std = initial_std

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) to (..., O)."""
        return linear(x, self.weight, self.bias)
