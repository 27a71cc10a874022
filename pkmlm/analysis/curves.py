"""The data of figures, for pictures and for the page alike."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pkmlm.analysis.usage import MemoryUsage, reads_of_a_slot

MOST_POINTS = 1000  # of one line

Line = tuple[NDArray[Any], NDArray[np.float64]]


def sorted_mass(memory: MemoryUsage) -> Line:
    """Rank (from 1) and share of the mass of each slot that holds any, most used first; thinned out on a log scale."""
    share = np.sort(memory.masses_S[memory.masses_S > 0])[::-1] / memory.masses_S.sum()
    at = np.unique(np.geomspace(1, len(share), MOST_POINTS).astype(int))
    return at, share[at - 1]


def uniform_mass(memory: MemoryUsage) -> Line:
    """Rank and share of the mass that the same reads would give at uniformly random slots, in falling rank."""
    tables, reads = (1 if memory.shared else memory.heads), memory.alike
    n, chance = reads_of_a_slot(memory.slots // tables, reads)
    rank = memory.slots * np.cumsum(chance[::-1])[::-1]
    seen = (n > 0) & (rank >= 1) & (memory.slots * np.cumsum(chance) >= 0.5)
    return rank[seen], n[seen] / (tables * reads)


def training_lines(metrics: Sequence[Mapping[str, Any]]) -> dict[tuple[int, str], NDArray[np.float64]]:
    """Of each memory, by layer and name: step, usage, KL, and those of random reading at each validation, (n, 5)."""
    lines: dict[tuple[int, str], list[tuple[float, ...]]] = {}
    for event in metrics:
        for entry in (event.get("usage") or []) if event["event"] == "valid" else []:
            floor = entry["uniform"]
            if entry.get("kl") is not None and floor.get("kl") is not None:
                point = (event["step"], entry["usage"], entry["kl"], floor["usage"], floor["kl"])
                lines.setdefault((entry["layer"], entry["name"]), []).append(point)
    return {memory: np.array(points) for memory, points in lines.items()}
