"""The gradient of a table of rows, kept as the reads that cause it.

N: tokens; r: reads of a token; K: rows; D: width; U: rows that were read; S: U + 1.
"""

import torch
from torch import Tensor

from pkmlm.kernels import backend
from pkmlm.kernels.matmul import cat
from pkmlm.kernels.reference import Segments

Reads = tuple[Tensor, Tensor, Tensor]  # of a backward pass: output gradients (N, D), slots (N, r), weights (N, r)


class RowGradient:
    """The gradient of a table, between the backward passes of a step and its update.

    Row s of the gradient is scale * (sum over reads (t, j) with slots[t, j] = s of weights[t, j] * x[t]), where x is
    the gradient of the output. Slots, weights and x are kept, never a row for each read. Further backward passes
    (accumulation) add reads; once these take more bytes than the table, all but those of the last pass are kept as sums
    of rows, so that the memory of a step does not grow with its passes. `pkmlm.memory.row_adam`, which updates the
    table, sums each row's reads on the way.

    Args:
        rows: of the table.
        every_row: whether `joined` has a segment for each row, read or not.

    Attributes:
        chosen_K: bool, the rows whose gradient counts; that of all others is 0. None: all.
        scale: the factor of the sum, perhaps known to the device alone (0-d).
        reads: of each backward pass that is not in the sums.
        sums: of rows (K, D), in fp32 (fp64 for fp64 reads), and which of them have been read (K); None: no sums yet.
        of_all_ranks: whether ranks have exchanged their reads already.
    """

    def __init__(self, rows: int, *, every_row: bool = False):
        self.rows, self.every_row = rows, every_row
        self.clear()

    def clear(self) -> None:
        """Forget all reads."""
        self.reads: list[Reads] = []
        self.sums: tuple[Tensor, Tensor] | None = None
        self.chosen_K: Tensor | None = None
        self._joined: tuple[Tensor, Segments] | None = None
        self.scale: float | Tensor = 1.0
        self.of_all_ranks = False

    def __bool__(self) -> bool:
        """Whether there has been a backward pass."""
        return bool(self.reads) or self.sums is not None

    def add(self, x_ND: Tensor, slots_Nr: Tensor, weights_Nr: Tensor) -> None:
        """Add the reads of a backward pass: gradients of outputs, slots (int64) and weights, floating."""
        # Counted as in `exchange_bytes`, so that reads which ranks would send as reads are never folded.
        taken = sum(x.numel() * x.element_size() + 8 * slots.numel() for x, slots, _ in self.reads)
        many = taken > 4 * self.rows * (x_ND.shape[1] + 1)
        if self.reads and (self.sums is not None or many or slots_Nr.shape[1] != self.reads[0][1].shape[1]):
            self.fold()
        # A copy: autograd may make the same storage some parameter's `grad`, to be added to and clipped.
        self.reads.append((x_ND.detach().clone(), slots_Nr, weights_Nr.detach()))
        self._joined = None

    def replace(self, reads: list[Reads], sums: tuple[Tensor, Tensor] | None = None) -> None:
        """Replace the reads and sums so far by others, for example by those of all ranks."""
        self.reads, self.sums, self._joined = reads, sums, None

    def keep(self, chosen_K: Tensor) -> None:
        """Limit the gradient to some rows (bool, by row) until it is cleared."""
        self.chosen_K, self._joined = chosen_K, None

    def fold(self) -> tuple[Tensor, Tensor]:
        """Turn all reads into `sums`, and return these.

        Raises:
            ValueError: there has been no backward pass.
        """
        sums = self.sums
        for x_ND, slots_Nr, weights_Nr in self.reads:
            dtype = torch.promote_types(x_ND.dtype, torch.float32)
            kernels = backend.of(x_ND)  # which widen x as they read it: each of its rows is read many times
            segments = kernels.sort_reads(slots_Nr, weights_Nr.to(dtype), self.rows)
            if sums is None:
                read_K = torch.zeros(self.rows, dtype=torch.bool, device=x_ND.device)
                sums = x_ND.new_zeros(self.rows, x_ND.shape[1], dtype=dtype), read_K
            kernels.segment_add_(sums[0], x_ND, segments, sums[1])
        if sums is None:
            raise ValueError("no reads to sum")
        self.replace([], sums)
        return sums

    def joined(self) -> tuple[Tensor, Segments]:
        """Output gradients of all passes (N, D), and the reads sorted by row.

        After folding, the sums (K, D) take the place of the gradients: each row that was read is one token, read once
        with weight 1.

        Raises:
            ValueError: there has been no backward pass, here and below.
        """
        if self._joined is None:
            x_ND, segments = self._sorted()
            if self.chosen_K is not None:
                segments = backend.of(x_ND).only(segments, self.chosen_K)
            self._joined = x_ND, segments
        return self._joined

    def _sorted(self) -> tuple[Tensor, Segments]:
        if self.sums is not None:
            sums_KD, read_K = self.fold()
            start_S = torch.arange(self.rows + 1, device=read_K.device)
            segments = Segments(start_S[:-1], start_S, start_S[:-1], sums_KD.new_ones(self.rows))
            return sums_KD, segments if self.every_row else backend.of(sums_KD).only(segments, read_K)
        x_ND, slots_Nr, weights_Nr = self._of_one_pass()
        return x_ND, backend.of(x_ND).sort_reads(slots_Nr, weights_Nr, self.rows, every_row=self.every_row)

    def _of_one_pass(self) -> Reads:
        if not self.reads:
            raise ValueError("no reads to sort")
        x_ND, slots_Nr, weights_Nr = (cat(parts) for parts in zip(*self.reads, strict=True))
        self.replace([(x_ND, slots_Nr, weights_Nr)])
        return x_ND, slots_Nr, weights_Nr

    def keep_sums(self) -> None:
        """Before the norm and the update, each of which would sum the rows: sum them once, if that takes less time.

        A second time reads M D numbers of x (M: all reads). To keep the sums moves 20 K D bytes: they are cleared, read
        and written as rows are added, and read for the norm and for the update. Twice as many must be saved, since x
        may come from the cache. How many rows were read is not asked for: the host would wait.

        Ranks that hold the same columns call this alike, since the last bits of sums that are kept may be others.
        """
        if not self.reads or self.sums is not None or not backend.of(self.reads[0][0]).KEEPS_SUMS:
            return
        x_ND, slots_Nr, _ = self._of_one_pass()
        if slots_Nr.numel() * x_ND.element_size() > 40 * self.rows:
            self.fold()

    def norm(self) -> Tensor:
        """The 2-norm: 0-d, float64; not finite where a gradient is not."""
        x_ND, segments = self.joined()
        return backend.of(x_ND).squared_norm(x_ND, segments).sqrt() * abs(self.scale)

    def dense(self) -> Tensor:
        """The full gradient (K, D), scaled, in the dtype of the weights."""
        x_ND, segments = self.joined()
        kernels = backend.of(x_ND)
        if self.every_row and self.chosen_K is None:  # all of them, in their order
            sums_KD: Tensor = kernels.segment_sum(x_ND, segments)
        else:
            sums_KD = segments.weight_M.new_zeros(self.rows, x_ND.shape[1])
            kernels.segment_add_(sums_KD, x_ND, segments)
        return sums_KD if isinstance(self.scale, float) and self.scale == 1 else sums_KD.mul_(self.scale)


def exchange_bytes(tokens: int, reads: int, rows: int, width: int, number: int = 4, *, ranks: int) -> tuple[int, int]:
    """Bytes that each of `ranks` ranks sends for the gradient of one table: as reads, and as sums of rows.

    Ranks send whichever is less.

    Args:
        tokens: of one rank in a step (of its group of ranks, where these divide the columns).
        reads: of a token.
        rows, width: of the part of the table that one rank holds.
        number: bytes of a number of the output's gradient.
    """
    by_reads = (ranks - 1) * tokens * (8 * reads + number * width)
    by_rows = 2 * (ranks - 1) * rows * (4 * width + 1) // ranks
    return by_reads, by_rows
