"""Grids and their files: which runs a grid holds, what is measured of them, and what the paper says.

A grid is YAML like a recipe (no anchors, no tags); its keys are the fields of `Grid`. `scales:` holds named trees that
are merged onto the rest, as a recipe is onto its base, so that one file serves a laptop and a cluster.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from itertools import combinations, product
from math import isfinite
from pathlib import Path
from typing import Literal, NoReturn

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from pkmlm.errors import UserError
from pkmlm.recipe.load import bind, merge, wrong
from pkmlm.recipe.nodes import Node, parse
from pkmlm.recipe.schema import quoted_text
from pkmlm.recipe.shipped import recipe_text
from pkmlm.report.equal import Over
from pkmlm.report.metrics import MEASURES

STRICT = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True)
Point = tuple[str, ...]  # one value of each axis, by name
EQUAL = "equal"  # the axis that the key of that name makes


@dataclass(frozen=True, config=STRICT)
class Claim:
    """An ordering that a paper claims, to be checked against the measurements.

    Attributes:
        text: the claim in words.
        measure: what is compared.
        greater, less: {axis: value}: the measure is greater at the values of `greater` than at those of `less`, with
            all other axes equal.
        rising, falling: instead of these, an axis along which the measure rises or falls, in the order of its values.
        at: {axis: values}: the claim is made only there.
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
    """A plot of one measure along an axis or against another measure.

    Attributes:
        x: an axis, or a measure (then the plot has one mark for every point of the grid).
        y: a measure.
        line: the axis whose values have a line each; None: one line.
        log: the axis that is logarithmic; None: neither.
    """

    x: str = ""
    y: str = ""
    line: str | None = None
    log: Literal["y"] | None = None


@dataclass(frozen=True, config=STRICT)
class Tune:
    """A key that is tuned at every point: the first seed runs at each value, the other seeds at the best of them.

    Attributes:
        also: {key: values} that go with it, one for each of `values`: the rates of several optimizers, for example.
    """

    key: str = "optim.lr"
    values: tuple[str, ...] = ()
    also: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def overrides(self, value: str) -> list[str]:
        """The `key=value` texts of one of `values`, with those that go with it."""
        at = self.values.index(value)
        return [f"{self.key}={value}", *(f"{key}={values[at]}" for key, values in self.also.items())]


@dataclass(frozen=True, config=STRICT)
class Grid:
    """Runs that differ in stated keys.

    Attributes:
        title: of the table; by default the name of the grid's file.
        base: the recipe that all cells start from, relative to the grid's file.
        set: {key: value} for all cells.
        axes: {axis: {name of a value: {key: value}}}; the grid is their product.
        only: {axis: values}: the values that a scale takes, if not all.
        without: points that are left out, {axis: value} each.
        seeds: of each point.
        measure: names of `MEASURES`, in the order of the table's columns.
        over: what the runs are also compared at equal amounts of, in tables and curves.
        equal: what whole runs take equally much of: `train.steps` are those of the first point, and the others' follow
            (see `budget`). `read_grid` makes it the last axis.
        paper: {measure: the paper's numbers, nested by the axes in their order; the last may be a list}.
    """

    title: str = ""
    base: str = ""
    set: Node | None = None
    axes: dict[str, dict[str, Node]] = field(default_factory=dict)
    only: dict[str, tuple[str, ...]] = field(default_factory=dict)
    without: tuple[dict[str, str], ...] = ()
    seeds: tuple[int, ...] = (1,)
    tune: Tune | None = None
    measure: tuple[str, ...] = ("bits_per_byte",)
    over: tuple[Over, ...] = ()
    equal: tuple[Over, ...] = ()
    paper: dict[str, Node] = field(default_factory=dict)
    claims: tuple[Claim, ...] = ()
    figures: tuple[Figure, ...] = ()

    @property
    def trains(self) -> bool:
        """Whether its measures need runs, rather than arithmetic alone."""
        return any(MEASURES[name].source != "cost" for name in self.measure)

    def names(self, axis: str) -> list[str]:
        """The values of an axis that this scale takes."""
        return [name for name in self.axes[axis] if name in self.only.get(axis, tuple(self.axes[axis]))]

    def points(self) -> list[Point]:
        """All points; the last axis varies fastest."""
        found = product(*(self.names(axis) for axis in self.axes))
        left_out = [set(point.items()) for point in self.without]
        return [p for p in found if not any(out <= self.place(p).items() for out in left_out)]

    def place(self, point: Point) -> dict[str, str]:
        """A point as {axis: name of a value}."""
        return dict(zip(self.axes, point, strict=True))

    def own(self, point: Point) -> Point:
        """A point without its place on the axis that `equal` makes, if it is set."""
        return point[:-1] if self.equal else point

    def overrides(self, point: Point, others: Iterable[str] = ()) -> list[str]:
        """The `key=value` texts that turn the base recipe into that of a point, the last of which wins: those of all
        cells, those of the point, `others`, and then what the point sets to null. So what one axis drops is gone,
        whatever is said of it elsewhere.
        """
        own = [text for axis, name in self.place(point).items() for text in assignments(self.axes[axis][name])]
        shared = assignments(self.set) if self.set else ()
        dropped = [text for text in own if text.endswith("=null")]
        return [*shared, *(text for text in own if text not in dropped), *others, *dropped]

    def varied(self) -> list[tuple[str, str]]:
        """The keys in which cells differ, each with what sets it: an axis, the seeds or `tune`."""
        keys = [("train.seed", "its seeds")]
        if self.tune:
            keys += [(key, "its tune") for key in (self.tune.key, *self.tune.also)]
        for axis, trees in self.axes.items():
            texts = [text for tree in trees.values() for text in assignments(tree)]
            keys += [(key, f"its axis {axis}") for key in dict.fromkeys(text.partition("=")[0] for text in texts)]
        return keys

    @cached_property
    def published(self) -> dict[str, dict[Point, float]]:
        """The paper's numbers by measure and point.

        Raises:
            UserError: one is not a number, or is for a value that an axis does not have.
        """
        axes = [(axis, list(self.axes[axis])) for axis in self.own(tuple(self.axes))]
        return {measure: dict(paper_numbers(node, f"paper.{measure}", axes)) for measure, node in self.paper.items()}

    def paper_value(self, measure: str, point: Point) -> float | None:
        """The paper's number at a point; None where it gives none."""
        return self.published.get(measure, {}).get(self.own(point))


def read_grid(path: Path, scale: str | None = None) -> tuple[Grid, str | None]:
    """Read and check a grid file.

    Args:
        scale: one of the file's scales; None: its first, if it has any.

    Returns:
        The grid, and the name of the scale; None where it has no scales.

    Raises:
        UserError: the file is not a grid; the message has the file and the line.
    """
    tree = parse(recipe_text(path), str(path))
    if not isinstance(tree.value, dict):
        raise UserError(f"{tree.place}: found {tree.shown()} (expected keys such as base: and axes:)")
    if "axes" not in tree.value and "model" in tree.value:
        raise UserError(f"{path} is a recipe (expected a grid)", f"`pkmlm train {path} -o RUN` trains its model")
    scales = tree.value.get("scales", Node({}, tree.place))
    if not isinstance(scales.value, dict):
        raise wrong(scales, "scales", "a mapping of names to keys of a grid")
    for name, keys in scales.value.items():
        if not isinstance(keys.value, dict):
            raise wrong(keys, f"scales.{name}", "a mapping, {} if nothing changes")
    if scale is None:
        scale = next(iter(scales.value), None)
    elif scale not in scales.value:
        have = f"has {', '.join(scales.value)}" if scales.value else "has none"
        raise UserError(f"{path}: no scale {scale} ({have})")
    tree = Node({key: node for key, node in tree.value.items() if key != "scales"}, tree.place)
    if scale is not None:
        tree = merge(tree, scales.value[scale])
    places: dict[str, str] = {}
    for key, node in tree.value.items() if isinstance(tree.value, dict) else ():
        if key == "seeds" and not isinstance(node.value, list):  # does 3 mean three seeds or the seed 3?
            raise wrong(node, key, "a list, such as [1, 2, 3]")
    grid: Grid = bind(tree, Grid, "", places)
    if grid.equal:
        if EQUAL in grid.axes:
            raise UserError(
                f"{places['axes.equal']}: axes: found equal (expected another name: the key equal makes it)"
            )
        grid = replace(grid, axes={**grid.axes, EQUAL: {each: Node({}, places["equal"]) for each in grid.equal}})
    check_grid(grid, path, places)
    return replace(grid, title=grid.title or path.stem), scale


def check_grid(grid: Grid, path: Path, places: Mapping[str, str]) -> None:
    """Refuse a grid whose parts refer to axes, values or measures that do not exist, or contradict each other.

    Args:
        places: the place of each key in the file, as `bind` notes it.

    Raises:
        UserError: a part is wrong; the message has its place.
    """

    def fail(key: str, message: str) -> NoReturn:
        raise UserError(f"{places.get(key, path)}: {message}")

    def require(name: str, choices: Sequence[str], key: str, what: str) -> None:
        if name not in choices:
            found = f"found {name or 'nothing'} (expected {what}: {', '.join(choices)})"
            fail(key, f"{key.partition('.')[0]}: {found}")

    def require_values(axis: str, values: Sequence[str], key: str) -> None:
        require(axis, list(grid.axes), key, "an axis")
        for value in values:
            require(value, list(grid.axes[axis]), key, f"a value of {axis}")

    for key, missing in (("base", not grid.base), ("axes", not set(grid.axes) - {EQUAL}), ("seeds", not grid.seeds)):
        if missing:
            fail(key, f"{key} is missing or empty (expected in every grid)")
    for axis, values in grid.axes.items():
        if not values or "" in values:
            fail(f"axes.{axis}", f"axes.{axis} has no values, or one without a name")
    if grid.tune and not grid.tune.values:
        fail("tune", f"tune has no values (expected values of {grid.tune.key})")
    if grid.tune:
        wanted = len(grid.tune.values)
        for key, others in grid.tune.also.items():
            if len(others) != wanted:
                found = f"found {len(others)} values of {key} (expected {wanted}, one for each of values)"
                fail(f"tune.also.{key}", f"tune.also: {found}")
    if grid.equal:
        for key, cause in grid.varied():
            if key in ("train.steps", "train.epochs"):
                fail(EQUAL, f"equal: {key} is set by {cause} (expected it in the base or in set, for all models)")
    unique: dict[str, Sequence[object]] = {
        "seeds": grid.seeds,
        "tune.values": grid.tune.values if grid.tune else (),
        "measure": grid.measure,
        "over": grid.over,
        "equal": grid.equal,
        "figures": [f"{figure.y} by {figure.x}" for figure in grid.figures],
    }
    for key, items in unique.items():
        for number, item in enumerate(items):
            if item in items[:number]:
                fail(f"{key}.{number}", f"{key}: found {item} twice (expected each once)")
    for axis, names in grid.only.items():
        require_values(axis, names, f"only.{axis}")
    for number, left_out in enumerate(grid.without):
        for axis, name in left_out.items():
            require_values(axis, [name], f"without.{number}")
    for number, measure in enumerate(grid.measure):
        require(measure, list(MEASURES), f"measure.{number}", "a measure")
    for measure in grid.paper:
        require(measure, list(MEASURES), f"paper.{measure}", "a measure")
    for key in ("over", EQUAL):
        if getattr(grid, key) and not grid.trains:
            fail(key, f"{key}: this grid trains nothing (expected a measure that needs runs)")
    _ = grid.published  # reads every number
    for number, claim in enumerate(grid.claims):
        key = f"claims.{number}"
        for axis, name in (*claim.greater.items(), *claim.less.items()):
            require_values(axis, [name], key)
        for axis, names in claim.at.items():
            require_values(axis, names, key)
        if not claim.text:
            fail(key, "claims: a claim has no text")
        require(claim.measure, grid.measure, key, "a measure of this grid")
        ways = (bool(claim.greater or claim.less), claim.rising is not None, claim.falling is not None)
        if sum(ways) != 1 or claim.greater.keys() != claim.less.keys():
            fail(key, "claims: expected greater: and less: of the same axes, or rising:, or falling:")
        if claim.greater and claim.greater == claim.less:
            fail(key, f"claims: {claim.text}: greater: and less: are equal (expected different values)")
        several = [axis for axis, values in grid.axes.items() if len(values) > 1]
        for along in filter(None, (claim.rising, claim.falling)):
            require(along, several, key, "an axis of several values")
    for number, figure in enumerate(grid.figures):
        key = f"figures.{number}"
        require(figure.x, [*grid.axes, *grid.measure], key, "an axis or a measure of this grid")
        require(figure.y, [m for m in grid.measure if m != figure.x], key, "another measure of this grid")
        if figure.line is not None:
            require(figure.line, [axis for axis in grid.axes if axis != figure.x], key, "another axis")
    if not grid.points():
        fail("", "no point is left (only: and without: exclude all)")
    for (key, cause), (other, by) in combinations(grid.varied(), 2):
        if cause != by and key == other:  # one of the two would have no effect
            fail("", f"{other} is set by {cause} and by {by} (expected one of them)")


def paper_numbers(node: Node, key: str, axes: Sequence[tuple[str, list[str]]]) -> Iterator[tuple[Point, float]]:
    """The numbers in a tree that is nested by axes, each with its point; null stands for no number."""
    if node.is_null:
        return
    if not axes:
        number = bind(node, float, key, {})
        if not isinstance(number, float) or not isfinite(number):
            raise wrong(node, key, "a finite number")
        yield (), number
        return
    (axis, names), *rest = axes
    below = node.value
    if isinstance(below, list) and len(below) <= len(names):
        below = dict(zip(names, below, strict=False))
    if not isinstance(below, dict) or not below.keys() <= set(names):
        raise wrong(node, key, f"by {axis}: {', '.join(names)}")
    for name, child in below.items():
        for point, number in paper_numbers(child, f"{key}.{name}", rest):
            yield (name, *point), number


def assignments(tree: Node, prefix: str = "") -> Iterator[str]:
    """A mapping of recipe keys, dotted or nested, as `key=value` texts."""
    if isinstance(tree.value, dict):
        for key, child in tree.value.items():
            yield from assignments(child, f"{prefix}.{key}" if prefix else key)
    elif prefix:
        yield f"{prefix}={override_text(tree)}"
    elif not tree.is_null:
        raise UserError(f"{tree.place}: found {tree.shown()} (expected recipe keys and values)")


def override_text(node: Node, within: str = "") -> str:
    """A scalar or a list in the syntax of an override; null in one spelling.

    Args:
        within: characters with a meaning where the text will stand.
    """
    if isinstance(node.value, list):
        return f"[{', '.join(override_text(item, within=',[]{}') for item in node.value)}]"
    if isinstance(node.value, dict):
        raise UserError(f"{node.place}: found a mapping (expected a value)")
    if node.quoted or any(c in node.value for c in within):
        return quoted_text(node.value)
    return "null" if node.value == "~" else node.value
