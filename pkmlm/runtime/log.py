"""What a run says while it trains: a live line on a terminal, plain lines elsewhere, and always files.

metrics.jsonl gets every event; train.log every plain line; TensorBoard and Weights & Biases where the recipe asks.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn

from pkmlm.errors import UserError, printable
from pkmlm.recipe.schema import Log
from pkmlm.runtime.files import disk_errors

Sink = Callable[[dict[str, Any]], None]


class TrainingLog:
    """The log of one training process. Use as a context manager.

    Args:
        folder: the run directory.
        name: the recipe's name.
        steps: the last step, for the bar and the ETA.
        settings: the recipe's `log` section.
        quiet: nothing on standard error but warnings.
    """

    def __init__(self, folder: Path, name: str, steps: int, settings: Log, *, quiet: bool = False):
        self.folder, self.name, self.steps, self.settings, self.quiet = folder, name, steps, settings, quiet
        self.console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
        self.live = self.console.is_terminal and not quiet
        self.began: tuple[float, int] | None = None

    def __enter__(self) -> "TrainingLog":
        with disk_errors(self.folder):
            self.metrics = open(self.folder / "metrics.jsonl", "a", encoding="utf-8", buffering=1)
            self.text = open(self.folder / "train.log", "a", encoding="utf-8", buffering=1)
        self.sinks = [open_sink(self.folder, self.name) for open_sink in self._wanted_sinks()]
        columns = (
            "{task.description}",
            BarColumn(bar_width=None),
            "{task.completed}/{task.total}",
            "{task.fields[say]}",
        )
        parts = [TextColumn(part) if isinstance(part, str) else part for part in columns]
        self.progress = Progress(*parts, console=self.console, disable=not self.live, expand=True)
        self.task = self.progress.add_task(escape(printable(self.name)), total=self.steps, say="")
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()
        self.metrics.close()
        self.text.close()

    def event(self, event: str, step: int, **numbers: Any) -> None:
        """Record one event; numbers that are not finite are written as null."""
        line = {"event": event, "step": step, **numbers}
        with disk_errors(self.folder / "metrics.jsonl"):
            self.metrics.write(json.dumps(line) + "\n")
        for sink in self.sinks:
            sink(line)

    def say(self, text: str) -> None:
        """One line for people: to train.log, and to standard error unless quiet."""
        with disk_errors(self.folder / "train.log"):
            self.text.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {printable(text)}\n")
        if not self.quiet:
            self.console.print(escape(printable(text)))

    def progressed(self, step: int, loss: float, tokens_per_second: float, extra: str) -> None:
        """Show where training is; the ETA leaves out the first ten steps of this process."""
        now = time.monotonic()
        if self.began is None:
            self.began = (now, step)
        elapsed, done = now - self.began[0], step - self.began[1]
        eta = f"ETA {duration(elapsed / done * (self.steps - step))}" if done >= 10 else "ETA -"
        say = f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s  {extra}{eta}"
        if self.live:
            self.progress.update(self.task, completed=step, say=say)
        if step % self.settings.every == 0 or step == self.steps:
            if self.live:
                self.text.write(f"step {step}/{self.steps}  {say}\n")
            else:
                self.say(f"step {step}/{self.steps}  {say}")

    def _wanted_sinks(self) -> list[Callable[[Path, str], Sink]]:
        wanted: list[Callable[[Path, str], Sink]] = []
        if self.settings.tensorboard:
            wanted.append(tensorboard_sink)
        if self.settings.wandb:
            project = self.settings.wandb
            wanted.append(lambda folder, name: wandb_sink(folder, name, project))
        return wanted


def tensorboard_sink(folder: Path, name: str) -> Sink:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError("log.tensorboard needs the package tensorboard", "pip install 'pkmlm[sinks]'") from None
    writer = SummaryWriter(str(folder / "tensorboard"))

    def sink(line: dict[str, Any]) -> None:
        for key, value in line.items():
            if isinstance(value, int | float) and key != "step":
                writer.add_scalar(f"{line['event']}/{key}", value, line["step"])

    return sink


def wandb_sink(folder: Path, name: str, project: str) -> Sink:
    try:
        import wandb
    except ImportError:
        raise UserError("log.wandb needs the package wandb", "pip install 'pkmlm[sinks]'") from None
    run = wandb.init(project=project, name=name, dir=str(folder), id=folder.resolve().name, resume="allow")

    def sink(line: dict[str, Any]) -> None:
        numbers = {f"{line['event']}/{key}": v for key, v in line.items() if isinstance(v, int | float)}
        run.log(numbers, step=line["step"])

    return sink


def duration(seconds: float) -> str:
    """Seconds as 42s, 3m05s or 2h07m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
