"""The factor of rows that are added to the stream.

N: tokens; D: model width.
"""

import torch
from torch import Tensor, nn

from pkmlm.memory.init import Constant, InitSpec

START = 0.1


class Scale(nn.Module):
    """One learnt factor, 0.1 at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.factor_1 = nn.Parameter(torch.empty(1))

    def init_spec(self) -> dict[str, InitSpec]:
        return {"factor_1": Constant(START)}

    def forward(self, x_ND: Tensor) -> Tensor:
        return x_ND * self.factor_1
