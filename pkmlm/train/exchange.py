"""What the ranks of a run tell each other of a step's gradient.

N: a rank's tokens; r: reads of a token; K: rows of a table; D: its columns on this rank; U: rows that were read.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from pkmlm.distributed import ProcessGroups, World
from pkmlm.kernels.row_gradient import RowGradient, exchange_bytes
from pkmlm.train.optim import ParameterGroup
from pkmlm.train.shard import is_shard

BUCKET = 1 << 23  # numbers that are summed in one call


def exchange_gradients(groups: list[ParameterGroup], ranks: ProcessGroups) -> None:
    """Make every rank's gradients those of the global batch (or this rank's columns of them).

    After the last micro-batch, in buckets that never change. DistributedDataParallel would overlap this with the
    backward pass, but regroups its buckets after its first step, and with them the order in which three or more ranks
    are summed: a resumed run would then differ in bits from one that was not stopped.
    """
    if ranks.world.size == 1:
        return
    for group in groups:
        grads = [p.grad for p in group.parameters.values() if p.grad is not None]
        sum_gradients([grad for grad in grads if not is_shard(grad)], ranks.world)
        for gradient in group.row_gradients:
            exchange_reads(gradient, ranks.data)


def sum_gradients(grads: list[Tensor], ranks: World) -> None:
    """Sum tensors of one dtype over all ranks, in place."""
    for bucket in buckets(grads):
        total = ranks.all_sum(torch.cat([grad.flatten() for grad in bucket]))
        for grad, part in zip(bucket, total.split([grad.numel() for grad in bucket]), strict=True):
            grad.copy_(part.view_as(grad))


def buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors in order, in lists that end where they reach BUCKET numbers."""
    bucket, numbers = [], 0
    for tensor in tensors:
        bucket.append(tensor)
        numbers += tensor.numel()
        if numbers >= BUCKET:
            yield bucket
            bucket, numbers = [], 0
    if bucket:
        yield bucket


def exchange_reads(gradient: RowGradient, ranks: World) -> None:
    """Make a table's gradient that of the reads of all ranks.

    Where that is less to send, the reads themselves travel, and are then in the order in which one process would have
    made them; else the sums of rows do.
    """
    if ranks.size == 1 or not gradient:
        return
    if gradient.sums is None:
        tokens, (x_ND, slots_Nr, _) = sum(len(x) for x, _, _ in gradient.reads), gradient.reads[0]
        reads, rows = exchange_bytes(
            tokens, slots_Nr.shape[1], gradient.rows, x_ND.shape[1], x_ND.element_size(), ranks=ranks.size
        )
        if reads <= rows:
            gradient.replace(
                [
                    (ranks.all_gather(x), ranks.all_gather(slots.int()).long(), ranks.all_gather(w))
                    for x, slots, w in gradient.reads
                ]
            )
            return
    sums_KD, read_K = gradient.fold()
    gradient.replace([], (ranks.all_sum(sums_KD), ranks.all_any(read_K)))
