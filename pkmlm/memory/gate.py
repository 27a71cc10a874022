"""What the output of a memory is multiplied with before it reaches the stream.

B: sequences; T: positions; D: model width.
"""

import math

import torch
from torch import Tensor, nn

from pkmlm.kernels.matmul import Linear, at_least_fp32, without_autocast
from pkmlm.memory.init import Constant, InitSpec


class Gate(nn.Module):
    """y * g * 2 sigmoid(<w, x> + b), where x is the stream that the memory reads, and y its output.

    g is one number that starts at 0, so that the model is what it was, to the bit, until g learns. The sigmoid lets
    each token decide; w and b start at 0, and so the factor at 1.

    Args:
        dim: width of the stream (D).
        zero: whether there is g.
        token: whether there is the sigmoid.
    """

    def __init__(self, dim: int, *, zero: bool, token: bool):
        super().__init__()
        self.factor_1 = nn.Parameter(torch.zeros(1)) if zero else None
        self.map = Linear(dim, 1, initial_std=0.0) if token else None
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def init_spec(self) -> dict[str, InitSpec]:
        return {} if self.factor_1 is None else {"factor_1": Constant(0.0)}

    @property
    def sign(self) -> float:
        """The sign of the factor, 1 or -1."""
        return 1.0 if self.factor_1 is None else math.copysign(1.0, self.factor_1.item())

    def forward(self, y_BTD: Tensor, x_BTD: Tensor) -> Tensor:
        """(B, T, D), in the dtype of `y_BTD`; factors are taken in fp32.

        Args:
            y_BTD: the memory's output.
            x_BTD: the stream.
        """
        with without_autocast(x_BTD.device):
            if self.map is not None:
                y_BTD = y_BTD * (2 * torch.sigmoid(self.map(at_least_fp32(x_BTD)))).to(y_BTD.dtype)
            return y_BTD if self.factor_1 is None else y_BTD * self.factor_1.to(y_BTD.dtype)
