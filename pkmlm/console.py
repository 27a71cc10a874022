"""What people see in a terminal: tables (and the same tables for a README, a paper or a spreadsheet), warnings,
progress bars, and a standard error that may close early.

Results go to standard output, warnings and progress to standard error. rich is imported when something is drawn.
"""

import csv
import io
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from pkmlm.errors import printable

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn, TaskID
    from rich.table import Table as Grid

Format = Literal["table", "md", "latex", "csv"]
MISSING = "-"
BREAK = "\x1f"  # where a long word may break: white space without width; not printable, so that no cell has it
SCIENTIFIC_FROM = 1e9  # larger floats are shown as 2.28e+49; counts are integers and keep their digits
SHARE, NATS = "{:.1%}", "{:.4f}"  # formats of numbers
# The ways to fit a table to the terminal, the first that does being taken: the width from which headings of numbers
# fold; the gap between columns; whether text folds; whether a number folds before its +-spread.
LAYOUTS = (
    *((99, 2, False, False), (8, 2, False, False), (1, 2, False, False), (1, 1, False, False)),
    *((1, 2, True, False), (1, 2, True, True), (1, 1, True, True)),
)
TEXT = 16  # a column of text folds where it is wider than this
RULE = "    \n    \n -- \n" + "    \n" * 5  # as rich wants a box: a rule below the headings, and nothing else
LATEX = {  # what LaTeX would take for markup, and signs for which it has its own
    **{sign: f"\\{sign}" for sign in "{}$&#%_"},
    **{sign: f"${sign}$" for sign in "<>|"},
    "\\": r"\textbackslash{}",
    "^": r"\textasciicircum{}",
    "~": r"$\sim$",
    "+-": r"$\pm\,$",
    "-": "$-$",
}


@dataclass(frozen=True)
class Column:
    """A heading and how the values below it are shown.

    Args:
        name: the heading, with the unit where there is one ("time (s)"); the key in CSV.
        align: "left" for text, "right" for numbers.
        format: a format string for numbers, e.g. "{:,}" or "{:.1%}"; text and missing values ignore it, as
            do floats from 1e9 on, which are shown as 2.28e+49.
    """

    name: str
    align: Literal["left", "right"] = "left"
    format: str = "{}"

    def show(self, value: Any) -> str:
        """A value as people read it; None is "-"."""
        if value is None:
            return MISSING
        if isinstance(value, str):
            return printable(value)
        is_huge = isinstance(value, float) and abs(value) >= SCIENTIFIC_FROM
        return ("{:.2e}" if is_huge else self.format).format(value)


def number(name: str, format: str = "{:,}") -> Column:
    """A right-aligned column of numbers, shown as 1,234 by default."""
    return Column(name, "right", format)


@dataclass(frozen=True)
class Table:
    """A table, as text in four formats.

    Args:
        title: a line above the table; may be empty.
        columns: headings and formats.
        rows: a value for each column: unrounded numbers, text, or None for a missing value.
        note: a line below the table, for people.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    note: str = ""

    def render(self, format: Format = "table") -> str:
        """The table as text that ends in a newline.

        Args:
            format: "table" fits the terminal (80 characters where there is none) as far as numbers can stay whole: a
                table of many numbers is wider. "md" is markdown, "latex" a float with booktabs' rules; "csv" keeps
                full precision.
        """
        writers = {"table": self._text, "md": self._markdown, "latex": self._latex, "csv": self._csv}
        return writers[format]()

    def _text(self) -> str:
        from rich.console import Console

        width = Console().width  # the terminal's, or 80
        console = Console(file=io.StringIO(), color_system=None, width=10**6)
        for room, gap, fold_text, fold_spreads in LAYOUTS:
            grid = self._grid(room, gap, fold_spreads)
            least = sum((column.min_width or 0) + gap for column in grid.columns) - gap
            if (least if fold_text else console.measure(grid).maximum) <= width:
                break
        console.width = max(width, least)  # in less room, rich would leave columns out
        with console.capture() as drawn:
            console.print(grid)
        lines = [line.rstrip() for line in drawn.get().replace(BREAK, "").split("\n")][:-1]
        title = [printable(self.title), ""] if self.title else []
        return "\n".join([*title, *lines, *([printable(self.note)] if self.note else []), ""])

    def _grid(self, room: int, gap: int, fold_spreads: bool) -> "Grid":
        """The table for rich, in one of `LAYOUTS`. Columns of numbers are as wide as their numbers or their heading."""
        from rich.box import Box
        from rich.cells import cell_len
        from rich.table import Table as Grid
        from rich.text import Text

        grid = Grid(box=Box(RULE, ascii=True), show_edge=False, pad_edge=False, padding=(0, gap - 1, 0, 0))
        head, *rows = self.shown()
        if fold_spreads:
            rows = [[cell.replace(" +-", "\n+-") for cell in row] for row in rows]
        for column, heading, *cells in zip(self.columns, head, *rows, strict=True):
            is_number = column.align == "right"
            widest = max(map(cell_len, "\n".join(cells).splitlines()), default=1)
            if is_number:
                heading = textwrap.fill(heading, max(room, widest), break_long_words=False)
            widest = max(widest, *map(cell_len, heading.splitlines() or [""]))
            least = widest if is_number else min(widest, TEXT)
            grid.add_column(Text(heading), justify=column.align, overflow="fold", no_wrap=is_number, min_width=least)
        for row in rows:
            grid.add_row(*(Text(re.sub(r"(?<=[-_/@])(?=\w)", BREAK, cell)) for cell in row))
        return grid

    def _markdown(self) -> str:
        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(re.sub(r"([\\|`*<\[])", r"\\\1", cell) for cell in cells) + " |\n"

        rule = "|" + "|".join("---:" if column.align == "right" else "---" for column in self.columns) + "|\n"
        head, *rows = map(line, self.shown())
        title = f"**{printable(self.title)}**\n\n" if self.title else ""
        note = f"\n{printable(self.note)}\n" if self.note else ""
        return title + head + rule + "".join(rows) + note

    def _latex(self) -> str:
        def escaped(text: str) -> str:
            return re.sub(r"\+-|(?<!\S)-(?=\d)|[\\{}$&#%_<>|^~]", lambda sign: LATEX[sign[0]], text)

        def line(cells: Sequence[str]) -> str:
            return " & ".join("--" if cell == MISSING else escaped(cell) for cell in cells) + r" \\"

        head, *rows = map(line, self.shown())
        about = ". ".join(escaped(printable(text)) for text in (self.title, self.note) if text)
        lines = [
            "% needs \\usepackage{booktabs}",
            r"\begin{table}",
            r"\centering",
            *([rf"\caption{{{about}}}"] if about else []),
            rf"\begin{{tabular}}{{{''.join(column.align[0] for column in self.columns)}}}",
            *(r"\toprule", head, r"\midrule", *rows, r"\bottomrule"),
            *(r"\end{tabular}", r"\end{table}", ""),
        ]
        return "\n".join(lines)

    def shown(self) -> list[list[str]]:
        """The headings, then each row, as people read them."""
        rows = [[c.show(v) for c, v in zip(self.columns, row, strict=True)] for row in self.rows]
        return [[printable(column.name) for column in self.columns], *rows]

    def _csv(self) -> str:
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        cells = [[column.name for column in self.columns], *self.rows]
        writer.writerows([[printable(v) if isinstance(v, str) else v for v in row] for row in cells])
        return file.getvalue()


def say_drawn(pictures: int, folder: Path) -> None:
    """Say on standard error where the pictures are."""
    where = f"{pictures} picture{'' if pictures == 1 else 's'} in {printable(str(folder))}"
    print(where if pictures else "nothing to draw: there is no data for the pictures", file=sys.stderr)


def warn(text: str) -> None:
    """Print a warning on standard error."""
    print(f"warning: {printable(text)}", file=sys.stderr)


def warn_each(warnings: Iterable[str]) -> None:
    """Print warnings on standard error, each of them once."""
    for warning in dict.fromkeys(warnings):
        warn(warning)


def progress_bars(quiet: bool, *columns: "ProgressColumn") -> "Progress":
    """Progress bars on standard error, which disappear at the end. Each has a description, a bar and then `columns`.

    Nothing is shown if `quiet`, or if standard error is not a terminal that can move its cursor (TERM=dumb cannot).
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(file=sys.stderr)
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        *columns,
        console=console,
        disable=quiet or not console.is_interactive,
        transient=True,
    )


@contextmanager
def token_progress(description: str, total: int, quiet: bool) -> Iterator[Callable[..., bool]]:
    """Show one bar that counts tokens.

    Yields:
        advance(done, total=None): sets the tokens done so far, and the total if it is known only now; returns True.
    """
    from rich.progress import TextColumn, TimeElapsedColumn, TimeRemainingColumn

    count = TextColumn("{task.completed:,.0f}/{task.total:,.0f} tokens")
    with progress_bars(quiet, count, TimeElapsedColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task(description, total=total)

        def advance(done: int, total: int | None = None) -> bool:
            progress.update(task, completed=done, total=total)
            return True

        yield advance


@contextmanager
def stage_progress(quiet: bool) -> Iterator[tuple[Callable[[str, int, int | None], None], dict[str, float]]]:
    """Show a bar for each of several stages that count bytes.

    Yields:
        report(stage, done, total): sets the bytes of a stage that are done, and its total, if known; and a mapping from
        stages to the seconds from their first to their last report.
    """
    from rich.progress import DownloadColumn, TimeElapsedColumn, TimeRemainingColumn

    started: dict[str, tuple[float, TaskID]] = {}
    seconds: dict[str, float] = {}
    columns = DownloadColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with progress_bars(quiet, *columns) as progress:

        def report(stage: str, done: int, total: int | None) -> None:
            if stage not in started:
                started[stage] = time.monotonic(), progress.add_task(stage, total=total)
            start, task = started[stage]
            seconds[stage] = time.monotonic() - start
            progress.update(task, completed=done, total=total)

        yield report, seconds


@contextmanager
def status_line(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows what is being done, on one line of standard error, where `progress_bars` would be."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(file=sys.stderr)
    if quiet or not console.is_interactive:
        yield lambda text: None
        return
    with console.status("") as status:
        yield lambda text: status.update(escape(printable(text)))


class BestEffortStream:
    """A text stream that ignores its own write errors: hours of training must not end because the terminal has closed,
    or because nobody reads a log line any more.

    Args:
        stream: takes what is written, for as long as it can.
    """

    def __init__(self, stream: IO[str]):
        self.stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def prepare_streams() -> None:
    """Make the standard streams safe to use: failures to write to standard error are ignored, and characters outside
    the encoding of standard output are escaped.
    """
    sys.stderr = BestEffortStream(sys.stderr)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
