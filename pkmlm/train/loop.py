"""The training loop: take a step, log it, validate, save, stop."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from pkmlm.analysis.drift import Drift, RecentReads
from pkmlm.errors import NotFinite, UserError
from pkmlm.files import remove_file
from pkmlm.model.memory.key_memory import KeyMemory
from pkmlm.runs import checkpoint
from pkmlm.runs.checkpoint import Validations
from pkmlm.runs.directory import RunDirectory
from pkmlm.signals import StopRequest
from pkmlm.train.log import RunLog
from pkmlm.train.loss_scale import LossScale
from pkmlm.train.resume_check import fixed_keys
from pkmlm.train.step import TrainState, diverged, train_step
from pkmlm.train.validation import recalibrate

Validate = Callable[[StopRequest], dict[str, Any] | None]


@dataclass(frozen=True)
class Outcome:
    """How training ended.

    Attributes:
        status: "finished", "patience" (early stopping) or "stopped" (on request; a checkpoint is saved).
        step: the step of the last checkpoint.
        exit_code: 0, or that of the signal.
        seconds: time spent in training steps, since the first.
    """

    status: str
    step: int
    exit_code: int
    seconds: float


class Training:
    """A run under way, from its latest checkpoint, which is loaded, or from the model as it is.

    All ranks construct it and call `train`; rank 0 alone writes, except for the parts of checkpoints. What the loop
    decides follows from what all ranks know: step numbers, the loss of rank 0's validation, and a stop request that
    all agree on.

    Args:
        state: filled from the latest checkpoint, if there is one.
        hashes: of all that a resumed run must find again, see `job.hashes_of`; each checkpoint holds them.
        validate: measures the model; returns the numbers of a "valid" event, "loss" (nats per token) among them, or
            None when the stop request came while it measured. None: there is nothing to validate on.

    Raises:
        UserError: the checkpoint cannot be read (exit code 1).
    """

    def __init__(
        self,
        run: RunDirectory,
        state: TrainState,
        hashes: dict[str, str],
        validate: Validate | None,
        log: RunLog,
        stop: StopRequest,
    ):
        self.run, self.state, self.validate, self.log, self.stop = run, state, validate, log, stop
        self.recipe, self.world = state.recipe, state.process_groups.world
        self.calibrated = 0  # the step at which running statistics were last recalibrated
        self.history = self._restore()
        state.progress.validations, state.progress.recipe = self.history, fixed_keys(self.recipe)
        state.progress.data = {**state.progress.data, **hashes}
        if self.world.rank == 0:
            state.progress.run = run.facts().get("id")
        self.drift = Drift(
            run.path / "usage", self.recipe, state.model, state.progress.step, self.world, run.refuse_replaced
        )
        for text in self.drift.warnings:
            log.warn(state.progress.step, text)
        keyed = [module for module in state.model.modules() if isinstance(module, KeyMemory)]
        self.reads = [RecentReads(memory, self.world) for memory in keyed[:2]]  # as many as fit on a line

    def train(self) -> Outcome:
        """Train to the recipe's last step, to the end of its patience, or until a stop request.

        Raises:
            UserError: training diverged (exit code 3), or a checkpoint could not be written (1).
        """
        last_step, patience = self.recipe.train.steps, self.recipe.eval.patience
        while True:
            step = self.state.progress.step
            if self._validation_is_due():
                self._validate()
            stop_code = self.stop.agreed() if step > 0 else None  # not before step 1: a stopped run has a checkpoint
            if stop_code is not None or is_due(self.recipe.checkpoint.every, step):
                self._save()
            if stop_code is not None and (step < last_step or self._validation_is_due()):
                self.log.say(f"stopped on request at step {step}; the checkpoint is saved")
                return self._outcome("stopped", stop_code)
            if step >= last_step:
                self._save()
                return self._outcome("finished")
            if patience is not None and self.history.worse >= patience:
                self.log.say(f"no better validation in the last {self.history.worse}: stopping early at step {step}")
                self._save()
                return self._outcome("patience")
            self._train_step()
            self.drift.record(self.state.progress.step, self.log.event)

    def _train_step(self) -> None:
        """Take the next step and log it: one "train" event, and the line that people see."""
        state, progress = self.state, self.state.progress
        began, sent_before = time.monotonic(), self.world.comm_stats.sent
        result = train_step(state, progress.step + 1)
        seconds = time.monotonic() - began
        progress.step += 1
        progress.tokens += state.batches.scored(progress.step)
        progress.seconds += seconds
        tokens_per_second = self.recipe.train.batch_tokens / seconds
        counts_bytes = self.world.size > 1 and not self.recipe.parallel.shard  # FSDP2 does not say what it sends
        first, *others = state.param_groups
        rates = {f"lr_{group.name}": group.schedule.lr_at(progress.step) for group in others}
        norms = {("grad_norm" if name == first.name else f"grad_norm_{name}"): x for name, x in result.norms.items()}
        self.log.event(
            "train",
            progress.step,
            loss=finite_or_none(result.loss),
            lr=first.schedule.lr_at(progress.step),
            **rates,
            tokens=progress.tokens,
            tokens_per_second=round(tokens_per_second, 1),
            **{name: finite_or_none(norm) for name, norm in norms.items()},
            **({"bytes_sent": round(self.world.comm_stats.sent - sent_before)} if counts_bytes else {}),
            **({"skipped": True} if result.skipped else {}),
        )
        if result.skipped and state.loss_scale:
            self.log.say(f"step {progress.step}: fp16 overflow, skipped; loss scale now {state.loss_scale.scale:g}")
        reads = "".join(f"{recent.after_step()}  " for recent in self.reads)
        self.log.progressed(progress.step, result.loss, tokens_per_second, reads)

    def _validation_is_due(self) -> bool:
        """Whether this step asks for a validation that it has not had."""
        step = self.state.progress.step
        asked = step >= self.recipe.train.steps or is_due(self.recipe.eval.every, step) or self.history.due
        return self.validate is not None and asked and self.history.step != step

    def _validate(self) -> None:
        """Validate, log the result, and save a checkpoint if it is the best. A resumed run repeats a validation that a
        stop request has cut short.
        """
        assert self.validate is not None
        step, history = self.state.progress.step, self.history
        try:
            with self.log.doing("validating"):
                self._recalibrate()
                numbers = self.world.broadcast(self.validate(self.stop))
        except NotFinite as error:
            raise self.world.on_rank_zero(diverged(step, error.message)) from None
        if numbers is None:
            return
        self.log.event("valid", step, **numbers)
        is_best = history.add(step, numbers["loss"], numbers.get("tokens"))
        mark = "best so far" if is_best else f"best {history.best_loss:.4f} at step {history.best_step}"
        self.log.say(f"step {step}  validation {numbers['loss']:.4f} nats/token  ({mark})")
        if is_best:
            self._save()

    def _save(self) -> None:
        """Save a checkpoint of this step, unless there is one: a step has one state. Then point `best` at it if it is
        the best, and delete the checkpoints that need not be kept, with what was kept beside them.
        """
        run, state, progress = self.run, self.state, self.state.progress
        with self.world.collective_errors():
            run.refuse_replaced()
        if not self.world.broadcast(run.checkpoint(progress.step).exists()):
            self.history.due = self._validation_is_due()
            self.drift.keep(progress.step)
            progress.scaler = asdict(state.loss_scale) if state.loss_scale else None
            with self.world.collective_errors():
                self.log.sync()  # events before the checkpoint that builds on them
            with self.log.doing("saving a checkpoint"):
                self._recalibrate()
                checkpoint.save(run, progress, *state.tensors(), state.process_groups)
            self.log.event("save", progress.step)
        with self.world.collective_errors():
            if self.world.rank == 0:
                if self.history.best_step == progress.step:
                    run.point("best", progress.step)
                checkpoint.prune(run, self.recipe.checkpoint.keep, self.history.best_step)
                run.note()
                self.drift.forget(run.steps())

    def _restore(self) -> Validations:
        """Load the latest checkpoint, if there is one; return what the validations until then have shown."""
        run, state = self.run, self.state
        steps = self.world.broadcast(run.steps())
        if not steps:
            return Validations()
        path = run.checkpoint(steps[-1])
        with self.world.collective_errors():
            state.progress = checkpoint.load(path, *state.tensors())
        history = state.progress.validations
        if history is None:  # a checkpoint of an earlier version
            valid_events = [event for event in run.metrics() if event["event"] == "valid"]
            history = Validations.of(self.world.broadcast(valid_events))
        with self.world.collective_errors():
            if self.world.rank == 0:
                run.point("latest", steps[-1])  # a kill may have come between the checkpoint and its pointer
                if history.best_step is not None and history.best_step in steps:
                    run.point("best", history.best_step)
                else:  # it is gone; a new checkpoint of its step would be taken for it
                    remove_file(run.path / "best")
        if state.progress.scaler and state.loss_scale:
            if state.progress.scaler.keys() != asdict(state.loss_scale).keys():
                raise UserError(f"{path}: the state of the loss scale is incomplete", exit_code=1)
            state.loss_scale = LossScale(**state.progress.scaler)
        return history

    def _recalibrate(self) -> None:
        """Recalibrate once a step, so that the checkpoint holds the statistics that validation has used."""
        if self.calibrated != self.state.progress.step:
            recalibrate(self.state, self.state.progress.step)
            self.calibrated = self.state.progress.step

    def _outcome(self, status: str, exit_code: int = 0) -> Outcome:
        return Outcome(status, self.state.progress.step, exit_code, self.state.progress.seconds)


def finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def is_due(every: int, step: int) -> bool:
    """Whether something that happens every `every` steps (0: never) happens after `step`."""
    return every > 0 and step > 0 and step % every == 0
