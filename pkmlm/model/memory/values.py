"""The rows that a memory reads: values of a key memory, or the tables of a hash layer.

N: tokens; r: reads of a token; K: rows; D: width.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from pkmlm.kernels import ops
from pkmlm.kernels.row_gradient import RowGradient
from pkmlm.model.initial import Initial, Normal

HALF_ON = ("cuda",)  # the CPU's kernels read fp32


class Values(nn.Module):
    """A table of rows, read as weighted sums.

    Args:
        rows, width: shape of the table.
        std: standard deviation of its initial entries.
        group: the parameter group that it trains in.

    Attributes:
        gradient: of the table, which has no `.grad`.
        copy_KD: the table in half precision, for forwards under autocast on a GPU; None until there was one. Whoever
            updates rows of the table other than by torch's own operations updates them here too (row Adam).
    """

    def __init__(self, rows: int, width: int, *, std: float, group: Literal["values", "tables"]):
        super().__init__()
        self.weight_KD = nn.Parameter(torch.empty(rows, width))
        self.gradient = RowGradient(rows)
        self.std, self.group = std, group
        self.copy_KD: Tensor | None = None
        self._copied = -1

    def initial(self) -> dict[str, Initial]:
        return {"weight_KD": Normal(self.std)}

    def forward(self, slots_Nr: Tensor, weights_Nr: Tensor) -> Tensor:
        """The weighted sum of the rows `slots_Nr` (int64); (N, D) in the dtype of the rows that are read."""
        return ops.weighted_row_sum(self.weight_KD, slots_Nr, weights_Nr, self.gradient, self._half())

    def _half(self) -> Tensor | None:
        """Under autocast on a GPU: the copy, as new as the table."""
        device = self.weight_KD.device.type
        if device not in HALF_ON or not torch.is_autocast_enabled(device):
            return None
        dtype = torch.get_autocast_dtype(device)
        if self.copy_KD is None or self.copy_KD.dtype != dtype or self._copied != self.weight_KD._version:
            self.copy_KD, self._copied = self.weight_KD.detach().to(dtype), self.weight_KD._version
        return self.copy_KD
