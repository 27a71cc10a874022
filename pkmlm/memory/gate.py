"""A factor before a memory's output, by which each token decides how much of it reaches the stream.

B: sequences; T: positions; D: model width.
"""

import torch
from torch import Tensor, nn

from pkmlm.kernels.matmul import Linear, at_least_fp32, without_autocast


class Gate(nn.Module):
    """y * 2 sigmoid(<w, x> + b), where x is the stream that the memory reads, and y its output. w and b start at 0, and
    so the factor at 1.

    Args:
        dim: width of the stream (D).
    """

    def __init__(self, dim: int):
        super().__init__()
        self.map = Linear(dim, 1, initial_std=0.0)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, y_BTD: Tensor, x_BTD: Tensor) -> Tensor:
        """(B, T, D), in the dtype of `y_BTD`; the sigmoid is taken in fp32.

        Args:
            y_BTD: the memory's output.
            x_BTD: the stream.
        """
        with without_autocast(x_BTD.device):
            return y_BTD * (2 * torch.sigmoid(self.map(at_least_fp32(x_BTD)))).to(y_BTD.dtype)
