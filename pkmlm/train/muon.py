"""Muon in bf16 or fp32, with steps that the device can skip.

`torch.optim.Muon` orthogonalises in bf16. A CPU without instructions for it takes 20 to 40 times as long for such a
product as for one in fp32: at width 128, a whole step of training took four times as long. Nor does it know
`found_inf`, as torch's fused Adam does: whether there is a step would have to be known to the host.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from pkmlm.memory.row_adam import found_inf


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` with `adjust_lr_fn="original"` and Nesterov's momentum (the arguments, the state and the
    equations are torch's), whose step changes nothing if its attribute `found_inf` (0-d) is above 0.

    Args:
        parameters, settings: as torch's.
        dtype: of the products: bf16, which gives torch's bits, or None, that of each parameter.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, dtype: torch.dtype | None, **settings: Any):
        super().__init__(parameters, adjust_lr_fn="original", **settings)
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        skip = found_inf(self)
        share = None if skip is None else (skip == 0).float()  # of the update that is taken
        for group in self.param_groups:
            decay = group["lr"] * group["weight_decay"]
            for parameter in group["params"]:
                if (grad := parameter.grad) is None:
                    continue
                state: dict[str, Any] = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                momentum = state["momentum_buffer"]
                if skip is not None:  # which then stays what it is
                    grad = torch.where(skip > 0, momentum, grad)
                momentum.lerp_(grad, 1 - group["momentum"])
                update = orthogonal(
                    grad.lerp(momentum, group["momentum"]).to(self.dtype or parameter.dtype),
                    group["ns_coefficients"],
                    group["ns_steps"],
                    group["eps"],
                )
                rows, columns = parameter.shape
                rate = group["lr"] * math.sqrt(max(1, rows / columns))
                parameter.mul_(1 - decay if share is None else 1 - decay * share)
                if share is None:
                    parameter.add_(update, alpha=-rate)
                else:
                    parameter.addcmul_(update.to(parameter.dtype), share, value=-rate)


def orthogonal(matrix_OI: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """A matrix with the singular vectors of another, and with singular values near 1, by steps of Newton-Schulz on its
    odd polynomial a X + b (X X^T) X + c (X X^T)^2 X (Jordan et al. 2024, "Muon").

    Args:
        matrix_OI: (out, in), of a floating dtype.
        coefficients: a, b and c.
        eps: the least norm by which the matrix is divided.
    """
    a, b, c = coefficients
    x = matrix_OI.T if matrix_OI.size(0) > matrix_OI.size(1) else matrix_OI  # the smaller of the two Gram matrices
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix_OI.size(0) > matrix_OI.size(1) else x
