"""One table, four ways to write it: for a terminal, for a README, for a spreadsheet, for a program."""

import csv
import io
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal, get_args

from pkmlm.errors import printable

if TYPE_CHECKING:
    from rich.console import Console

Format = Literal["table", "md", "csv", "json"]
FORMATS: tuple[Format, ...] = get_args(Format)
MISSING = "-"
HUGE, SCIENTIFIC = 1e9, "{:.2e}"  # from where on the digits of a float say nothing: counts are integers
SHARE, NATS = "{:.1%}", "{:.4f}"  # formats of numbers
WORD = 16  # characters of a text column that are kept on one line, if they are one word
BREAK = "\x1f"  # white space, but of no width; no cell has it, for it is not printable


@dataclass(frozen=True)
class Column:
    """A heading and how the values below it are shown.

    Args:
        name: the heading, with the unit where there is one ("time (s)"); the key in CSV and JSON.
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
        return (SCIENTIFIC if isinstance(value, float) and abs(value) >= HUGE else self.format).format(value)


def breakable(text: str) -> str:
    """A cell in which long words, names of runs mostly, break after their marks rather than in a number."""
    return re.sub(rf"\S{{{WORD + 1},}}", lambda word: re.sub(r"((?<!\de)[-_/@])", rf"\1{BREAK}", word[0]), text)


def wrapped(console: "Console", cell: str, width: int, align: Literal["left", "right"]) -> list[str]:
    """The lines of a cell, each of that width."""
    from rich.text import Text

    lines = Text(breakable(cell)).wrap(console, width, justify=align, overflow="fold")
    return [line.plain.replace(BREAK, "") for line in lines]


def number(name: str, format: str = "{:,}") -> Column:
    """A column of numbers, 1,234 as they come."""
    return Column(name, "right", format)


@dataclass(frozen=True)
class Table:
    """Rows of values (numbers unrounded, None where there is none) below columns."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]

    def render(self, format: Format = "table") -> str:
        """The table as text that ends in a newline.

        Args:
            format: "table" for a terminal, as wide as it (80 characters where there is none): long text wraps, a number
                is never cut, so that a table of many numbers may be wider; "md" for markdown; "csv" and "json" (a list
                of objects) keep full precision.
        """
        return {"table": self._text, "md": self._markdown, "csv": self._csv, "json": self._json}[format]()

    def _text(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO())  # as wide as the terminal, or 80
        widths, apart = self._widths(console.width)

        def lines(cells: Iterable[Sequence[str]]) -> list[str]:
            rows = (zip(parts, widths, strict=True) for parts in zip_longest(*cells))
            return [(" " * apart).join(part or " " * width for part, width in row).rstrip() for row in rows]

        shown = [zip(row, widths, self.columns, strict=True) for row in self._shown()]
        head, *rows = [[wrapped(console, cell, width, column.align) for cell, width, column in row] for row in shown]
        body = lines(cell[::-1] for cell in head)[::-1]  # headings stand on the rule
        body.append("-" * (sum(widths) + apart * (len(widths) - 1)))
        body += [line for row in rows for line in lines(row)]
        return "\n".join([*([printable(self.title), ""] if self.title else []), *body, ""])

    def _widths(self, width: int) -> tuple[list[int], int]:
        """How wide each column is in a terminal of this width, and how far apart they stand: two characters, or one
        where they would not fit. What is left goes to what lacks the least: first of the cells, then of the headings.
        """
        from rich.cells import cell_len

        shown, found = self._shown(), []
        for column, cells in zip(self.columns, zip(*shown, strict=True), strict=True):
            longest = max((cell_len(word) for cell in cells for word in cell.split()), default=1)
            found.append(longest if column.align == "right" else min(longest, WORD))
        gaps = len(found) - 1
        apart = 2 if sum(found) + 2 * gaps <= width else 1
        left = width - sum(found) - apart * gaps
        for rows in (shown[1:], shown):
            wanted = [max((cell_len(row[index]) for row in rows), default=0) for index in range(len(found))]
            while left > 0 and (lacking := [index for index, wide in enumerate(found) if wide < wanted[index]]):
                found[min(lacking, key=lambda index: wanted[index] - found[index])] += 1
                left -= 1
        return found, apart

    def _markdown(self) -> str:
        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(re.sub(r"([\\|`*<\[])", r"\\\1", cell) for cell in cells) + " |\n"

        rule = "|" + "|".join("---:" if column.align == "right" else "---" for column in self.columns) + "|\n"
        head, *rows = map(line, self._shown())
        title = f"**{printable(self.title)}**\n\n" if self.title else ""
        return title + head + rule + "".join(rows)

    def _shown(self) -> list[list[str]]:
        """The headings, and each row, as people read them."""
        rows = [[c.show(v) for c, v in zip(self.columns, row, strict=True)] for row in self.rows]
        return [[printable(column.name) for column in self.columns], *rows]

    def _csv(self) -> str:
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        cells = [[column.name for column in self.columns], *self.rows]
        writer.writerows([[printable(v) if isinstance(v, str) else v for v in row] for row in cells])
        return file.getvalue()

    def _json(self) -> str:
        names = [column.name for column in self.columns]
        rows = [dict(zip(names, row, strict=True)) for row in self.rows]
        return json.dumps(rows, indent=2, allow_nan=False) + "\n"
