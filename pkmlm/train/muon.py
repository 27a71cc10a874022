"""Muon in fp32, for CPUs that cannot multiply in bf16.

`torch.optim.Muon` orthogonalises in bf16. A CPU without instructions for it takes 20 to 40 times as long for such a
product as for one in fp32: at width 128, a whole step of training took four times as long.
"""

import math
from typing import Any

import torch
from torch import Tensor


class Fp32Muon(torch.optim.Muon):
    """`torch.optim.Muon` with `adjust_lr_fn="original"` and Nesterov's momentum (the arguments, the state and the
    equations are torch's), whose products are those of its parameters' dtype.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state: dict[str, Any] = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                momentum = state["momentum_buffer"].lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonal(
                    parameter.grad.lerp(momentum, group["momentum"]),
                    group["ns_coefficients"],
                    group["ns_steps"],
                    group["eps"],
                )
                rows, columns = parameter.shape
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * math.sqrt(max(1, rows / columns)))


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
