"""How evenly a memory is read: usage, KL, Gini and overlap from the counts of `UsageCounters` (PKM section 4.2).

Needs no torch, so that a report that is kept is read and drawn without it.

H: memory heads (or tables, where each head has its own); K: slots that one head can read; S: slots of the memory.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

Measures = dict[str, float | int | None]

# Kinds whose slots are pairs of sub-keys: of n sub-keys a half, slot n * i + j has key i of the first, j of the second.
PAIRED_KINDS = ("product-key", "peer")
# Above so many reads a slot the sum over the binomial cancels to nothing; the series is then good to 1e-12.
MANY_READS = 1e4


@dataclass(frozen=True)
class MemoryUsage:
    """What was read from one memory.

    Attributes:
        layer: the block, counted from 1.
        name: which memory of the block: "memory", or for hash layers "qkv", "ffn1", "ffn2".
        kind: of memory, as its tap says: "product-key", "flat-key", "hash".
        tokens: positions that were counted.
        counts_HK: int64, reads of each slot by each head.
        masses_HK: float64, the same reads, each weighing its weight after the softmax.
        squares_H: float64, the sum of the squared weights of each head's reads.
        common_HH: int64, slots that two heads both read for one token, summed over tokens; None where each head has a
            table of its own, as in hash layers.
    """

    layer: int
    name: str
    kind: str
    tokens: int
    counts_HK: NDArray[np.int64]
    masses_HK: NDArray[np.float64]
    squares_H: NDArray[np.float64]
    common_HH: NDArray[np.int64] | None

    @property
    def shared(self) -> bool:
        """Whether all heads read the same slots; otherwise each has a table of its own."""
        return self.common_HH is not None

    @property
    def heads(self) -> int:
        """Heads, or tables."""
        return self.counts_HK.shape[0]

    @property
    def slots(self) -> int:
        """Slots of the whole memory, S."""
        return self.counts_HK.shape[1] if self.shared else self.counts_HK.size

    @property
    def subkeys(self) -> int | None:
        """Sub-keys of each half, if the slots are pairs of sub-keys."""
        return math.isqrt(self.slots) if self.kind in PAIRED_KINDS else None

    @cached_property
    def reads(self) -> int:
        return int(self.counts_HK.sum())

    @cached_property
    def counts_S(self) -> NDArray[np.int64]:
        """int64 (slots,): reads of each slot of the whole memory."""
        return self.counts_HK.sum(axis=0) if self.shared else self.counts_HK.ravel()

    @cached_property
    def masses_S(self) -> NDArray[np.float64]:
        """float64 (slots,): mass of each slot of the whole memory."""
        return self.masses_HK.sum(axis=0) if self.shared else self.masses_HK.ravel()

    @cached_property
    def overlap_HH(self) -> NDArray[np.float64] | None:
        """float64 (H, H): the mean share of its slots that a head has in common with another for one token; None where
        there is one head, or each has its own table.
        """
        if self.common_HH is None or self.heads == 1 or not self.reads:
            return None
        return self.common_HH / (self.reads / self.heads)

    @property
    def uniform_overlap(self) -> float:
        """The overlap of independent heads that read uniformly: topk / slots."""
        return self.reads / self.heads / self.tokens / self.slots

    def as_json(self) -> dict[str, Any]:
        """The memory's entry in `usage-report --format json`, all numbers unrounded.

        `mass` and `heads` (or `tables`) weigh reads by their weight, `count` counts them. `uniform` is what as many
        uniformly random reads give by count (of one table, where each head has its own), `uniform_mass` what they give
        by mass, and `uniform_head` the mean of that over single heads.
        """
        unit = "head" if self.shared else "table"
        entry = {
            "layer": self.layer,
            "name": self.name,
            "kind": self.kind,
            "slots": self.slots,
            "tokens": self.tokens,
            "reads": self.reads,
            "uniform": self.uniform,
            "uniform_mass": self.uniform_mass,
            "uniform_head": self.uniform_head,
            "mass": measures(self.masses_S),
            "count": measures(self.counts_S),
            f"{unit}s": [
                {unit: number, "usage": found["usage"], "kl": found["kl"]}
                for number, found in enumerate(map(measures, self.masses_HK), start=1)
            ],
        }
        if self.overlap_HH is None:
            return entry | dict.fromkeys(("head_overlap", "head_overlap_uniform", "head_overlap_matrix"))
        return entry | {
            "head_overlap": float(self.overlap_HH[~np.eye(self.heads, dtype=bool)].mean()),
            "head_overlap_uniform": self.uniform_overlap,
            "head_overlap_matrix": self.overlap_HH.tolist(),
        }

    def as_event(self) -> dict[str, Any]:
        """The memory's entry in a `valid` line of metrics.jsonl: usage and KL of the mass, and of uniform reading."""
        mass = measures(self.masses_S)
        return {
            "layer": self.layer,
            "name": self.name,
            "usage": mass["usage"],
            "kl": mass["kl"],
            "uniform": self.uniform_mass,
        }

    @property
    def uniform(self) -> Measures:
        """What as many uniformly random reads give by count; of one table, where each head has its own."""
        return uniform_reading(self.counts_HK.shape[1], self.reads if self.shared else self.tokens)

    @cached_property
    def shares_H(self) -> NDArray[np.float64]:
        """float64 (H,): each head's share of the mass; zeros where there is no mass."""
        masses_H = self.masses_HK.sum(axis=1)
        return masses_H / (masses_H.sum() or 1.0)

    @property
    def effective_reads(self) -> int:
        """How many reads of equal weight scatter as much as these: of the memory, or of a table on average."""
        if self.shared:
            return effective_reads(self.masses_HK.sum(), self.squares_H.sum())
        return round(fmean(map(effective_reads, self.masses_HK.sum(axis=1), self.squares_H)))

    @property
    def uniform_mass(self) -> Measures:
        """What the same reads give by mass if each keeps its weight and falls on a random slot (of its table).

        The expected KL is that of `effective_reads` reads of equal weight, to first order: for peaked weights (32 drawn
        from a Dirichlet distribution of 0.3) it is 2 % too high at 100 reads a slot, and 25 % at 3. Tables keep their
        masses, and the difference between these adds to the KL.
        """
        if not self.masses_HK.any():
            return {"usage": 0.0, "kl": None}
        if self.shared:
            return self.uniform | {"kl": uniform_reading(self.slots, self.effective_reads)["kl"]}
        kls = zip(self.shares_H, self._uniform_kls(), strict=True)
        return self.uniform | {"kl": sum(p * (math.log(p * self.heads) + kl) for p, kl in kls if p > 0)}

    @property
    def uniform_head(self) -> Measures:
        """What the reads of one head give at random slots, by mass: the mean over heads that have any."""
        usage = uniform_reading(self.counts_HK.shape[1], self.reads // self.heads)["usage"]
        kls = [kl for kl in self._uniform_kls() if kl is not None]
        return {"usage": usage, "kl": fmean(kls) if kls else None}

    def _uniform_kls(self) -> list[Any]:
        """For each head the KL of its reads at random slots, by mass; None for a head without any."""
        reads = map(effective_reads, self.masses_HK.sum(axis=1), self.squares_H)
        return [uniform_reading(self.counts_HK.shape[1], each)["kl"] for each in reads]


def effective_reads(mass: float, squares: float) -> int:
    """Kish's effective sample size of weights: (sum w)^2 / sum w^2.

    The masses of slots that are drawn at random for each weight vary as much as those of so many equal weights.

    Args:
        mass: the sum of the weights.
        squares: the sum of their squares.
    """
    return round(float(mass**2 / squares)) if squares > 0 else 0


def measures(reads_S: NDArray[Any]) -> Measures:
    """How evenly reads spread over slots.

    With S slots and z the reads divided by their sum:

    - usage: the fraction of slots with z != 0 (PKM section 4.2);
    - kl: log S + sum z log z, in nats: 0 for uniform reading, log S for a single slot (PKM section 4.2);
    - gini: 0 for uniform reading, 1 - 1/S for a single slot (XLM's value is lower by 1/S);
    - top50, top90, top99: the smallest number of slots that hold that percentage of the reads;
    - effective: exp of the entropy of z: so many slots, read uniformly, have the same entropy.

    Args:
        reads_S: counts or masses, (slots,), none negative.

    Returns:
        The values above; with no reads, usage 0 and the rest None.
    """
    slots, total = reads_S.size, reads_S.sum()
    if not total > 0:
        return {"usage": 0.0} | dict.fromkeys(("kl", "gini", "top50", "top90", "top99", "effective"))
    used = np.sort(reads_S[reads_S != 0])[::-1]
    z = used / total
    kl = max(0.0, math.log(slots) + float((z * np.log(z)).sum()))
    # Slots in falling order; unread ones come last and add nothing.
    gini = float(((slots + 1 - 2 * np.arange(1, used.size + 1)) * z).sum()) / slots
    held = np.cumsum(used)
    # A float64 sum is good to about 1e-9 of itself: a slot more only because of rounding would be wrong.
    tops = {f"top{p}": int(np.searchsorted(held, p / 100 * total * (1 - 1e-9))) + 1 for p in (50, 90, 99)}
    return {
        "usage": used.size / slots,
        "kl": kl,
        "gini": max(0.0, gini),
        **tops,
        "effective": slots * math.exp(-kl),
    }


def uniform_reading(slots: int, reads: int) -> Measures:
    """What `measures` is expected to give for the counts of so many independent, uniformly random reads.

    With S slots and R reads, usage = 1 - (1 - 1/S)^R. A slot is read n ~ Bin(R, 1/S) times, so that the KL's
    expectation, log S + S E[n/R log n/R], is E[log((1 + m) S/R)] with m ~ Bin(R - 1, 1/S). Where reads are
    very many, the series (S - 1)/2R + (S^2 - 1)/12R^2 + (S^3 - S^2)/12R^3 takes over (Harris 1975: bias of
    the plug-in entropy). Relative error below 1e-9 for 1 to at least 1e12 reads; no reads: usage 0, KL None.
    """
    if reads < 1:
        return {"usage": 0.0, "kl": None}
    if slots == 1:
        return {"usage": 1.0, "kl": 0.0}
    usage = -math.expm1(reads * math.log1p(-1 / slots))
    x = slots / reads
    if reads / slots > MANY_READS:
        kl = (x - 1 / reads) / 2 + (x * x - reads**-2.0) / 12 + (x**3 - x * x / reads) / 12
    else:
        m, chance = reads_of_a_slot(slots, reads - 1)
        kl = float((chance * np.log((1 + m) * x)).sum())
    return {"usage": usage, "kl": kl}


def reads_of_a_slot(slots: int, reads: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """How often one of two or more slots is read by uniformly random reads: Bin(reads, 1/slots).

    Returns:
        Numbers of reads and their probabilities, float64 (window,) each; the window leaves out less than 1e-20.
    """
    mean = reads / slots
    reach = 10 * math.sqrt(mean) + 40
    n = np.arange(max(0, math.floor(mean - reach)), min(reads, math.ceil(mean + reach)) + 1, dtype=np.float64)
    # The ratio of neighbours: unlike factorials, it loses no digits when reads are many.
    steps = np.log((reads - n[:-1]) / (n[1:] * (slots - 1)))
    logs = np.concatenate([[0.0], np.cumsum(steps)])
    chance = np.exp(logs - logs.max())
    return n, chance / chance.sum()
