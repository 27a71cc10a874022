"""The training loop: take a step, log it, validate, save, stop."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pkmlm.errors import NotFinite, UserError
from pkmlm.model.memory.key_memory import KeyMemory
from pkmlm.runs.directory import RunDirectory
from pkmlm.runs.files import remove_file
from pkmlm.signals import StopRequest
from pkmlm.train import checkpoint
from pkmlm.train.checkpoint import Progress
from pkmlm.train.drift import Drift
from pkmlm.train.history import History
from pkmlm.train.log import RunLog
from pkmlm.train.read_slots import RecentReads
from pkmlm.train.recalibrate import recalibrate
from pkmlm.train.step import Stepper, diverged

Validate = Callable[[StopRequest], dict[str, Any] | None]


@dataclass(frozen=True)
class Outcome:
    """How training ended.

    Attributes:
        status: "finished", "patience" (early stopping) or "stopped" (on request; a checkpoint is saved).
        step: the step of the last checkpoint.
        exit_code: 0, or what the signal stands for.
        seconds: time spent in training steps, since the first.
    """

    status: str
    step: int
    exit_code: int
    seconds: float


class Training:
    """A run under way: from its latest checkpoint, which is read, or from the model as it stands.

    Ranks that train together all make it and call it; rank 0 alone writes, but for the parts of checkpoints. What the
    loop decides follows from what all know: step numbers, the loss of rank 0's validation, and a stop request that all
    agree on.

    Args:
        validate: measures the model; returns the numbers of a "valid" event, "loss" (nats a token) among them, or None
            when the stop request came while it measured. None: there is nothing to validate on.

    Raises:
        UserError: the checkpoint cannot be read (exit code 1).
    """

    def __init__(self, run: RunDirectory, stepper: Stepper, validate: Validate | None, log: RunLog, stop: StopRequest):
        self.run, self.stepper, self.validate, self.log, self.stop = run, stepper, validate, log, stop
        self.recipe, self.world = stepper.recipe, stepper.ranks.world
        self.history = History.of(self.world.broadcast([line for line in run.metrics() if line["event"] == "valid"]))
        self.calibrated = 0  # the step whose running statistics the model has
        self.progress = self._restore()
        self.progress.data |= stepper.batches.corpus.hashes
        model, step = stepper.model, self.progress.step
        self.drift = Drift(run.path / "usage", self.recipe, model, step, self.world, run.refuse_replaced)
        keyed = [module for module in model.modules() if isinstance(module, KeyMemory)]
        self.reads = [RecentReads(memory, self.world) for memory in keyed[:2]]  # what fits a line

    def train(self) -> Outcome:
        """Train to the recipe's last step, to the end of its patience, or until a stop request.

        Raises:
            UserError: training diverged (exit code 3), or a checkpoint could not be written (1).
        """
        while True:
            step = self.progress.step
            if validate := self._validation_due():
                self._measure(validate)
            stopping = self.stop.agreed() if step > 0 else None  # not before step 1: a stopped run has a checkpoint
            if stopping is not None or due(self.recipe.checkpoint.every, step):
                self._save()
            if stopping is not None and (step < self.recipe.train.steps or self._validation_due()):
                self.log.say(f"stopped on request at step {step}; the checkpoint is saved")
                return Outcome("stopped", step, stopping, self.progress.seconds)
            if step >= self.recipe.train.steps:
                self._save()
                return Outcome("finished", step, 0, self.progress.seconds)
            patience = self.recipe.eval.patience
            if patience is not None and self.history.worse >= patience:
                self.log.say(f"no better validation in {self.history.worse}: stopping early at step {step}")
                self._save()
                return Outcome("patience", step, 0, self.progress.seconds)
            self._take_step()
            self.drift.record(self.progress.step, self.log)

    def _validation_due(self) -> Validate | None:
        """The validation that this step asks for and has not had."""
        step = self.progress.step
        asked = step >= self.recipe.train.steps or due(self.recipe.eval.every, step)
        return self.validate if asked and self.history.step != step else None

    def _restore(self) -> Progress:
        """Go back to the latest checkpoint, if there is one."""
        run, stepper = self.run, self.stepper
        steps = self.world.broadcast(run.steps())
        if not steps:
            return Progress()
        with self.world.together():
            progress = checkpoint.load(run.checkpoint(steps[-1]), stepper.model, stepper.groups)
            if self.world.rank == 0:
                run.point("latest", steps[-1])  # a kill may have come between the checkpoint and its pointer
                best = self.history.best_step
                if best is not None and best in steps:
                    run.point("best", best)
                else:  # it is gone; a new checkpoint of its step would be taken for it
                    remove_file(run.path / "best")
        stepper.skips = progress.skips
        if progress.scaler and stepper.scaler.is_enabled():
            if progress.scaler.keys() != stepper.scaler.state_dict().keys():
                raise UserError(f"{run.checkpoint(steps[-1])}: the state of the loss scaler is not whole", exit_code=1)
            stepper.scaler.load_state_dict(progress.scaler)
        return progress

    def _take_step(self) -> None:
        """Take the next step and record it: one "train" event, and the line that people see."""
        stepper, progress = self.stepper, self.progress
        began = time.monotonic()
        result = stepper.take(progress.step + 1)
        seconds = time.monotonic() - began
        progress.step += 1
        progress.tokens += stepper.batches.scored(progress.step)
        progress.seconds += seconds
        speed = self.recipe.train.batch_tokens / seconds
        norms = {("grad_norm" if name == "dense" else f"grad_norm_{name}"): norm for name, norm in result.norms.items()}
        self.log.event(
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
            scale = stepper.scaler.get_scale()
            self.log.say(f"step {progress.step}: fp16 overflow, skipped; loss scale now {scale:g}")
        read = "".join(f"{window.after_step()}  " for window in self.reads)
        self.log.progressed(progress.step, result.loss, speed, read)

    def _measure(self, validate: Validate) -> None:
        """Validate, record it, and keep the best; a validation that a stop request cuts short is made up for on
        resume."""
        step, history = self.progress.step, self.history
        try:
            with self.log.doing("validating"):
                self._calibrate()
                numbers = self.world.broadcast(validate(self.stop))
        except NotFinite as error:
            raise self.world.same(diverged(step, error.message)) from None
        if numbers is None:
            return
        self.log.event("valid", step, **numbers)
        mark = f"best {history.best_loss:.4f} at step {history.best_step}"
        better = history.add(step, numbers["loss"])
        self.log.say(f"step {step}  validation {numbers['loss']:.4f} nats/token  ({'best so far' if better else mark})")
        if better:
            self._save()
            with self.world.together():
                if self.world.rank == 0:
                    self.run.point("best", step)
            self._prune()  # the one that was best

    def _save(self) -> None:
        """Save a checkpoint of this step, unless there is one: a step has one state."""
        run, stepper, progress = self.run, self.stepper, self.progress
        with self.world.together():
            run.refuse_replaced()
        if self.world.broadcast(run.checkpoint(progress.step).exists()):
            return
        self.drift.keep(progress.step)
        progress.skips, progress.scaler = stepper.skips, stepper.scaler.state_dict()
        with self.world.together():
            self.log.sync()
        with self.log.doing("saving a checkpoint"):
            self._calibrate()
            checkpoint.save(run, stepper.model, stepper.groups, progress, stepper.ranks)
        self._prune()
        self.log.event("save", progress.step)

    def _calibrate(self) -> None:
        """Take running statistics anew, once a step: those that are measured with are those that are saved."""
        if self.calibrated != self.progress.step:
            recalibrate(self.stepper, self.progress.step)
            self.calibrated = self.progress.step

    def _prune(self) -> None:
        """Delete checkpoints that need not be kept, and what was kept beside them."""
        with self.world.together():
            if self.world.rank == 0:
                checkpoint.prune(self.run, self.recipe.checkpoint.keep)
                self.drift.forget(self.run.steps())


def finite_or_none(value: float) -> float | None:
    return value if abs(value) < float("inf") else None


def due(every: int, step: int) -> bool:
    """Whether something that happens every so many steps happens after `step`."""
    return every > 0 and step > 0 and step % every == 0
