"""RUN/usage: what a usage report measured, so that tables and plots need no second forward pass.

`test-step-500.json` holds one entry of `usage-report --format json`, and what it was measured on (`source`);
`test-step-500.npz` holds the counts and masses of every head and slot, and sums over heads.
"""

from pathlib import Path
from typing import Any

import numpy as np

from pkmlm.analysis.usage import MemoryUsage
from pkmlm.errors import UserError
from pkmlm.runs.arrays import read_arrays
from pkmlm.runs.files import make_folder, read_json, refuse_link, write_json, writing
from pkmlm.runs.shapes import misfit

ARRAYS = ("counts_HK", "masses_HK", "squares_H", "common_HH")


def save_usage(stem: Path, entry: dict[str, Any], memories: list[MemoryUsage]) -> None:
    """Write STEM.npz and then STEM.json, each whole or not at all."""
    refuse_link(stem.parent)
    make_folder(stem.parent)
    arrays = {f"{number}-{name}": getattr(m, name) for number, m in enumerate(memories) for name in ARRAYS}
    with writing(stem.with_name(f"{stem.name}.npz")) as file:
        np.savez_compressed(file, **{key: array for key, array in arrays.items() if array is not None})
    write_json(stem.with_name(f"{stem.name}.json"), entry)


def load_usage(stem: Path, source: dict[str, Any]) -> tuple[dict[str, Any], list[MemoryUsage]] | None:
    """What `save_usage` wrote; None where there is nothing whole, or it was measured on another `source`."""
    try:
        entry = read_json(stem.with_name(f"{stem.name}.json"), "the usage report")
        if entry["source"] != source:
            return None
        arrays = read_arrays(stem.with_name(f"{stem.name}.npz"))
        memories = [_memory(number, facts, arrays) for number, facts in enumerate(entry["memories"])]
        agree = [memory.as_json() for memory in memories] == entry["memories"]
        agree = agree and type(entry["step"]) is int and isinstance(entry["split"], str)
        agree = agree and not misfit(entry, {"warnings?": [(str,)]})  # older ones have none
    except (ArithmeticError, LookupError, TypeError, ValueError, UserError):
        return None
    return (entry, memories) if agree else None


def _memory(number: int, facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> MemoryUsage:
    layer, name, kind, tokens = (facts[key] for key in ("layer", "name", "kind", "tokens"))
    counts_HK, masses_HK, squares_H = (arrays[f"{number}-{array}"] for array in ARRAYS[:-1])
    common_HH = arrays.get(f"{number}-{ARRAYS[-1]}")
    return MemoryUsage(layer, name, kind, tokens, counts_HK, masses_HK, squares_H, common_HH)
