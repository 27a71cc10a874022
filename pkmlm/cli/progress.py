"""Progress bars of commands that pass over tokens, on standard error, on a terminal only."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def token_progress(what: str, total: int, quiet: bool) -> Iterator[Callable[..., bool]]:
    """Yield a function that is told how many tokens are done (and of how many, where that is known only then); it
    returns True (go on).
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(file=sys.stderr)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} tokens"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=quiet or not console.is_terminal,
        transient=True,
    ) as progress:
        task = progress.add_task(what, total=total)

        def advance(done: int, total: int | None = None) -> bool:
            progress.update(task, completed=done, total=total)
            return True

        yield advance
