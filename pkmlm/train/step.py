"""The state of training, and one step of it: micro-batches forward and backward, one verdict on the gradient, one
update of every group.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pkmlm.data.batches import Batches
from pkmlm.device import Precision, autocast, to_device, to_host
from pkmlm.distributed import ProcessGroups, World
from pkmlm.errors import UserError
from pkmlm.measure.background import Background
from pkmlm.memory.query import QueryBatchNorm
from pkmlm.memory.row_exchange import all_gather_row_gradients
from pkmlm.memory.table import table_ranks
from pkmlm.model.transformer import Transformer
from pkmlm.recipe.schema import Recipe
from pkmlm.runs.checkpoint import Progress, Tables
from pkmlm.seeds import derived_seed
from pkmlm.train.compile_and_recompute import compile_dense_parts, recompute_activations
from pkmlm.train.loss_scale import FLOOR, LossScale
from pkmlm.train.optim import optimizer_state, parameter_groups
from pkmlm.train.parallel import data_parallel_loss
from pkmlm.train.slot_choice import SlotChoice

MOST_SKIPS = 20  # fp16 steps in a row


class TrainState:
    """A model, its optimizers, its data, and the progress of its training.

    Construction prepares the model as the recipe asks: it compiles the dense parts, and lets blocks recompute their
    activations.

    Args:
        recipe: how to train.
        model: the model, on the device to train on; weights, gradients and moments are fp32 in every precision.
        batches: the training data.
        precision: "fp32", "bf16" or "fp16".
        process_groups: the ranks that take each step together; None: this process alone.
        background: the counts by which slots are chosen, if the recipe asks for that.

    Raises:
        UserError: the background is not of this model; (exit code 1) torch.compile does not work on this machine.

    Attributes:
        param_groups: the parameters that move together, with their optimizers.
        slot_choice: which slots a step moves; None: all that it reads.
        data_parallel: what to call instead of `model.loss` where several ranks train; None: there is nothing to sum.
        loss_scale: the factor of the loss in fp16; None: in another precision, where there is none.
        waits: whether the host learns of a gradient that is not finite before it updates. On a GPU it does not wait to
            know, except in fp16, where the next loss depends on it.
        stopped: 0-d, on the device: 1 once a gradient was not finite, without `waits`; then no update changes anything.
        progress: steps, tokens, seconds, and fp16 steps skipped in a row.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: Transformer,
        batches: Batches,
        precision: Precision,
        process_groups: ProcessGroups | None = None,
        background: Background | None = None,
    ):
        self.recipe, self.model, self.batches, self.precision = recipe, model, batches, precision
        self.process_groups = process_groups or ProcessGroups()
        self.device = next(model.parameters()).device
        self.loss_scale = LossScale() if precision == "fp16" else None
        self.waits = self.device.type == "cpu" or precision == "fp16"
        self.stopped = torch.zeros((), device=self.device)
        self.progress = Progress()
        self.param_groups = parameter_groups(model, recipe)
        self.slot_choice = None if recipe.finetune.slots == "all" else SlotChoice(recipe, model, background)
        if recipe.train.compile:
            compile_dense_parts(model)
        if recipe.train.recompute:
            for block in model.blocks:
                recompute_activations(block)
        dense = [p for group in self.param_groups if not group.row_gradients for p in group.parameters.values()]
        self.data_parallel = data_parallel_loss(model, dense, self.process_groups.world)

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor], Tables]:
        """What a checkpoint holds: the model's tensors, the optimizers', and which of the model's are tables."""
        return self.model.state_dict(), optimizer_state(self.param_groups), table_ranks(self.model)


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


@dataclass(frozen=True)
class QueuedStep:
    """A step that the host has queued; a GPU may not have taken it yet.

    Attributes:
        step: its number.
        groups: the names of the parameter groups.
        numbers: waits for the loss and the groups' norms (float64).
        world: the ranks that take it.
        skipped: as in `StepResult`.
    """

    step: int
    groups: list[str]
    numbers: Callable[[], Tensor]
    world: World
    skipped: bool = False

    def result(self) -> StepResult:
        """Wait until the step is taken.

        Returns:
            loss and gradient norms of the global batch: the same numbers on all ranks.

        Raises:
            UserError: as `train_step`.
        """
        loss, *norms = self.numbers().tolist()
        result = StepResult(loss, dict(zip(self.groups, norms, strict=True)), self.skipped)
        if not self.skipped and not all(map(math.isfinite, (loss, *norms))):
            raise self.world.on_rank_zero(diverged(self.step, _what_is_not_finite(result)))
        return result


def train_step(state: TrainState, step: int) -> StepResult:
    """Take one optimizer step, and wait for it; all ranks call it together.

    Args:
        step: its number, from 1; everything random in it follows from the recipe's seed, this number and the rank.

    Returns:
        loss and gradient norms of the global batch: the same numbers on all ranks.

    Raises:
        UserError: (exit code 3) the loss or a gradient is not finite, and no smaller loss scale can help; the
            parameters are those of the step before.
    """
    return queue_step(state, step).result()


def queue_step(state: TrainState, step: int) -> QueuedStep:
    """As `train_step`, but without waiting for a GPU, unless `state.waits`.

    Without a wait, nobody knows yet whether loss and gradients are finite. The device does when it updates: if they are
    not, this update and all that follow leave parameters, moments and statistics as they are, to the bit. That training
    has diverged is known when the result is asked for.
    """
    world, loss_scale = state.process_groups.world, state.loss_scale
    world.comm_state.step = step
    place = (step, world.rank) if world.rank else (step,)
    torch.manual_seed(derived_seed(state.recipe.train.seed, "dropout", *place))
    state.model.train()
    if state.recipe.train.only in ("values", "gates"):  # a batch norm in training would move its statistics
        for module in state.model.modules():
            if isinstance(module, QueryBatchNorm):
                module.eval()
    statistics: list[tuple[Tensor, Tensor]] = []  # each with what it was before the forward passes
    if loss_scale or not state.waits:
        floating = (buffer for buffer in state.model.buffers() if buffer.is_floating_point())
        statistics = [(buffer, buffer.clone()) for buffer in floating]

    numbers = _gradient(state, step)
    taken = QueuedStep(step, [group.name for group in state.param_groups], to_host(numbers), world)
    if not state.waits:
        skip = state.stopped.logical_or_(~numbers.isfinite().all())
        _update(state, step, numbers, skip)
        for buffer, before in statistics:
            buffer.copy_(torch.where(skip > 0, before, buffer))
    elif bool(taken.numbers().isfinite().all()):
        _update(state, step, numbers)
        state.progress.skips = 0
        if loss_scale:
            loss_scale.update(overflow=False)
    elif loss_scale:  # a skipped step leaves no trace
        taken = replace(taken, skipped=True)
        state.progress.skips += 1
        if loss_scale.scale <= FLOOR or state.progress.skips >= MOST_SKIPS:
            after = f" after {state.progress.skips} skipped steps in a row, at a loss scale of {loss_scale.scale:g}"
            raise world.on_rank_zero(diverged(step, _what_is_not_finite(taken.result(), after)))
        for buffer, before in statistics:
            buffer.copy_(before)
        loss_scale.update(overflow=True)
    else:
        taken.result()  # raises
    for group in state.param_groups:
        group.optimizer.zero_grad(set_to_none=True)
    return taken


def _gradient(state: TrainState, step: int) -> Tensor:
    """Leave the gradient of the global batch with the parameter groups; return `_loss_and_norms`."""
    choice = state.slot_choice
    with nullcontext() if choice is None else choice.counters:
        loss_share = _accumulate_gradients(state, step)
    for group in state.param_groups:
        for gradient in group.row_gradients:
            all_gather_row_gradients(gradient, state.process_groups.data)
    if choice is not None:  # before the norms: what is not chosen has no gradient
        choice.choose(state.process_groups.world)
    for group in state.param_groups:
        if state.loss_scale:
            group.scale_gradient(1 / state.loss_scale.scale)
        for gradient in group.row_gradients:
            gradient.keep_sums()
    return _loss_and_norms(state, loss_share)


def _update(state: TrainState, step: int, numbers: Tensor, skip: Tensor | None = None) -> None:
    """Clip the gradient of each parameter group by its norm, and update its parameters.

    Args:
        numbers: `_loss_and_norms`.
        skip: 0-d; above 0, nothing is updated. None: it is.
    """
    for group, norm in zip(state.param_groups, numbers[1:], strict=True):
        group.clip_gradient(norm)
        group.step(step, skip)


def _accumulate_gradients(state: TrainState, step: int) -> Tensor:
    """Accumulate the gradient of the mean loss over the global batch; return this rank's share of that mean, a sum over
    its tokens: 0-d, detached. Gradients of tables are such shares, too; those of dense parameters are sums over all
    ranks.
    """
    world, scored = state.process_groups.world, state.batches.scored(step)
    loss_scale = state.loss_scale.scale if state.loss_scale else 1.0
    total = torch.zeros((), device=state.device)
    count, compute_loss = state.recipe.micro_batches(world.size), state.data_parallel or state.model.loss
    for index in range(count):
        batch = state.batches.micro_batch(step, index, state.recipe.train.micro_batch, world.rank, world.size)
        tokens_BT, targets_BT = (to_device(part, state.device) for part in batch)
        if state.slot_choice is not None:
            state.slot_choice.counters.only((targets_BT >= 0).flatten())
        last = index == count - 1
        with nullcontext() if last or state.data_parallel is None else state.data_parallel.no_sync():
            with autocast(state.device, state.precision):
                loss = compute_loss(tokens_BT, targets_BT, loss_scale / max(1, scored))
            loss.backward()
        total = total + loss.detach() / loss_scale
    return total


def _loss_and_norms(state: TrainState, loss_share: Tensor) -> Tensor:
    """Loss and gradient norms of the global batch, float64: the same on all ranks, and so the same verdict."""
    shares = [loss_share.double(), *(group.own_square(state.process_groups) for group in state.param_groups)]
    total = state.process_groups.world.all_sum(torch.stack(shares))
    return torch.cat([total[:1], total[1:].sqrt()])


def _what_is_not_finite(result: StepResult, after: str = "") -> str:
    bad = [name for name, norm in result.norms.items() if not math.isfinite(norm)]
    where = f", gradient norm of {' and '.join(bad)} not finite" if bad else ""
    return f"loss {result.loss:g}{where}{after}; nothing was updated"


def diverged(step: int, what: str) -> UserError:
    """The error that ends training (exit code 3)."""
    return UserError(
        f"training diverged at step {step}: {what}",
        "train under another -o with a lower optim.lr, a longer warm-up or tighter clipping; "
        "-s train.init_from=RUN starts from this run's best checkpoint, if it has one",
        exit_code=3,
    )
