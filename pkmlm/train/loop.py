"""The training loop: take a step, log it, validate, save, stop."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from pkmlm.errors import NotFinite
from pkmlm.files import remove_file
from pkmlm.measure.drift import Drift
from pkmlm.runs import checkpoint
from pkmlm.runs.checkpoint import prune
from pkmlm.runs.directory import RunDirectory
from pkmlm.runs.saving import Saver
from pkmlm.signals import StopRequest
from pkmlm.train.job import Job, hashes_of
from pkmlm.train.log import RunLog
from pkmlm.train.loss_scale import LossScale
from pkmlm.train.out_of_memory import step_bytes
from pkmlm.train.step import QueuedStep, TrainState, diverged, queue_step

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


@dataclass(frozen=True)
class Unlogged:
    """A step that is queued, but not logged.

    Attributes:
        began: when it was queued, by the monotonic clock.
        tokens: scored so far, with it.
        line: what the progress line says besides.
    """

    taken: QueuedStep
    began: float
    tokens: int
    line: str


class Training:
    """A run under way, from its latest checkpoint, which is loaded, or from the model as it is.

    All ranks construct it and call `train`; rank 0 alone writes, except for the parts of checkpoints. What the loop
    decides follows from what all ranks know: step numbers, the loss of rank 0's validation, and a stop request that
    all agree on.

    Args:
        state: filled from the latest checkpoint, if there is one.
        job: what is trained; each checkpoint holds its recipe and the hashes of all that a resume must find again.
        validate: measures the model; returns the numbers of a "valid" event, among them "loss" (nats per token) and
            "bits_per_byte", or None when the stop request came while it measured. None: there is nothing to validate
            on.

    Raises:
        UserError: the checkpoint cannot be read (exit code 1).
    """

    def __init__(
        self,
        run: RunDirectory,
        state: TrainState,
        job: Job,
        validate: Validate | None,
        log: RunLog,
        stop: StopRequest,
    ):
        self.run, self.state, self.validate, self.log, self.stop = run, state, validate, log, stop
        self.recipe, self.world = state.recipe, state.process_groups.world
        self.unlogged: Unlogged | None = None
        self.ended = 0.0  # when the last step that is logged was done
        on_cpu = state.device.type == "cpu"
        self.saver = Saver(
            run,
            job.recipe,
            state.process_groups,
            log.say,
            lambda step: log.event("save", step),
            step_bytes(job, state.precision) if on_cpu else 0,
        )
        self.drift = Drift(self.recipe, state.model, self.world)
        self._restore()
        self.history = state.progress.validations
        state.progress.data |= hashes_of(job)
        state.progress.vocab_size = job.vocab_size
        state.progress.parameters = run.facts().get("parameters") or {}

    def train(self) -> Outcome:
        """Train to the recipe's last step, to the end of its patience, or until a stop request. The last checkpoint
        stands when this returns.

        Raises:
            UserError: training diverged (exit code 3), or a checkpoint could not be written (1).
        """
        with self.saver:
            outcome = self._train()
            self.saver.wait()
            return outcome

    def _train(self) -> Outcome:
        last_step, patience = self.recipe.train.steps, self.recipe.eval.patience
        while True:
            step = self.state.progress.step
            self.saver.check()
            if self._validation_is_due():
                self._validate()
            stop_code = self.stop.agreed() if step > 0 else None  # not before step 1: a stopped run has a checkpoint
            if stop_code is not None or is_due(self.recipe.checkpoint.every, step):
                self._save()
            if stop_code is not None and (step < last_step or self._validation_is_due()):
                self.saver.wait()
                self.log.say(f"stopped on request at step {step}; the checkpoint is saved")
                return self._outcome("stopped", stop_code)
            if step >= last_step:
                self._save()
                return self._outcome("finished")
            if patience is not None and self.history.worse >= patience:
                self.log.say(f"no improvement in the last {self.history.worse} validations: stopping at step {step}")
                self._save()
                return self._outcome("patience")
            self._train_step()
            self.drift.record(self.state.progress.step, self._event)

    def _train_step(self) -> None:
        """Take the next step, and log it. A GPU takes it while the host goes on: there, the step before is logged. Its
        numbers have come by then, and the GPU has work to do while they are written.
        """
        state, progress = self.state, self.state.progress
        began = time.monotonic()
        with self.drift:
            taken = queue_step(state, progress.step + 1)
        if not state.waits:
            self._log_step()
        progress.step += 1
        progress.tokens += state.batches.scored(progress.step)
        self.unlogged = Unlogged(taken, began, progress.tokens, self.drift.after_step())
        if state.waits:
            self._log_step()

    def _log_step(self) -> None:
        """Log the step that is queued, if there is one, when it is done: one "train" event, and the line that people
        see.

        Raises:
            UserError: training diverged in it (exit code 3).
        """
        if self.unlogged is None:
            return
        state, progress, logged = self.state, self.state.progress, self.unlogged
        self.unlogged = None
        result, step = logged.taken.result(), logged.taken.step
        now = time.monotonic()
        seconds = now - max(logged.began, self.ended)
        self.ended = now
        progress.seconds += seconds
        tokens_per_second = state.batches.read(step) / seconds
        first, *others = state.param_groups
        rates = {f"lr_{group.name}": group.schedule.lr_at(step) for group in others}
        norms = {("grad_norm" if name == first.name else f"grad_norm_{name}"): x for name, x in result.norms.items()}
        self.log.event(
            "train",
            step,
            loss=finite_or_none(result.loss),
            lr=first.schedule.lr_at(step),
            **rates,
            tokens=logged.tokens,
            tokens_per_second=round(tokens_per_second, 1),
            **{name: finite_or_none(norm) for name, norm in norms.items()},
            **({"skipped": True} if result.skipped else {}),
        )
        if result.skipped and state.loss_scale:
            self.log.say(f"step {step}: fp16 overflow, skipped; loss scale now {state.loss_scale.scale:g}")
        self.log.progressed(step, result.loss, tokens_per_second, logged.line)

    def _event(self, event: str, step: int, **numbers: Any) -> None:
        """Log what follows the last step, which is logged before."""
        self._log_step()
        self.log.event(event, step, **numbers)

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
        self._log_step()
        step, history = self.state.progress.step, self.history
        try:
            with self.log.doing("validating"):
                numbers = self.world.broadcast(self.validate(self.stop))
        except NotFinite as error:
            raise self.world.on_rank_zero(diverged(step, error.message)) from None
        if numbers is None:
            return
        self.log.event("valid", step, **numbers)
        is_best = history.add(step, numbers["loss"], numbers.get("tokens"))
        mark = "best so far" if is_best else f"best {history.best_loss:.4f} at step {history.best_step}"
        found = f"{numbers['bits_per_byte']:.4f} bits/byte, {numbers['loss']:.4f} nats/token"
        self.log.say(f"step {step}  validation {found}  ({mark})")
        if is_best:
            self._save()

    def _save(self) -> None:
        """Save a checkpoint of this step in the background, unless there is one, or it is being written: a step has one
        state. When it stands, point at it, and delete those that need not be kept.
        """
        run, state, progress, history = self.run, self.state, self.state.progress, self.history
        self._log_step()  # if training has diverged, nothing more is saved
        if self.saver.step == progress.step:
            return
        if self.world.broadcast(run.checkpoint(progress.step).exists()):
            with self.world.collective_errors():
                if self.world.rank == 0 and history.best_step == progress.step:  # validated after a resume
                    run.set_pointer("best", progress.step)
            return
        history.due = self._validation_is_due()
        progress.scaler = asdict(state.loss_scale) if state.loss_scale else {}
        step, best = progress.step, history.best_step

        def committed(seconds: float) -> None:
            self.saved.append(round(seconds, 3))
            run.write_facts(save_seconds_waited=self.saved)
            run.set_pointer("latest", step)
            if best == step:
                run.set_pointer("best", step)
            prune(run, self.recipe.checkpoint.keep, best)

        with self.world.collective_errors():
            self.log.sync()  # events before the checkpoint that builds on them
        with self.log.doing("saving a checkpoint"):
            self.saver.save(progress, *state.tensors(), self.drift.tensors(), committed)

    def _restore(self) -> None:
        """Load the latest checkpoint, if there is one."""
        run, state = self.run, self.state
        steps = self.world.broadcast(run.steps())
        self.saved: list[float] = list(run.facts().get("save_seconds_waited") or ())
        if not steps:
            return
        path = run.checkpoint(steps[-1])
        with self.world.collective_errors():
            state.progress = checkpoint.load(path, *state.tensors())
            self.drift.load(checkpoint.load_drift(path))
        best = state.progress.validations.best_step
        with self.world.collective_errors():
            if self.world.rank == 0:
                run.set_pointer("latest", steps[-1])  # a kill may have come between the checkpoint and its pointer
                if best is not None and best in steps:
                    run.set_pointer("best", best)
                else:  # it is gone; a new checkpoint of its step would be taken for it
                    remove_file(run.path / "best")
        if state.progress.scaler and state.loss_scale:
            state.loss_scale = LossScale(**state.progress.scaler)

    def _outcome(self, status: str, exit_code: int = 0) -> Outcome:
        return Outcome(status, self.state.progress.step, exit_code, self.state.progress.seconds)


def finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def is_due(every: int, step: int) -> bool:
    """Whether something that happens every `every` steps (0: never) happens after `step`."""
    return every > 0 and step > 0 and step % every == 0
