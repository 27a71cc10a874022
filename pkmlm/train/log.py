"""The log of a run: a live line on a terminal, plain lines elsewhere, and files.

metrics.jsonl gets every event; train.log every plain line; TensorBoard and Weights & Biases where the recipe asks.
"""

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column

from pkmlm.errors import UserError, printable
from pkmlm.files import open_log, write_errors
from pkmlm.memory.address import memory_label
from pkmlm.recipe.schema import Log
from pkmlm.report.metrics import FLOORED
from pkmlm.runs.directory import RunDirectory
from pkmlm.train.monitor import TrainingMonitor


class TrainingLog:
    """The log of one training process. Use as a context manager.

    Args:
        folder: the run directory.
        name: the recipe's name.
        steps: the last step, for the bar and the ETA.
        settings: the recipe's `log` section.
        quiet: write nothing but warnings to standard error.
        monitor: gives warnings about events; None: there are none.

    Attributes:
        start: the step of the latest checkpoint, from which a resumed run continues; or 0.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        steps: int,
        settings: Log,
        *,
        quiet: bool = False,
        monitor: TrainingMonitor | None = None,
    ):
        self.folder, self.name, self.steps, self.settings, self.quiet = folder, name, steps, settings, quiet
        self.monitor = monitor
        self.console = Console(file=sys.stderr, markup=False, emoji=False, highlight=False)  # text as it is
        self.console.soft_wrap = not self.console.is_interactive  # a terminal would break a long line within a word
        self.live = self.console.is_interactive and not quiet
        self.start = max(RunDirectory(folder).steps(), default=0)
        self.began, self.taken = (0.0, 0), 0

    def __enter__(self) -> "TrainingLog":
        self.metrics = open_log(self.folder / "metrics.jsonl")
        self.text = open_log(self.folder / "train.log")
        self.sinks: list[TensorBoardSink | WandbSink] = []
        if self.settings.tensorboard:
            self.sinks.append(TensorBoardSink(self.folder, self.start + 1))
        if self.settings.wandb:
            self.sinks.append(WandbSink(self.folder, self.name, self.settings.wandb))
        # In a narrow terminal the bar gives way, then the text wraps.
        columns = (
            BarColumn(bar_width=None, table_column=Column(width=4, ratio=1)),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[say]}", table_column=Column()),
        )
        self.progress = Progress(*columns, console=self.console, disable=not self.live, expand=True)
        self.task = self.progress.add_task("", total=self.steps, completed=self.start, say="ETA -")
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()
        for sink in self.sinks:
            sink.close()
        for file in (self.metrics, self.text):
            with contextlib.suppress(OSError):  # the write that failed has been reported
                file.close()

    def event(self, event: str, step: int, **numbers: Any) -> None:
        """Record one event; its numbers are finite or None."""
        line = {"event": event, "step": step, **numbers}
        with write_errors(self.folder / "metrics.jsonl"):
            self.metrics.write(json.dumps(line, allow_nan=False) + "\n")
        scalars = {f"{event}/{name}": number for name, number in numbers.items() if isinstance(number, int | float)}
        for memory in numbers.get("usage") or ():
            used = {key: memory[key] for key in FLOORED if memory[key] is not None}
            label = memory_label(memory)
            scalars |= {f"{event}/{label}/{key}": used[key] for key in used}
        for sink in self.sinks:
            sink.write(scalars, step)
        for text in self.monitor.warnings(line) if self.monitor else ():
            self.warn(step, text)

    def sync(self) -> None:
        """Make the events so far survive a power cut: a checkpoint that follows builds on them."""
        with write_errors(self.folder / "metrics.jsonl"):
            os.fsync(self.metrics.fileno())

    def say(self, text: str, *, on_screen: bool = True) -> None:
        """Write a line for people to train.log and, unless quiet, to standard error."""
        with write_errors(self.folder / "train.log"):
            self.text.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {printable(text)}\n")
        if on_screen and not self.quiet:
            self.console.print(printable(text))

    def warn(self, step: int, text: str) -> None:
        """Report something that a person should look at: a "warn" event, and a line that `quiet` does not silence."""
        self.event("warn", step, text=text)
        self.say(f"warning: step {step}: {text}", on_screen=False)
        self.console.print(printable(f"warning: step {step}: {text}"))

    def progressed(self, step: int, loss: float, tokens_per_second: float, extra: str) -> None:
        """Show where training is; the ETA leaves out the first ten steps of this process, which are slower."""
        now = time.monotonic()
        self.taken += 1
        if self.taken <= 10:
            self.began = (now, step)
        elapsed, done = now - self.began[0], step - self.began[1]
        eta = f"ETA {timedelta(seconds=round(elapsed / done * (self.steps - step)))}" if done else "ETA -"
        say = f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s  {extra}{eta}"
        if self.live:
            self.progress.update(self.task, completed=step, say=say)
        if step % self.settings.every == 0 or step == self.steps:
            self.say(f"step {step}/{self.steps}  {say}", on_screen=not self.live)

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Show beside the bar what happens between two steps, such as "validating"."""
        before = self.progress.tasks[0].fields["say"]
        self.progress.update(self.task, say=what)
        yield
        self.progress.update(self.task, say=before)


class SilentLog:
    """The log of a rank other than 0, which does nothing: rank 0 logs the same events."""

    def event(self, event: str, step: int, **numbers: Any) -> None: ...

    def sync(self) -> None: ...

    def say(self, text: str, *, on_screen: bool = True) -> None: ...

    def warn(self, step: int, text: str) -> None: ...

    def progressed(self, step: int, loss: float, tokens_per_second: float, extra: str) -> None: ...

    def doing(self, what: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


RunLog = TrainingLog | SilentLog


class TensorBoardSink:
    """Events for TensorBoard, in the run's folder `tensorboard`; those of earlier processes before `first` stay."""

    def __init__(self, folder: Path, first: int):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError("log.tensorboard needs the package tensorboard", "pip install tensorboard") from None
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first)

    def write(self, scalars: dict[str, float], step: int) -> None:
        for name, number in scalars.items():
            self.writer.add_scalar(name, number, step)

    def close(self) -> None:
        self.writer.close()


class WandbSink:
    """A run of a Weights & Biases project. A resumed run continues it; a new one in its place, or a copy, does not."""

    def __init__(self, folder: Path, name: str, project: str):
        try:
            import wandb
        except ImportError:
            raise UserError("log.wandb needs the package wandb", "pip install wandb") from None
        place = f"{folder.resolve()} {RunDirectory(folder).facts().get('started')}"
        identity = hashlib.sha256(place.encode()).hexdigest()[:16]
        self.run = wandb.init(project=project, name=name, dir=str(folder), id=identity, resume="allow")

    def write(self, scalars: dict[str, float], step: int) -> None:
        self.run.log(scalars, step=step)

    def close(self) -> None:
        self.run.finish()
