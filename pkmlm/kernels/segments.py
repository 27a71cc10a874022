"""Reads in the order of the rows that they read.

N: tokens; r: reads of a token; M: all reads (N * r); U: distinct rows read; S: U + 1; K: rows of the table.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Segments(NamedTuple):
    """The reads of a table, sorted by row (stably: reads of one row stay in the order of their tokens).

    Attributes:
        rows_U: int64, the rows that are read, ascending.
        start_S: int64 (U + 1): the reads of rows_U[u] are start_S[u] ... start_S[u + 1] - 1.
        token_M: int64, the token of each read.
        weight_M: its weight.
    """

    rows_U: Tensor
    start_S: Tensor
    token_M: Tensor
    weight_M: Tensor

    def every_row(self, rows: int) -> "Segments":
        """The same reads with a segment, perhaps empty, for each row of the table."""
        count_K = self.start_S.new_zeros(rows)
        count_K[self.rows_U] = self.start_S.diff()
        start_S = torch.cat([count_K.new_zeros(1), count_K.cumsum(0)])
        return self._replace(rows_U=torch.arange(rows, device=start_S.device), start_S=start_S)
