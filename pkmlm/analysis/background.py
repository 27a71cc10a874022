"""`usage-report --export`: how a memory is used on a text, as arrays, for work that chooses slots by it.

Of each memory, by layer and name ("3.memory", "1.ffn2"):
    3.memory.counts   int64 (heads, slots): reads of each slot by each head (hash layers: (tables, buckets))
    3.memory.masses   float64, same shape: the sum of their weights after the softmax
    3.memory.tokens   int64: positions that were counted
and of the whole: run, step, split, and sha256 (of the checkpoint's manifest, which lists that of every file; of
an exported folder's, or, where it has none, of such a list).
"""

from pathlib import Path
from typing import Any

import numpy as np

from pkmlm.analysis.usage import MemoryUsage
from pkmlm.runs.files import writing


def export_usage(path: Path, entry: dict[str, Any], sha256: str, memories: list[MemoryUsage]) -> None:
    """Write the arrays above, compressed (.npz), whole or not at all."""
    arrays: dict[str, Any] = {key: np.array(entry[key]) for key in ("run", "step", "split")}
    arrays["sha256"] = np.array(sha256)
    for memory in memories:
        where = f"{memory.layer}.{memory.name}"
        arrays[f"{where}.counts"], arrays[f"{where}.masses"] = memory.counts_HK, memory.masses_HK
        arrays[f"{where}.tokens"] = np.array(memory.tokens)
    with writing(path) as file:
        np.savez_compressed(file, **arrays)
