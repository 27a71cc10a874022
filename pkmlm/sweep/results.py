"""The results of a grid: mean and spread over seeds at each point, beside the paper's numbers and claims; and the
folder that keeps them: the runs in `cells/`, and what is made from these: `results.json`, a page (`README.md`), plots.
"""

import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import floor, log10
from pathlib import Path
from statistics import fmean, median
from typing import Any

from typing_extensions import TypedDict

from pkmlm import __version__
from pkmlm.console import Column, Table, number
from pkmlm.data.batches import mean_read
from pkmlm.environment import source_commit, source_sha256
from pkmlm.errors import UserError
from pkmlm.files import make_folder, read_json, write_json, write_text
from pkmlm.recipe.schema import recipe_sha256
from pkmlm.report.compare import Comparison, Group
from pkmlm.report.equal import Equal
from pkmlm.report.metrics import FLOORED, MEASURES
from pkmlm.report.tables import equal_table, with_spread
from pkmlm.runs.directory import RunDirectory
from pkmlm.runs.results import Timed
from pkmlm.sweep.cells import Cell, CellOutcome, Cells, Place, best, finished
from pkmlm.sweep.grid import Grid, Point, Tune
from pkmlm.sweep.verdicts import Verdict, rank_correlations, verdict

NAMES = ("memory", "layer", "kind", "part")  # what an entry of a usage report begins with
COSTS = ("dense", "memory", "operations", "bytes", "tokens", "seconds")  # shown beside every perplexity


@dataclass
class Results:
    """What is known of a grid so far.

    Attributes:
        costs: what `facts_of_cost` says of the recipe of each point and tuned value.
        outcomes: of the cells that have ended, by name.
        speeds: of the points' models, all timed in one call, perhaps an earlier one for which a point had another
            recipe.
        equals: where runs are compared at equal amounts of what the grid says.
        source: the `source_sha256` of the code that runs the sweep.
        note: a line below what holds; empty: none.
    """

    grid: Grid
    cells: Cells
    costs: Mapping[Place, dict[str, Any]]
    outcomes: dict[str, CellOutcome] = field(default_factory=dict)
    speeds: dict[Point, Timed] = field(default_factory=dict)
    equals: list[Equal] = field(default_factory=list)
    source: str = field(default_factory=source_sha256)
    note: str = ""

    @property
    def ended(self) -> int:
        """How many runs were measured or have diverged."""
        return sum(outcome.status in ("measured", "diverged") for outcome in self.outcomes.values())

    @property
    def failed(self) -> list[CellOutcome]:
        return [outcome for outcome in self.outcomes.values() if outcome.status == "failed"]

    def of_other_code(self) -> list[str]:
        """The names of the runs that were trained, in an earlier call, with other code than this sweep's."""
        sources = {each.cell.name: each.facts.get("trained_by", {}).get("source_sha256") for each in self.in_order()}
        return [name for name, source in sources.items() if source not in (None, self.source)]

    def add(self, outcome: CellOutcome) -> None:
        self.outcomes[outcome.cell.name] = outcome

    def add_finished(self, cells: Sequence[Cell], runs: Path) -> None:
        """Add the outcomes of those cells whose runs have ended."""
        for cell in cells:
            if outcome := finished(cell, runs):
                self.add(outcome)

    def in_order(self) -> list[CellOutcome]:
        """The outcomes in the order of the grid, whichever run ended first."""
        found = [outcome for point in self.grid.points() for outcome in self.tried(point)]
        return list({outcome.cell.name: outcome for outcome in found}.values())

    def tried(self, point: Point) -> list[CellOutcome]:
        """The outcomes of a point's cells, of all tuned values and seeds, chosen or not."""
        winner = self.winner(point)
        cells = [*self.cells.tuning(point), *(self.others(point, winner) if winner else [])]
        return [self.outcomes[cell.name] for cell in cells if cell.name in self.outcomes]

    def others(self, point: Point, winner: CellOutcome) -> list[Cell]:
        """The cells of a point that follow its winner, which is perhaps another point's run, too."""
        return self.cells.others(point, winner.cell.tuned)

    def winner(self, point: Point) -> CellOutcome | None:
        """The outcome of the first seed at the best tuned value of a point; None: not yet known."""
        tuning = self.cells.tuning(point)
        tried = [self.outcomes[cell.name] for cell in tuning if cell.name in self.outcomes]
        return best(tried) if len(tried) == len(tuning) else None

    def cost(self, point: Point) -> dict[str, Any]:
        """What a point's model costs at its best tuned value, or at the first until that is known."""
        winner = self.winner(point)
        return self.costs[point, winner.cell.tuned if winner else self.cells.values[0]]

    def chosen(self, point: Point) -> list[CellOutcome]:
        """The measured cells of a point that count: those at its best tuned value."""
        winner = self.winner(point)
        if winner is None:
            return []
        others = [self.outcomes.get(cell.name) for cell in self.others(point, winner)]
        return [one for one in (winner, *others) if one is not None and one.status == "measured"]

    def rounds(self, point: Point) -> list[float]:
        """Tokens per second of a point's model, one number per round; empty if it has not been timed."""
        speed, chosen = self.speeds.get(point), self.chosen(point)
        if not (speed and chosen and speed["recipe"] == recipe_sha256(chosen[0].cell.recipe)):
            return []
        return speed["tokens_per_second"]

    def by_seed(self, measure: str, point: Point) -> dict[int, float]:
        """The measurements of a point by seed; empty where there are none.

        Costs and speed (the median of its rounds) do not depend on the seed and are given for the first.
        """
        metric = MEASURES[measure]
        if metric.seeded:
            found = {outcome.cell.seed: metric.read(outcome.facts) for outcome in self.chosen(point)}
        else:
            rounds = self.rounds(point)
            speed = {"scoring_tokens_per_second": median(rounds) if rounds else None}
            found = {self.grid.seeds[0]: metric.read(self.cost(point) | speed)}
        return {seed: value for seed, value in found.items() if value is not None}

    def values(self, measure: str, point: Point) -> tuple[float, ...]:
        """The numbers of `by_seed`."""
        return tuple(self.by_seed(measure, point).values())

    def seeds_of(self, point: Point, measures: Sequence[str]) -> int:
        """How many seeds a point has measurements of: the least over those of `measures` that it has; if none of these
        depends on the seed, how many were trained.
        """
        seeded = [name for name in measures if MEASURES[name].seeded]
        counts = [len(self.by_seed(name, point)) for name in seeded] or [len(self.chosen(point))]
        return min(filter(None, counts), default=0)

    def groups(self, points: Sequence[Point] | None = None) -> list[Group]:
        """The runs that count, one group per point: of all, or of some."""
        found = {", ".join(point): chosen for point in points or self.grid.points() if (chosen := self.chosen(point))}
        return [Group(name, [outcome.facts for outcome in chosen]) for name, chosen in found.items()]

    def comparison(self, runs: Path) -> Comparison:
        """The runs that count, side by side.

        Args:
            runs: the folder of the run directories.
        """
        groups = self.groups()
        facts = {run["run"]: run for group in groups for run in group.runs}
        return Comparison({name: RunDirectory(runs / name) for name in facts}, list(facts.values()), groups, [])

    def by_budget(self) -> list[list[Point]]:
        """The points, apart for each value of `equal`."""
        if not self.grid.equal:
            return [self.grid.points()]
        return [[point for point in self.grid.points() if point[-1] == each] for each in self.grid.equal]

    def verdicts(self) -> list[Verdict]:
        of_points = [(self.by_seed, self.tokenizer, self.equal_at(points), points) for points in self.by_budget()]
        found = [verdict(self.grid, claim, *each) for claim in self.grid.claims for each in of_points]
        return found + [each for of in of_points for each in rank_correlations(self.grid, *of)]

    def equal_at(self, points: Sequence[Point]) -> str | None:
        """What the runs of these points take equally much of: without `equal`, tokens, if all of them read as many of
        one tokenizer.
        """
        if self.grid.equal:
            return points[0][-1]
        read = set()
        for outcome in (outcome for point in points for outcome in self.chosen(point)):
            recipe = outcome.cell.recipe
            read.add((outcome.facts["step"] * recipe.train.batch_tokens, recipe.data.pack))
        return "tokens" if len(read) == 1 and not self.several_tokenizers(points) else None

    def several_tokenizers(self, points: Sequence[Point]) -> bool:
        """Whether the runs of these points are known to have different tokenizers."""
        return len(set(map(self.tokenizer, points)) - {None}) > 1

    def tokenizer(self, point: Point) -> str | None:
        """The sha256 of the tokenizer of a point's runs; None if none was measured."""
        return next((outcome.facts.get("tokenizer") for outcome in self.chosen(point)), None)

    def as_json(self, name: str, scale: str | None) -> dict[str, Any]:
        """The content of results.json; "trained_by" of a cell is an index into the list of that name."""
        trainers: list[Any] = []
        for outcome in self.in_order():
            if outcome.facts.get("trained_by") not in (None, *trainers):
                trainers.append(outcome.facts["trained_by"])
        points = []
        for point in self.grid.points():
            measured = {measure: self.values(measure, point) for measure in self.grid.measure}
            points.append(
                {
                    "point": self.grid.place(point),
                    "tuned": next((outcome.cell.tuned for outcome in self.chosen(point)), None),
                    "measured": {
                        measure: {"mean": fmean(values), "values": list(values)} if values else None
                        for measure, values in measured.items()
                    },
                    "paper": {measure: self.grid.paper_value(measure, point) for measure in self.grid.paper},
                    "cost": self.cost(point),
                }
            )
        return {
            "grid": name,
            "title": self.grid.title,
            "scale": scale,
            "base": self.grid.base,
            "set": list(self.cells.extra),
            "seeds": list(self.grid.seeds),
            "trained_by": trainers,
            "published_by": {
                "versions": {"pkmlm": __version__, "python": platform.python_version()},
                "commit": source_commit(),
                "source_sha256": self.source,
            },
            "points": points,
            "verdicts": [asdict(each) for each in self.verdicts()],
            "cells": [cell_json(self.grid, outcome, trainers) for outcome in self.in_order()],
            "equal": {each.over: each.as_json() for each in self.equals},
            "speed": list(self.speeds.values()),
        }

    def tables(self) -> list[Table]:
        """The paper-style table, the tuned values, and the verdicts."""
        some = self.grid.trains and self.ended < len(self.cells)
        so_far = f": {self.ended} of {len(self.cells)} runs" if some else ""
        found = [self._points(self.grid.title + so_far, self.grid.measure)]
        costs = [name for name in COSTS if name not in self.grid.measure and (name != "tokens" or self.grid.equal)]
        if self.grid.trains and costs:
            found.append(self._points("What each takes", costs))
        if self.grid.tune and len(self.grid.tune.values) > 1:
            found.append(self._tuning(self.grid.tune))
        found += [equal_table(self.groups(), equal) for equal in self.equals]
        verdicts = self.verdicts()
        if verdicts:
            columns = [Column("Claim or measure"), number("holds")]
            if self.grid.trains:
                columns += [number("in every seed"), number("beyond seeds"), Column("at equal")]
            rows = [each.row()[: len(columns)] for each in verdicts]
            found.append(Table("What holds", columns, rows, note=self.note))
        elif self.note:
            found[0] = replace(found[0], note="\n".join(filter(None, [found[0].note, self.note])))
        return found

    def plan(self, seconds: Mapping[Point, float]) -> Table:
        """The table of a dry run: what each point costs, and how long its runs train.

        Args:
            seconds: that a step of each point's model takes on this machine; empty: not known.
        """
        grid, rows, shared, all_hours = self.grid, [], set(), 0.0
        for point in grid.points():
            cost, cell = self.cost(point), self.cells.first[point, self.cells.values[0]]
            first = {each.name: each for each in self.cells.tuning(point)}
            steps, runs = cell.recipe.train.steps, len(first) + len(grid.seeds) - 1
            sizes = [cost["dense"], cost["memory"], cost["operations"] / 1e6]
            all_steps = sum(each.recipe.train.steps for each in first.values()) + (runs - len(first)) * steps
            hours = seconds[point] * all_steps / 3600 if seconds else 0.0
            names = tuple(first)
            all_hours += hours if names not in shared else 0.0
            shared.add(names)
            rows.append([*point, *sizes, steps, steps * mean_read(cell.recipe) / 1e6, runs, hours])
        *_, all_operations, _, all_tokens, _, _ = zip(*rows, strict=True)
        columns = [Column(axis) for axis in grid.axes]
        columns += [number("dense"), number("in memory"), millions("M ops/token", all_operations)]
        title = f"{grid.title}: {len(self.cells) if grid.trains else 'no'} runs"
        if grid.trains:
            columns += [number("steps"), millions(MEASURES["tokens"].heading, all_tokens), number("runs")]
        if seconds:
            columns.append(number("hours", "{:,.2f}"))
            title += f", {all_hours:,.1f} hours of training here, one after the other"
        return Table(title, columns, [row[: len(columns)] for row in rows])

    def _points(self, title: str, measures: Sequence[str]) -> Table:
        """A row for each point: its measures, beside the paper's."""
        grid = self.grid
        columns = [Column(axis) for axis in grid.axes]
        if grid.tune:
            columns.append(number(grid.tune.key.rpartition(".")[2]))
        if grid.trains:
            columns.append(number("seeds"))
        for measure in measures:
            columns.append(number(MEASURES[measure].heading))
            if measure in grid.paper:
                columns.append(number("paper", MEASURES[measure].format))
        rows = []
        for point in grid.points():
            chosen, row = self.chosen(point), list[Any](point)
            if grid.tune:
                row.append(chosen[0].cell.tuned if chosen and self.cells.tunes(point) else None)
            if grid.trains:
                seeds, wanted = self.seeds_of(point, measures), len(grid.seeds)
                row.append(f"{seeds}/{wanted}" if 0 < seeds < wanted else seeds or None)
            first_cell = len(row)
            for measure in measures:
                row.append(with_spread(self.values(measure, point), MEASURES[measure].format))
                if measure in grid.paper:
                    row.append(grid.paper_value(measure, point))
            if row[first_cell] is None and not chosen:  # how its runs ended, for example "diverged"
                ended = {outcome.status for outcome in self.tried(point)}
                row[first_cell] = " and ".join(sorted(ended - {"measured", "stopped"})) or None
            rows.append(row)
        apart = self.several_tokenizers(grid.points())
        by_token = [MEASURES[measure].heading for measure in measures if MEASURES[measure].by_token]
        note = f"not comparable between points, whose tokenizers differ: {', '.join(by_token)}"
        return Table(title, columns, rows, note if apart and by_token else "")

    def _tuning(self, tune: Tune) -> Table:
        """The validation loss at each tuned value. If the best is the first or the last of the list, one beyond it may
        be better still.
        """
        columns = [Column(axis) for axis in self.grid.axes]
        columns += [number(value, MEASURES["valid_loss"].format) for value in tune.values]
        columns.append(Column("best at the edge"))
        rows = []
        for point in self.grid.points():
            row: list[Any] = list(point)
            for cell in self.cells.tuning(point):
                outcome = self.outcomes.get(cell.name)
                if outcome is None or outcome.status == "stopped":
                    row.append(None)
                else:
                    row.append(outcome.facts.get("valid_loss") if outcome.status == "measured" else outcome.status)
            winner = self.winner(point)
            at_edge = winner and self.cells.tunes(point) and winner.cell.tuned in (tune.values[0], tune.values[-1])
            rows.append([*row, "yes" if at_edge else None])
        return Table(f"Validation (nats per token) of seed {self.grid.seeds[0]} by {tune.key}", columns, rows)


def millions(name: str, values: Sequence[float]) -> Column:
    """A column of millions: one decimal, or as many as the least of them needs to show two digits."""
    places = 1 - floor(log10(min(values)))
    return number(name, f"{{:,.{max(1, places)}f}}")


def cell_json(grid: Grid, outcome: CellOutcome, trainers: Sequence[Any]) -> dict[str, Any]:
    """A cell in results.json."""
    cell, facts = outcome.cell, outcome.facts
    kept = ("valid_loss", "test_token_ppl", "test_word_ppl", "test_bits_per_byte", "step", "tokens", "seconds")
    return {
        "name": cell.name,
        "point": grid.place(cell.point),
        "seed": cell.seed,
        "tuned": cell.tuned,
        "overrides": list(cell.overrides),
        "status": outcome.status,
        "message": outcome.message,
        "trained_by": trainers.index(facts["trained_by"]) if "trained_by" in facts else None,
        **{key: facts.get(key) for key in kept},
        **{key: value for key, value in facts.items() if key.startswith("equal_") or key.endswith("_per_step")},
        "tasks": {name: task.get("acc") for name, task in (facts.get("tasks") or {}).items()},
        "usage": [
            {key: m[key] for key in NAMES if key in m} | {key: m["mass"][key] for key in FLOORED}
            for m in facts.get("usage") or []
        ],
    }


class SweepResults(TypedDict):
    """results.json; all models are timed in turn."""

    speed: list[Timed]
    grid: str
    scale: str | None
    set: list[str]
    cells: list[dict[str, Any]]


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

    def recall(self, results: Results) -> None:
        """Add the speeds that an earlier call measured to the results; it timed all models of a table together.

        Raises:
            UserError: the folder holds the results of another grid or of other overrides, or other files.
        """
        found, cells = self.read(), results.cells
        theirs, ours = found.get("set"), list(cells.extra)
        if theirs not in (None, ours):
            # With other overrides, the runs here would fail one by one, others would be trained, and a table of both
            # would replace theirs. It is allowed if every run is one of the grid's cells, or there is nothing to lose.
            held = {outcome.status for cell in cells.first.values() if (outcome := finished(cell, self.runs))}
            if "failed" in held or (found.get("cells") and not held):
                was, asked = (shlex.join(each) or "nothing" for each in (theirs, ours))
                hint = "repeat its -s, or name another folder with -o"
                raise UserError(f"-s: {self.path} holds the sweep with {was} (expected {asked})", hint)
        for speed in found.get("speed") or []:
            point = tuple(speed["point"].values())
            if point in results.grid.points():
                results.speeds[point] = speed

    def read(self) -> dict[str, Any]:
        """The folder's results.json, which must be this grid's; empty if there is none yet.

        Raises:
            UserError: it is damaged (exit code 1) or another grid's, or the folder holds other files.
        """
        file = self.path / "results.json"
        if not file.exists():
            if self.path.exists() and not self.path.is_dir():
                raise UserError(f"-o {self.path} is a file (expected a folder, or nothing)")
            if self.path.is_dir() and any(self.path.iterdir()) and not self.runs.exists():
                raise UserError(f"{self.path} holds no sweep, but other files", "name a new folder with -o")
            return {}
        try:
            found = read_json(file, "the sweep's results", exit_code=1, schema=SweepResults)
        except UserError as error:
            raise UserError(error.message, "delete it: it is made from the runs", error.exit_code) from None
        if (found["grid"], found.get("scale")) != (self.grid, self.scale):
            held, asked = f"{found['grid']} at scale {found.get('scale')}", f"{self.grid} at scale {self.scale}"
            hint = "choose its --scale, or name another folder with -o"
            raise UserError(f"{self.path} holds the sweep of {held} (expected {asked})", hint)
        return found

    def begin(self, results: Results) -> None:
        """Write the overrides of the runs before the first has ended: `--table` needs them."""
        if not self.read().get("cells"):
            write_json(self.path / "results.json", results.as_json(self.grid, self.scale))

    def collect(self, results: Results) -> None:
        """Add the runs in the folder to the results, if the grid needs any.

        Raises:
            UserError: none of this grid has ended; an empty table must not replace another.
        """
        if not results.grid.trains:
            return
        for point in results.grid.points():
            results.add_finished(results.cells.tuning(point), self.runs)
            if winner := results.winner(point):
                results.add_finished(results.others(point, winner), self.runs)
        if not results.ended:
            failed = [f"{outcome.cell.name}: {outcome.message}" for outcome in results.outcomes.values()]
            hint = failed[0] if failed else "wait for one to end, or leave --table out to train them"
            raise UserError(f"{self.path} holds no run of this grid that has ended", hint)

    def write(self, results: Results, drawn: Sequence[Path] = ()) -> tuple[dict[str, Any], list[Table]]:
        """Write results.json, and a page of the tables and the plots `drawn`; returns the record and the tables."""
        tables, record = results.tables(), results.as_json(self.grid, self.scale)
        setting = f"Grid `{self.grid}`, base `{record['base']}`, seeds {', '.join(map(str, record['seeds']))}"
        setting += f", scale `{self.scale}`." if self.scale else "."
        if trainers := record["trained_by"]:
            torch = sorted({(facts.get("versions") or {}).get("torch", "unknown") for facts in trainers})
            commits = sorted({(facts.get("commit") or "unknown")[:7] for facts in trainers})
            setting += f" Trained with torch {', '.join(torch)}, commit {', '.join(commits)}."
        shown = {path.stem: path for path in sorted(drawn, key=lambda path: path.suffix)}  # not a .pdf
        plots = [f"{'' if path.suffix == '.pdf' else '!'}[{stem}]({path.name})\n" for stem, path in shown.items()]
        page = [f"# {results.grid.title}\n", f"{setting}\n", *plots, *(table.render("md") for table in tables)]
        make_folder(self.path)
        write_json(self.path / "results.json", record)
        write_text(self.path / "README.md", "\n".join(page))
        return record, tables
