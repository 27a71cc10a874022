"""The runs of a grid: their recipes, and which of them have to be done before others."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pkmlm.analysis.compare import first_of
from pkmlm.data.index import read_index
from pkmlm.errors import UserError
from pkmlm.recipe.check import warnings
from pkmlm.recipe.dump import dump_recipe
from pkmlm.recipe.load import load_recipe
from pkmlm.recipe.nodes import shorten
from pkmlm.recipe.schema import Recipe
from pkmlm.sweep.grid import Grid, Point, overlap
from pkmlm.sweep.measures import MEASURES

LONGEST = 200  # bytes of a cell's name, of the 255 that a file system allows: runs and their pictures are named by it


@dataclass(frozen=True)
class Cell:
    """One run of a grid.

    Attributes:
        point: where in the grid.
        seed: of weights, data order and dropout.
        tuned: the value of the tuned key; None where the grid tunes nothing.
        overrides: what makes the grid's base recipe this cell's, `key=value` each.
        recipe: that recipe.
    """

    point: Point
    seed: int
    tuned: str | None
    overrides: tuple[str, ...]
    recipe: Recipe

    @property
    def name(self) -> str:
        """Also the name of its run directory."""
        parts = [*self.point, *([] if self.tuned is None else [self.tuned]), f"seed-{self.seed}"]
        return "_".join("".join(c if c.isalnum() or c in "-.+" else "-" for c in part) for part in parts)

    @property
    def recipe_sha256(self) -> str:
        """Of the whole recipe: what was measured of a run of another one is not this cell's."""
        return hashlib.sha256(dump_recipe(self.recipe).encode()).hexdigest()


class Cells:
    """All cells of a grid.

    Args:
        base: the base recipe's file.
        extra: overrides of the command line, for all cells.

    Raises:
        UserError: a cell's recipe is impossible; it is named. Or `extra` has a key in which cells differ.
    """

    def __init__(self, grid: Grid, base: Path, extra: Sequence[str] = ()):
        self.grid, self.base, self.extra = grid, base, extra
        for key in (text.partition("=")[0].strip() for text in extra):
            for varied, cause in grid.varied():
                if overlap(key, varied):
                    message = f"-s {key}: the grid sets {varied} by {cause} (expected a key that all cells share)"
                    raise UserError(message, "change the grid's file")
        values = grid.tune.values if grid.tune else (None,)
        self.first = {(p, value): self._cell(p, grid.seeds[0], value) for p in grid.points() for value in values}
        for seed in grid.seeds[1:]:  # refuses now what no recipe can have as its seed
            self._cell(grid.points()[0], seed, values[0])
        names = [cell.name for cell in self.first.values()]
        folders = [name.lower() for name in names]  # as a file system that ignores case has them
        twice = next((name for name in names if folders.count(name.lower()) > 1), None)
        if twice:
            hint = "name the axes' values apart, by more than their case"
            raise UserError(f"two cells of the grid have the name {twice}", hint)
        longest = max(names, key=lambda name: len(name.encode()))
        if len(longest.encode()) > LONGEST:
            found = f"a cell's name has {len(longest.encode())} bytes (expected at most {LONGEST})"
            raise UserError(f"{found}: {shorten(longest)}", "name the axes' values shorter")

    def _cell(self, point: Point, seed: int, tuned: str | None) -> Cell:
        tuning = [] if self.grid.tune is None else [f"{self.grid.tune.key}={tuned}"]
        overrides = [*self.grid.overrides(point), *tuning, *self.extra, f"train.seed={seed}"]
        try:
            recipe = load_recipe(self.base, overrides)
        except UserError as error:
            where = ", ".join(f"{axis} {name}" for axis, name in self.grid.place(point).items())
            raise UserError(f"{where}: {error.message}", error.hint) from None
        return Cell(point, seed, tuned, tuple(overrides), recipe)

    def refuse_missing_data(self) -> None:
        """Refuse tokens without the valid split by which a value is chosen, or the test split that is measured.

        Raises:
            UserError: there are such, or a recipe names no tokens.
        """
        tune = self.grid.tune
        needed = {"valid": f"by which the grid chooses {tune.key}"} if tune and len(tune.values) > 1 else {}
        for name in self.grid.measure:
            why = f"on which the grid measures {name}"
            if name.startswith("valid_"):
                needed.setdefault("valid", why)
            elif MEASURES[name].source in ("eval", "usage", "speed"):
                needed.setdefault("test", why)
        for folder in {cell.recipe.data.dir for cell in self.first.values()}:
            if folder is None:
                raise UserError("data.dir is not set", "add -s data.dir=DIR, a folder that `pkmlm tokenize` wrote")
            splits = read_index(Path(folder)).splits
            for split, why in needed.items():
                if split not in splits:
                    raise UserError(f"{folder} has no {split} split, {why}", f"tokenize it with --{split} FILE")

    def doubts(self) -> list[str]:
        """What to warn of, a line each: what the cells' recipes say and hardly mean."""
        told: dict[str, list[str]] = {}
        for cell in self.first.values():
            for text in warnings(cell.recipe, self.base, cell.overrides):
                told.setdefault(text, []).append(cell.name)
        return [f"{first_of(names, ', ')}: {text}" for text, names in told.items()]

    def tuning(self, point: Point) -> list[Cell]:
        """The cells of a point's first seed, one for each value of the tuned key."""
        return [cell for (p, _), cell in self.first.items() if p == point]

    def others(self, chosen: Cell) -> list[Cell]:
        """The cells of the other seeds, at the tuned value of `chosen`, whatever became of the base's file."""
        return [
            replace(
                chosen,
                seed=seed,
                overrides=(*chosen.overrides[:-1], f"train.seed={seed}"),
                recipe=replace(chosen.recipe, train=replace(chosen.recipe.train, seed=seed)),
            )
            for seed in self.grid.seeds[1:]
        ]

    def __len__(self) -> int:
        return len(self.first) + len(self.grid.points()) * (len(self.grid.seeds) - 1)
