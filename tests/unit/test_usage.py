"""Usage: the numbers against hand and brute force, the counters against plain Python."""

import copy
import json
import math
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pkmlm.errors import UserError
from pkmlm.measure import counters as counting
from pkmlm.measure import usage as numbers
from pkmlm.measure.counters import UsageCounters
from pkmlm.measure.usage import MemoryUsage, measures, reads_of_a_slot, uniform_reading
from pkmlm.memory.address import Addresses
from pkmlm.memory.base import UsageTap
from pkmlm.report.metrics import METRICS
from pkmlm.report.tables import usage_tables
from pkmlm.report.usage_report import load_usage, save_usage

TABLES = Addresses(8, 4, tables=True)


def tap_of(slots: int, heads: int, layer: int = 1, kind: str = "product-key", **options: Any) -> UsageTap:
    """The tap of a memory whose heads read the same slots."""
    return UsageTap(layer, options.pop("name", "pkm"), kind, Addresses(slots), heads, **options)


def tables_of(slots: int, tables: int, part: str, layer: int = 1) -> UsageTap:
    """The tap of hash tables."""
    addresses = Addresses(slots, slots // tables, tables=True)
    return UsageTap(layer, "tables", "hash", addresses, tables, part=part, shared=False)


def test_measures_by_hand() -> None:
    found = measures(np.array([1, 0, 4, 1, 2, 0, 0, 0]))
    entropy = 0.5 * math.log(2) + 0.25 * math.log(4) + 2 * 0.125 * math.log(8)
    assert found["usage"] == 0.5
    assert found["kl"] == pytest.approx(math.log(8) - entropy)
    assert (found["top50"], found["top90"], found["top99"]) == (1, 4, 4)


@pytest.mark.parametrize("slots", [1, 7, 100, 1000])
def test_measures_at_both_ends(slots: int) -> None:
    even = measures(np.full(slots, 0.1))
    assert even["usage"] == 1.0
    assert even["kl"] == pytest.approx(0.0, abs=1e-12)
    assert even["gini"] == pytest.approx(0.0, abs=1e-12)
    assert [even[f"top{p}"] for p in (50, 90, 99)] == [-(-slots * p // 100) for p in (50, 90, 99)]
    single = measures(np.eye(slots)[slots // 2])
    assert single["kl"] == pytest.approx(math.log(slots))
    assert single["gini"] == pytest.approx(1 - 1 / slots)
    assert single["usage"] == 1 / slots
    assert single["top99"] == 1


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40).filter(any))
@settings(max_examples=100, deadline=None)
def test_gini_and_tops_equal_their_definitions(reads: list[int]) -> None:
    found, total = measures(np.array(reads)), sum(reads)
    pairs = sum(abs(a - b) for a in reads for b in reads)
    assert found["gini"] == pytest.approx(pairs / (2 * len(reads) * total), abs=1e-12)
    falling = sorted(reads, reverse=True)
    for percent in (50, 90, 99):
        least = next(n for n in range(1, len(reads) + 1) if 100 * sum(falling[:n]) >= percent * total)
        assert found[f"top{percent}"] == least


def exact_kl(slots: int, reads: int) -> float:
    chance = [Fraction(math.comb(reads, n) * (slots - 1) ** (reads - n), slots**reads) for n in range(reads + 1)]
    entropy = sum(float(chance[n]) * (n / reads) * math.log(n / reads) for n in range(1, reads + 1))
    return math.log(slots) + slots * entropy


@pytest.mark.parametrize(("slots", "reads"), [(2, 1), (2, 3), (5, 40), (10, 7), (16, 300), (1000, 2)])
def test_uniform_reading_equals_the_binomial_sum(slots: int, reads: int) -> None:
    found = uniform_reading(slots, reads)
    assert found["kl"] == pytest.approx(exact_kl(slots, reads), rel=1e-10, abs=0)
    assert found["usage"] == pytest.approx(float(1 - (1 - Fraction(1, slots)) ** reads), rel=1e-12)


@pytest.mark.parametrize("slots", [2, 16, 1000, 10**8])
def test_uniform_reading_sum_and_series_meet(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = int(slots * numbers.MANY_READS)
    by_sum = uniform_reading(slots, reads)["kl"]
    monkeypatch.setattr(numbers, "MANY_READS", 0)
    assert uniform_reading(slots, reads)["kl"] == pytest.approx(by_sum, rel=3e-10, abs=0)


def test_uniform_reading_at_its_ends() -> None:
    assert uniform_reading(100, 0) == {"usage": 0.0, "kl": None}
    assert uniform_reading(1, 10) == {"usage": 1.0, "kl": 0.0}
    assert uniform_reading(100, 1) == {"usage": pytest.approx(0.01), "kl": pytest.approx(math.log(100))}
    assert uniform_reading(2, 10**12)["kl"] == pytest.approx(0.5e-12, rel=1e-6, abs=0)
    assert uniform_reading(10**6, 10**12)["kl"] == pytest.approx(0.5e-6, rel=1e-5, abs=0)
    falling = [uniform_reading(1000, 10**power)["kl"] for power in range(13)]
    assert falling == sorted(falling, reverse=True)


def sampled(draws: int, topk: int, slots: int, random: np.random.Generator) -> np.ndarray:
    """Slots that uniformly random draws read, (draws, topk): those of one draw differ."""
    if topk == 1:
        return random.integers(0, slots, (draws, 1))
    return random.random((draws, slots)).argsort(axis=1)[:, :topk]


@pytest.mark.parametrize(("slots", "draws", "topk"), [(3, 2, 2), (4, 3, 1), (4, 3, 3), (5, 1, 3), (5, 3, 2), (4, 3, 4)])
def test_uniform_reading_is_the_mean_over_all_draws(slots: int, draws: int, topk: int) -> None:
    choices = [np.isin(range(slots), choice) for choice in combinations(range(slots), topk)]
    counts = [sum(map(np.int64, drawn)) for drawn in product(choices, repeat=draws)]
    found = uniform_reading(slots, draws, topk)
    assert found["kl"] == pytest.approx(np.mean([measures(n)["kl"] for n in counts]), rel=1e-12, abs=1e-15)
    assert found["usage"] == pytest.approx(np.mean([measures(n)["usage"] for n in counts]), rel=1e-12)


@pytest.mark.parametrize(("slots", "draws", "topk"), [(64, 500, 32), (64, 40, 8), (16, 200_000, 12), (4096, 100, 32)])
def test_uniform_reading_is_what_sampling_gives(slots: int, draws: int, topk: int) -> None:
    random, found = np.random.default_rng(0), uniform_reading(slots, draws, topk)
    times = max(4, 100_000 // (draws * slots))
    drawn = [measures(np.bincount(sampled(draws, topk, slots, random).ravel(), minlength=slots)) for _ in range(times)]
    error = 4 * math.sqrt(2 / slots / times)  # of the KL, which is nearly a chi-squared number
    assert np.mean([each["kl"] for each in drawn]) == pytest.approx(found["kl"], rel=error)
    assert np.mean([each["usage"] for each in drawn]) == pytest.approx(found["usage"], rel=0.01)


@pytest.mark.parametrize(("kind", "slots", "topk"), [("product-key", 64, 32), ("flat-key", 256, 8), ("hash", 256, 1)])
def test_uniform_mass_is_what_sampling_gives(kind: str, slots: int, topk: int) -> None:
    """A head's weights are as uneven as those of a peaked softmax; of tables, one has three times the other's."""
    random, shared = np.random.default_rng(0), kind != "hash"
    tokens = 2000 if shared else 40_000  # the formula is of first order in one over reads
    kls, floors, of_heads, head_floors = [], [], [], []
    for _ in range(20):
        slots_NHk = sampled(tokens * 2, topk, slots, random).reshape(tokens, 2, topk)
        weights_NHk = random.exponential(size=(tokens, 2, topk)) ** 2
        if shared:
            weights_NHk /= weights_NHk.sum(axis=2, keepdims=True)
        else:
            weights_NHk *= np.array([[1], [3]])
            slots_NHk += np.array([[0], [slots]])
        addresses = Addresses(slots) if shared else Addresses(2 * slots, slots, tables=True)
        tap = UsageTap(1, "memory", kind, addresses, 2, shared=shared)
        with UsageCounters(model := Reader(tap)) as counters:
            model((torch.from_numpy(slots_NHk), torch.from_numpy(weights_NHk)))
        entry = counters.memories()[0].as_json()
        kls.append(entry["mass"]["kl"])
        floors.append(entry["uniform_mass"]["kl"])
        of_heads += [head["kl"] for head in entry["heads" if shared else "tables"]]
        head_floors.append(entry["uniform_head"]["kl"])
    error = 4 * math.sqrt(2 / slots / 20)
    assert np.mean(kls) == pytest.approx(np.mean(floors), rel=error)
    assert np.mean(of_heads) == pytest.approx(np.mean(head_floors), rel=error)


def test_an_overlap_that_was_not_counted_is_not_known() -> None:
    tap = tap_of(8, 2)
    for overlap, expected in ((True, 0.5), (False, None)):
        with UsageCounters(model := Reader(tap), overlap=overlap) as counters:
            model((torch.tensor([[[0, 1], [1, 2]]]), torch.full((1, 2, 2), 0.5)))
        assert counters.memories()[0].as_json()["head_overlap"] == expected


def test_reads_of_a_slot_have_the_binomial_s_moments() -> None:
    for slots, reads in ((10, 3), (1000, 10**6), (10**6, 10**9)):
        n, chance = reads_of_a_slot(slots, reads)
        mean = float((n * chance).sum())
        assert mean == pytest.approx(reads / slots, rel=1e-9)
        variance = reads / slots * (1 - 1 / slots)
        assert float(((n - mean) ** 2 * chance).sum()) == pytest.approx(variance, rel=1e-6)


class Reader(nn.Module):
    """Memories whose reads are given."""

    def __init__(self, *taps: UsageTap):
        super().__init__()
        self.taps = nn.ModuleList(taps)

    def forward(self, *reads: tuple[Tensor, Tensor]) -> None:
        for tap, (slots_NHk, weights_NHk) in zip(self.taps, reads, strict=True):
            tap(slots_NHk, weights_NHk)


def draw(tokens: int, heads: int, topk: int, slots: int, seed: int) -> tuple[Tensor, Tensor]:
    """Reads as a memory makes them: a head's slots differ, its weights sum to 1."""
    random = torch.Generator().manual_seed(seed)
    slots_NHk = torch.rand(tokens, heads, slots, generator=random).topk(topk).indices
    return slots_NHk, torch.rand(tokens, heads, topk, generator=random).softmax(-1)


def test_counters_equal_plain_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "COMPARISONS", {"cpu": 40})  # several chunks of tokens, the last not full
    heads, topk, slots = 3, 4, 20
    model = Reader(tap_of(slots, heads, layer=5))
    counts: Counter[tuple[int, int]] = Counter()
    masses: Counter[tuple[int, int]] = Counter()
    squares, common, tokens = [0.0] * heads, np.zeros((heads, heads), dtype=int), 0
    effective, top = [], []
    with UsageCounters(model) as counters:
        for seed, number in enumerate((7, 10, 1)):
            slots_NHk, weights_NHk = draw(number, heads, topk, slots, seed)
            mask_N = torch.rand(number, generator=torch.Generator().manual_seed(seed)) < 0.6
            counters.only(mask_N)
            model((slots_NHk, weights_NHk))
            for token in mask_N.nonzero().flatten().tolist():
                tokens += 1
                read = [set(slots_NHk[token, h].tolist()) for h in range(heads)]
                common += np.array([[len(a & b) for b in read] for a in read])
                for h in range(heads):
                    weights = weights_NHk[token, h].tolist()  # their sum is 1
                    effective.append(math.exp(-sum(weight * math.log(weight) for weight in weights)))
                    top.append(max(weights))
                    for slot, weight in zip(slots_NHk[token, h], weights_NHk[token, h], strict=True):
                        counts[h, int(slot)] += 1
                        masses[h, int(slot)] += float(weight)
                        squares[h] += float(weight) ** 2
    (found,) = counters.memories()
    assert found.tokens == tokens > 0
    assert found.counts_HK.dtype == np.int64
    assert found.masses_HK.dtype == np.float64
    for h in range(heads):
        for slot in range(slots):
            assert found.counts_HK[h, slot] == counts[h, slot]
            assert found.masses_HK[h, slot] == pytest.approx(masses[h, slot], abs=1e-12)
    assert found.common_HH is not None
    assert (found.common_HH == common).all()
    assert found.masses_S.sum() == pytest.approx(tokens * heads)
    entry = found.as_json()
    assert entry["reads"] == tokens * heads * topk == found.counts_S.sum()
    pairs = [common[a, b] / (tokens * topk) for a in range(heads) for b in range(heads) if a != b]
    assert entry["head_overlap"] == pytest.approx(np.mean(pairs))
    assert entry["head_overlap_uniform"] == topk / slots
    assert [head["head"] for head in entry["heads"]] == [1, 2, 3]
    assert entry["uniform"] == uniform_reading(slots, tokens * heads, topk)
    assert entry["effective"] == pytest.approx(np.mean(effective))
    assert entry["top_weight"] == pytest.approx(np.mean(top))
    assert found.squares_H == pytest.approx(squares)
    mass, square = tokens * heads, sum(squares)
    assert entry["uniform_mass"]["usage"] == entry["uniform"]["usage"]
    reads = mass**2 / square / (tokens * heads)
    assert entry["uniform_mass"]["kl"] == pytest.approx(uniform_reading(slots, tokens * heads, reads)["kl"])
    of_heads = [uniform_reading(slots, tokens, tokens / square)["kl"] for square in squares]
    assert entry["uniform_head"] == {
        "usage": uniform_reading(slots, tokens, topk)["usage"],
        "kl": pytest.approx(np.mean(of_heads)),
    }
    assert found.as_event() == {
        "memory": "pkm",
        "layer": 5,
        "kind": "product-key",
        "usage": entry["mass"]["usage"],
        "kl": entry["mass"]["kl"],
        "uniform": entry["uniform_mass"],
        "effective": entry["effective"],
        "top_weight": entry["top_weight"],
    }


def test_weights_count_by_their_size_and_a_head_of_zeros_for_nothing() -> None:
    """Where scores are weights, they have signs; where relu makes them, all may be 0."""
    model = Reader(tap_of(4, 2))
    weights_1Hk = torch.tensor([[[-3.0, 1.0], [0.0, 0.0]]])
    with UsageCounters(model) as counters:
        model((torch.tensor([[[0, 1], [2, 3]]]), weights_1Hk))
    (found,) = counters.memories()
    assert found.masses_HK.tolist() == [[3, 1, 0, 0], [0, 0, 0, 0]]
    assert found.reads == 4
    entry = found.as_json()
    assert entry["top_weight"] == 0.75
    assert entry["effective"] == pytest.approx(math.exp(-0.75 * math.log(0.75) - 0.25 * math.log(0.25)))


def test_random_reads_without_weight_use_no_slot_by_mass() -> None:
    """Of reads at random slots of which relu leaves one in six a weight, usage by mass is that of the floor."""
    random = torch.Generator().manual_seed(0)
    taps = [tap_of(4096, 2, layer=layer, pool=(1, 2)) for layer in (1, 2)]
    tables = tables_of(4096, 2, "qkv", layer=3)
    model = Reader(*taps, tables)
    drawn = [torch.rand(2048, 4096, generator=random).topk(8).indices.view(1024, 2, 8) for _ in taps]
    buckets = torch.randint(2048, (1024, 2, 1), generator=random) + torch.tensor([[0], [2048]])
    weights = [torch.randn(reads.shape, generator=random).sub(1).relu() for reads in (*drawn, buckets)]
    with UsageCounters(model) as counters:
        model(*zip((*drawn, buckets), weights, strict=True))
    for entry in (memory.as_json() for memory in counters.memories()):
        assert entry["uniform_mass"]["usage"] == pytest.approx(entry["mass"]["usage"], rel=0.03)
        assert entry["uniform_mass"]["usage"] < 0.75 * entry["uniform"]["usage"]
        heads = entry["heads"] if "heads" in entry else entry["tables"]
        assert entry["uniform_head"]["usage"] == pytest.approx(np.mean([head["usage"] for head in heads]), rel=0.03)


def test_a_shared_table_is_one_memory_more() -> None:
    taps = [tap_of(4, 2, layer=layer, pool=(2, 5)) for layer in (2, 5)]
    model = Reader(tables_of(4, 2, "qkv"), *taps)
    of_hash = torch.tensor([[[0], [2]]]), torch.ones(1, 2, 1)
    reads = [
        (torch.tensor([[[0, 1], [1, 0]]]), torch.tensor([[[0.5, 0.5], [0.25, 0.75]]])),  # slots 0, 1: 1.25, 0.75
        (torch.tensor([[[1, 2], [2, 1]]]), torch.tensor([[[1.0, 0.0], [0.5, 0.5]]])),  # slots 1, 2: 1.5, 0.5
    ]
    with UsageCounters(model) as counters:
        model(of_hash, *reads)
    hashed, *layers, pool = counters.memories()
    assert [memory.label for memory in (hashed, *layers, pool)] == [
        "layer 1 tables qkv",
        "layer 2 pkm",
        "layer 5 pkm",
        "pkm",
    ]
    assert pool.counts_S.tolist() == [2, 4, 2, 0]
    assert pool.masses_S.tolist() == [1.25, 2.25, 0.5, 0]
    entry, found = pool.as_json(), measures(np.array([1.25, 2.25, 0.5, 0]))
    assert entry["mass"] == found
    assert entry["mass"]["usage"] == 0.75
    assert [layer["layer"] for layer in entry["layers"]] == [2, 5]
    assert [layer["usage"] for layer in entry["layers"]] == [0.5, 0.5]
    assert entry["layer_overlap"] == pytest.approx(min(0.75, 1.5) / 2)
    assert entry["uniform"] == uniform_reading(4, 4, 2)
    assert len(entry["heads"]) == 4
    assert entry["effective"] == pytest.approx(np.mean([layer.as_json()["effective"] for layer in layers]))
    assert entry["pool"] == layers[0].as_json()["pool"] == [2, 5]
    assert "pool" not in hashed.as_json()
    assert hashed.as_json()["effective"] is None, "each look-up reads one row"
    with UsageCounters(model, taps[:1]) as some:
        model(of_hash, *reads)
    assert [memory.label for memory in some.memories()] == ["layer 2 pkm"], "half of a pool is none"
    tables = usage_tables(
        [{"run": "r", "step": 1, "split": "test", "memories": [m.as_json() for m in (*layers, pool)]}]
    )
    assert [row[0] for row in tables[1].rows] == ["2 pkm", "5 pkm", "pkm"]


def test_each_memory_has_a_pool_of_its_own() -> None:
    places = {"one": (1, 3), "two": (2, 3)}
    taps = [tap_of(4, 1, layer=layer, name=name, pool=pool) for name, pool in places.items() for layer in pool]
    model = Reader(*sorted(taps, key=lambda tap: tap.layer))
    with UsageCounters(model) as counters:
        model(*((torch.tensor([[[tap.layer]]]), torch.full((1, 1, 1), 1.0 * tap.layer)) for tap in model.taps))
    *layers, one, two = counters.memories()
    assert [memory.label for memory in layers] == ["layer 1 one", "layer 2 two", "layer 3 one", "layer 3 two"]
    assert [(memory.label, memory.pool) for memory in (one, two)] == [("one", (1, 3)), ("two", (2, 3))]
    assert (one.masses_S.tolist(), two.masses_S.tolist()) == ([0, 1, 0, 3], [0, 0, 2, 3])
    entries = [memory.as_json() for memory in counters.memories()]
    assert METRICS["usage"].read({"usage": entries}) == 0.5, "over tables: layers that share one count once"
    assert [entry["layer"] for entry in entries if "layers" in entry] == [None, None]


def test_a_shared_table_is_no_memory_more_where_a_layer_has_no_mass() -> None:
    model = Reader(*(tap_of(4, 2, layer=layer, pool=(2, 5)) for layer in (2, 5)))
    slots_1Hk = torch.tensor([[[0, 1], [1, 0]]])
    with UsageCounters(model) as counters:
        model((slots_1Hk, torch.full((1, 2, 2), 0.5)), (slots_1Hk, torch.zeros(1, 2, 2)))
    entries = [memory.as_json() for memory in counters.memories()]
    assert entries[-1]["layer_overlap"] is None
    texts, *others = usage_tables([{"run": "r", "step": 1, "split": "test", "memories": entries}])
    assert texts.rows[0][-1] == 1
    assert ["2, 5", None] in [row for table in others for row in table.rows]


def test_counters_of_hash_tables() -> None:
    model = Reader(tables_of(12, 3, "qkv"))
    rows_N31 = torch.tensor([[0, 4, 8], [0, 5, 11], [0, 7, 11]])[..., None]
    with UsageCounters(model) as counters:
        model((rows_N31, torch.full((3, 3, 1), 0.25)))
    (found,) = counters.memories()
    assert found.counts_HK.tolist() == [[3, 0, 0, 0], [1, 1, 0, 1], [1, 0, 0, 2]]
    assert (found.masses_HK == 0.25 * found.counts_HK).all()
    entry = found.as_json()
    assert entry["slots"] == 12
    assert [table["usage"] for table in entry["tables"]] == [0.25, 0.75, 0.5]
    assert entry["tables"][0]["kl"] == pytest.approx(math.log(4))
    assert entry["uniform"] == uniform_reading(4, 3), "each table is read once a token"
    assert "heads" not in entry
    assert entry["head_overlap"] is None, "tables share nothing"


def test_counters_stay_exact_where_single_precision_saturates() -> None:
    model = Reader(tables_of(2, 1, "ffn1"))
    reads = torch.zeros(1 << 22, 1, 1, dtype=torch.int64), torch.ones(1 << 22, 1, 1)
    with UsageCounters(model) as counters:
        for _ in range(4):
            model(reads)
        model((reads[0][:1], reads[1][:1]))
    (found,) = counters.memories()
    assert found.counts_HK[0, 0] == found.masses_HK[0, 0] == (1 << 24) + 1


def test_a_read_of_no_weight_is_a_read() -> None:
    model = Reader(tap_of(4, 1, kind="flat-key"))
    with UsageCounters(model) as counters:
        model((torch.tensor([[[1, 2]]]), torch.tensor([[[1.0, 0.0]]])))
    entry = counters.memories()[0].as_json()
    assert entry["count"]["usage"] == 0.5
    assert entry["mass"]["usage"] == 0.25
    assert entry["head_overlap"] is None, "one head has none to share with"


def test_reads_without_any_weight_are_told() -> None:
    usage = MemoryUsage("tables", 1, "hash", TABLES, 3, np.full((2, 4), 3), np.zeros((2, 4)), np.zeros(2), None)
    entry = {"run": "r", "step": 1, "split": "test", "memories": [usage.as_json()]}
    assert "0.0%" in "".join(table.render() for table in usage_tables([entry]))


def test_counting_ends_with_the_block_and_models_share_nothing() -> None:
    one, two = (Reader(tap_of(4, 1)) for _ in range(2))
    reads = torch.tensor([[[1, 2]]]), torch.tensor([[[0.5, 0.5]]])
    with UsageCounters(one) as first, UsageCounters(two) as second:
        one(reads)
    one(reads)
    assert first.memories()[0].reads == 2
    assert second.memories()[0].reads == 0
    nothing = second.memories()[0].as_json()
    assert nothing["mass"]["kl"] is None
    assert nothing["uniform"] == {"usage": 0.0, "kl": None}


def test_threads_say_which_positions_of_their_own_calls_count() -> None:
    """All read one slot at the positions that they choose, and another one elsewhere."""
    threads, times, model = 4, 50, Reader(tap_of(8, 1))
    mask_N, inside, together = torch.arange(16) % 2 > 0, list[int](), list[int]()

    def call(thread: int) -> None:
        mine_N = mask_N if thread % 2 else ~mask_N
        slots_N = torch.where(mine_N, 3, 7)
        for _ in range(times):
            counters.only(mine_N)
            model((slots_N.view(-1, 1, 1), torch.ones(16, 1, 1)))

    def listen(slots_NHk: Tensor, weights_NHk: Tensor) -> None:
        inside.append(len(inside))
        time.sleep(0.001)
        together.append(inside.pop())

    others = [(model.taps[0], listen)]
    with UsageCounters(model, others=others) as counters, ThreadPoolExecutor(threads) as pool:
        list(pool.map(call, range(threads)))
    (found,) = counters.memories()
    assert found.tokens == found.counts_S[3] == found.masses_S[3] == found.squares_H[0] == threads * times * 8
    assert found.reads == found.tokens
    assert set(together) == {0}, "sums would lose what two threads add at the same moment"


def test_a_thread_whose_positions_nobody_chose_is_refused() -> None:
    model = Reader(tap_of(4, 1))
    reads = torch.zeros(2, 1, 1).long(), torch.ones(2, 1, 1)
    with UsageCounters(model) as counters, ThreadPoolExecutor(1) as pool:
        pool.submit(model, reads).result()
        counters.only(torch.tensor([True, False]))
        model(reads)
        with pytest.raises(UserError):
            pool.submit(model, reads).result()
    assert counters.memories()[0].tokens == 3


def test_a_copy_of_a_model_is_not_listened_to() -> None:
    model = Reader(tap_of(4, 1))
    with UsageCounters(model) as counters:
        copy.deepcopy(model)((torch.zeros(2, 1, 1).long(), torch.ones(2, 1, 1)))
    assert counters.memories()[0].tokens == 0


def test_weights_that_are_not_finite_are_an_error() -> None:
    model = Reader(tap_of(4, 1, layer=3))
    with UsageCounters(model) as counters:
        model((torch.tensor([[[1, 2]]]), torch.tensor([[[0.5, float("nan")]]])))
    with pytest.raises(UserError, match="layer 3"):
        counters.memories()


def test_files_give_back_what_was_counted(tmp_path: Path) -> None:
    counts, common, masses = np.arange(8).reshape(2, 4), np.array([[6, 1], [1, 6]]), (np.ones((2, 4)), np.ones(2))
    memories = [
        MemoryUsage("a", 2, "product-key", Addresses(4, 2), 3, counts, np.ones((2, 4)) / 3, np.ones(2), common),
        MemoryUsage("b", 1, "hash", TABLES, 3, counts, np.ones((2, 4)), np.ones(2), None, part="qkv"),
        MemoryUsage(
            "c", None, "flat-key", Addresses(4), 3, counts, *masses, None, np.array([1.5, 0.5, 2]), pool=(1, 2)
        ),
    ]
    entry = {"run": "r", "step": 5, "checkpoint": "a", "split": "test", "source": {"sha256": "b"}, "warnings": []}
    entry["memories"] = [memory.as_json() for memory in memories]
    stem = tmp_path / "usage" / "test-step-5"
    assert load_usage(stem, "a", entry["source"]) is None
    save_usage(stem, entry, memories)
    loaded = load_usage(stem, "a", {"sha256": "b"})
    assert loaded is not None
    assert loaded[0] == entry
    for memory, kept in zip(memories, loaded[1], strict=True):
        assert kept.as_json() == memory.as_json()
        assert (kept.label, kept.addresses) == (memory.label, memory.addresses)
        assert (kept.counts_HK == memory.counts_HK).all()
        assert kept.counts_HK.dtype == np.int64
    assert load_usage(stem, "c", entry["source"]) is None, "measured on another checkpoint"
    assert load_usage(stem, "a", {"sha256": "c"}) is None, "or of another text"
    arrays, record = stem.with_name("test-step-5.npz"), stem.with_name("test-step-5.json")
    text, whole = record.read_text(), arrays.read_bytes()
    for damaged in ("[]", "{}", json.dumps(entry)[:-9]):
        record.write_text(damaged)
        assert load_usage(stem, "a", entry["source"]) is None, damaged
    record.write_text(text)
    for content in (whole[:-30], b"", whole[:100] + b"\xff" * 40 + whole[140:]):
        arrays.write_bytes(content)
        assert load_usage(stem, "a", entry["source"]) is None
