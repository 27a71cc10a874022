"""One table, four ways to write it: for a terminal, for a README, for a spreadsheet, for a program."""

import csv
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pkmlm.errors import printable

Format = Literal["table", "md", "csv", "json"]
FORMATS: tuple[Format, ...] = get_args(Format)
MISSING = "-"
HUGE, SCIENTIFIC = 1e9, "{:.2e}"  # from where on the digits of a float say nothing: counts are integers
SHARE, NATS = "{:.1%}", "{:.4f}"  # formats of numbers
WORD = 16  # characters of a text column that are kept on one line, if they are one word
BREAK = "\x1f"  # white space, but of no width; no cell has it, for it is not printable

# Only ASCII, so that a table can be printed in any locale: a rule below the header and nothing else.
RULE = "    \n    \n -- \n    \n    \n    \n    \n    \n"


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
        from rich import box, table
        from rich.cells import cell_len
        from rich.console import Console
        from rich.text import Text

        shown = self._shown()
        style = box.Box(RULE, ascii=True)
        grid = table.Table(box=style, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        least = -2  # columns stand two apart
        for index, column in enumerate(self.columns):
            words = [word for row in shown for word in row[index].split()]
            longest = max((cell_len(word) for word in words), default=1)
            narrowest = longest if column.align == "right" else min(longest, WORD)
            grid.add_column(Text(shown[0][index]), justify=column.align, overflow="fold", min_width=narrowest)
            least += narrowest + 2
        for row in shown[1:]:
            grid.add_row(*(Text(breakable(cell)) for cell in row))
        console = Console(file=io.StringIO(), width=10_000, color_system=None)  # a narrow console would drop columns
        goal = max(Console(file=io.StringIO()).width, least)
        for limit in range(goal, goal - len(self.columns) - 1, -1):  # rich may exceed the width by a character a column
            with console.capture() as captured:
                console.print(grid, width=limit)
            lines = [line.rstrip() for line in captured.get().replace(BREAK, "").splitlines()]
            if max(map(cell_len, lines)) <= goal:
                break
        body = "\n".join(lines)
        return f"{printable(self.title)}\n\n{body}\n" if self.title else f"{body}\n"

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
