"""The cells of a grid: their recipes, and what is known of their runs."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pkmlm.data.corpus import Corpus, holds_tokens
from pkmlm.errors import UserError
from pkmlm.files import open_file
from pkmlm.recipe.load import read_tree, recipe_of
from pkmlm.recipe.schema import Recipe, differences
from pkmlm.recipe.warnings import warnings
from pkmlm.report.compare import Facts, facts_of
from pkmlm.report.metrics import MEASURES, TASKS, mean
from pkmlm.runs.directory import RunDirectory
from pkmlm.runs.record import read_progress
from pkmlm.sweep.grid import Grid, Point

Place = tuple[Point, str | None]  # a point and a value of the tuned key, None where nothing is tuned
WRONG_USAGE = 2  # exit code of a command
# Keys of run.json.
PROVENANCE = ("versions", "commit", "source_sha256", "device", "cpu", "precision", "ranks", "earlier")


@dataclass(frozen=True)
class Cell:
    """One run of a grid.

    Attributes:
        point: where in the grid.
        seed: of weights, data order and dropout.
        tuned: the value of the tuned key; None where the grid tunes nothing.
        overrides: what turns the grid's base recipe into this cell's, `key=value` each.
        recipe: that recipe.
        named: the point by which its run is named: of a grid with `equal`, maybe another amount, at which it takes as
            many steps.
    """

    point: Point
    seed: int
    tuned: str | None
    overrides: tuple[str, ...]
    recipe: Recipe
    named: Point

    @property
    def name(self) -> str:
        """The name of its run directory."""
        parts = [*self.named, *([] if self.tuned is None else [self.tuned]), f"seed-{self.seed}"]
        return "_".join("".join(c if c.isalnum() or c in "-.+" else "-" for c in part) for part in parts)


class Cells:
    """All cells of a grid.

    Args:
        base: the base recipe's file.
        extra: overrides of the command line, for all cells.
        relative: by point and tuned value, how many steps stand for one of the recipe; empty: as the recipe says.

    Raises:
        UserError: a cell's recipe is invalid (the message says which cell's), two cells have the same name, or `extra`
            has a key in which cells differ.
    """

    def __init__(
        self,
        grid: Grid,
        base: Path,
        extra: Sequence[str] = (),
        relative: Mapping[Place, float] | None = None,
    ):
        self.grid, self.base, self.extra, self.tree = grid, base, extra, read_tree(base)
        self.relative = relative or {}
        for key in (text.partition("=")[0].strip() for text in extra):
            for varied, cause in grid.varied():
                if f"{varied}.".startswith(f"{key}."):  # it, or a section that holds it
                    message = f"-s {key}: the grid sets {varied} by {cause} (expected a key that all cells share)"
                    raise UserError(message, "change the grid's file")
        self.values = grid.tune.values if grid.tune else (None,)
        seed = grid.seeds[0]
        places = [(point, value) for point in grid.points() for value in self.values]
        self.first: dict[Place, Cell] = {}
        for point, value in places:
            cell = self._cell(point, seed, value)
            # A point without the tuned key has the same recipe at each value, and one run.
            alike = (self.first[point, other] for other in self.values if (point, other) in self.first)
            self.first[point, value] = next((other for other in alike if other.recipe == cell.recipe), cell)
        for other in grid.seeds[1:]:  # refuses an invalid seed now
            self._cell(grid.points()[0], other, self.values[0])
        distinct: dict[str, Cell] = {}
        for cell in self.first.values():
            twin = distinct.setdefault(cell.name, cell)
            if (twin.named, twin.tuned) != (cell.named, cell.tuned):
                message = f"two cells of the grid have the name {cell.name}"
                raise UserError(message, "give the axes' values distinct names")

    def _cell(self, point: Point, seed: int, tuned: str | None) -> Cell:
        tuning = [] if self.grid.tune is None or tuned is None else self.grid.tune.overrides(tuned)
        overrides = [*self.grid.overrides(point, [*tuning, *self.extra]), f"train.seed={seed}"]
        named = point
        try:
            recipe = recipe_of(self.tree, overrides)
            if self.grid.equal:
                steps, named = self._at_its_amount(point, tuned, recipe)
                if steps != recipe.train.steps:
                    overrides.insert(-1, f"train.steps={steps}")
                    recipe = recipe_of(self.tree, overrides)
            folders = recipe.data.folders
            if recipe.train.epochs is not None and folders and all(map(holds_tokens, folders)):
                corpus = Corpus(recipe.data.folders, "train")
                recipe = recipe.with_epochs(corpus.tokens, corpus.documents)
        except UserError as error:
            where = ", ".join(f"{axis} {name}" for axis, name in self.grid.place(point).items())
            raise UserError(f"{where}: {error.message}", error.hint, error.exit_code) from None
        return Cell(point, seed, tuned, tuple(overrides), recipe, named)

    def _at_its_amount(self, point: Point, tuned: str | None, recipe: Recipe) -> tuple[int, Point]:
        """How many steps a point of a grid with `equal` trains for, and what its run is named by: one run stands for
        all amounts at which it takes as many steps.
        """
        if recipe.train.epochs is not None:
            raise UserError("train.epochs: found with the grid's equal (expected train.steps, which it scales)")
        own, asked = self.grid.own(point), recipe.train.steps
        factors = {str(each): self.relative.get(((*own, each), tuned), 1.0) for each in self.grid.equal}
        steps = {each: max(1, round(asked * factor)) for each, factor in factors.items()}
        mine = steps[point[-1]]
        return mine, own if mine == asked else (*own, next(each for each in steps if steps[each] == mine))

    def refuse_missing_data(self) -> None:
        """Refuse tokens without a split that the grid needs: valid, to choose a value, or valid or test, to measure.

        Raises:
            UserError: a split is missing, or a recipe has no data.dir.
        """
        tune = self.grid.tune
        needed = {"valid": f"by which the grid chooses {tune.key}"} if tune and len(tune.values) > 1 else {}
        for name in self.grid.measure:
            why = f"on which the grid measures {name}"
            if name.startswith("valid_"):
                needed.setdefault("valid", why)
            elif MEASURES[name].source in ("eval", "usage", "speed"):
                needed.setdefault("test", why)
        for folders in {cell.recipe.data.folders for cell in self.first.values()}:
            if not folders:
                raise UserError("data.dir is not set", "add -s data.dir=DIR, a folder that `pkmlm tokenize` wrote")
            corpus = Corpus(folders, "train")
            for split, why in needed.items():
                if split not in corpus.splits:
                    raise UserError(f"{corpus.name} has no {split} split, {why}", f"tokenize it with --{split} FILE")

    def warnings(self) -> list[str]:
        """The warnings of all cells' recipes, a line each, with the cells that they concern."""
        found: dict[str, list[str]] = {}
        for cell in self.first.values():
            counted = cell.recipe.train.epochs is None or all(map(holds_tokens, cell.recipe.data.folders))
            for text in warnings(cell.recipe, counted=counted):
                found.setdefault(text, []).append(cell.name)
        return [f"{', '.join(names)}: {text}" for text, names in found.items()]

    def tuning(self, point: Point) -> list[Cell]:
        """The cells of a point's first seed, one for each value of the tuned key: the same, if the point lacks it."""
        return [self.first[point, value] for value in self.values]

    def tunes(self, point: Point) -> bool:
        """Whether the tuned key is in this point's recipe, so that its values are told apart; one alone is taken so."""
        return len(self.values) == 1 or len({cell.name for cell in self.tuning(point)}) > 1

    def others(self, point: Point, tuned: str | None) -> list[Cell]:
        """The cells of a point's other seeds at a tuned value, whatever happened to the base's file since."""
        first = self.first[point, tuned]
        return [
            replace(
                first,
                seed=seed,
                overrides=(*first.overrides[:-1], f"train.seed={seed}"),
                recipe=replace(first.recipe, train=replace(first.recipe.train, seed=seed)),
            )
            for seed in self.grid.seeds[1:]
        ]

    def __len__(self) -> int:
        """How many runs there are: points may share theirs."""
        first = {cell.name for cell in self.first.values()}
        apart = {tuple(cell.name for cell in self.tuning(point)) for point in self.grid.points()}
        return len(first) + len(apart) * (len(self.grid.seeds) - 1)


@dataclass(frozen=True)
class CellOutcome:
    """How a cell ended.

    Attributes:
        status: "measured", "diverged", "failed" or "stopped".
        facts: of the run, where it was measured; see `facts_at_end`.
        message: the last line of a failed command, or why training ended early.
        exit_code: of a failure: 2 for wrong usage, else 1.
    """

    cell: Cell
    status: str
    facts: Facts
    message: str = ""
    exit_code: int = 1

    @property
    def loss(self) -> float:
        """The last validation loss, by which tuned values are chosen; without validation, infinite."""
        loss = self.facts.get("valid_loss")
        return loss if isinstance(loss, float) else float("inf")


def best(outcomes: Sequence[CellOutcome]) -> CellOutcome | None:
    """The outcome with the lowest validation loss; None if none was measured, or if one was stopped or failed and will
    run again. A single outcome, where nothing is chosen, needs no validation and may have diverged.

    Raises:
        UserError: one of several was measured, but its validation loss is unknown.
    """
    if any(outcome.status in ("stopped", "failed") for outcome in outcomes):
        return None
    if len(outcomes) == 1:
        return outcomes[0]
    measured = [outcome for outcome in outcomes if outcome.status == "measured"]
    unknown = [outcome.cell.name for outcome in measured if outcome.loss == float("inf")]
    if len(measured) > 1 and unknown:
        message = f"{unknown[0]} has no validation loss, so that no value can be chosen"
        raise UserError(message, "delete its folder to train it again")
    return min(measured, key=lambda outcome: outcome.loss, default=None)


def facts_at_end(cell: Cell, run: RunDirectory) -> Facts:
    """The facts of a cell's run at its last step: those of `facts_of`; "trained_by", its provenance in run.json; and
    "average_acc", see `suite_accuracy`.

    What was measured at another step is left out, and so are few-shot tasks; validation is the last, not the best.
    """
    metrics, last, recorded = list(run.metrics()), run.done(), run.facts()
    facts = facts_of(cell.name, run, metrics, run.evaluations())
    facts["trained_by"] = {key: recorded[key] for key in PROVENANCE if key in recorded}
    valid = [event for event in metrics if event["event"] == "valid"][-1:]
    for key in ("step", "loss", "token_ppl", "bits_per_byte"):
        facts[f"valid_{key}"] = valid[0].get(key) if valid else None
    if facts["test_step"] != last:
        facts |= {key: None for key in facts if key.startswith("test_")}
    if facts["usage_step"] != last:
        facts |= {"usage_step": None, "usage": []}
    if facts["tasks_step"] != last:
        facts |= {"tasks_step": None, "tasks": {}}
    facts["tasks"] = {name: task for name, task in facts["tasks"].items() if not task.get("num_fewshot")}
    return facts | {"average_acc": suite_accuracy(facts["tasks"])}


def suite_accuracy(tasks: Facts) -> float | None:
    """The mean over the paper's tasks; None if one was not scored. A run's other tasks do not count."""
    found = [tasks.get(name, {}).get("acc") for name in TASKS]
    return None if None in found else mean(found)


def finished(cell: Cell, folder: Path) -> CellOutcome | None:
    """The outcome of a cell that has run before; None if it has not ended; "failed" if its files cannot be read, or are
    those of another recipe.
    """
    run = RunDirectory(folder / cell.name)
    try:
        if not run.recipe_file.exists() and not run.steps():
            return None
        recipe = run.recipe()
        asked = replace(cell.recipe, name=recipe.name)  # which changes no number
        if asked.train.epochs == recipe.train.epochs is not None:  # the steps of its tokens, which may be gone
            asked = replace(asked, train=replace(asked.train, steps=recipe.train.steps))
        if recipe != asked and not has_moved_tokens(run, recipe, asked):
            # Resuming it could take it for complete despite another eval.tokens, or continue at learning rates that a
            # run of these steps would not have had. Without a checkpoint, it is trained from the start.
            pairs = differences(recipe, asked).items()
            found = ", ".join(f"{key} {had} (expected {wanted})" for key, (had, wanted) in pairs)
            message = f"its run has {found}: set it back with -s, or name another folder with -o"
            return CellOutcome(cell, "failed", {}, message, WRONG_USAGE) if run.steps() else None
        if run.facts().get("status") == "diverged":
            return CellOutcome(cell, "diverged", {}, "as its run.json says; delete its folder to train it again")
        step = run.done()
        if step is None:
            return None
        message = "" if step >= recipe.train.steps else f"eval.patience ended it at step {step}"
        return CellOutcome(cell, "measured", facts_at_end(cell, run), message)
    except UserError as error:
        return CellOutcome(cell, "failed", {}, error.message, error.exit_code)


def has_moved_tokens(run: RunDirectory, before: Recipe, now: Recipe) -> bool:
    """Whether two recipes differ only in the folder of the same tokens, or of tokens that are gone from both."""
    if now.data.dir is None or replace(before, data=now.data) != now:
        return False
    if not any(map(holds_tokens, (*before.data.folders, *now.data.folders))):
        return True
    latest, train = run.of_latest(read_progress), Corpus(now.data.dir, "train")
    trained = latest.data if latest else {}
    return (trained.get("tokenizer"), trained.get("train")) == (train.tokenizer_sha256, train.sha256)


def steps_taken(cell: Cell, folder: Path) -> int:
    """How many steps a running cell has logged, from the end of its log; 0 if the log does not say."""
    try:
        with open_file(RunDirectory(folder / cell.name).metrics_file) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 16)))  # a line has an entry per memory
            last = file.read().splitlines()[-1]
        return int(json.loads(last)["step"])
    except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError):
        return 0
