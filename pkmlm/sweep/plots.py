"""The figures of a grid: its measurements, beside the paper's numbers."""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.transforms import Bbox

from pkmlm.files import remove_file
from pkmlm.report.metrics import MEASURES
from pkmlm.report.plots import LETTER, SMALL, Look, drawing, file_name, label, legend, line_style, plain
from pkmlm.sweep.grid import EQUAL, Figure, Grid, Point
from pkmlm.sweep.results import Results

Measurements = Callable[[str, Point], tuple[float, ...]]  # of a measure at a point: one a seed, or the paper's


class Named(NamedTuple):
    """A point of a panel and its name: `ys` are its mean and the ends of its bar."""

    text: str
    x: float
    ys: tuple[float, float, float]


@drawing
def draw(results: Results, folder: Path, look: Look) -> list[Path]:
    """Draw the grid's figures into a folder; returns their files. The files of a figure without points are removed."""
    drawn = []
    for figure in results.grid.figures:
        canvas, name = picture(results, figure, look), f"{file_name(figure.y)}-by-{file_name(figure.x)}"
        if canvas is None:
            for format in ("png", "pdf", "svg"):
                remove_file(folder / f"{name}.{format}")
        else:
            drawn += look.save(folder, name, canvas)
    return drawn


def picture(results: Results, figure: Figure, look: Look) -> Canvas | None:
    """One figure: a panel of the measurements, with bars from the least to the greatest of the seeds, and one of the
    paper's numbers, if they are not all at one place.
    """
    grid = results.grid

    def published(measure: str, point: Point) -> tuple[float, ...]:
        value = grid.paper_value(measure, point)
        return () if value is None else (value,)

    budgets = results.by_budget()
    if not (measured := known(grid, figure, results.values, grid.points())):
        return None
    fewest = min(results.seeds_of(point, [figure.y]) for point in measured)
    lacking = f"\n(some: {fewest} of {len(grid.seeds)} seeds)" if 0 < fewest < len(grid.seeds) else ""
    panels: list[tuple[str, Measurements, list[Point]]] = []
    for points in budgets:
        at = f" at equal {points[0][-1]}" if len(budgets) > 1 else ""
        panels.append((f"measured{at}{lacking}", results.values, points))
    paper = known(grid, figure, published, budgets[0])
    if len({(position(grid, figure, p, published), published(figure.y, p)) for p in paper}) > 1:
        panels.append(("the paper", published, paper))
    canvas = look.figure(plain(grid.title), height=0.6 if figure.x in grid.axes else 0.8)
    both, names = list(canvas.subplots(1, len(panels), squeeze=False)[0]), []
    for axes, (title, value, points) in zip(both, panels, strict=True):
        if len(panels) > 1 or lacking:
            axes.set_title(title)
        names.append(panel(axes, grid, figure, value, points))
    equal_heights(both)
    both[0].set_ylabel(MEASURES[figure.y].label)
    if figure.line:
        legend(canvas, label(figure.line))
    canvas.draw_without_rendering()  # after this, the positions of the points are known
    for axes, named in zip(both, names, strict=True):
        write_names(axes, named)
    return canvas


def equal_heights(panels: Sequence[Axes]) -> None:
    """Give panels the same y axis if their ranges overlap or reach 0, otherwise axes that span the same factor, so that
    equal slopes are equal ratios.
    """
    ends = [axes.get_ylim() for axes in panels]
    lowest, highest = min(low for low, _ in ends), max(high for _, high in ends)
    if lowest <= 0 or max(low for low, _ in ends) < min(high for _, high in ends):
        for axes in panels:
            axes.set_ylim(lowest, highest)
        return
    factor = max(high / low for low, high in ends)
    for axes, (low, high) in zip(panels, ends, strict=True):
        middle = (low * high) ** 0.5
        axes.set_ylim(middle / factor**0.5, middle * factor**0.5)


def known(grid: Grid, figure: Figure, value: Measurements, points: Sequence[Point]) -> list[Point]:
    """Those of some points that have a place in the figure."""
    return [p for p in points if value(figure.y, p) and (figure.x in grid.axes or value(figure.x, p))]


def panel(axes: Axes, grid: Grid, figure: Figure, value: Measurements, points: Sequence[Point]) -> list[Named]:
    """Draw some points as the lines of one panel; returns their names if x is a measure."""
    named: list[Named] = []
    along_axis = figure.x in grid.axes
    others = [axis for axis in grid.axes if axis not in (figure.line, EQUAL)]
    # A stroke joins points that differ only in the axis x, or, along a measure, only in the last axis.
    apart = [axis for axis in others if axis != figure.x] if along_axis else others[:-1]
    for number, name in enumerate(grid.names(figure.line) if figure.line else [None]):
        placed = known(grid, figure, value, points)
        chosen = [p for p in placed if name is None or grid.place(p)[figure.line or ""] == name]
        style = line_style(number) | {"marker": "o"}
        if not along_axis:
            style["linestyle"] = "-" if figure.line else "none"
        shown = None if name is None else label(name)
        strokes: dict[tuple[str, ...], list[Point]] = {}
        for point in chosen:
            strokes.setdefault(tuple(grid.place(point)[axis] for axis in apart), []).append(point)
        for run in strokes.values():
            found = [value(figure.y, p) for p in run]
            means = [fmean(seeds) for seeds in found]
            # Rounding can put the mean of equal numbers beyond them, which must not become a bar.
            bars = [[max(0.0, fmean(s) - min(s)) for s in found], [max(0.0, max(s) - fmean(s)) for s in found]]
            where = [position(grid, figure, p, value) for p in run]
            axes.errorbar(where, means, yerr=bars, **style, label=shown if run[0] == chosen[0] else None)
            for x, seeds, p in zip(where, found, run, strict=True) if not along_axis else ():
                place = {axis: grid.place(p)[axis] for axis in others}  # the line's name is in the legend
                own = " ".join(f"{axis} {at}" if at.isdecimal() else at for axis, at in place.items())
                named.append(Named(label(own), x, (fmean(seeds), min(seeds), max(seeds))))
    if along_axis:
        names = grid.names(figure.x)
        axes.set_xticks(range(len(names)), [label(name) for name in names])
        axes.set_xlabel(label(figure.x))
    else:
        axes.set_xlabel(MEASURES[figure.x].label)
        axes.margins(0.12)  # room for names
    if figure.log:
        axes.set_yscale("log")
    axes.grid(True)
    return named


def write_names(axes: Axes, named: Sequence[Named]) -> None:
    """Write each name beside its point, on the side where it covers the fewest points, bars, lines and other names."""
    scale = 72 / axes.figure.dpi  # to points
    marks = [axes.transData.transform([(name.x, y) for y in name.ys]) * scale for name in named]
    taken = [Bbox.from_bounds(x - 2, y - 2, 4, 4) for bar in marks for x, y in bar]
    for line in (line for line in axes.lines if line.get_linestyle() != "None"):
        corners = axes.transData.transform(line.get_xydata()) * scale
        along = np.linspace(0, len(corners) - 1, 4 * len(corners))
        path = zip(*(np.interp(along, np.arange(len(corners)), each) for each in corners.T), strict=True)
        taken += [Bbox.from_bounds(x, y, 0.1, 0.1) for x, y in path]
    written: list[Bbox] = []
    frame = Bbox(axes.bbox.get_points() * scale)
    for name, ((x, y), *_) in zip(named, marks, strict=True):
        width, height = LETTER * SMALL * len(name.text), 1.2 * SMALL
        places: list[tuple[int, int, int, Bbox]] = []
        for right, up in product((1, -1, 0), repeat=2):
            for away in (4, 13):
                left, bottom = x + away * right + width * (right - 1) / 2, y + away * up + height * (up - 1) / 2
                box = Bbox.from_bounds(left, bottom, width, height)
                outside = not (frame.contains(*box.min) and frame.contains(*box.max))
                covers = box.count_overlaps(taken) + 9 * box.count_overlaps(written) + 99 * outside
                places.append((covers, away, len(places), box))
        _, away, _, box = min(places)
        written.append(box)
        leader = {"arrowstyle": "-", "linewidth": 0.4, "shrinkA": 0, "shrinkB": 0} if away > 4 else None
        axes.annotate(
            name.text,
            (name.x, name.ys[0]),
            (box.x0 - x, box.y0 + 0.2 * SMALL - y),
            textcoords="offset points",
            fontsize=SMALL,
            arrowprops=leader,
        ).set_in_layout(False)


def position(grid: Grid, figure: Figure, point: Point, value: Measurements) -> float:
    """Where a point is along x: the number of its value, or the mean of its measure."""
    if figure.x in grid.axes:
        return grid.names(figure.x).index(grid.place(point)[figure.x])
    return fmean(value(figure.x, point))
