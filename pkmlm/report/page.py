"""`usage-report --html`: one page that holds its data, its script and its style, and needs no network.

S: slots of a memory.
"""

import base64
import json
import re
import zlib
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import to_hex
from numpy.typing import NDArray

from pkmlm.console import Table
from pkmlm.errors import printable
from pkmlm.measure.slots import PageSlots, SlotDetails, Word, count_patterns
from pkmlm.measure.usage import MemoryUsage
from pkmlm.memory.address import memory_label
from pkmlm.memory.registry import SPECS
from pkmlm.report.plots import sorted_mass, training_lines, uniform_mass
from pkmlm.report.tables import pattern_text, usage_tables
from pkmlm.report.usage_report import RunUsage

CODES = 65534  # steps of the page's logarithmic scale of masses
LISTED = 200  # slots in a memory's list, whose patterns are counted
CONTEXTS = 6  # shown of a slot


def usage_page(reports: Sequence[RunUsage]) -> str:
    """The HTML page of reports that have details of their slots."""
    runs = [
        {
            "entry": report.entry | {"run": printable(report.entry["run"]), "split": printable(report.entry["split"])},
            "memories": [memory_data(*pair) for pair in zip(report.memories, report.slots, strict=True)],
            "training": training_data(list(report.run.metrics())),
        }
        for report in reports
    ]
    colours = [to_hex(colour) for colour in colormaps["viridis"](np.linspace(0, 1, 256))]
    # No text can end the page's script: Base64 has no < in it.
    data = packed(json.dumps({"runs": runs, "colours": colours}, allow_nan=False).encode())
    made = {"data": data, "tables": "".join(map(table_html, usage_tables([report.entry for report in reports])))}
    folder = files("pkmlm.report") / "page"

    def part(mark: re.Match[str]) -> str:
        return made[mark[1]] if mark[1] in made else (folder / mark[1]).read_text(encoding="utf-8").strip()

    # A mark such as /*charts.js*/ is replaced by the content of that file.
    return re.sub(r"/\*([\w.]+)\*/", part, (folder / "page.html").read_text(encoding="utf-8"))


def table_html(table: Table) -> str:
    """A table as the page shows it until its script has drawn the figures."""

    def line(tag: str, cells: Sequence[str]) -> str:
        kinds = (' class="number"' if column.align == "right" else "" for column in table.columns)
        return "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))

    head, *rows = table.shown()
    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    caption, note = (escape(printable(text)) for text in (table.title, table.note))
    whole = f"<caption>{caption}</caption><thead><tr>{line('th', head)}</tr></thead><tbody>{body}</tbody>"
    below = f'<p class="note">{note}</p>' if note else ""
    return f'<section class="panel"><table>{whole}</table>{below}</section>\n'


def memory_data(memory: MemoryUsage, slots: PageSlots) -> dict[str, Any]:
    """One memory's label, the words for its kind, its arrays and slots."""
    read, spec = memory.masses_S.any(), SPECS[memory.kind]
    return {
        "label": memory.label,
        "title": spec.title,
        "unit": spec.unit,
        "counts": array_data(memory.counts_S.astype(np.uint32 if memory.counts_S.max() < 2**32 else np.uint64)),
        "mass": mass_data(memory.masses_S),
        "sorted": [part.tolist() for part in sorted_mass(memory)] if read else None,
        "uniform": [part[::-1].tolist() for part in uniform_mass(memory)] if read and memory.slots > 1 else None,
        "first": None if slots.first_K is None else array_data((slots.first_K + 1).astype(np.uint32)),
        "tokens": [printable(token) for token in slots.tokens],
        "patterns": count_patterns(slots.slots[:LISTED]),
        "slots": {str(slot.slot): slot_data(slot) for slot in slots.slots},
    }


def mass_data(masses_S: NDArray[np.float64]) -> dict[str, Any]:
    """Masses on a logarithmic scale: code 0 is none, code c is exp(low + (c - 1) * step); log exact to step / 2."""
    used = masses_S > 0
    logs = np.log(masses_S[used]) if used.any() else np.zeros(1)
    low, step = float(logs.min()), float(np.ptp(logs)) / CODES
    codes = np.zeros(masses_S.shape, dtype=np.uint16)
    codes[used] = 1 + np.round((logs - low) / step).astype(np.uint16) if step else 1
    # The colours begin at the same percentile as those of `--plots`.
    dark = int(np.percentile(codes[used], 0.5)) if used.any() else 1
    return {"codes": array_data(codes), "low": low, "step": step, "dark": dark, "total": float(masses_S.sum())}


def slot_data(slot: SlotDetails) -> dict[str, Any]:
    """One slot."""

    def shown(words: list[Word] | None) -> list[Any] | None:
        return None if words is None else [[printable(word.token), round(word.logit, 3)] for word in words]

    return {
        "reads": slot.reads,
        "heads": [[head, reads] for head, reads, _ in slot.heads],
        "raises": shown(slot.raises),
        "lowers": shown(slot.lowers),
        "pattern": None if slot.pattern is None else printable(str(pattern_text(slot.pattern._asdict()))),
        "contexts": [
            [round(c.weight, 4), *map(printable, (c.before, c.token, c.after))] for c in slot.contexts[:CONTEXTS]
        ],
    }


def training_data(metrics: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By the label of a memory: usage and KL at each validation, and the drift records."""
    lines = training_lines(metrics)
    drift: dict[str, list[dict[str, Any]]] = {}
    for event in metrics:
        for numbers in event.get("memories") or [] if event["event"] == "drift" else []:
            drift.setdefault(memory_label(numbers), []).append(
                {"step": event["step"], "since": event["since"], **numbers}
            )
    return {"valid": {label: points.T.tolist() for (_, label), points in lines.items()}, "drift": drift}


def array_data(array: NDArray[Any]) -> dict[str, Any]:
    """Unsigned integers, deflated as planes of bytes, the lowest first: most high bytes are 0."""
    width = array.dtype.itemsize
    planes = array.astype(array.dtype.newbyteorder("<")).view(np.uint8).reshape(-1, width).T
    used = max([1, *(i + 1 for i in range(width) if planes[i].any())])
    return {"planes": used, "data": packed(np.ascontiguousarray(planes[:used]).tobytes())}


def packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode("ascii")
