"""How every report ends: its files are written, its result is printed, and its warnings come last."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import click

from pkmlm.cli.options import PATH, Command, given, plot_options
from pkmlm.cli.outputs import refuse_read_only
from pkmlm.console import Table, say_drawn, warn_each
from pkmlm.errors import UserError

if TYPE_CHECKING:
    from pkmlm.report.plots import Look

Form = Literal["table", "md", "latex", "csv", "json"]
NO_CSV: tuple[Form, ...] = ("table", "md", "latex", "json")  # of several tables, which no CSV file can hold
DRAW = "Also write plots into this folder."
LINE_STARTS = {"md": "- ", "latex": "% "}  # of lines between tables


class Output(NamedTuple):
    """Where and in which form a report is shown, as its options say."""

    shown_as: Form
    plots: str | None = None
    plot_format: tuple[str, ...] = ()
    plot_width: float | None = None

    def refuse_plots(self, force: bool) -> None:
        """Check, before any work, that pictures can be written into the folder that `--plots` names.

        Raises:
            UserError: it is a file; it is not empty and `force` was not given; an option for pictures is given without
                `--plots`; (exit code 1) it is not writable.
        """
        if self.plots is None:
            context = click.get_current_context()
            for name in ("plot_format", "plot_width", "plot_log"):
                if given(context, name):
                    what = f"--{name.replace('_', '-')} requires --plots"
                    raise UserError(what, "give a folder for pictures: --plots DIR")
            return
        folder, shown = Path(self.plots), f"--plots {self.plots}"
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{shown} is a file (expected a folder)")
        refuse_read_only(shown, next(each for each in (folder, *folder.absolute().parents) if each.exists()))
        if folder.exists() and any(folder.iterdir()) and not force:
            raise UserError(f"{shown} is not empty", "choose another folder, or add --force to overwrite")

    def show(
        self,
        record: Any,
        parts: Iterable[Table | str],
        *,
        csv: Table | None = None,
        draw: "Callable[[Path, Look], Sequence[Path]] | None" = None,
        write: Callable[[], None] | None = None,
        warnings: Iterable[str] = (),
    ) -> None:
        """Write a report's files, print its result, and warn. Files come first, because the output may have been closed
        (`| head`); if one cannot be written (the disk is full), the result is printed all the same.

        Args:
            record: the result as JSON.
            parts: the result for people: tables, and lines between them. Read after the files are written.
            csv: the result as one table, for commands with `--format csv`.
            draw: writes pictures into a folder and returns their files; called with `--plots` only.
            write: writes all other files.
            warnings: read last, so that `write` may add to them.

        Raises:
            UserError: (exit code 1) a file cannot be written.
        """
        with ExitStack() as ending:  # both are done whatever fails before them, the second one first
            ending.callback(lambda: warn_each(warnings))
            ending.callback(lambda: click.echo(self._text(record, parts, csv), nl=False))
            if draw is not None and self.plots is not None:
                from pkmlm.report.plots import Look

                folder = Path(self.plots)
                say_drawn(len(draw(folder, Look(self.plot_format, self.plot_width))), folder)
            if write is not None:
                write()

    def _text(self, record: Any, parts: Iterable[Table | str], csv: Table | None) -> str:
        if self.shown_as == "json":
            return json.dumps(record, indent=2, allow_nan=False) + "\n"
        start = LINE_STARTS.get(self.shown_as, "")
        return "\n".join(
            part.render(self.shown_as) if isinstance(part, Table) else re.sub(r"(?m)^(?=.)", start, part) + "\n"
            for part in ([csv] if self.shown_as == "csv" and csv else parts)
        )


def report_options(formats: Sequence[Form] = get_args(Form), plots: str = "") -> Callable[[Command], Command]:
    """Add the options that say how a report is shown. The command receives them as one argument, `out`.

    Args:
        formats: choices of `--format`; none: only `--json`.
        plots: help of `--plots`; empty: the command draws nothing.
    """

    def add(command: Command) -> Command:
        if plots:
            command = click.option("--plots", type=PATH, metavar="DIR", help=plots)(plot_options(command))

        @wraps(command)
        def showing(**options: Any) -> Any:
            how = {name: options.pop(name) for name in Output._fields if name in options}
            return command(out=Output(**how), **options)

        in_json = click.option(
            "--json", "shown_as", flag_value="json", default="table", show_default=False, help="Print JSON."
        )
        in_any = click.option(
            "--format",
            "shown_as",
            type=click.Choice(formats),
            default="table",
            help="Tables for a terminal, a page or a paper; in other formats, numbers are unrounded.",
        )
        return in_any(in_json(showing)) if formats else in_json(showing)

    return add
