"""How ranks share the gradients of tables of rows: they exchange what they read, or sum rows.

N: a rank's tokens; r: reads of a token; K: rows of a table; D: its columns on this rank.
"""

import torch
from torch.nn.functional import pad

from pkmlm.distributed import World
from pkmlm.errors import UserError
from pkmlm.kernels.matmul import cat
from pkmlm.kernels.row_gradient import RowGradient, exchange_bytes
from pkmlm.memory.table import Values


def all_gather_row_gradients(gradient: RowGradient, ranks: World) -> None:
    """Turn a table's gradient into that of the reads of all ranks.

    Where it takes no more bytes (`exchange_bytes`), ranks gather each other's reads, in the order in which one process
    would have made them; otherwise they sum rows.

    Args:
        gradient: this rank's, after its last micro-batch.
        ranks: those that hold the same columns of the table.
    """
    gradient.of_all_ranks = True
    if ranks.size == 1 or not gradient:
        return
    if gradient.sums is None:
        tokens, (x_ND, slots_Nr, _) = sum(len(x) for x, _, _ in gradient.reads), gradient.reads[0]
        as_reads, as_rows = exchange_bytes(
            tokens, slots_Nr.shape[1], gradient.rows, x_ND.shape[1], x_ND.element_size(), ranks=ranks.size
        )
        if as_reads <= as_rows:
            gradient.replace(
                [
                    (ranks.all_gather(x), ranks.all_gather(slots.int()).long(), ranks.all_gather(w))
                    for x, slots, w in gradient.reads
                ]
            )
            return
    sums_KD, read_K = gradient.fold()
    gradient.replace([], (ranks.all_sum(sums_KD), ranks.all_any(read_K)))


def check_same_table(table: Values, ranks: World) -> None:
    """Check that ranks begin with the same table: sharing gradients alone, they would train tables of their own.

    Args:
        table, ranks: as for `average_row_gradients`.

    Raises:
        UserError: a rank has other weights than the first.
    """
    if ranks.size == 1 or (table.gradient is not None and table.gradient.of_all_ranks):
        return
    rows_K = table.weight_KD.detach().view(torch.int16).sum(1, dtype=torch.int64)  # integers: all ranks add them alike
    places_K = torch.arange(1, len(rows_K) + 1, device=rows_K.device)
    sums_W = ranks.all_gather((rows_K * places_K).sum()[None]).tolist()
    if other := next((rank for rank, each in enumerate(sums_W) if each != sums_W[0]), None):
        message = f"a table of {tuple(table.weight_KD.shape)} has other weights on rank {other} than on rank 0"
        raise UserError(message, "start all ranks with the same seed, and load the same weights on all")


def average_row_gradients(table: Values, ranks: World) -> None:
    """Turn a table's gradient into its mean over the ranks, as DDP does with dense parameters, unless they have
    exchanged it already. Batches may differ in size, and a rank may have read nothing.

    Args:
        table: it keeps its reads.
        ranks: each holds the whole table.
    """
    gradient, weight_KD = table.gradient, table.weight_KD
    if ranks.size == 1 or gradient is None or gradient.of_all_ranks:
        return
    if not ranks.all_any(torch.tensor([bool(gradient)], device=weight_KD.device)):
        return
    if not gradient:
        gradient.replace([], (torch.zeros_like(weight_KD), torch.zeros_like(weight_KD[:, 0], dtype=torch.bool)))
    if gradient.scale != 1:  # each rank has clipped its own
        sums = gradient.fold()
        gradient.replace([], (gradient.scale * sums[0], sums[1]))
    even_row_gradients(gradient, ranks)
    all_gather_row_gradients(gradient, ranks)
    gradient.scale = 1 / ranks.size


def even_row_gradients(gradient: RowGradient, ranks: World) -> None:
    """Let ranks whose batches differ in size send the same amount, as `all_gather_row_gradients` requires: a rank with
    fewer tokens repeats the reads of its last token, with weight 0, which changes no row. If a rank has sums, or no
    tokens, all ranks make sums.

    Args:
        gradient, ranks: as in `all_gather_row_gradients`; each rank has had a backward pass.
    """
    if ranks.size == 1 or not gradient:
        return
    reads, sums = gradient.reads, gradient.sums
    device = (sums or reads[0])[0].device
    own_12 = torch.tensor([[sum(len(x) for x, _, _ in reads), sums is not None]], device=device)
    tokens_W, summed_W = ranks.all_gather(own_12).unbind(1)
    if summed_W.any() or not tokens_W.all():
        gradient.fold()
        return
    x_ND, slots_Nr, weights_Nr = (cat(parts) for parts in zip(*reads, strict=True))
    at_N = torch.arange(int(tokens_W.max()), device=device).clamp(max=len(x_ND) - 1)
    weights_Nr = pad(weights_Nr, (0, 0, 0, len(at_N) - len(x_ND)))
    gradient.replace([(x_ND[at_N], slots_Nr[at_N], weights_Nr)])
