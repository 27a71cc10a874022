"""The training loop: take a step, log it, validate, save, stop."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pkmlm.data.batches import Batches
from pkmlm.model.memory.usage_tap import UsageTap, usage_taps
from pkmlm.model.transformer import Transformer
from pkmlm.recipe.schema import Recipe
from pkmlm.runtime.log import TrainingLog
from pkmlm.runtime.rundir import RunDirectory
from pkmlm.runtime.signals import StopRequest
from pkmlm.train import checkpoint
from pkmlm.train.checkpoint import Progress
from pkmlm.train.optim import parameter_groups
from pkmlm.train.step import Stepper

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
    log: TrainingLog,
    stop: StopRequest,
) -> Outcome:
    """Train `model` in `run` from its latest checkpoint, or from the start, to the recipe's last step.

    Args:
        validate: measures the model; returns the numbers of a "valid" event, "loss" (nats a token) among them, or None
            when the stop request came while it measured. None: there is nothing to validate on.

    Raises:
        UserError: training diverged (exit code 3), or a checkpoint could not be written or read (1).
    """
    groups = parameter_groups(model, recipe)
    stepper = Stepper(model, groups, batches, recipe, precision)
    progress = restore(run, stepper)
    reads = [RecentReads(tap) for tap in usage_taps(model) if tap.name == "memory"]
    while progress.step < recipe.train.steps or progress.unvalidated:
        if not progress.unvalidated:
            take_step(stepper, progress, log, reads)
            last = progress.step == recipe.train.steps
            progress.unvalidated = validate is not None and (last or due(recipe.eval.every, progress.step))
        if progress.unvalidated and validate is not None:
            measure(run, stepper, progress, validate, log, stop)
        finished = progress.step == recipe.train.steps and not progress.unvalidated
        impatient = recipe.eval.patience is not None and progress.worse >= recipe.eval.patience
        if finished or impatient or stop or due(recipe.checkpoint.every, progress.step):
            save(run, stepper, progress)
            log.event("save", progress.step)
        if impatient and not finished:
            log.say(f"no better validation in {progress.worse}: stopping early at step {progress.step}")
            return Outcome("patience", progress.step, 0)
        if stop.exit_code is not None and not finished:
            log.say(f"stopped on request at step {progress.step}; the checkpoint is saved")
            return Outcome("stopped", progress.step, stop.exit_code)
    return Outcome("finished", progress.step, 0)


def restore(run: RunDirectory, stepper: Stepper) -> Progress:
    """Go back to the latest checkpoint, if there is one."""
    steps = run.steps()
    if not steps:
        return Progress()
    progress = checkpoint.load(run.checkpoint(steps[-1]), stepper.model, stepper.groups)
    if progress.best_step in steps:  # a kill may have come between the checkpoint and its pointer
        run.point("best", progress.best_step)
    stepper.skips = progress.skips
    if progress.scaler and stepper.scaler.is_enabled():
        stepper.scaler.load_state_dict(progress.scaler)
    return progress


def save(run: RunDirectory, stepper: Stepper, progress: Progress) -> None:
    progress.skips, progress.scaler = stepper.skips, stepper.scaler.state_dict()
    checkpoint.save(run, stepper.model, stepper.groups, progress)
    checkpoint.prune(run, stepper.recipe.checkpoint.keep)


def take_step(stepper: Stepper, progress: Progress, log: TrainingLog, reads: "list[RecentReads]") -> None:
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
    read = "".join(f"{window.say()}  " for window in reads[:2])
    log.progressed(progress.step, result.loss, speed, read)


def measure(
    run: RunDirectory, stepper: Stepper, progress: Progress, validate: Validate, log: TrainingLog, stop: StopRequest
) -> None:
    """Validate, record it, and keep the best; a validation that a stop request cuts short is made up for on resume."""
    numbers = validate(stop)
    if numbers is None:
        return
    log.event("valid", progress.step, **numbers)
    progress.unvalidated = False
    better = progress.best_loss is None or numbers["loss"] < progress.best_loss
    mark = "(best so far)" if better else f"(best {progress.best_loss:.4f} at step {progress.best_step})"
    log.say(f"step {progress.step}  validation {numbers['loss']:.4f} nats/token  {mark}")
    if better:
        progress.best_loss, progress.best_step, progress.worse = numbers["loss"], progress.step, 0
        save(run, stepper, progress)
        run.point("best", progress.step)
    else:
        progress.worse += 1


def finite_or_none(value: float) -> float | None:
    return value if abs(value) < float("inf") else None


def due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


class RecentReads:
    """The share of a memory's slots that training has read in the current window of steps.

    Args:
        tap: of the memory to watch.
        window: training forwards in a window; the share shown is that of the last whole window.
    """

    def __init__(self, tap: UsageTap, window: int = 100):
        self.tap, self.window = tap, window
        self.read_K: Tensor | None = None
        self.forwards = 0
        self.share: float | None = None
        tap.register_forward_hook(self._note)

    def _note(self, tap: torch.nn.Module, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        if not tap.training:
            return
        if self.read_K is None:
            self.read_K = torch.zeros(self.tap.slots, dtype=torch.bool, device=output[0].device)
        self.read_K[output[0].flatten()] = True
        self.forwards += 1
        if self.forwards == self.window:
            self.share = float(self.read_K.float().mean())
            self.read_K.zero_()
            self.forwards = 0

    def say(self) -> str:
        """For the progress line; empty until a window is whole."""
        return "" if self.share is None else f"layer {self.tap.layer} reads {self.share:.0%}"
