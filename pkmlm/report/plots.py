"""Pictures of how memories are used and of how runs learn.

Letters have 7 or 8 points at any width, so that a picture as wide as a column of a paper is readable there. The colours
are those of Okabe and Ito, which are distinct with any kind of colour vision. Figures are built without pyplot, which
would keep global state.
"""

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, LogFormatter, LogLocator, ScalarFormatter
from numpy.typing import NDArray

from pkmlm.errors import printable
from pkmlm.files import make_folder, writing
from pkmlm.measure.usage import MemoryUsage, reads_of_a_slot
from pkmlm.memory.address import memory_label
from pkmlm.memory.registry import SPECS
from pkmlm.report.compare import Comparison, comparable_with_dense
from pkmlm.report.metrics import OVER_TOKENS, mean
from pkmlm.runs.results import validations

Metrics = Sequence[Mapping[str, Any]]
Curves = tuple[float, Metrics]  # how far a step of a run goes along x; the lines of its metrics.jsonl
Line = tuple[NDArray[Any], NDArray[np.float64]]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", ":", "-.")
GREY = "#8c8c8c"
UNREAD = "#d9d9d9"
MOST_LINES = 8  # of one picture; if there are more memories, only some layers are drawn
MOST_PIXELS = 512  # of a map's side
MOST_POINTS = 1000  # of one line
AXES = {
    "steps": "step",
    "tokens": "tokens",
    "operations": "forward operations",
    "seconds": "seconds, of steps timed side by side",
}
WIDTH = 6.0  # inches, of a picture that is not for a paper
SMALL, LETTER = 7, 0.58  # points; the mean width of a letter, relative to its size
STYLE: dict[Any, Any] = {  # laid over the user's matplotlibrc, whose fonts are kept
    **{f"{what}size": 8 for what in ("font.", "axes.title", "axes.label", "figure.title")},
    **{f"{what}size": SMALL for what in ("xtick.label", "ytick.label", "legend.font", "legend.title_font")},
    **{f"{what}width": 0.6 for what in ("axes.line", "patch.line", "xtick.major.", "ytick.major.")},
    "grid.linewidth": 0.4,
    "grid.alpha": 0.4,
    "lines.linewidth": 1.2,
    "lines.markersize": 3,
    "errorbar.capsize": 2,
    "legend.frameon": False,
    "savefig.dpi": 300,
    "pdf.fonttype": 42,  # TrueType: publishers refuse the default
    "svg.hashsalt": "pkmlm",  # the same picture is the same file
}
drawing = rc_context(STYLE)  # decorates the functions that draw files


@dataclass(frozen=True)
class Look:
    """How pictures are written.

    Args:
        formats: "png", "pdf" or "svg": a file in each.
        width: in inches, of a picture for a paper, whose caption replaces the title. None: 6, with a title.
    """

    formats: Sequence[str] = ("png",)
    width: float | None = None

    def figure(self, title: str, height: float = 0.6) -> Figure:
        """An empty figure.

        Args:
            title: shown if the look has no `width`.
            height: as a multiple of the width.
        """
        width = self.width or WIDTH
        figure = Figure(figsize=(width, height * width), layout="constrained")
        if self.width is None:
            figure.suptitle(title, wrap=True)
        return figure

    def plot(self, title: str, height: float = 0.6) -> tuple[Figure, Axes]:
        """An empty figure with one plot."""
        figure = self.figure(title, height)
        axes = figure.add_subplot()
        axes.grid(True)
        return figure, axes

    @drawing
    def save(self, folder: Path, name: str, figure: Figure | None) -> list[Path]:
        """Write a figure, if there is one, in each format, and return the files."""
        if figure is None:
            return []
        files = [folder / f"{name}.{format}" for format in self.formats]
        make_folder(folder)
        for format, path in zip(self.formats, files, strict=True):
            undated = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(format)
            with warnings.catch_warnings(), writing(path) as file:
                warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)  # missing from the font
                figure.savefig(file, format=format, metadata=undated)
        return files


@drawing
def draw_usage(folder: Path, run: str, memories: Sequence[MemoryUsage], metrics: Metrics, look: Look) -> list[Path]:
    """Draw one run's memories into a folder and return the files; what has no data is not drawn.

    Args:
        folder: made if it is missing; files in it are replaced.
        run: the run's name, for titles and file names.
        memories: what was counted.
        metrics: the lines of the run's metrics.jsonl, for usage over training.
        look: of the files.
    """
    read = [memory for memory in memories if memory.masses_S.any()]
    figures: dict[str, Figure] = {"slot-mass": slot_mass(run, read, look)} if read else {}
    for memory in read:
        where = memory.label.replace(" ", "-")
        if memory.addresses.subkeys is not None:
            figures[f"map-{where}"] = key_map(run, memory, look)
        if memory.overlap_HH is not None:
            figures[f"overlap-{where}"] = head_overlap(run, memory, memory.overlap_HH, look)
    tables = [memory for memory in read if not memory.shared]
    for where, parts in groupby(tables, key=lambda memory: replace(memory, part="").label):
        block = list(parts)
        unit = SPECS[block[0].kind].unit
        figures[f"{unit}s-{where.replace(' ', '-')}"] = table_reads(run, where, block, look)
    training = usage_over_training(run, metrics, look)
    if training is not None:
        figures["usage-over-training"] = training
    return [path for name, each in figures.items() for path in look.save(folder, f"{file_name(run)}-{name}", each)]


@drawing
def draw_probes(folder: Path, record: Mapping[str, Any], look: Look) -> list[Path]:
    """Draw the probes of each memory into a folder and return the files.

    Args:
        folder: made if it is missing; files in it are replaced.
        record: of `pkmlm probe --json`.
        look: of the files.
    """
    found = []
    for memory in record["memories"]:
        where = memory_label(memory).replace(" ", "-")
        name = f"{file_name(record['run'])}-probe-{where}"
        found += look.save(folder, name, probe_bars(record, memory, look))
    return found


@drawing
def draw_curves(
    folder: Path,
    runs: Mapping[str, Sequence[Curves]],
    over: str,
    look: Look,
    log: bool = False,
    by_byte: bool = False,
) -> list[Path]:
    """Draw learning curves into a folder and return the files: none where no loss has been logged.

    Args:
        folder: made if it is missing; files in it are replaced.
        runs: by name, one run, or several that differ in their seed.
        over: the x axis, a key of `AXES`.
        look: of the files.
        log: whether the x axis is logarithmic.
        by_byte: whether losses are in bits per byte, in place of nats per token.
    """
    name = "learning-curves" if over == "steps" else f"learning-curves-over-{over}"
    return look.save(folder, name, learning_curves(runs, over, look, log, by_byte))


def draw_comparison(
    folder: Path,
    comparison: Comparison,
    overs: Sequence[str],
    look: Look,
    log: bool = False,
) -> list[Path]:
    """Draw the learning curves of runs over each of `overs`, and their use of memories over tokens, into a folder and
    return the files: none where no loss has been logged.

    Args:
        folder, look, log: see `draw_curves`.
        comparison: the runs.
        overs: keys of `AXES`.
    """
    branches, drawn = comparison.branches(), []
    for over in overs:
        curves = comparison.curves(over)
        lines = {name: [seed for one in (name, *ends) for seed in curves[one]] for name, ends in branches.items()}
        drawn += draw_curves(folder, lines, over, look, log, comparison.by_byte)
    dense, comparable = comparable_with_dense(comparison.groups)
    trunk = next((name for name, ends in branches.items() if dense and dense.name in (name, *ends)), None)
    names = [group.name for group in comparable]
    figure = over_tokens(comparison.curves("tokens"), branches, trunk, names, look, comparison.by_byte)
    return drawn + look.save(folder, "perplexity-and-use-over-tokens", figure)


def probe_bars(record: Mapping[str, Any], memory: Mapping[str, Any], look: Look) -> Figure:
    """A bar for each probe of a memory: its nats above the real ones, with intervals; lines at dense twins."""
    where = memory_label(memory)
    figure, axes = look.plot(f"In place of the memory's output: {label(record['run'])}, {where}")
    names, probes = list(memory["probes"]), list(memory["probes"].values())
    nats = np.array([probe["nats"] for probe in probes])
    reach = np.array(
        [[probe["nats"] - probe["low"], probe["high"] - probe["nats"]] for probe in probes if probe["low"] is not None]
    )
    errors = reach.T.clip(min=0) if len(reach) else None
    axes.barh([name.replace("_", " ") for name in names], nats, xerr=errors, color=COLOURS[0])
    for place, probe in enumerate(probes):
        kept = "" if probe["share"] is None else f" ({probe['share']:.0%})"
        end = probe["nats"] if probe["high"] is None else probe["high"]
        text = f"{probe['nats']:+.4f}{kept}"
        axes.annotate(text, (max(end, 0.0), place), (3, 0), textcoords="offset points", va="center", size=SMALL)
    for number, twin in enumerate(record["dense"], start=1):
        axes.axvline(twin["nats"], **line_style(number), label=f"{label(twin['run'])} ({twin['nats']:+.4f})")
    axes.axvline(0, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.margins(x=0.3)
    gain = "\n(share of the gain kept)" if any(probe["share"] is not None for probe in probes) else ""
    axes.set(xlabel=f"nats per token above the real {record['real']['nats']:.3f}{gain}")
    if record["dense"]:
        legend(figure)
    return figure


def slot_mass(run: str, memories: Sequence[MemoryUsage], look: Look) -> Figure:
    """Each slot's share of the mass, most used first, and the same for reads of random slots."""
    indices, layers_drawn = spread([memory.layer or 0 for memory in memories])
    chosen = [memories[index] for index in indices]
    figure, axes = look.plot(f"Slot mass in sorted order: {label(run)}")
    for number, memory in enumerate(chosen):
        axes.plot(*sorted_mass(memory), **line_style(number), label=memory.label)
    floors = {(m.slots, *m.equal_draws): m for m in chosen if m.slots > 1}
    for number, (_, memory) in enumerate(sorted(floors.items(), key=lambda item: item[0])):
        name = "random reading" if number == 0 else None
        axes.plot(*uniform_mass(memory), color=GREY, linestyle="--", linewidth=1, label=name)
    axes.set(xscale="log", yscale="log", xlabel="slots, most used first (rank)", ylabel="share of the mass")
    legend(figure, layers_drawn)
    return figure


def key_map(run: str, memory: MemoryUsage, look: Look) -> Figure:
    """Mass of the n x n slots, relative to uniform, over the sub-keys of both halves."""
    n = memory.addresses.subkeys or 1
    starts = np.arange(0, n, -(-n // MOST_PIXELS))
    size = np.diff(np.append(starts, n))
    mass = memory.masses_S.reshape(n, n)
    binned = np.add.reduceat(np.add.reduceat(mass, starts, axis=0), starts, axis=1)
    relative = binned / np.outer(size, size) * memory.slots / mass.sum()
    used = relative[relative > 0]
    low, high = float(np.percentile(used, 0.5)), float(used.max())
    unread = "; grey: never read" if used.size < relative.size else ""
    figure, axes = look.plot(f"{SPECS[memory.kind].title} in use: {label(run)}, {memory.label}", height=0.8)
    figure.set_layout_engine("compressed")
    axes.set_facecolor(UNREAD)
    image = axes.imshow(
        np.ma.masked_equal(relative, 0.0),
        norm=LogNorm(low, max(high, low * 1.01)),
        cmap="viridis",
        extent=(0, n, n, 0),
        interpolation="nearest",
    )
    axes.grid(False)
    axes.set(xlabel="sub-key of the second half", ylabel="sub-key of the first half")
    figure.colorbar(image, ax=axes, label=f"mass of a slot\n(1: uniform{unread})", extend="min")
    return figure


def head_overlap(run: str, memory: MemoryUsage, overlap_HH: NDArray[np.float64], look: Look) -> Figure:
    """The mean share of slots that two heads have in common, as a matrix."""
    heads = memory.heads
    percent = np.ma.masked_array(100 * overlap_HH, mask=np.eye(heads, dtype=bool))
    figure, axes = look.plot(f"Slots that two heads have in common: {label(run)}, {memory.label}", height=0.8)
    figure.set_layout_engine("compressed")
    axes.set_facecolor(UNREAD)
    image = axes.imshow(percent, cmap="cividis", vmin=0, vmax=max(float(percent.max()), 1e-9))
    cell = 0.6 * 72 * figure.get_figwidth() / heads  # points: the matrix is about 0.6 of the figure
    size = min(SMALL, 0.9 * cell / (LETTER * len(f"{percent.max():.2f}")))
    for g, h in zip(*np.nonzero(~percent.mask), strict=True):
        colour = "black" if percent[g, h] > percent.max() / 2 else "white"
        axes.text(h, g, f"{percent[g, h]:.2f}", ha="center", va="center", color=colour, fontsize=size)
    ticks = range(heads)
    names = [str(head + 1) for head in ticks]
    axes.grid(False)
    axes.set(xlabel="head", ylabel="head", xticks=ticks, yticks=ticks, xticklabels=names, yticklabels=names)
    random = 100 * memory.uniform_overlap
    figure.colorbar(image, ax=axes, label=f"slots in common for one token (%)\n(at random: {random:.2f})")
    return figure


def table_reads(run: str, where: str, memories: Sequence[MemoryUsage], look: Look) -> Figure:
    """How often each row is read, in the first and the last table of each part of a memory in a layer (MemoryFormer
    figure 4). All panels have the same logarithmic scale, so that both a row read once and the most read row are
    visible.

    Args:
        where: the label of the memory in the layer, for the title.
        memories: its parts.
    """
    spec = SPECS[memories[0].kind]
    figure = look.figure(f"{spec.title}, {where}: {label(run)}", height=0.1 + 0.28 * len(memories))
    both = any(memory.heads > 1 for memory in memories)
    grid = figure.subplots(len(memories), 2 if both else 1, squeeze=False, sharey=True)
    least = min(100 / float(memory.counts_HK.sum(axis=1).max()) for memory in memories)  # one read (%)
    for row, memory in zip(grid, memories, strict=True):
        tables = sorted({0, memory.heads - 1})
        for axes, table in zip(row, tables, strict=False):
            counts = memory.counts_HK[table]
            share = 100 * counts / counts.sum()
            edges = np.arange(len(counts) + 1)
            axes.stairs(share, edges, baseline=least / 2, fill=True, color=COLOURS[0], linewidth=0.3, label="read")
            axes.axhline(100 / len(counts), color=COLOURS[1], linestyle="--", linewidth=1, label="uniform")
            axes.set_title(f"{memory.part or memory.memory}, table {table + 1} of {memory.heads}", fontsize=SMALL)
            axes.set(xlim=(0, len(counts)), yscale="log", ylim=(least / 2, None))
        for axes in row[len(tables) :]:
            axes.set_visible(False)
    for axes in grid[-1]:
        axes.set_xlabel(spec.unit)
    figure.supylabel("reads (%)", fontsize=8)
    legend(figure)
    return figure


def usage_over_training(run: str, metrics: Metrics, look: Look) -> Figure | None:
    """Usage and KL of every memory at each validation; None if there are fewer than two validations."""
    lines = training_lines(metrics)
    if max(map(len, lines.values()), default=0) < 2:
        return None
    figure = look.figure(f"Memory use over training, on the validation text: {label(run)}", height=0.8)
    upper, lower = figure.subplots(2, 1, sharex=True)
    names = list(lines)
    indices, layers_drawn = spread([layer for layer, _ in names])
    for number, (layer, name) in enumerate(names[index] for index in indices):
        step, usage, kl, random_usage, random_kl = lines[layer, name].T
        style = line_style(number) | {"marker": "o"}
        upper.plot(step, 100 * usage, **style, label=name)
        lower.plot(step, kl, **style)
        for axes, floor in ((upper, 100 * random_usage), (lower, random_kl)):
            axes.plot(step, floor, color=style["color"], linewidth=0.8, linestyle=":")
    upper.set(ylabel=OVER_TOKENS["usage"], ylim=(0, 105))
    lower.set(ylabel=OVER_TOKENS["kl"], xlabel="step", xlim=(0, None), ylim=(0, None))
    short_numbers(lower)
    for axes in (upper, lower):
        axes.grid(True)
    dotted = Line2D([], [], color="black", linewidth=0.8, linestyle=":", label="random reading")
    legend(figure, layers_drawn, [dotted])
    return figure


def learning_curves(
    runs: Mapping[str, Sequence[Curves]], over: str, look: Look, log: bool = False, by_byte: bool = False
) -> Figure | None:
    """Training loss, smoothed, and validation loss; None if no loss has been logged. Runs that differ in their seed
    have the same colour.
    """
    figure, axes = look.plot("Loss of training (smoothed) and of validation", height=0.65)
    scaled, cut = [], []  # losses that set the scale, and those that may lie above it
    shown: dict[str, Line2D] = {}
    for number, (name, seeds) in enumerate(runs.items()):
        style = line_style(number)
        for per_step, metrics in seeds:
            train = smoothed(points((event for event in metrics if event["event"] == "train"), per_step))
            valid = points(validations(metrics), per_step)
            early = 0 if log else len(train) // 20  # so steep that on a linear axis it goes straight up
            scaled += [valid[:, 1], train[early:, 1]]
            cut.append(train[:early, 1])
            drawn = [axes.plot(*train.T, **(style | {"linewidth": 0.6, "alpha": 0.7}))] if len(train) else []
            drawn += [axes.plot(*valid.T, **style, marker=marker(number))] if len(valid) else []
            if drawn and name not in shown:
                shown[name] = drawn[-1][0]
                shown[name].set_label(label(name))
    losses = np.concatenate([np.zeros(0), *scaled])
    if not losses.size:
        return None
    margin = 0.05 * (losses.max() - losses.min()) or 0.1
    unit = "bits per byte" if by_byte else "nats per token"
    axes.set(xlabel=AXES[over], ylabel=f"loss ({unit})", ylim=(losses.min() - margin, losses.max() + margin))
    above = any((early > losses.max() + margin).any() for early in cut)
    if log:
        axes.set_xscale("log")
    short_numbers(axes)
    kinds = (
        Line2D([], [], color=GREY, linewidth=0.6, label="training" + " (begins higher)" * above),
        Line2D([], [], color=GREY, marker="o", label="validation"),
    )
    legend(figure, more=kinds)
    return figure


@drawing
def over_tokens(
    runs: Mapping[str, Sequence[Curves]],
    branches: Mapping[str, Sequence[str]],
    dense: str | None,
    comparable: Collection[str],
    look: Look,
    by_byte: bool = False,
) -> Figure | None:
    """Perplexity (or bits per byte), the lead over a dense run, and how memories are used, at each validation; None if
    no run has two validations. A panel without data is left out.

    Args:
        runs: by name, one run, or several that differ in their seed, over tokens.
        branches: the names that have curves, each with those that branched off it, of which the last point is drawn.
        dense: the name that others are compared with: curves with its curves, a branch with its branch of that length.
        comparable: the names whose losses can be compared with those of `dense`.
        look: of the figure.
        by_byte: whether losses are in bits per byte, in place of nats per token; the lead is then left out.
    """
    lines = {name: [token_lines(*seed) for seed in seeds] for name, seeds in runs.items()}
    if all(len(seed["loss"]) < 2 for name in branches for seed in lines[name]):
        return None
    twins, led = [seed["loss"] for seed in lines.get(dense or "", ())], set() if by_byte else set(comparable) - {dense}
    shorter: dict[float, list[NDArray[np.float64]]] = {}  # branches of the dense run, by their length
    for twin in (seed["loss"] for end in branches.get(dense or "", ()) for seed in lines[end]):
        if len(twin):
            shorter.setdefault(twin[-1, 0], []).append(twin)
    drawn: list[tuple[dict[str, Any], dict[str, NDArray[np.float64]]]] = []
    for number, (name, ends) in enumerate(branches.items()):
        style = line_style(number)
        first = next((index for index, seed in enumerate(lines[name]) if len(seed["loss"])), 0)
        for index, seed in enumerate(lines[name]):
            shown = {
                "label": label(name) if index == first else None,
                "marker": marker(number) if len(seed["loss"]) == 1 else None,
            }
            drawn.append((style | shown, seed | {"lead": lead(seed["loss"], twins if name in led else [])}))
        mark = {"color": style["color"], "linestyle": "none", "marker": "D", "markersize": 4}
        for seed in (seed for end in ends for seed in lines[end] if len(seed["loss"])):
            alike = shorter.get(seed["loss"][-1, 0], []) if name in led else []
            whole, end = seed | {"lead": lead(seed["loss"], alike)}, seed["loss"][-1, 0]
            drawn.append((mark, {panel: line[line[:, 0] == end] for panel, line in whole.items()}))
    panels = [panel for panel in OVER_TOKENS if any(len(found[panel]) for _, found in drawn)]
    if not panels:
        return None
    columns = min(len(panels), 2 if (look.width or WIDTH) >= WIDTH * 0.8 else 1)
    rows = -(-len(panels) // columns)
    figure = look.figure(
        "Over tokens; for several memories, the mean over layers", height=rows * (0.33 if columns > 1 else 0.45)
    )
    for place, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, columns, place, sharex=figure.axes[0] if place > 1 else None)
        if panel == "lead":
            axes.axhline(0, **line_style(list(branches).index(dense or "")))
        for style, found in drawn:
            if len(found[panel]):
                x, y = found[panel].T
                axes.plot(x, np.exp(y) if panel == "loss" and not by_byte else y, **style)
        axes.grid(True)
        heading = "bits per byte" if panel == "loss" and by_byte else OVER_TOKENS[panel]
        axes.set(xscale="log", ylabel=heading, xlabel="tokens" if place > len(panels) - columns else "")
        low, high = axes.dataLim.intervalx
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 3) if high > 10 * low else (1, 2, 3, 5, 7)))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.xaxis.set_minor_formatter("")
        if panel in ("usage", "kl", "dead"):
            axes.set_ylim(0, 105 if panel == "usage" else max(0.1, 1.05 * axes.dataLim.y1))
        if panel == "loss" and not by_byte:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(ScalarFormatter())
            axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.7)))
    figure.align_ylabels()
    decayed = Line2D([], [], color=GREY, linestyle="none", marker="D", label="a branch's end")
    legend(figure, more=[decayed] if any(branches.values()) else [])
    return figure


def token_lines(per_step: float, metrics: Metrics) -> dict[str, NDArray[np.float64]]:
    """The points (n, 2) of a run in each panel of `OVER_TOKENS` but the lead; for several memories the mean, without
    their pools.
    """
    measured: dict[str, list[tuple[float, float]]] = {panel: [] for panel in ("usage", "kl", "effective", "dead")}
    validated = validations(metrics)
    for event in (*validated, *(event for event in metrics if event["event"] == "drift")):
        if event["event"] == "drift":
            found = {"dead": [1 - memory["read"] / memory["slots"] for memory in event["memories"]]}
        else:
            of_layers = [memory for memory in event.get("usage") or () if memory["layer"]]
            found = {key: [memory.get(key) for memory in of_layers] for key in ("usage", "kl", "effective")}
        for panel, values in found.items():
            if (value := mean(values)) is not None:
                percent = 100 if panel in ("usage", "dead") else 1
                measured[panel].append((event["step"] * per_step, percent * value))
    losses = points(validated, per_step)
    lines = {panel: np.array(pairs).reshape(-1, 2) for panel, pairs in measured.items()}
    return {"loss": losses[np.isfinite(losses[:, 1])], **lines}


def lead(loss: NDArray[np.float64], dense: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """By how much the perplexity of a curve of losses (n, 2) is below the mean of some dense ones (%), over the range
    that all of these cover; their losses are interpolated linearly between validations.
    """
    dense = [curve for curve in dense if len(curve)]
    if not dense:
        return loss[:0]
    start, end = max(curve[0, 0] for curve in dense), min(curve[-1, 0] for curve in dense)
    x, own = loss[(loss[:, 0] >= start) & (loss[:, 0] <= end)].T
    others = np.mean([np.interp(x, *curve.T) for curve in dense], axis=0)
    return np.column_stack([x, 100 * (1 - np.exp(own - others))])


def sorted_mass(memory: MemoryUsage) -> Line:
    """Rank (from 1) and share of the mass of each slot that holds any, most used first; thinned out on a log scale."""
    share = np.sort(memory.masses_S[memory.masses_S > 0])[::-1] / memory.masses_S.sum()
    at = np.unique(np.geomspace(1, len(share), MOST_POINTS).astype(int))
    return at, share[at - 1]


def uniform_mass(memory: MemoryUsage) -> Line:
    """Rank and share of the mass that the same reads would give at uniformly random slots, in falling rank."""
    tables, (draws, topk) = (1 if memory.shared else memory.heads), memory.equal_draws
    n, chance = reads_of_a_slot(memory.slots // tables, draws, topk)
    rank = memory.slots * np.cumsum(chance[::-1])[::-1]
    seen = (n > 0) & (rank >= 1) & (memory.slots * np.cumsum(chance) >= 0.5)
    return rank[seen], n[seen] / (tables * draws * topk)


def training_lines(metrics: Metrics) -> dict[tuple[int, str], NDArray[np.float64]]:
    """By the layer (0: several) and the label of a memory: step, usage, KL, and both of random reading at each
    validation, (n, 5).
    """
    lines: dict[tuple[int, str], list[tuple[float, ...]]] = {}
    for event in validations(metrics):
        for entry in event.get("usage") or ():
            floor = entry["uniform"]
            if entry.get("kl") is not None and floor.get("kl") is not None:
                point = (event["step"], entry["usage"], entry["kl"], floor["usage"], floor["kl"])
                lines.setdefault((entry["layer"] or 0, memory_label(entry)), []).append(point)
    return {memory: np.array(points) for memory, points in lines.items()}


def points(events: Iterable[Mapping[str, Any]], per_step: float) -> NDArray[np.float64]:
    """(steps times `per_step`, loss) of the events that have a loss, (n, 2)."""
    pairs = [(event["step"] * per_step, event["loss"]) for event in events if event.get("loss") is not None]
    return np.array(pairs, dtype=np.float64).reshape(-1, 2)


def smoothed(curve: NDArray[np.float64]) -> NDArray[np.float64]:
    """A curve (n, 2), smoothed by a running mean over a twenty-fifth of its points, fewer near the ends, and thinned
    out to MOST_POINTS.
    """
    n, at = len(curve), np.arange(len(curve))
    before = np.minimum(at, n // 50)  # and as many after, so that no mean lags; fewer near the ends
    after = np.minimum(before, n - 1 - at)
    sums = np.concatenate([[0.0], np.cumsum(curve[:, 1])])
    means = (sums[at + after + 1] - sums[at - before]) / (before + after + 1)
    shown = np.linspace(0, n - 1, min(n, MOST_POINTS)).round().astype(int)
    return np.column_stack([curve[:, 0], means])[shown]


def short_numbers(axes: Axes) -> None:
    """Write large numbers along x as 200k: 200000 would run into its neighbour."""
    if axes.get_xlim()[1] >= 10_000:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def legend(figure: Figure, title: str | None = None, more: Iterable[Artist] = ()) -> None:
    """A legend of all plots, below them, where it hides nothing; the figure grows by the legend's height.

    Args:
        more: artists with a label that are in no plot.
    """
    handles: list[Artist] = []
    for axes in figure.axes:
        before = {handle.get_label() for handle in handles}  # panels share labels
        handles += [handle for handle in axes.get_legend_handles_labels()[0] if handle.get_label() not in before]
    handles += more
    entry = SMALL * (LETTER * max(len(str(handle.get_label())) for handle in handles) + 4.5)
    columns = max(1, min(len(handles), int(72 * figure.get_figwidth() / entry)))
    lines = -(-len(handles) // columns) + (title is not None)
    figure.set_figheight(figure.get_figheight() + lines * 1.5 * SMALL / 72)
    figure.legend(handles=handles, title=title, ncols=columns, columnspacing=1.5, loc="outside lower center")


def line_style(number: int) -> dict[str, Any]:
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": STYLES[number // len(COLOURS) % len(STYLES)],
    }


def marker(number: int) -> str:
    """The marker that distinguishes lines of one colour that are single points; diamonds are the ends of branches."""
    return "os^vP*"[number // len(COLOURS) % 6]


def spread(layers: Sequence[int]) -> tuple[list[int], str | None]:
    """The indices of the memories to draw, about MOST_LINES, given the layer of each: all memories of evenly spaced
    layers; and a title for the legend, if some layers are left out.
    """
    distinct = sorted(set(layers))
    most = max(1, min(len(distinct), MOST_LINES * len(distinct) // len(layers)))
    chosen = {distinct[index] for index in np.linspace(0, len(distinct) - 1, most).round().astype(int)}
    title = None if len(chosen) == len(distinct) else f"{len(chosen)} of {len(distinct)} layers"
    return [index for index, layer in enumerate(layers) if layer in chosen], title


def label(run: str) -> str:
    """A run's name for a legend: shortened, and not hidden by a leading underscore."""
    text = plain(run if len(run) <= 40 else f"{run[:18]}...{run[-19:]}")
    return f" {text}" if text.startswith("_") else text


def plain(text: str) -> str:
    """Text that matplotlib shows as it is, without mathematics."""
    return printable(text).replace("$", r"\$")


def file_name(run: str) -> str:
    """A run's name as part of a file's name. One that must be changed gets a digest of the original: another one may be
    changed to the same.
    """
    name = "".join(c if c.isalnum() or c in "-_.@" else "-" for c in run).lstrip(".")
    return name if name == run else f"{name}-{sha256(run.encode(errors='backslashreplace')).hexdigest()[:8]}"
