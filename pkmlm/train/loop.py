"""The training loop: take a step, log it, validate, save, stop."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pkmlm.data.batches import Batches
from pkmlm.errors import NotFinite, UserError
from pkmlm.model.memory.usage_tap import usage_taps
from pkmlm.model.transformer import Transformer
from pkmlm.recipe.schema import Recipe
from pkmlm.runtime.distributed import Ranks
from pkmlm.runtime.log import RunLog
from pkmlm.runtime.rundir import RunDirectory
from pkmlm.runtime.signals import StopRequest
from pkmlm.train import checkpoint
from pkmlm.train.checkpoint import Progress
from pkmlm.train.drift import Drift
from pkmlm.train.history import History
from pkmlm.train.recalibrate import recalibrate
from pkmlm.train.recent_reads import RecentReads
from pkmlm.train.step import Stepper, diverged, stepper_for

Validate = Callable[[StopRequest], dict[str, Any] | None]


@dataclass(frozen=True)
class Outcome:
    """How a call of `train` ended.

    Attributes:
        status: "finished", "patience" (early stopping) or "stopped" (on request; a checkpoint is saved).
        step: the step of the last checkpoint.
        exit_code: 0, or what the signal stands for.
    """

    status: str
    step: int
    exit_code: int


def train(
    run: RunDirectory,
    recipe: Recipe,
    model: Transformer,
    batches: Batches,
    precision: str,
    validate: Validate | None,
    log: RunLog,
    stop: StopRequest,
    ranks: Ranks | None = None,
) -> Outcome:
    """Train `model` in `run` from its latest checkpoint, or from the start, to the recipe's last step.

    Ranks that train together all call it; rank 0 alone writes, but for the parts of checkpoints. What the loop decides
    follows from what all know: step numbers, the loss of rank 0's validation, and a stop request that all agree on.

    Args:
        validate: measures the model; returns the numbers of a "valid" event, "loss" (nats a token) among them, or None
            when the stop request came while it measured. None: there is nothing to validate on.

    Raises:
        UserError: training diverged (exit code 3), or a checkpoint could not be written or read (1).
    """
    stepper = stepper_for(recipe, model, batches, precision, ranks)
    progress = restore(run, stepper)
    progress.data |= batches.corpus.hashes
    world = stepper.ranks.world
    reads = [RecentReads(tap, world) for tap in usage_taps(model) if tap.name == "memory"][:2]
    drift = Drift(run.path / "usage", recipe, model, progress.step, world, run.refuse_replaced)
    history = History.of(world.broadcast([line for line in run.metrics() if line["event"] == "valid"]))

    def unvalidated() -> bool:
        asked = progress.step >= recipe.train.steps or due(recipe.eval.every, progress.step)
        return validate is not None and asked and history.step != progress.step

    while True:
        if validate is not None and unvalidated():
            measure(run, stepper, progress, history, validate, log, stop, drift)
        stopping = stop.agreed() if progress.step > 0 else None  # not before step 1: a stopped run has a checkpoint
        if stopping is not None or due(recipe.checkpoint.every, progress.step):
            save(run, stepper, progress, log, drift)
        if stopping is not None and (progress.step < recipe.train.steps or unvalidated()):
            log.say(f"stopped on request at step {progress.step}; the checkpoint is saved")
            return Outcome("stopped", progress.step, stopping)
        if progress.step >= recipe.train.steps:
            save(run, stepper, progress, log, drift)
            return Outcome("finished", progress.step, 0)
        if recipe.eval.patience is not None and history.worse >= recipe.eval.patience:
            log.say(f"no better validation in {history.worse}: stopping early at step {progress.step}")
            save(run, stepper, progress, log, drift)
            return Outcome("patience", progress.step, 0)
        take_step(stepper, progress, log, reads)
        drift.record(progress.step, log)


def restore(run: RunDirectory, stepper: Stepper) -> Progress:
    """Go back to the latest checkpoint, if there is one."""
    world = stepper.ranks.world
    steps = world.broadcast(run.steps())
    if not steps:
        return Progress()
    with world.together():
        progress = checkpoint.load(run.checkpoint(steps[-1]), stepper.model, stepper.groups)
        if world.rank == 0:
            best = History.of(run.metrics()).best_step
            run.point("latest", steps[-1])  # a kill may have come between the checkpoint and its pointer
            if best is not None and best in steps:
                run.point("best", best)
    stepper.skips = progress.skips
    if progress.scaler and stepper.scaler.is_enabled():
        if progress.scaler.keys() != stepper.scaler.state_dict().keys():
            raise UserError(f"{run.checkpoint(steps[-1])}: the state of the loss scaler is not whole", exit_code=1)
        stepper.scaler.load_state_dict(progress.scaler)
    return progress


def save(run: RunDirectory, stepper: Stepper, progress: Progress, log: RunLog, drift: Drift) -> None:
    """Save a checkpoint of this step, unless there is one: a step has one state."""
    world = stepper.ranks.world
    with world.together():
        run.refuse_replaced()
    if world.broadcast(run.checkpoint(progress.step).exists()):
        return
    drift.keep(progress.step)
    progress.skips, progress.scaler = stepper.skips, stepper.scaler.state_dict()
    with world.together():
        log.sync()
    checkpoint.save(run, stepper.model, stepper.groups, progress, stepper.ranks)
    prune(run, stepper, drift)
    log.event("save", progress.step)


def prune(run: RunDirectory, stepper: Stepper, drift: Drift) -> None:
    """Delete checkpoints that need not be kept, and what was kept beside them."""
    with stepper.ranks.world.together():
        if stepper.ranks.world.rank == 0:
            checkpoint.prune(run, stepper.recipe.checkpoint.keep)
            drift.forget(run.steps())


def take_step(stepper: Stepper, progress: Progress, log: RunLog, reads: list[RecentReads]) -> None:
    """Take the next step and record it: one "train" event, and the line that people see."""
    began = time.monotonic()
    result = stepper.take(progress.step + 1)
    seconds = time.monotonic() - began
    progress.step += 1
    progress.tokens += stepper.batches.scored(progress.step)
    progress.seconds += seconds
    speed = stepper.recipe.train.batch_tokens / seconds
    norms = {("grad_norm" if name == "dense" else f"grad_norm_{name}"): norm for name, norm in result.norms.items()}
    log.event(
        "train",
        progress.step,
        loss=finite_or_none(result.loss),
        lr=stepper.groups[0].rate(progress.step),
        tokens=progress.tokens,
        tokens_per_second=round(speed, 1),
        **{name: finite_or_none(norm) for name, norm in norms.items()},
        **({"skipped": True} if result.skipped else {}),
    )
    if result.skipped:
        log.say(f"step {progress.step}: fp16 overflow, skipped; loss scale now {stepper.scaler.get_scale():g}")
    read = "".join(f"{window.after_step()}  " for window in reads)
    log.progressed(progress.step, result.loss, speed, read)


def measure(
    run: RunDirectory,
    stepper: Stepper,
    progress: Progress,
    history: History,
    validate: Validate,
    log: RunLog,
    stop: StopRequest,
    drift: Drift,
) -> None:
    """Validate, record it, and keep the best; a validation that a stop request cuts short is made up for on resume."""
    world = stepper.ranks.world
    recalibrate(stepper, progress.step)
    try:
        numbers = world.broadcast(validate(stop))
    except NotFinite as error:
        raise world.same(diverged(progress.step, error.message)) from None
    if numbers is None:
        return
    log.event("valid", progress.step, **numbers)
    mark = f"best {history.best_loss:.4f} at step {history.best_step}"
    better = history.add(progress.step, numbers["loss"])
    log.say(f"step {progress.step}  validation {numbers['loss']:.4f} nats/token  ({'best so far' if better else mark})")
    if better:
        save(run, stepper, progress, log, drift)
        with world.together():
            if world.rank == 0:
                run.point("best", progress.step)
        prune(run, stepper, drift)  # the one that was best


def finite_or_none(value: float) -> float | None:
    return value if abs(value) < float("inf") else None


def due(every: int, step: int) -> bool:
    """Whether something that happens every so many steps happens after `step`."""
    return every > 0 and step > 0 and step % every == 0
