"""The figures of a grid: its measurements, beside the paper's numbers."""

from itertools import groupby
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from pkmlm.analysis.plots import file_name, label, line_style, plain, save
from pkmlm.runs.files import remove_file
from pkmlm.sweep.grid import Figure, Grid, Point
from pkmlm.sweep.measures import MEASURES
from pkmlm.sweep.results import Results
from pkmlm.sweep.verdicts import Values


def draw(results: Results, folder: Path) -> list[Path]:
    """Draw the grid's figures into a folder; returns their files. The file of a figure without points is removed."""
    drawn = []
    for figure in results.grid.figures:
        canvas, path = picture(results, figure), folder / f"{file_name(figure.y)}-by-{file_name(figure.x)}.png"
        if canvas is None:
            remove_file(path)
        else:
            drawn.append(save(path, canvas))
    return drawn


def picture(results: Results, figure: Figure) -> Canvas | None:
    """One figure: a panel of the measurements, with bars from the least to the greatest of the seeds, and one of the
    paper's numbers where it has different ones.
    """
    grid = results.grid

    def published(measure: str, point: Point) -> tuple[float, ...]:
        value = grid.paper_value(measure, point)
        return () if value is None else (value,)

    if not known(grid, figure, results.values):
        return None
    panels: list[tuple[str, Values]] = [("measured", results.values)]
    places = [(position(grid, figure, p, published), published(figure.y, p)) for p in known(grid, figure, published)]
    if len(set(places)) > 1:
        panels.append(("the paper", published))
    canvas = Canvas(figsize=(12, 7), dpi=100, layout="constrained")
    fewest = min(results.seeds_of(point, [figure.y]) for point in known(grid, figure, results.values))
    lacking = f" ({fewest} of {len(grid.seeds)} seeds at some points)" if 0 < fewest < len(grid.seeds) else ""
    canvas.suptitle(plain(grid.title) + lacking)
    for axes, (title, value) in zip(canvas.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        if len(panels) > 1:
            axes.set_title(title, fontsize=11)
        panel(axes, grid, figure, value)
    return canvas


def known(grid: Grid, figure: Figure, value: Values) -> list[Point]:
    """The points that have a place in the figure."""
    return [p for p in grid.points() if value(figure.y, p) and (figure.x in grid.axes or value(figure.x, p))]


def panel(axes: Axes, grid: Grid, figure: Figure, value: Values) -> None:
    """The lines of one panel; along a measure, every point carries its name."""
    along_axis = figure.x in grid.axes
    others = [axis for axis in grid.axes if axis != figure.line]
    apart = [] if along_axis else others[:-1]  # along a measure, a stroke joins points that differ in the last alone
    for number, name in enumerate(grid.names(figure.line) if figure.line else [None]):
        points = [p for p in known(grid, figure, value) if name is None or grid.place(p)[figure.line or ""] == name]
        style = line_style(number) | {"marker": "o", "markersize": 5, "capsize": 3}
        if not along_axis:
            style["linestyle"] = "-" if figure.line else "none"
        shown = None if name is None else label(name)
        for _, stroke in groupby(points, lambda p: [grid.place(p)[axis] for axis in apart]):
            run = list(stroke)
            found = [value(figure.y, p) for p in run]
            means = [fmean(seeds) for seeds in found]
            bars = [[fmean(seeds) - min(seeds) for seeds in found], [max(seeds) - fmean(seeds) for seeds in found]]
            where = [position(grid, figure, p, value) for p in run]
            axes.errorbar(where, means, yerr=bars, **style, label=shown if run[0] == points[0] else None)
            for x, mean, p in zip(where, means, run, strict=True) if not along_axis else ():
                place = {axis: grid.place(p)[axis] for axis in others}  # the line's name is in the legend
                own = " ".join(f"{axis} {at}" if at.isdecimal() else at for axis, at in place.items())
                axes.annotate(label(own), (x, mean), xytext=(6, 6), textcoords="offset points", fontsize=8)
    if along_axis:
        names = grid.names(figure.x)
        axes.set_xticks(range(len(names)), [label(name) for name in names])
        axes.set_xlabel(label(figure.x))
    else:
        axes.set_xlabel(MEASURES[figure.x].label)
        axes.margins(x=0.1)  # room for the last point's name
        if "x" in figure.log:
            axes.set_xscale("log")
    if "y" in figure.log:
        axes.set_yscale("log")
    axes.set_ylabel(MEASURES[figure.y].label)
    axes.grid(alpha=0.3)
    if figure.line:
        axes.legend(title=label(figure.line), fontsize=9)


def position(grid: Grid, figure: Figure, point: Point, value: Values) -> float:
    """Where a point stands along x: the number of its value, or the mean of its measure."""
    if figure.x in grid.axes:
        return grid.names(figure.x).index(grid.place(point)[figure.x])
    return fmean(value(figure.x, point))
