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
from pkmlm.train.step import Stepper, StepResult

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
    validate: Validate,
    log: TrainingLog,
    stop: StopRequest,
) -> Outcome:
    """Train `model` in `run` from its latest checkpoint, or from the start, to the recipe's last step.

    Args:
        validate: measures the model; returns the numbers of a "valid" event, "loss" (nats a token) among them, or None
            when the stop request came while it measured.

    Raises:
        UserError: training diverged (exit code 3), or a checkpoint could not be written or read (1).
    """
    groups = parameter_groups(model, recipe)
    stepper = Stepper(model, groups, batches, recipe, precision)
    progress = restore(run, model, stepper)
    reads = [RecentReads(tap) for tap in usage_taps(model) if tap.name == "memory"]
    while progress.step < recipe.train.steps:
        began = time.monotonic()
        result = stepper.take(progress.step + 1)
        progress.step += 1
        progress.tokens += batches.scored(progress.step)
        seconds = time.monotonic() - began
        progress.seconds += seconds
        record(log, recipe, stepper, progress, result, reads, seconds)
        last = progress.step == recipe.train.steps
        if last or due(recipe.eval.every, progress.step):
            numbers = validate(stop)
            if numbers is not None and is_best(progress, numbers, log):
                save(run, recipe, stepper, progress)
                run.point("best", progress.step)
        impatient = recipe.eval.patience is not None and progress.worse >= recipe.eval.patience
        if last or impatient or stop or due(recipe.checkpoint.every, progress.step):
            save(run, recipe, stepper, progress)
            log.event("save", progress.step)
        if impatient and not last:
            log.say(f"no better validation in {progress.worse}: stopping early at step {progress.step}")
            return Outcome("patience", progress.step, 0)
        if stop and not last:
            assert stop.exit_code is not None
            log.say(f"stopped on request at step {progress.step}; the checkpoint is saved")
            return Outcome("stopped", progress.step, stop.exit_code)
    return Outcome("finished", progress.step, 0)


def restore(run: RunDirectory, model: Transformer, stepper: Stepper) -> Progress:
    """Go back to the latest checkpoint, if there is one."""
    steps = run.steps()
    progress = checkpoint.load(run.checkpoint(steps[-1]), model, stepper.groups) if steps else Progress()
    stepper.skips = progress.skips
    if progress.scaler and stepper.scaler.is_enabled():
        stepper.scaler.load_state_dict(progress.scaler)
    return progress


def save(run: RunDirectory, recipe: Recipe, stepper: Stepper, progress: Progress) -> None:
    progress.skips, progress.scaler = stepper.skips, stepper.scaler.state_dict()
    checkpoint.save(run, stepper.model, stepper.groups, progress)
    checkpoint.prune(run, recipe.checkpoint.keep)


def record(
    log: TrainingLog,
    recipe: Recipe,
    stepper: Stepper,
    progress: Progress,
    result: StepResult,
    reads: "list[RecentReads]",
    seconds: float,
) -> None:
    """One "train" event, and the line that people see."""
    speed = recipe.train.batch_tokens / seconds
    extra: dict[str, Any] = {f"grad_norm_{name}": norm for name, norm in result.norms.items() if name != "dense"}
    if result.skipped:
        log.say(f"step {progress.step}: fp16 overflow, skipped; loss scale now {stepper.scaler.get_scale():g}")
        extra["skipped"] = True
    log.event(
        "train",
        progress.step,
        loss=finite_or_none(result.loss),
        lr=stepper.groups[0].rate(progress.step),
        grad_norm=finite_or_none(result.norms["dense"]),
        tokens=progress.tokens,
        tokens_per_second=round(speed, 1),
        **{name: value if value is True else finite_or_none(value) for name, value in extra.items()},
    )
    read = "".join(f"{window.say()}  " for window in reads[:2])
    log.progressed(progress.step, result.loss, speed, read)


def finite_or_none(value: float) -> float | None:
    return value if abs(value) < float("inf") else None


def is_best(progress: Progress, numbers: dict[str, Any], log: TrainingLog) -> bool:
    """Log a validation; whether it is the best so far."""
    log.event("valid", progress.step, **numbers)
    better = progress.best_loss is None or numbers["loss"] < progress.best_loss
    mark = "  (best so far)" if better else f"  (best {progress.best_loss:.4f} at step {progress.best_step})"
    log.say(f"step {progress.step}  validation {numbers['loss']:.4f} nats/token{mark}")
    if better:
        progress.best_loss, progress.best_step, progress.worse = numbers["loss"], progress.step, 0
    else:
        progress.worse += 1
    return better


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
