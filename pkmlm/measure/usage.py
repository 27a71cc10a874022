"""How evenly a memory is read: usage, KL, Gini and overlap from the counts of `UsageCounters` (PKM section 4.2).

Needs no torch, so that kept reports can be read and drawn without it.

H: memory heads (or tables, where each head has its own); L: layers that share a table; K: slots that one head can read;
S: slots of the memory.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pkmlm.memory.address import Addresses, entry_of, memory_label

Measures = dict[str, float | int | None]
SPREAD = ("effective", "top_weight")

# Above this many reads per slot, cancellation makes the binomial sum useless; the series is then good to 1e-12.
MANY_READS = 1e4


@dataclass(frozen=True)
class MemoryUsage:
    """What was read from one memory in one layer, or from the table that several of its layers share.

    Attributes:
        memory: its name in the recipe.
        layer: the block, counted from 1; None: several, which share a table.
        kind: of memory, as its tap says.
        addresses: the names of its slots.
        tokens: positions that were counted.
        counts_HK: int64, reads of each slot by each head; of a pool, by those of all layers, one after the other.
        masses_HK: float64, the same reads, each counted as the absolute value of its weight.
        squares_H: float64, the sum of the squared weights of each head's reads.
        common_HH: int64, slots that two heads both read for one token, summed over tokens; None where each head has a
            table of its own, as in hash layers, and for a pool.
        spread_3: float64, three sums over the heads and tokens whose weights are not all 0: how many reads of equal
            weight these are worth, the share of the largest, and 1; None: not known.
        pool: the layers that share the table; empty: the table is this memory's alone.
        weighing_H: int64, reads of each head whose weight is not 0; None: not known, and taken to be all.
        part: which of the memory's parts in the layer, if it has several: "qkv", "ffn1" and "ffn2" of hash tables.
    """

    memory: str
    layer: int | None
    kind: str
    addresses: Addresses
    tokens: int
    counts_HK: NDArray[np.int64]
    masses_HK: NDArray[np.float64]
    squares_H: NDArray[np.float64]
    common_HH: NDArray[np.int64] | None
    spread_3: NDArray[np.float64] | None = None
    pool: tuple[int, ...] = ()
    weighing_H: NDArray[np.int64] | None = None
    part: str = ""

    @property
    def entry(self) -> dict[str, Any]:
        """What its entry in a report begins with."""
        return entry_of(self.memory, self.layer, self.kind, self.part)

    @property
    def label(self) -> str:
        """Its name in reports: "layer 3 pkm"."""
        return memory_label(self.entry)

    @property
    def is_pool(self) -> bool:
        """Whether this is a table that layers share, with the heads of all of them."""
        return self.layer is None

    @property
    def shared(self) -> bool:
        """Whether all heads read the same slots; otherwise each has a table of its own."""
        return self.common_HH is not None or self.is_pool

    @property
    def heads(self) -> int:
        """Heads, or tables."""
        return self.counts_HK.shape[0]

    @property
    def slots(self) -> int:
        """Slots of the whole memory, S."""
        return self.addresses.slots

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
        """float64 (H, H): the mean share of its slots that a head has in common with another for one token; None if
        there is one head, each has its own table, or overlap was not counted.
        """
        if self.common_HH is None or self.heads == 1 or not self.common_HH.any():  # a head shares all slots with itself
            return None
        return self.common_HH / (self.reads / self.heads)

    @property
    def topk(self) -> float:
        """Slots that a head reads for one token, all of them distinct."""
        return self.reads / self.heads / self.tokens if self.tokens else 0.0

    @property
    def spread(self) -> dict[str, float | None]:
        """Averages over a head's weights for a token: `effective`, exp of their entropy, which is the number of equal
        weights that have this entropy; and `top_weight`, the share of the largest. None if all are 0 or not known, and
        for tables, where a look-up reads one row.
        """
        effective, top, number = (0, 0, 0) if self.spread_3 is None or not self.shared else self.spread_3.tolist()
        return {"effective": effective / number, "top_weight": top / number} if number else dict.fromkeys(SPREAD)

    @cached_property
    def masses_LK(self) -> NDArray[np.float64]:
        """float64 (L, K), of a pool: the mass that each layer gives to each slot."""
        return self.masses_HK.reshape(len(self.pool), -1, self.slots).sum(axis=1)

    @cached_property
    def layer_overlap_LL(self) -> NDArray[np.float64] | None:
        """float64 (L, L), of a pool: the share of mass that two layers give to the same slots: the sum over slots of
        the smaller of both layers' shares; 1 if the shares are equal, 0 if the layers have no slot in common.
        None if a layer has no mass, and for a memory that is not a pool.
        """
        if not self.is_pool or not self.masses_LK.any(axis=1).all():
            return None
        shares_LK = self.masses_LK / self.masses_LK.sum(axis=1, keepdims=True)
        return np.array([np.minimum(shares_K, shares_LK).sum(axis=1) for shares_K in shares_LK])

    @property
    def uniform_overlap(self) -> float:
        """The overlap of independent heads that read uniformly: topk / slots."""
        return self.topk / self.slots

    def as_json(self) -> dict[str, Any]:
        """The memory's entry in `usage-report --format json`, all numbers unrounded.

        `addresses` says how slots are called (see `Addresses`). `mass` and `heads` (or `tables`) count reads by the
        size of their weight, `count` counts each as 1. `uniform` is what as many uniformly random reads give by count
        (of one table, where each head has its own), `uniform_mass` what they give by mass, and `uniform_head` the mean
        of that over single heads. `effective` and `top_weight`: see `spread`. A pool has the `heads` of all its
        `layers`, and `layer_overlap`, the mean of `layer_overlap_LL` over pairs.
        """
        unit = "head" if self.shared else "table"
        entry: dict[str, Any] = {
            **self.entry,
            "slots": self.slots,
            "addresses": {"columns": self.addresses.columns, "tables": self.addresses.tables},
            "tokens": self.tokens,
            "reads": self.reads,
            **self.spread,
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
        if self.pool:
            entry["pool"] = list(self.pool)
        if self.is_pool:
            entry["layers"] = [
                {"layer": layer, "usage": found["usage"], "kl": found["kl"]}
                for layer, found in zip(self.pool, map(measures, self.masses_LK), strict=True)
            ]
            overlap_LL = self.layer_overlap_LL
            entry["layer_overlap"] = None if overlap_LL is None else mean_of_pairs(overlap_LL)
            entry["layer_overlap_matrix"] = None if overlap_LL is None else overlap_LL.tolist()
        if self.overlap_HH is None:
            return entry | dict.fromkeys(("head_overlap", "head_overlap_uniform", "head_overlap_matrix"))
        return entry | {
            "head_overlap": mean_of_pairs(self.overlap_HH),
            "head_overlap_uniform": self.uniform_overlap,
            "head_overlap_matrix": self.overlap_HH.tolist(),
        }

    def as_event(self) -> dict[str, Any]:
        """The memory's entry in a `valid` line of metrics.jsonl: usage and KL of the mass, and of uniform reading."""
        mass = measures(self.masses_S)
        return {
            **self.entry,
            "usage": mass["usage"],
            "kl": mass["kl"],
            "uniform": self.uniform_mass,
            **self.spread,
        }

    @property
    def uniform(self) -> Measures:
        """What as many uniformly random reads give by count; of one table, where each head has its own."""
        return self._uniform(self.topk)

    def _uniform(self, topk: float) -> Measures:
        """The same, if each search finds `topk` slots."""
        return uniform_reading(self.counts_HK.shape[1], self.tokens * (self.heads if self.shared else 1), topk)

    @property
    def weighing(self) -> float:
        """Slots that a head reads for one token with a weight that is not 0, on average."""
        if self.weighing_H is None:
            return self.topk
        return float(self.weighing_H.mean()) / self.tokens if self.tokens else 0.0

    @property
    def equal_draws(self) -> tuple[int, float]:
        """Draws of equal weight that scatter as much as these reads would at random slots: how many, and the slots of
        each (see `uniform_mass`); for the memory, or for a table on average.
        """
        if self.shared:
            return self._equal_draws(self.masses_HK.sum(), self.squares_H.sum(), self.tokens * self.heads)
        return round(fmean(draws for draws, _ in self._equal_draws_H())), 1.0

    @property
    def uniform_mass(self) -> Measures:
        """What the same reads give by mass if each keeps its weight and falls on a random slot (of its table), those of
        one head for one token on different slots.

        With N searches (a head, a token) whose k weights w sum to 1, a random slot's mass has the variance
        sum w^2 / S - N / S^2, as with N draws of n / N slots with equal weights, where n = N^2 / sum w^2 is Kish's
        effective number of reads. The KL is that of such draws, which is equal to first order. For peaked weights (32
        drawn from a Dirichlet distribution of 0.3) it is 1 % too high at 100 reads per slot, and 26 % at 3. The reads
        of a table are n draws of one slot. Tables keep their masses, and the differences between these add to the KL.
        """
        if not self.masses_HK.any():
            return {"usage": 0.0, "kl": None}
        if self.shared:
            return self._uniform(self.weighing) | {"kl": uniform_reading(self.slots, *self.equal_draws)["kl"]}
        masses_H = self.masses_HK.sum(axis=1)
        kls = zip(masses_H / masses_H.sum(), self._uniform_kls(), strict=True)
        return self._uniform(self.weighing) | {"kl": sum(p * (math.log(p * self.heads) + kl) for p, kl in kls if p > 0)}

    @property
    def uniform_head(self) -> Measures:
        """What the reads of one head give at random slots, by mass: the mean over heads that have any."""
        usage = uniform_reading(self.counts_HK.shape[1], self.tokens, self.weighing)["usage"]
        kls = [kl for kl in self._uniform_kls() if kl is not None]
        return {"usage": usage, "kl": fmean(kls) if kls else None}

    def _uniform_kls(self) -> list[Any]:
        """For each head the KL of its reads at random slots, by mass; None for a head without any."""
        return [uniform_reading(self.counts_HK.shape[1], *draws)["kl"] for draws in self._equal_draws_H()]

    def _equal_draws_H(self) -> list[tuple[int, float]]:
        """The `equal_draws` of each head."""
        sums = zip(self.masses_HK.sum(axis=1), self.squares_H, strict=True)
        return [self._equal_draws(mass, squares, self.tokens) for mass, squares in sums]

    def _equal_draws(self, mass: float, squares: float, searches: int) -> tuple[int, float]:
        """The `equal_draws` of a number of searches, given the sum of their weights and the sum of their squares."""
        effective_reads = float(mass**2 / squares) if squares > 0 else 0.0
        if self.shared and effective_reads:
            return searches, effective_reads / searches
        return round(effective_reads), 1.0


def with_pools(memories: list[MemoryUsage]) -> list[MemoryUsage]:
    """The memories of a model in its layers; and then, each as one more with the heads of all of its layers, the tables
    that layers share, if all of these are given.
    """
    sharing: dict[str, list[MemoryUsage]] = {}
    for memory in memories:
        if memory.pool:
            sharing.setdefault(memory.memory, []).append(memory)
    return memories + [pool_of(layers) for layers in sharing.values() if len(layers) == len(layers[0].pool)]


def pool_of(layers: list[MemoryUsage]) -> MemoryUsage:
    """The table that layers of a memory share, with the heads of all of them."""
    weighing = [memory.weighing_H for memory in layers if memory.weighing_H is not None]
    return MemoryUsage(
        memory=layers[0].memory,
        layer=None,
        kind=layers[0].kind,
        addresses=layers[0].addresses,
        tokens=layers[0].tokens,
        counts_HK=np.concatenate([memory.counts_HK for memory in layers]),
        masses_HK=np.concatenate([memory.masses_HK for memory in layers]),
        squares_H=np.concatenate([memory.squares_H for memory in layers]),
        common_HH=None,
        spread_3=np.sum([memory.spread_3 for memory in layers if memory.spread_3 is not None], axis=0),
        pool=tuple(memory.layer for memory in layers if memory.layer),
        weighing_H=np.concatenate(weighing) if len(weighing) == len(layers) else None,
    )


def mean_of_pairs(matrix_HH: NDArray[np.float64]) -> float:
    """The mean of the entries off the diagonal."""
    return float(matrix_HH[~np.eye(len(matrix_HH), dtype=bool)].mean())


def measures(reads_S: NDArray[Any]) -> Measures:
    """How evenly reads spread over slots.

    With S slots and z the reads divided by their sum:

    - usage: the fraction of slots with z != 0 (PKM section 4.2);
    - kl: log S + sum z log z, in nats: 0 for uniform reading, log S for a single slot (PKM section 4.2);
    - gini: 0 for uniform reading, 1 - 1/S for a single slot (XLM's value is lower by 1/S);
    - top50, top90, top99: the smallest number of slots that hold that percentage of the reads.

    Args:
        reads_S: counts or masses, (slots,), none negative.

    Returns:
        The values above; with no reads, usage 0 and the rest None.
    """
    slots, total = reads_S.size, reads_S.sum()
    if not total > 0:
        return {"usage": 0.0} | dict.fromkeys(("kl", "gini", "top50", "top90", "top99"))
    used = np.sort(reads_S[reads_S != 0])[::-1]
    z = used / total
    kl = max(0.0, math.log(slots) + float((z * np.log(z)).sum()))
    # Slots in falling order; unread ones come last and add nothing.
    gini = float(((slots + 1 - 2 * np.arange(1, used.size + 1)) * z).sum()) / slots
    held = np.cumsum(used)
    # A float64 sum is good to about 1e-9 of itself; rounding must not add a slot.
    tops = {f"top{p}": int(np.searchsorted(held, p / 100 * total * (1 - 1e-9))) + 1 for p in (50, 90, 99)}
    return {"usage": used.size / slots, "kl": kl, "gini": max(0.0, gini), **tops}


def uniform_reading(slots: int, draws: int, topk: float = 1.0) -> Measures:
    """The usage and KL (see `measures`) to expect from independent, uniformly random draws of topk distinct slots each.

    A slot is read n ~ Bin(N, p) times, with S slots, N draws and p = topk/S, and R = N topk reads are made. Hence
    usage = 1 - (1 - p)^N, and the KL's expectation, log S + S E[n/R log n/R], is E[log((1 + m) S/R)] with
    m ~ Bin(N - 1, p). Both are exact. For very many reads, the series
    (S/R - 1/N)/2 + (S^2/R^2 - 1/N^2)/12 + (S^3/R^3 - S^2/(R^2 N))/12 takes over (for topk = 1: Harris 1975, bias of the
    plug-in entropy). Relative error below 1e-9 for 1 to at least 1e12 reads.

    Args:
        slots: S.
        draws: N; without any read, usage is 0 and KL None.
        topk: slots of a draw, 0 to S; as a mean, it need not be a whole number.
    """
    if draws < 1 or topk <= 0:
        return {"usage": 0.0, "kl": None}
    if topk >= slots:
        return {"usage": 1.0, "kl": 0.0}
    usage = -math.expm1(draws * math.log1p(-topk / slots))
    x = slots / (draws * topk)
    if draws * topk / slots > MANY_READS:
        kl = (x - 1 / draws) / 2 + (x * x - float(draws) ** -2.0) / 12 + (x**3 - x * x / draws) / 12
    else:
        m, chance = reads_of_a_slot(slots, draws - 1, topk)
        kl = float((chance * np.log((1 + m) * x)).sum())
    return {"usage": usage, "kl": max(0.0, kl)}


def reads_of_a_slot(slots: int, draws: int, topk: float = 1.0) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """How often one slot is read by uniformly random draws of topk slots each: Bin(draws, topk/slots).

    Returns:
        Numbers of reads and their probabilities, float64 (window,) each; what the window leaves out is below 1e-20.
    """
    if topk >= slots:
        return np.array([float(draws)]), np.ones(1)
    mean = draws * topk / slots
    reach = 10 * math.sqrt(mean) + 40
    n = np.arange(max(0, math.floor(mean - reach)), min(draws, math.ceil(mean + reach)) + 1, dtype=np.float64)
    # The ratio of neighbours: unlike factorials, it loses no digits when reads are many.
    steps = np.log((draws - n[:-1]) * topk / (n[1:] * (slots - topk)))
    logs = np.concatenate([[0.0], np.cumsum(steps)])
    chance = np.exp(logs - logs.max())
    return n, chance / chance.sum()
