"""A sweep's folder: the runs in `cells/`, and `results.json`, `table.md` and plots, which are made from them."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import NotRequired, TypedDict

from pkmlm.console import Table
from pkmlm.errors import UserError
from pkmlm.runs.files import make_folder, read_json, write_json, write_text
from pkmlm.runs.results import Number
from pkmlm.sweep.cells import finished
from pkmlm.sweep.results import Results, Speed


class Timed(TypedDict):
    """How fast the model of a point scores text."""

    point: dict[str, str]
    recipe: NotRequired[str | None]
    timed_on: NotRequired[dict[str, str] | None]
    tokens_per_second: list[Number]


class SweepResults(TypedDict):
    """results.json."""

    grid: str
    scale: NotRequired[str | None]
    set: NotRequired[list[str] | None]
    cells: NotRequired[list[dict[str, Any]] | None]
    speed: NotRequired[list[Timed] | None]


@dataclass(frozen=True)
class SweepFolder:
    """The folder of one grid at one scale.

    Attributes:
        grid: the name of the grid's file, without its ending.
        scale: of the grid; None: it has none.
    """

    path: Path
    grid: str
    scale: str | None

    @property
    def runs(self) -> Path:
        """The folder of the cells' run directories."""
        return self.path / "cells"

    def settings(self) -> tuple[str, ...]:
        """The `-s` overrides with which the results in the folder were made.

        Raises:
            UserError: the folder holds another grid's results, or other files.
        """
        return tuple(self._found().get("set") or ())

    def recall(self, results: Results) -> None:
        """Add the speeds that an earlier call measured to the results: all models of a table are timed together.

        Raises:
            UserError: the folder holds the results of another grid or of other overrides, or other files.
        """
        points, found, cells = set(results.grid.points()), self._found(), results.cells
        theirs, ours = found.get("set"), list(cells.extra)
        if theirs not in (None, ours):
            # With other overrides the runs here would fail one by one, others would be trained, and a table of both
            # would replace theirs; unless every run is one of the grid's cells, or there is nothing to lose.
            held = {outcome.status for cell in cells.first.values() if (outcome := finished(cell, self.runs))}
            if "failed" in held or (found.get("cells") and not held):
                was, asked = (
                    shlex.join(w for text in each for w in ("-s", text)) or "no -s" for each in (theirs, ours)
                )
                hint = "repeat its -s, or name another folder with -o"
                raise UserError(f"{self.path} holds the sweep with {was} (expected {asked})", hint)
        for speed in found.get("speed") or []:
            point = tuple(speed["point"].values())
            if point in points:
                results.speeds[point] = Speed(speed.get("recipe"), speed["tokens_per_second"], speed.get("timed_on"))

    def _found(self) -> dict[str, Any]:
        """The folder's results.json, which is this grid's; empty where there is none yet."""
        file = self.path / "results.json"
        if not file.exists():
            if self.path.exists() and not self.path.is_dir():
                raise UserError(f"-o {self.path} is a file (expected a folder, or nothing)")
            if self.path.is_dir() and any(self.path.iterdir()) and not self.runs.exists():
                raise UserError(f"{self.path} holds no sweep, but other files", "name a new folder with -o")
            return {}
        hint = "delete it: it is made from the runs"
        found: dict[str, Any] = read_json(file, "the sweep's results", hint, exit_code=1, schema=SweepResults)
        if (found["grid"], found.get("scale")) != (self.grid, self.scale):
            held, asked = (
                " at scale ".join(filter(None, names))
                for names in ((found["grid"], found.get("scale")), (self.grid, self.scale))
            )
            hint = "choose its --scale, or name another folder with -o"
            raise UserError(f"{self.path} holds the sweep of {held} (expected {asked})", hint)
        return found

    def begin(self, results: Results) -> None:
        """Write the overrides of the runs before the first has ended: `--table` needs the same."""
        if not self._found().get("cells"):
            write_json(self.path / "results.json", results.as_json(self.grid, self.scale))

    def collect(self, results: Results) -> None:
        """Add the runs in the folder to the results, if the grid needs any.

        Raises:
            UserError: none of this grid has ended; an empty table must not replace another.
        """
        if not results.grid.trains:
            return
        if not self.runs.is_dir():
            message = f"{self.path} holds no runs of a sweep (expected {self.runs})"
            raise UserError(message, "leave --table out to train")
        for cell in results.cells.first.values():
            if outcome := finished(cell, self.runs):
                results.add(outcome)
        for point in results.grid.points():
            for chosen in results.chosen(point)[:1]:
                for cell in results.cells.others(chosen.cell):
                    if outcome := finished(cell, self.runs):
                        results.add(outcome)
        if not results.ended:
            message = f"{self.path} holds no run of this grid that has ended"
            failed = [f"{outcome.cell.name}: {outcome.message}" for outcome in results.outcomes.values()]
            raise UserError(message, failed[0] if failed else "wait for one, or leave --table out to train them")

    def write(self, results: Results) -> list[Table]:
        """Write results.json and table.md; returns the tables."""
        tables = results.tables()
        make_folder(self.path)
        write_json(self.path / "results.json", results.as_json(self.grid, self.scale))
        write_text(self.path / "table.md", "\n".join(table.render("md") for table in tables))
        return tables
