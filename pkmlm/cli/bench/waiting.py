"""What a benchmark says while it runs: one line on standard error, on a terminal only."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def waiting(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows what is being done."""
    from rich.console import Console
    from rich.markup import escape

    from pkmlm.errors import printable

    console = Console(file=sys.stderr)
    if quiet or not console.is_terminal:
        yield lambda text: None
        return
    with console.status("") as status:
        yield lambda text: status.update(escape(printable(text)))
