"""Pictures of how memories are used and of how runs learn: PNG files of 1200 x 700 pixels.

Figures are built without pyplot, so that nothing global is kept; colours are those of Okabe and Ito, which
can be told apart with any kind of colour vision.
"""

import warnings
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from numpy.typing import NDArray

from pkmlm.analysis.usage import MemoryUsage, reads_of_a_slot
from pkmlm.errors import printable
from pkmlm.runs.files import make_folder, writing

Metrics = Sequence[Mapping[str, Any]]
Line = tuple[NDArray[Any], NDArray[np.float64]]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", ":", "-.")
GREY = "#8c8c8c"
MOST_LINES = 8  # of one picture; of more memories, those of some layers are drawn
MOST_PIXELS = 512  # of a map's side
MOST_POINTS = 1000  # of one line


def draw_usage(folder: Path, run: str, memories: Sequence[MemoryUsage], metrics: Metrics) -> list[Path]:
    """Draw one run's memories into a folder and return the files; what has no data is not drawn.

    Args:
        folder: made if it is missing; files in it are replaced.
        run: the run's name, for titles and file names.
        memories: what was counted.
        metrics: the lines of the run's metrics.jsonl, for usage over training.
    """
    read = [memory for memory in memories if memory.masses_S.any()]
    figures: dict[str, Figure] = {"slot-mass": slot_mass(run, read)} if read else {}
    for memory in read:
        where = f"layer-{memory.layer}-{memory.name}"
        if memory.subkeys is not None:
            figures[f"map-{where}"] = key_map(run, memory)
        if memory.overlap_HH is not None:
            figures[f"overlap-{where}"] = head_overlap(run, memory, memory.overlap_HH)
    tables = [memory for memory in read if not memory.shared]
    for layer, block in groupby(tables, key=lambda memory: memory.layer):
        figures[f"buckets-layer-{layer}"] = buckets(run, layer, list(block))
    training = usage_over_training(run, metrics)
    if training is not None:
        figures["usage-over-training"] = training
    return [save(folder / f"{file_name(run)}-{name}.png", figure) for name, figure in figures.items()]


def draw_probes(folder: Path, record: Mapping[str, Any]) -> list[Path]:
    """Draw the probes of each memory into a folder and return the files.

    Args:
        folder: made if it is missing; files in it are replaced.
        record: of `pkmlm probe --json`.
    """
    found = []
    for memory in record["memories"]:
        where = memory["name"] if memory["layer"] is None else f"layer-{memory['layer']}-{memory['name']}"
        path = folder / f"{file_name(record['run'])}-probe-{where}.png"
        found.append(save(path, probe_bars(record, memory)))
    return found


def probe_bars(record: Mapping[str, Any], memory: Mapping[str, Any]) -> Figure:
    """Nats above the real ones of each probe of a memory, with intervals; lines at dense twins."""
    where = memory["name"] if memory["layer"] is None else f"layer {memory['layer']} {memory['name']}"
    figure, axes = new_figure(f"Other answers in the memory's place: {label(record['run'])}, {where}")
    names, probes = list(memory["probes"]), list(memory["probes"].values())
    nats = np.array([probe["nats"] for probe in probes])
    reach = np.array(
        [[probe["nats"] - probe["low"], probe["high"] - probe["nats"]] for probe in probes if probe["low"] is not None]
    )
    errors = reach.T.clip(min=0) if len(reach) else None
    axes.barh([name.replace("_", " ") for name in names], nats, xerr=errors, capsize=4, color=COLOURS[0])
    for place, probe in enumerate(probes):
        kept = "" if probe["share"] is None else f" ({probe['share']:.0%} of the gain)"
        end = probe["nats"] if probe["high"] is None else probe["high"]
        axes.annotate(
            f"{probe['nats']:+.3f}{kept}", (max(end, 0.0), place), (6, 0), textcoords="offset points", va="center"
        )
    for number, twin in enumerate(record["dense"], start=1):
        axes.axvline(twin["nats"], **line_style(number), label=f"{label(twin['run'])} ({twin['nats']:+.3f})")
    axes.axvline(0, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set(xlabel=f"nats a token above the real {record['real']['nats']:.3f}")
    if record["dense"]:
        axes.legend(fontsize=9)
    return figure


def slot_mass(run: str, memories: Sequence[MemoryUsage]) -> Figure:
    """Share of the mass of each slot, most used first, and the same for reads of random slots."""
    indices, layers_drawn = spread([memory.layer for memory in memories])
    chosen = [memories[index] for index in indices]
    figure, axes = new_figure(f"Slot mass in sorted order: {label(run)}")
    for number, memory in enumerate(chosen):
        axes.plot(*sorted_mass(memory), **line_style(number), label=f"layer {memory.layer} {memory.name}")
    floors = {(m.slots, *m.equal_draws): m for m in chosen if m.slots > 1}
    for number, (_, memory) in enumerate(sorted(floors.items(), key=lambda item: item[0])):
        name = "the same reads at random slots" if number == 0 else None
        axes.plot(*uniform_mass(memory), color=GREY, linestyle="--", linewidth=1.2, label=name)
    axes.set(xscale="log", yscale="log", xlabel="slots, most used first (rank)", ylabel="share of the mass")
    axes.legend(fontsize=9, title=layers_drawn)
    return figure


def key_map(run: str, memory: MemoryUsage) -> Figure:
    """Mass of the n x n product keys, relative to uniform, over the sub-keys of both halves."""
    n = memory.subkeys or 1
    starts = np.arange(0, n, -(-n // MOST_PIXELS))
    size = np.diff(np.append(starts, n))
    mass = memory.masses_S.reshape(n, n)
    binned = np.add.reduceat(np.add.reduceat(mass, starts, axis=0), starts, axis=1)
    relative = binned / np.outer(size, size) * memory.slots / mass.sum()
    used = relative[relative > 0]
    low, high = float(np.percentile(used, 0.5)), float(used.max())
    unread = " (grey: never read)" if used.size < relative.size else ""
    where = f"layer {memory.layer} {memory.name}"
    figure, axes = new_figure(f"Product keys in use: {label(run)}, {where}{unread}")
    figure.set_layout_engine("compressed")
    axes.set_facecolor("#d9d9d9")
    image = axes.imshow(
        np.ma.masked_equal(relative, 0.0),
        norm=LogNorm(low, max(high, low * 1.01)),
        cmap="viridis",
        extent=(0, n, n, 0),
        interpolation="nearest",
    )
    axes.grid(False)
    axes.set(xlabel="sub-key of the second half", ylabel="sub-key of the first half")
    figure.colorbar(image, ax=axes, label="mass of a slot (1 = uniform)", extend="min")
    return figure


def head_overlap(run: str, memory: MemoryUsage, overlap_HH: NDArray[np.float64]) -> Figure:
    """The mean share of slots that two heads have in common, as a matrix."""
    heads = memory.heads
    percent = np.ma.masked_array(100 * overlap_HH, mask=np.eye(heads, dtype=bool))
    where = f"layer {memory.layer} {memory.name} (random: {memory.uniform_overlap:.2%})"
    figure, axes = new_figure(f"Slots that two heads have in common: {label(run)}, {where}")
    axes.set_facecolor("#d9d9d9")
    image = axes.imshow(percent, cmap="cividis", aspect="auto", vmin=0, vmax=max(float(percent.max()), 1e-9))
    for g, h in zip(*np.nonzero(~percent.mask), strict=True):
        bright = percent[g, h] > percent.max() / 2
        colour, size = ("black" if bright else "white"), (11 if heads <= 8 else 6)
        axes.text(h, g, f"{percent[g, h]:.2f}", ha="center", va="center", color=colour, fontsize=size)
    ticks = range(heads)
    names = [str(head + 1) for head in ticks]
    axes.grid(False)
    axes.set(xlabel="head", ylabel="head", xticks=ticks, yticks=ticks, xticklabels=names, yticklabels=names)
    figure.colorbar(image, ax=axes, label="slots in common for one token (%)")
    return figure


def buckets(run: str, layer: int, memories: Sequence[MemoryUsage]) -> Figure:
    """How often each bucket is retrieved: first and last table of each hash layer (MemoryFormer figure 4)."""
    figure = Figure(figsize=(12, 7), dpi=100, layout="constrained")
    figure.suptitle(f"Hash buckets of layer {layer}: {label(run)}")
    both = any(memory.heads > 1 for memory in memories)
    grid = figure.subplots(len(memories), 2 if both else 1, squeeze=False)
    for row, memory in zip(grid, memories, strict=True):
        tables = sorted({0, memory.heads - 1})
        for axes, table in zip(row, tables, strict=False):
            counts = memory.counts_HK[table]
            share = 100 * counts / counts.sum()
            edges = np.arange(len(counts) + 1)
            axes.stairs(share, edges, fill=True, color=COLOURS[0])
            line = axes.axhline(100 / len(counts), color=COLOURS[1], linestyle="--", linewidth=1.2)
            axes.set_title(f"{memory.name}, table {table + 1} of {memory.heads}", fontsize=10)
            axes.set(xlim=(0, len(counts)), ylim=(0, None), ylabel="reads (%)")
        for axes in row[len(tables) :]:
            axes.set_visible(False)
    for axes in grid[-1]:
        axes.set_xlabel("bucket")
    figure.legend([line], ["uniform"], loc="upper right", fontsize=9)
    return figure


def usage_over_training(run: str, metrics: Metrics) -> Figure | None:
    """Usage and KL of every memory at each validation; None where none was measured."""
    lines = training_lines(metrics)
    if not lines:
        return None
    figure = Figure(figsize=(12, 7), dpi=100, layout="constrained")
    figure.suptitle(f"Memory use over training, on the validation text (dotted: random reading): {label(run)}")
    upper, lower = figure.subplots(2, 1, sharex=True)
    names = list(lines)
    indices, layers_drawn = spread([layer for layer, _ in names])
    for number, (layer, name) in enumerate(names[index] for index in indices):
        step, usage, kl, random_usage, random_kl = lines[layer, name].T
        style = line_style(number) | {"marker": "o", "markersize": 3}
        upper.plot(step, 100 * usage, **style, label=f"layer {layer} {name}")
        lower.plot(step, kl, **style)
        for axes, floor in ((upper, 100 * random_usage), (lower, random_kl)):
            axes.plot(step, floor, color=style["color"], linewidth=0.8, linestyle=":")
    upper.set(ylabel="slots used (%)", ylim=(0, 105))
    lower.set(ylabel="KL from uniform (nats)", xlabel="step", xlim=(0, None), ylim=(0, None))
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
    upper.legend(fontsize=9, title=layers_drawn)
    return figure


def learning_curves(metrics: Mapping[str, Metrics]) -> Figure | None:
    """Training and validation loss of every run; None where none has been logged."""
    figure, axes = new_figure("Loss of training (thin) and of validation (points)")
    late = []  # only losses after a curve's first twentieth set the scale
    for number, (run, events) in enumerate(metrics.items()):
        style, name = line_style(number), label(run)
        train, valid = points(events, "train"), points(events, "valid")
        late += [curve[len(curve) // 20 :, 1] for curve in (train, valid) if len(curve)]
        if len(train):
            axes.plot(*train.T, **(style | {"linewidth": 0.7, "alpha": 0.5}), label=None if len(valid) else name)
        if len(valid):
            axes.plot(*valid.T, **style, marker="o", markersize=3.5, label=name)
    if not late:
        return None
    losses = np.concatenate(late)
    margin = 0.05 * (losses.max() - losses.min()) or 0.1
    axes.set(xlabel="step", ylabel="loss (nats a token)", ylim=(losses.min() - margin, losses.max() + margin))
    axes.legend(fontsize=9)
    return figure


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
    """Of each memory, by layer and name: step, usage, KL, and those of random reading at each validation, (n, 5)."""
    lines: dict[tuple[int, str], list[tuple[float, ...]]] = {}
    for event in metrics:
        for entry in (event.get("usage") or []) if event["event"] == "valid" else []:
            floor = entry["uniform"]
            if entry.get("kl") is not None and floor.get("kl") is not None:
                point = (event["step"], entry["usage"], entry["kl"], floor["usage"], floor["kl"])
                lines.setdefault((entry["layer"], entry["name"]), []).append(point)
    return {memory: np.array(points) for memory, points in lines.items()}


def points(events: Metrics, kind: str) -> NDArray[np.float64]:
    """(step, loss) of the events of one kind that have a loss, (n, 2).

    Of more than MOST_POINTS, neighbours are averaged.
    """
    pairs = [(e["step"], e["loss"]) for e in events if e["event"] == kind and e.get("loss") is not None]
    found = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    if len(found) <= MOST_POINTS:
        return found
    return np.stack([part.mean(axis=0) for part in np.array_split(found, MOST_POINTS)])


def save(path: Path, figure: Figure) -> Path:
    """Write a figure as PNG."""
    make_folder(path.parent)
    with warnings.catch_warnings(), writing(path) as file:
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)  # of a script that the font lacks
        figure.savefig(file, format="png")
    return path


def new_figure(title: str) -> tuple[Figure, Axes]:
    """An empty figure with one plot."""
    figure = Figure(figsize=(12, 7), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title)
    axes.grid(alpha=0.3)
    return figure, axes


def line_style(number: int) -> dict[str, Any]:
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": STYLES[number // len(COLOURS) % len(STYLES)],
        "linewidth": 1.6,
    }


def spread(layers: Sequence[int]) -> tuple[list[int], str | None]:
    """Which memories to draw, given the layer of each: whole layers, evenly spaced, some MOST_LINES; and the legend's
    title where these are not all.
    """
    distinct = sorted(set(layers))
    most = max(1, min(len(distinct), MOST_LINES * len(distinct) // len(layers)))
    chosen = {distinct[index] for index in np.linspace(0, len(distinct) - 1, most).round().astype(int)}
    title = None if len(chosen) == len(distinct) else f"{len(chosen)} of {len(distinct)} layers"
    return [index for index, layer in enumerate(layers) if layer in chosen], title


def label(run: str) -> str:
    """A run's name, shortened, that a leading underscore does not hide from a legend."""
    text = plain(run if len(run) <= 40 else f"{run[:18]}...{run[-19:]}")
    return f" {text}" if text.startswith("_") else text


def plain(text: str) -> str:
    """Text as matplotlib should show it: as it is, without mathematics."""
    return printable(text).replace("$", r"\$")


def file_name(run: str) -> str:
    """A run's name as part of a file's name: at most 200 bytes, which leaves 55 for the rest. One that must be changed
    gets a mark of the whole: another's may be changed to the same.
    """
    name = "".join(c if c.isalnum() or c in "-_.@" else "-" for c in run).encode()[-190:].decode(errors="ignore")
    name = name.lstrip(".")
    return name if name == run else f"{name}-{sha256(run.encode(errors='backslashreplace')).hexdigest()[:8]}"
