"""How ranks share the gradients of a step.

Dense parameters: every rank holds them whole, and torch's DDP sums their gradients; with `parallel.shard`, FSDP2
divides them, their gradients and their moments among the ranks. Tables of rows: ranks exchange what they read. The
modules of FSDP2 take half as long to import as torch itself, so they are imported only where parameters are divided.

N: a rank's tokens; r: reads of a token; K: rows of a table; D: its columns on this rank.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel

from pkmlm.distributed import World, is_shard
from pkmlm.kernels.matmul import cat
from pkmlm.kernels.row_gradient import RowGradient, exchange_bytes
from pkmlm.model.memory.key_memory import KeyMemory
from pkmlm.model.memory.values import Values
from pkmlm.model.transformer import Transformer


class DenseLoss(nn.Module):
    """The loss of a model as DDP sees it: a function of those parameters whose gradients DDP is to sum.

    Args:
        model: computes the loss.
        parameters: the parameters, without tables, whose gradients are exchanged in another way.
    """

    def __init__(self, model: Transformer, parameters: Sequence[nn.Parameter]):
        super().__init__()
        self.dense = nn.ParameterList(parameters)
        self.loss = model.loss

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor, scale: float) -> Tensor:
        return self.loss(tokens_BT, targets_BT, scale)


def data_parallel_loss(
    model: Transformer, parameters: Sequence[nn.Parameter], world: World
) -> DistributedDataParallel | None:
    """`model.loss`, whose backward pass sums the gradients of whole dense parameters over all ranks as it goes.

    A resumed run must equal an uninterrupted one bit for bit, so the order in which three or more ranks are summed must
    not depend on how many steps a process has taken. By default, and with `static_graph`, DDP regroups its buckets
    after the first step; with `find_unused_parameters` it never does. FSDP2 on a mesh of (ranks, 1) also keeps the
    bits, but makes every parameter a DTensor, and fp16 and torch.compile would be refused as with `parallel.shard`.

    Args:
        model: its parameters are equal on all ranks.
        parameters: its dense parameters; those that `shard_dense_parameters` has divided are left out.
        world: all ranks of the run.

    Returns:
        a module to call like `model.loss`; in all micro-batches of a step but the last, under its `no_sync`. None where
        there is nothing to sum.
    """
    whole = [parameter for parameter in parameters if not is_shard(parameter)]
    if world.size == 1 or not whole:
        return None
    loss = DistributedDataParallel(
        DenseLoss(model, whole),
        process_group=world.group,
        init_sync=False,  # ranks draw the same weights
        find_unused_parameters=True,
        gradient_as_bucket_view=True,
    )
    loss.register_comm_hook(world, _all_sum)
    return loss


def _all_sum(world: World, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Sum a bucket of gradients over the ranks; DDP itself would take means, which rounds once more."""
    gradients = bucket.buffer()
    world.comm_stats.sent += 2 * (world.size - 1) / world.size * gradients.nbytes
    work = dist.all_reduce(gradients, group=world.group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


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


def shard_dense_parameters(model: Transformer, ranks: int) -> None:
    """Divide a model's dense parameters among all ranks, which fetch those of a block when they need them.

    Tables have columns of their own on each rank. Sub-keys stay whole: they are small, and the CPU's kernels keep
    references to their storage. Gradients are sums over ranks.

    Args:
        model: its dense parameters become DTensors.
        ranks: the size of the world.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(next(model.parameters()).device.type, (ranks,))
    memories = [module for module in model.modules() if isinstance(module, Values | KeyMemory)]
    whole = {parameter for memory in memories for parameter in memory.parameters(recurse=False)}
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, ignored_params=whole)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    for name in ("hidden", "head", "loss"):  # training and evaluation call these, not forward
        register_fsdp_forward_method(model, name)
