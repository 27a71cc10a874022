"""How ranks share the gradients of a step.

Dense parameters: every rank holds them whole, and torch's DDP sums their gradients. Tables of rows: see `row_exchange`.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pkmlm.distributed import World
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
    """`model.loss`, whose backward pass sums the gradients of dense parameters over all ranks as it goes.

    A resumed run must equal an uninterrupted one bit for bit, so the order in which three or more ranks are summed must
    not depend on how many steps a process has taken. By default, and with `static_graph`, DDP regroups its buckets
    after the first step; with `find_unused_parameters` it never does.

    Args:
        model: its parameters are equal on all ranks.
        parameters: its dense parameters.
        world: all ranks of the run.

    Returns:
        a module to call like `model.loss`; in all micro-batches of a step but the last, under its `no_sync`. None where
        there is nothing to sum.
    """
    if world.size == 1 or not parameters:
        return None
    loss = DistributedDataParallel(
        DenseLoss(model, parameters),
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
