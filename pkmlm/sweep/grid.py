"""A grid from its file: which runs it holds, what is measured of them, and what the paper says.

A grid is YAML as a recipe is (no anchors, no tags); its keys are the fields of `Grid`. `scales:` holds named trees that
are laid over the rest, as a recipe lies over its base: one grid file serves a laptop and a cluster.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from itertools import combinations, product
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from pkmlm.errors import UserError
from pkmlm.recipe.dump import quoted_text
from pkmlm.recipe.load import bind, listed, merge, wrong
from pkmlm.recipe.nodes import Node, parse, yaml_text
from pkmlm.sweep.measures import MEASURES

STRICT = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True)
Point = tuple[str, ...]  # the name of one value of each axis
Known = Callable[[str, Sequence[str], str, str], None]  # refuses a name that is none of the choices


@dataclass(frozen=True, config=STRICT)
class Claim:
    """An ordering that a paper states, to be looked for in what was measured.

    Attributes:
        text: in words.
        measure: what is compared.
        greater, less: values of axes, {axis: value}: the measure is greater at one than at the other, with all other
            axes equal; or
        rising, falling: an axis along which it goes one way, in the order of its values.
        at: only there, {axis: values}.
    """

    text: str = ""
    measure: str = ""
    greater: dict[str, str] = field(default_factory=dict)
    less: dict[str, str] = field(default_factory=dict)
    rising: str | None = None
    falling: str | None = None
    at: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, config=STRICT)
class Figure:
    """A plot of one measure (or of one against another).

    Attributes:
        x: an axis, or a measure (then every point of the grid is a point of the plot).
        y: a measure.
        line: the axis whose values have a line each; null: one line.
        log: which of the two axes is logarithmic (x only where it is a measure).
    """

    x: str = ""
    y: str = ""
    line: str | None = None
    log: tuple[Literal["x", "y"], ...] = ()


@dataclass(frozen=True, config=STRICT)
class Tune:
    """A key that every point of the grid is tuned in: the first seed runs at each value, the others at the best."""

    key: str = "optim.lr"
    values: tuple[str, ...] = ()


@dataclass(frozen=True, config=STRICT)
class Grid:
    """Runs that differ in stated keys.

    Attributes:
        title: of the table.
        base: the recipe that all cells start from, relative to the grid's file.
        set: keys that all cells have, {key: value}.
        axes: {axis: {name of a value: {key: value}}}; the grid is their product.
        only: {axis: values}: fewer of them, for a scale that takes not all.
        without: points that are left out, {axis: value} each.
        seeds: of each point.
        tune: see `Tune`.
        measure: names of `MEASURES`, in the order of the table's columns.
        paper: {measure: nested by the axes in their order; the last may be a list}: the paper's numbers.
        claims, figures: see there.
    """

    title: str = ""
    base: str = ""
    set: Node | None = None
    axes: dict[str, dict[str, Node]] = field(default_factory=dict)
    only: dict[str, tuple[str, ...]] = field(default_factory=dict)
    without: tuple[dict[str, str], ...] = ()
    seeds: tuple[int, ...] = (1,)
    tune: Tune | None = None
    measure: tuple[str, ...] = ("perplexity",)
    paper: dict[str, Node] = field(default_factory=dict)
    claims: tuple[Claim, ...] = ()
    figures: tuple[Figure, ...] = ()

    def names(self, axis: str) -> list[str]:
        """The values of an axis that this scale takes."""
        return [name for name in self.axes[axis] if name in self.only.get(axis, tuple(self.axes[axis]))]

    def points(self) -> list[Point]:
        """All points, the last axis running fastest."""
        found = product(*(self.names(axis) for axis in self.axes))
        left_out = [set(point.items()) for point in self.without]
        return [p for p in found if not any(out <= self.place(p).items() for out in left_out)]

    def place(self, point: Point) -> dict[str, str]:
        """A point as {axis: name of a value}."""
        return dict(zip(self.axes, point, strict=True))

    def overrides(self, point: Point) -> list[str]:
        """What makes the base recipe that of a point, as `key=value`."""
        trees = [self.axes[axis][name] for axis, name in self.place(point).items()]
        return [text for tree in ([self.set] if self.set else []) + trees for text in assignments(tree)]

    def varied(self) -> list[tuple[str, str]]:
        """The keys in which cells differ, each with what sets it."""
        keys = [("train.seed", "its seeds"), *([(self.tune.key, "its tune")] if self.tune else [])]
        for axis, trees in self.axes.items():
            texts = [text for tree in trees.values() for text in assignments(tree)]
            keys += [(key, f"its axis {axis}") for key in dict.fromkeys(text.partition("=")[0] for text in texts)]
        return keys

    def paper_value(self, measure: str, point: Point) -> float | None:
        """The paper's number at a point, if it gives one."""
        node = self.paper.get(measure)
        for axis, name in self.place(point).items():
            if node is None:
                return None
            if isinstance(node.value, list):
                index = list(self.axes[axis]).index(name)
                node = node.value[index] if index < len(node.value) else None
            else:
                node = node.value.get(name) if isinstance(node.value, dict) else None
        if node is None or node.is_null:
            return None
        return number_of(node, f"paper.{measure}")


def read_grid(path: Path, scale: str | None = None) -> tuple[Grid, str | None]:
    """Read and check a grid file, at one of its scales (None: its first, if it has any); the grid, and that scale.

    Raises:
        UserError: it is no grid; names the file and the line.
    """
    tree = parse(yaml_text(path), str(path))
    if not isinstance(tree.value, dict):
        raise UserError(f"{tree.place}: found {tree.shown()} (expected keys such as base: and axes:)")
    scales = tree.value.get("scales", Node({}, tree.place))
    if not isinstance(scales.value, dict):
        raise wrong(scales, "scales", "a mapping of names to keys of a grid")
    for name, keys in scales.value.items():
        if not isinstance(keys.value, dict):
            raise wrong(keys, f"scales.{name}", "a mapping, {} where nothing is laid over")
    if scale is None:
        scale = next(iter(scales.value), None)
    elif scale not in scales.value:
        have = f"has {listed(list(scales.value))}" if scales.value else "has none"
        raise UserError(f"{path}: no scale {scale} ({have})")
    tree = Node({key: node for key, node in tree.value.items() if key != "scales"}, tree.place)
    if scale is not None:
        tree = merge(tree, scales.value[scale])
    places: dict[str, str] = {}
    grid: Grid = bind(tree, Grid, "", places)
    check_grid(grid, path, places)
    check_causes(grid, path)
    return grid, scale


def check_grid(grid: Grid, path: Path, places: Mapping[str, str]) -> None:
    """Refuse names of axes, values and measures that are not there."""

    def known(name: str, choices: Sequence[str], key: str, what: str) -> None:
        if name not in choices:
            where = f"{places.get(key, path)}: {key.partition('.')[0]}"
            raise UserError(f"{where}: found {name or 'nothing'} (expected {what}: {', '.join(choices)})")

    def named(axis: str, values: Sequence[str], key: str) -> None:
        known(axis, list(grid.axes), key, "an axis")
        for value in values:
            known(value, list(grid.axes[axis]), key, f"a value of {axis}")

    for key, missing in (("base", not grid.base), ("axes", not grid.axes), ("seeds", not grid.seeds)):
        if missing:
            raise UserError(f"{places.get(key, path)}: {key} is missing or empty (expected in every grid)")
    for axis, values in grid.axes.items():
        if not values or "" in values:
            raise UserError(f"{places[f'axes.{axis}']}: axes.{axis} has no values, or one without a name")
    if grid.tune and not grid.tune.values:
        raise UserError(f"{places['tune']}: tune has no values (expected some of {grid.tune.key})")
    figures = [f"{figure.y} by {figure.x}" for figure in grid.figures]
    tuned = grid.tune.values if grid.tune else ()
    unique = {"seeds": grid.seeds, "tune.values": tuned, "measure": grid.measure, "figures": figures}
    for key, items in unique.items():
        if len(set(items)) < len(items):
            number = next(number for number, one in enumerate(items) if one in items[:number])
            raise UserError(f"{places[f'{key}.{number}']}: {key}: found {items[number]} twice (expected each once)")
    for axis, names in grid.only.items():
        named(axis, names, f"only.{axis}")
    for number, out in enumerate(grid.without):
        for axis, name in out.items():
            named(axis, [name], f"without.{number}")
    for number, measure in enumerate(grid.measure):
        known(measure, list(MEASURES), f"measure.{number}", "a measure")
    for measure, node in grid.paper.items():
        known(measure, list(MEASURES), f"paper.{measure}", "a measure")
        check_paper(node, f"paper.{measure}", list(grid.axes.items()))
    for number, claim in enumerate(grid.claims):
        key = f"claims.{number}"
        for axis, name in (*claim.greater.items(), *claim.less.items()):
            named(axis, [name], key)
        for axis, names in claim.at.items():
            named(axis, names, key)
        check_claim(claim, grid, known, key, places[key])
    for number, figure in enumerate(grid.figures):
        check_figure(figure, grid, known, f"figures.{number}", places[f"figures.{number}"])
    if not grid.points():
        raise UserError(f"{path}: no point is left (only and without leave none)")


def check_claim(claim: Claim, grid: Grid, known: Known, key: str, place: str) -> None:
    """A claim speaks of one measure, and of two sides that differ or of an axis of two values and more."""
    if not claim.text:
        raise UserError(f"{place}: claims: one has no text")
    known(claim.measure, grid.measure, key, "a measure of this grid")
    ways = (bool(claim.greater and claim.less), claim.rising is not None, claim.falling is not None)
    if sum(ways) != 1 or bool(claim.greater) != bool(claim.less):
        raise UserError(f"{place}: claims: expected greater: and less:, or rising:, or falling:")
    if claim.greater and (claim.greater.keys() != claim.less.keys() or claim.greater == claim.less):
        raise UserError(f"{place}: claims: {claim.text}: expected other values of the same axes in greater: and less:")
    several = [axis for axis, values in grid.axes.items() if len(values) > 1]
    for axis in filter(None, (claim.rising, claim.falling)):
        known(axis, several, key, "an axis of several values")


def check_figure(figure: Figure, grid: Grid, known: Known, key: str, place: str) -> None:
    """A figure has a measure along y, another or an axis along x, and perhaps another axis for its lines."""
    known(figure.x, [*grid.axes, *grid.measure], key, "an axis or a measure of this grid")
    known(figure.y, [name for name in grid.measure if name != figure.x], key, "another measure of this grid")
    if figure.line is not None:
        known(figure.line, [axis for axis in grid.axes if axis != figure.x], key, "another axis")
    if "x" in figure.log and figure.x in grid.axes:
        raise UserError(f"{place}: figures: found log: x along the axis {figure.x} (expected a measure)")


def check_causes(grid: Grid, path: Path) -> None:
    """Refuse a key that two axes set, or an axis and the seeds or what is tuned: one of them would do nothing."""
    for (key, cause), (other, by) in combinations(grid.varied(), 2):
        if cause != by and overlap(key, other):
            raise UserError(f"{path}: {other} is set by {cause} and by {by} (expected one of them)")


def overlap(key: str, other: str) -> bool:
    """Whether two keys are the same, or one is a section that holds the other."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def check_paper(node: Node, key: str, axes: Sequence[tuple[str, Mapping[str, Node]]]) -> None:
    """Refuse what is no number below all axes, and names that an axis has not."""
    if node.is_null:
        return
    if not axes:
        number_of(node, key)
        return
    (axis, names), *rest = axes
    below = node.value
    if isinstance(below, list) and len(below) <= len(names):
        below = dict(zip(names, below, strict=False))
    if not isinstance(below, dict) or not below.keys() <= names.keys():
        raise wrong(node, key, f"by {axis}: {', '.join(names)}")
    for name, child in below.items():
        check_paper(child, f"{key}.{name}", rest)


def number_of(node: Node, key: str) -> float:
    """The number that a node stands for; refuses everything else."""
    number = bind(node, float, key, {})
    if not isinstance(number, float):
        raise wrong(node, key, "a number")
    return number


def assignments(tree: Node, prefix: str = "") -> Iterator[str]:
    """A mapping of recipe keys, dotted or nested, as `key=value` texts."""
    if isinstance(tree.value, dict):
        for key, child in tree.value.items():
            yield from assignments(child, f"{prefix}.{key}" if prefix else key)
    elif not prefix:
        if not tree.is_null:
            raise UserError(f"{tree.place}: found {tree.shown()} (expected recipe keys and values)")
    else:
        yield f"{prefix}={written(tree)}"


def written(node: Node) -> str:
    """A scalar or a list as an override has it."""
    if isinstance(node.value, list):
        return f"[{', '.join(written(item) for item in node.value)}]"
    if isinstance(node.value, dict):
        raise UserError(f"{node.place}: found a mapping (expected a value)")
    assert isinstance(node.value, str)
    return quoted_text(node.value) if node.quoted else node.value
