"""A grid from its file: which runs it holds, what is measured of them, and what the paper says.

A grid is YAML as a recipe is (no anchors, no tags); its keys are the fields of `Grid`. `scales:` holds named trees that
are merged onto the rest, as a recipe onto its base: one grid file serves a laptop and a cluster.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from itertools import combinations, product
from pathlib import Path
from typing import Literal, NoReturn

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from pkmlm.errors import UserError
from pkmlm.recipe.dump import quoted_text
from pkmlm.recipe.load import bind, listed, merge, wrong
from pkmlm.recipe.nodes import Node, parse, yaml_text
from pkmlm.sweep.measures import MEASURES

STRICT = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True)
Point = tuple[str, ...]  # one value of each axis, by name


@dataclass(frozen=True, config=STRICT)
class Claim:
    """An ordering that a paper states, to be looked for in the measurements.

    Attributes:
        text: the claim in words.
        measure: what is compared.
        greater, less: {axis: value}: the measure is greater at the values of `greater` than at those of `less`, with
            all other axes equal.
        rising, falling: instead of these, an axis along which the measure rises or falls, in the order of its values.
        at: {axis: values}: the claim holds only there.
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
        log: the logarithmic axes of the plot; x only where it is a measure.
    """

    x: str = ""
    y: str = ""
    line: str | None = None
    log: tuple[Literal["x", "y"], ...] = ()


@dataclass(frozen=True, config=STRICT)
class Tune:
    """A key that is tuned at every point: the first seed runs at each value, the other seeds at the best of them."""

    key: str = "optim.lr"
    values: tuple[str, ...] = ()


@dataclass(frozen=True, config=STRICT)
class Grid:
    """Runs that differ in stated keys.

    Attributes:
        title: of the table.
        base: the recipe that all cells start from, relative to the grid's file.
        set: {key: value} for all cells.
        axes: {axis: {name of a value: {key: value}}}; the grid is their product.
        only: {axis: values}: the values that a scale takes, where not all.
        without: points that are left out, {axis: value} each.
        seeds: of each point.
        measure: names of `MEASURES`, in the order of the table's columns.
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
    measure: tuple[str, ...] = ("perplexity",)
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

    def overrides(self, point: Point) -> list[str]:
        """The `key=value` that turn the base recipe into that of a point."""
        trees = [self.axes[axis][name] for axis, name in self.place(point).items()]
        return [text for tree in ([self.set] if self.set else []) + trees for text in assignments(tree)]

    def varied(self) -> list[tuple[str, str]]:
        """The keys in which cells differ, each with what sets it: an axis, the seeds or `tune`."""
        keys = [("train.seed", "its seeds")]
        if self.tune:
            keys.append((self.tune.key, "its tune"))
        for axis, trees in self.axes.items():
            texts = [text for tree in trees.values() for text in assignments(tree)]
            keys += [(key, f"its axis {axis}") for key in dict.fromkeys(text.partition("=")[0] for text in texts)]
        return keys

    def paper_value(self, measure: str, point: Point) -> float | None:
        """The paper's number at a point; None where it gives none."""
        node = self.paper.get(measure)
        for axis, name in self.place(point).items():
            if node is None:
                return None
            below = paper_by_name(node, list(self.axes[axis]))
            node = below.get(name) if below is not None else None
        return None if node is None or node.is_null else number_of(node, f"paper.{measure}")


def read_grid(path: Path, scale: str | None = None) -> tuple[Grid, str | None]:
    """Read and check a grid file.

    Args:
        scale: one of the file's scales; None: its first, if it has any.

    Returns:
        The grid, and the name of the scale; None where it has no scales.

    Raises:
        UserError: the file is no grid; names the file and the line.
    """
    tree = parse(yaml_text(path), str(path))
    if not isinstance(tree.value, dict):
        raise UserError(f"{tree.place}: found {tree.shown()} (expected keys such as base: and axes:)")
    scales = tree.value.get("scales", Node({}, tree.place))
    if not isinstance(scales.value, dict):
        raise wrong(scales, "scales", "a mapping of names to keys of a grid")
    for name, keys in scales.value.items():
        if not isinstance(keys.value, dict):
            raise wrong(keys, f"scales.{name}", "a mapping, {} where nothing changes")
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
    GridCheck(grid, path, places).run()
    return grid, scale


class GridCheck:
    """Refuses a grid whose parts name axes, values or measures that do not exist, or that contradict each other.

    Args:
        places: where each key stands, as `bind` notes it.
    """

    def __init__(self, grid: Grid, path: Path, places: Mapping[str, str]):
        self.grid, self.path, self.places = grid, path, places

    def fail(self, key: str, message: str) -> NoReturn:
        raise UserError(f"{self.places.get(key, self.path)}: {message}")

    def known(self, name: str, choices: Sequence[str], key: str, what: str) -> None:
        """Refuse a name that is none of the choices."""
        if name not in choices:
            found = f"found {name or 'nothing'} (expected {what}: {', '.join(choices)})"
            self.fail(key, f"{key.partition('.')[0]}: {found}")

    def named(self, axis: str, values: Sequence[str], key: str) -> None:
        """Refuse an axis, or values of it, that the grid does not have."""
        self.known(axis, list(self.grid.axes), key, "an axis")
        for value in values:
            self.known(value, list(self.grid.axes[axis]), key, f"a value of {axis}")

    def run(self) -> None:
        grid = self.grid
        for key, missing in (("base", not grid.base), ("axes", not grid.axes), ("seeds", not grid.seeds)):
            if missing:
                self.fail(key, f"{key} is missing or empty (expected in every grid)")
        for axis, values in grid.axes.items():
            if not values or "" in values:
                self.fail(f"axes.{axis}", f"axes.{axis} has no values, or one without a name")
        if grid.tune and not grid.tune.values:
            self.fail("tune", f"tune has no values (expected some of {grid.tune.key})")
        self.check_unique()
        for axis, names in grid.only.items():
            self.named(axis, names, f"only.{axis}")
        for number, out in enumerate(grid.without):
            for axis, name in out.items():
                self.named(axis, [name], f"without.{number}")
        for number, measure in enumerate(grid.measure):
            self.known(measure, list(MEASURES), f"measure.{number}", "a measure")
        for measure, node in grid.paper.items():
            self.known(measure, list(MEASURES), f"paper.{measure}", "a measure")
            check_paper(node, f"paper.{measure}", list(grid.axes.items()))
        for number, claim in enumerate(grid.claims):
            self.check_claim(claim, f"claims.{number}")
        for number, figure in enumerate(grid.figures):
            self.check_figure(figure, f"figures.{number}")
        if not grid.points():
            self.fail("", "no point is left (only and without leave none)")
        for (key, cause), (other, by) in combinations(grid.varied(), 2):
            if cause != by and overlap(key, other):  # one of the two would have no effect
                self.fail("", f"{other} is set by {cause} and by {by} (expected one of them)")

    def check_unique(self) -> None:
        """Refuse what is listed twice."""
        grid = self.grid
        unique: dict[str, Sequence[object]] = {
            "seeds": grid.seeds,
            "tune.values": grid.tune.values if grid.tune else (),
            "measure": grid.measure,
            "figures": [f"{figure.y} by {figure.x}" for figure in grid.figures],
        }
        for key, items in unique.items():
            for number, item in enumerate(items):
                if item in items[:number]:
                    self.fail(f"{key}.{number}", f"{key}: found {item} twice (expected each once)")

    def check_claim(self, claim: Claim, key: str) -> None:
        """A claim orders a measure of the grid: two sides that differ, or an axis of several values."""
        for axis, name in (*claim.greater.items(), *claim.less.items()):
            self.named(axis, [name], key)
        for axis, names in claim.at.items():
            self.named(axis, names, key)
        if not claim.text:
            self.fail(key, "claims: one has no text")
        self.known(claim.measure, self.grid.measure, key, "a measure of this grid")
        ways = (bool(claim.greater and claim.less), claim.rising is not None, claim.falling is not None)
        if sum(ways) != 1 or bool(claim.greater) != bool(claim.less):
            self.fail(key, "claims: expected greater: and less:, or rising:, or falling:")
        if claim.greater and (claim.greater.keys() != claim.less.keys() or claim.greater == claim.less):
            self.fail(key, f"claims: {claim.text}: expected other values of the same axes in greater: and less:")
        several = [axis for axis, values in self.grid.axes.items() if len(values) > 1]
        for axis in filter(None, (claim.rising, claim.falling)):
            self.known(axis, several, key, "an axis of several values")

    def check_figure(self, figure: Figure, key: str) -> None:
        """A figure has a measure along y, an axis or another measure along x, and perhaps another axis for lines."""
        grid = self.grid
        self.known(figure.x, [*grid.axes, *grid.measure], key, "an axis or a measure of this grid")
        self.known(figure.y, [m for m in grid.measure if m != figure.x], key, "another measure of this grid")
        if figure.line is not None:
            self.known(figure.line, [axis for axis in grid.axes if axis != figure.x], key, "another axis")
        if "x" in figure.log and figure.x in grid.axes:
            self.fail(key, f"figures: found log: x along the axis {figure.x} (expected a measure)")


def overlap(key: str, other: str) -> bool:
    """Whether two keys are the same, or one is a section that holds the other."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def check_paper(node: Node, key: str, axes: Sequence[tuple[str, Mapping[str, Node]]]) -> None:
    """Refuse what is no number below all axes, and names that an axis does not have."""
    if node.is_null:
        return
    if not axes:
        number_of(node, key)
        return
    (axis, values), *rest = axes
    below = paper_by_name(node, list(values))
    if below is None or not below.keys() <= values.keys():
        raise wrong(node, key, f"by {axis}: {', '.join(values)}")
    for name, child in below.items():
        check_paper(child, f"{key}.{name}", rest)


def paper_by_name(node: Node, names: Sequence[str]) -> dict[str, Node] | None:
    """Paper numbers along one axis by the names of its values; None where the node is no mapping or list of them."""
    if isinstance(node.value, list) and len(node.value) <= len(names):
        return dict(zip(names, node.value, strict=False))
    return node.value if isinstance(node.value, dict) else None


def number_of(node: Node, key: str) -> float:
    """The number that a node stands for; anything else is refused."""
    number = bind(node, float, key, {})
    if not isinstance(number, float):
        raise wrong(node, key, "a number")
    return number


def assignments(tree: Node, prefix: str = "") -> Iterator[str]:
    """A mapping of recipe keys, dotted or nested, as `key=value` texts."""
    if isinstance(tree.value, dict):
        for key, child in tree.value.items():
            yield from assignments(child, f"{prefix}.{key}" if prefix else key)
    elif prefix:
        yield f"{prefix}={override_text(tree)}"
    elif not tree.is_null:
        raise UserError(f"{tree.place}: found {tree.shown()} (expected recipe keys and values)")


def override_text(node: Node) -> str:
    """A scalar or a list as an override takes it."""
    if isinstance(node.value, list):
        return f"[{', '.join(override_text(item) for item in node.value)}]"
    if isinstance(node.value, dict):
        raise UserError(f"{node.place}: found a mapping (expected a value)")
    return quoted_text(node.value) if node.quoted else node.value
