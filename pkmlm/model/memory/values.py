"""The rows that a memory reads: values of a key memory, or the tables of a hash layer.

N: tokens; r: reads of a token; K: rows; D: width.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from pkmlm.kernels import ops
from pkmlm.kernels.row_gradient import RowGradient
from pkmlm.model.initial import Initial, Normal


class Values(nn.Module):
    """A table of rows, read as weighted sums.

    Args:
        rows, width: shape of the table.
        std: standard deviation of its initial entries.
        group: the parameter group that it trains in.

    Attributes:
        gradient: of the table, which has no `.grad`.
    """

    def __init__(self, rows: int, width: int, *, std: float, group: Literal["values", "tables"]):
        super().__init__()
        self.weight_KD = nn.Parameter(torch.empty(rows, width))
        self.gradient = RowGradient(rows)
        self.std, self.group = std, group

    def initial(self) -> dict[str, Initial]:
        return {"weight_KD": Normal(self.std)}

    def forward(self, slots_Nr: Tensor, weights_Nr: Tensor) -> Tensor:
        """The weighted sum of the rows `slots_Nr` (int64); (N, D) in the dtype of the table."""
        return ops.weighted_row_sum(self.weight_KD, slots_Nr, weights_Nr, self.gradient)
