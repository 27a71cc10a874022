"""One optimizer step: micro-batches forward and backward, one verdict on the gradient, one update of every group."""

import math
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from pkmlm.device import autocast, to_device
from pkmlm.errors import UserError
from pkmlm.seeds import derived_seed
from pkmlm.train.parallel import all_gather_row_gradients
from pkmlm.train.state import TrainState

SCALE_FLOOR = 1.0
MOST_SKIPS = 20


@dataclass(frozen=True)
class StepResult:
    """What a step did.

    Attributes:
        loss: mean over the global batch's scored tokens, nats.
        norms: gradient norm of each parameter group before clipping.
        skipped: fp16 gradients overflowed, and nothing was updated.
    """

    loss: float
    norms: dict[str, float]
    skipped: bool


def train_step(state: TrainState, step: int) -> StepResult:
    """Take one optimizer step; all ranks call it together.

    Args:
        step: its number, from 1; everything random in it follows from the recipe's seed, this number and the rank.

    Returns:
        loss and gradient norms of the global batch: the same numbers on all ranks.

    Raises:
        UserError: (exit code 3) the loss or a gradient is not finite and no smaller loss scale can mend it; the
            parameters are those of the step before.
    """
    world, scaler = state.process_groups.world, state.scaler
    world.comm_stats.step = step
    place = (step, world.rank) if world.rank else (step,)
    torch.manual_seed(derived_seed(state.recipe.train.seed, "dropout", *place))
    state.model.train()
    fp16 = scaler.is_enabled()
    buffers_before = [buffer.clone() for buffer in state.model.buffers()] if fp16 else []

    loss_share = _accumulate_gradients(state, step)
    for group in state.param_groups:
        for gradient in group.row_gradients:
            all_gather_row_gradients(gradient, state.process_groups.data)
    if fp16:
        for group in state.param_groups:
            group.unscale(scaler)
    loss, norms = _loss_and_norms(state, loss_share)

    finite = all(math.isfinite(value) for value in (loss, *norms.values()))
    if finite:
        for group in state.param_groups:
            if group.clip and norms[group.name] > group.clip:
                group.scale_gradient(group.clip / norms[group.name])
            group.step(step)
    elif fp16:  # a skipped step leaves no trace
        for buffer, value in zip(state.model.buffers(), buffers_before, strict=True):
            buffer.copy_(value)
    else:
        raise world.on_rank_zero(diverged(step, _what_is_not_finite(loss, norms)))
    if fp16:
        _adapt_loss_scale(state, step, finite, loss, norms)
    for group in state.param_groups:
        group.optimizer.zero_grad(set_to_none=True)
    return StepResult(loss, norms, skipped=not finite)


def _accumulate_gradients(state: TrainState, step: int) -> Tensor:
    """Accumulate the gradient of the mean over the global batch; return that mean, 0-d, detached. The mean is this
    rank's share, a sum over its tokens; so are gradients of tables. Those of dense parameters are sums over all ranks.
    """
    world, scaler = state.process_groups.world, state.scaler
    scored = state.batches.scored(step)
    # By `scale`, and not `get_scale`: the former also makes the scaler's tensors, which unscaling needs.
    loss_scale = float(scaler.scale(torch.ones((), device=state.device))) if scaler.is_enabled() else 1.0
    total = torch.zeros((), device=state.device)
    count, compute_loss = state.recipe.micro_batches(world.size), state.data_parallel or state.model.loss
    for index in range(count):
        batch = state.batches.micro_batch(step, index, state.recipe.train.micro_batch, world.rank, world.size)
        tokens_BT, targets_BT = (to_device(part, state.device) for part in batch)
        last = index == count - 1
        with nullcontext() if last or state.data_parallel is None else state.data_parallel.no_sync():
            with autocast(state.device, state.precision):
                loss = compute_loss(tokens_BT, targets_BT, loss_scale / scored)
            loss.backward()
        total = total + loss.detach() / loss_scale
    return total


def _loss_and_norms(state: TrainState, loss_share: Tensor) -> tuple[float, dict[str, float]]:
    """Loss and gradient norms of the global batch: the same numbers on all ranks, and so the same verdict."""
    shares = [loss_share.double(), *(group.own_square(state.process_groups) for group in state.param_groups)]
    total = state.process_groups.world.all_sum(torch.stack(shares))
    loss, *norms = torch.cat([total[:1], total[1:].sqrt()]).tolist()
    return loss, dict(zip((group.name for group in state.param_groups), norms, strict=True))


def _adapt_loss_scale(state: TrainState, step: int, finite: bool, loss: float, norms: dict[str, float]) -> None:
    """Let the loss scale grow or back off: one verdict for all groups (torch's scaler keeps one for each)."""
    scaler, progress = state.scaler, state.progress
    if finite:
        progress.skips = 0
        scaler.update()
        return
    progress.skips += 1
    scale = scaler.get_scale()
    if scale <= SCALE_FLOOR or progress.skips >= MOST_SKIPS:
        after = f" after {progress.skips} skipped steps in a row, at a loss scale of {scale:g}"
        raise state.process_groups.world.on_rank_zero(diverged(step, _what_is_not_finite(loss, norms, after)))
    scaler.update(new_scale=max(SCALE_FLOOR, scale * scaler.get_backoff_factor()))
    scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 0})


def _what_is_not_finite(loss: float, norms: dict[str, float], after: str = "") -> str:
    bad = [name for name, norm in norms.items() if not math.isfinite(norm)]
    where = f", gradient norm of {' and '.join(bad)} not finite" if bad else ""
    return f"loss {loss:g}{where}{after}; nothing was updated"


def diverged(step: int, what: str) -> UserError:
    """The error that ends training (exit code 3)."""
    return UserError(
        f"training diverged at step {step}: {what}",
        "train under another -o with a lower optim.lr, a longer warm-up or tighter clipping; "
        "-s train.init_from=RUN starts from this run's best checkpoint, if it has one",
        exit_code=3,
    )
