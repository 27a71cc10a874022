"""Progress bars, on standard error, on a terminal only."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn, TaskID


def bars(quiet: bool, *columns: "ProgressColumn") -> "Progress":
    """Bars that begin with what they are of, and go when all is done; none where `quiet`."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(file=sys.stderr)
    hidden = quiet or not console.is_terminal
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        *columns,
        console=console,
        disable=hidden,
        transient=True,
    )


@contextmanager
def token_progress(what: str, total: int, quiet: bool) -> Iterator[Callable[..., bool]]:
    """Yield a function that is told how many tokens are done (and of how many, where that is known only then); it
    returns True (go on).
    """
    from rich.progress import TextColumn, TimeElapsedColumn, TimeRemainingColumn

    count = TextColumn("{task.completed:,.0f}/{task.total:,.0f} tokens")
    with bars(quiet, count, TimeElapsedColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task(what, total=total)

        def advance(done: int, total: int | None = None) -> bool:
            progress.update(task, completed=done, total=total)
            return True

        yield advance


class Stopwatch:
    """Times each stage from its first to its last report, and moves its bar.

    Attributes:
        seconds: of each stage that has reported.
    """

    def __init__(self, progress: "Progress"):
        self.progress = progress
        self.seconds: dict[str, float] = {}
        self._begun: dict[str, tuple[float, TaskID]] = {}

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """Report that `done` bytes of a stage are done, of `total`, if that is known."""
        if stage not in self._begun:
            self._begun[stage] = time.monotonic(), self.progress.add_task(stage, total=total)
        began, task = self._begun[stage]
        self.seconds[stage] = time.monotonic() - began
        self.progress.update(task, completed=done)


@contextmanager
def stopwatch(quiet: bool) -> Iterator[Stopwatch]:
    """A stopwatch with bars."""
    from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    with bars(quiet, DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()) as progress:
        yield Stopwatch(progress)
