"""Recalibration: the running statistics of batch norms, computed again for the weights as they are.

During training they follow weights that move, and so lag behind; validation can use those of the current weights.
"""

import torch

from pkmlm.device import autocast, to_device
from pkmlm.model.memory.query import QueryBatchNorm
from pkmlm.model.memory.values import Values
from pkmlm.train.state import TrainState


@torch.no_grad()
def recalibrate(state: TrainState, step: int) -> None:
    """Set the running statistics of the query's batch norms to means over `eval.recalibrate` micro-batches (0:
    leave them).

    These are the micro-batches of the steps up to `step` (of all steps, where these are fewer), without dropout; all
    ranks call this together. Nothing else changes: training continues as it would have, and the same step gives the
    same statistics.
    """
    world = state.process_groups.world
    count, size = state.recipe.micro_batches(world.size), state.recipe.train.micro_batch
    micro_batches = min(state.recipe.eval.recalibrate, step * count)
    norms = [module for module in state.model.modules() if isinstance(module, QueryBatchNorm)]
    if not micro_batches or not norms:
        return
    before = [norm.momentum for norm in norms]
    state.model.eval()
    for module in state.model.modules():
        if isinstance(module, QueryBatchNorm | Values):  # whose ranks have tokens of their own
            module.train()
    first = step + 1 - -(-micro_batches // count)
    for number in range(micro_batches):
        for norm in norms:
            norm.momentum = 1 / (number + 1)
        batch = state.batches.micro_batch(first + number // count, number % count, size, world.rank, world.size)
        with autocast(state.device, state.precision):
            state.model.hidden(to_device(batch.tokens_BT, state.device))
    for norm, momentum in zip(norms, before, strict=True):
        norm.momentum = momentum
