"""How ranks share the gradients of a step.

Dense parameters: every rank holds them whole, and torch's DDP sums their gradients; with `parallel.shard`, FSDP2
divides them, their gradients and their moments among the ranks. Tables of rows: see `row_exchange`. The modules of
FSDP2 take half as long to import as torch itself, so they are imported only where parameters are divided.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from pkmlm.distributed import World, is_shard
from pkmlm.memory.base import memories
from pkmlm.memory.table import tables_of
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
    work = dist.all_reduce(gradients, group=world.group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


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
    whole = {table.weight_KD for table in tables_of(model).values()}
    whole |= {key for memory in memories(model) for key in memory.key_parameters()}
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, ignored_params=whole)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    for name in ("hidden", "head", "loss"):  # training and evaluation call these, not forward
        register_fsdp_forward_method(model, name)
