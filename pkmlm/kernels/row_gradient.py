"""The gradient of a table of rows, kept as the reads that cause it.

N: tokens; r: reads of a token; K: rows; D: width; U: rows that were read.
"""

import torch
from torch import Tensor

from pkmlm.kernels import backend
from pkmlm.kernels.segments import Segments

Reads = tuple[Tensor, Tensor, Tensor]  # of a backward pass: output gradients (N, D), slots (N, r), weights (N, r)


class RowGradient:
    """The gradient of a table, between the backward passes of a step and its update.

    The row s of the gradient is scale * (sum over reads (t, j) with slots[t, j] = s of weights[t, j] * x[t]), x being
    the gradient of the output. Kept are slots, weights and x: never a row for each row of the table, nor one for each
    read. More backward passes (accumulation) add more reads. Whoever updates the table sums each row's reads on the
    way: `pkmlm.train.row_adam`.

    Attributes:
        reads: of each backward pass.
    """

    def __init__(self, rows: int):
        self.rows = rows
        self.clear()

    def clear(self) -> None:
        """Forget all reads."""
        self.reads: list[Reads] = []
        self._joined: tuple[Tensor, Segments] | None = None
        self.scale = 1.0

    def __bool__(self) -> bool:
        """Whether there has been a backward pass."""
        return bool(self.reads)

    def add(self, x_ND: Tensor, slots_Nr: Tensor, weights_Nr: Tensor) -> None:
        """Add the reads of a backward pass."""
        self.reads.append((x_ND.detach(), slots_Nr, weights_Nr.detach()))
        self._joined = None

    def replace(self, reads: list[Reads]) -> None:
        """Take other reads in place of those so far: those of all ranks, say."""
        self.reads, self._joined = reads, None

    def joined(self) -> tuple[Tensor, Segments]:
        """Output gradients of all passes (N, D), and the reads sorted by row."""
        if self._joined is None:
            x_ND, slots_Nr, weights_Nr = (torch.cat(parts) for parts in zip(*self.reads, strict=True))
            self.reads = [(x_ND, slots_Nr, weights_Nr)]
            self._joined = x_ND, backend.of(x_ND).sort_reads(slots_Nr, weights_Nr, self.rows)
        return self._joined

    def norm(self) -> Tensor:
        """The 2-norm: 0-d, float64; not finite where a gradient is not."""
        x_ND, segments = self.joined()
        return backend.of(x_ND).squared_norm(x_ND, segments).sqrt() * abs(self.scale)

    def dense(self) -> Tensor:
        """The whole gradient (K, D), scaled."""
        x_ND, segments = self.joined()
        sums_UD = backend.of(x_ND).segment_sum(x_ND, segments) * self.scale
        return sums_UD.new_zeros(self.rows, x_ND.shape[1]).index_copy_(0, segments.rows_U, sums_UD)
