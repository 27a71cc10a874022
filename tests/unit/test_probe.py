"""Probes: against a forward in numpy that knows nothing of torch or of hooks, and on models whose answer is known."""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from pkmlm.data.corpus import Corpus
from pkmlm.errors import UserError
from pkmlm.evaluate.documents import Documents, TextChoice, documents_of_split, documents_of_texts, open_split
from pkmlm.evaluate.load import LoadedRun, load_run
from pkmlm.evaluate.perplexity import score
from pkmlm.measure.counters import ReadListener
from pkmlm.measure.probe import (
    PROBES,
    Means,
    Probes,
    Reader,
    Text,
    groups_of,
    intervals,
    partners,
    probe_run,
    streams_of,
)
from pkmlm.memory.address import Addresses
from pkmlm.memory.base import SparseMemory, UsageTap, memories
from pkmlm.memory.init import initialise
from pkmlm.memory.table import Values

TEXTS = [
    "It was a dark night.\n",
    "He said nothing; " * 20,
    "x",
    "\u4e8c!",
    "The road to the house was near, and it was in the end of the king. " * 9,
]
FIT = 6000
Forward = Callable[[list[int], Callable | None], tuple[np.ndarray, np.ndarray]]


def quiet(tokens: int) -> None:
    """No progress."""


def documents(run: LoadedRun, texts: list[str] = TEXTS) -> Documents:
    return documents_of_texts("some", [np.array(run.tokenizer.encode(text)) for text in texts], texts)


@pytest.fixture(scope="module")
def run(trained) -> LoadedRun:
    """The tiny product-key run, in double precision."""
    loaded = load_run(trained("product-key"))
    loaded.model.double()
    return loaded


@pytest.fixture(scope="module")
def corpus(run: LoadedRun) -> Corpus:
    return open_split(run.recipe.data.dir, "train", run.tokenizer)


def numpy_model(run: LoadedRun) -> Forward:
    """A function of a window's tokens and of another answer that returns log p (T, V) and the memory's own answer.

    The other answer is a function of the memory's input, the slots that it chooses and their weights.
    """
    w = {name: tensor.numpy() for name, tensor in run.model.state_dict().items()}
    memory = run.recipe.model.memories["pkm"]
    heads, topk, n = run.recipe.model.heads, memory.topk, memory.num_keys
    erf = np.vectorize(math.erf)

    def norm(x, at):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * w[f"{at}.weight"] + w[f"{at}.bias"]

    def linear(x, at):
        return x @ w[f"{at}.weight"].T + w[f"{at}.bias"]

    def softmax(x):
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    def attention(x, at):
        length, dim = x.shape
        q, k, v = linear(x, f"{at}.qkv").reshape(length, 3, heads, -1).transpose(1, 2, 0, 3)
        scores = q @ k.transpose(0, 2, 1) / math.sqrt(dim // heads)
        mixed = softmax(np.where(np.tri(length, dtype=bool), scores, -np.inf)) @ v
        return linear(mixed.transpose(1, 0, 2).reshape(length, dim), f"{at}.out")

    def ffn(x, at):
        h = linear(x, f"{at}.up")
        return linear(h * (1 + erf(h / math.sqrt(2))) / 2, f"{at}.down")

    def search(x, at):
        q = linear(x, f"{at}.query.map") - w[f"{at}.query.norm.running_mean"]
        q = q / np.sqrt(w[f"{at}.query.norm.running_var"] + 1e-5) * w[f"{at}.query.norm.weight"]
        q = (q + w[f"{at}.query.norm.bias"]).reshape(len(x), -1, 2, w[f"{at}.subkeys_H2nf"].shape[-1])
        half = np.einsum("thaf,hanf->ahtn", q, w[f"{at}.subkeys_H2nf"])
        scores = (half[0][..., :, None] + half[1][..., None, :]).reshape(*half.shape[1:3], n * n).transpose(1, 0, 2)
        slots = np.argsort(-scores, axis=-1)[..., :topk]
        return slots, softmax(np.take_along_axis(scores, slots, axis=-1))

    def forward(tokens, other=None):
        x = w["embedding.weight"][tokens] + w["positions.weight"][: len(tokens)]
        x = x + attention(norm(x, "blocks.0.attention_norm"), "blocks.0.attention")
        x = x + ffn(norm(x, "blocks.0.norm"), "blocks.0.parts.ffn")
        x = x + attention(norm(x, "blocks.1.attention_norm"), "blocks.1.attention")
        at = "blocks.1.parts.memory_pkm"
        slots, weights = search(norm(x, "blocks.1.norm"), at)
        own = np.einsum("thk,thkd->td", weights, w[f"{at}.values.weight_KD"][slots])
        x = x + (own if other is None else other(weights, own))
        logits = norm(x, "norm") @ w["embedding.weight"].T
        return logits - logits.max(-1, keepdims=True) - np.log(
            np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True)
        ), own

    return forward


def numpy_windows(run: LoadedRun, texts: list[str]) -> list[tuple[list[int], int, int, list[int]]]:
    """Each window's tokens, the position (over all texts) of its first token, of its first scored one, and targets."""
    found, start, context = [], 0, run.model.context
    for text in texts:
        ids = [run.tokenizer.eos, *run.tokenizer.encode(text)]
        for done in range(0, len(ids) - 1, context):
            stop = min(len(ids) - 1, done + context)
            first = max(0, stop - context)
            found.append((ids[first:stop], start + first, start + done, ids[done + 1 : stop + 1]))
        start += len(ids) - 1
    return found


def numpy_nll(forward: Forward, found: list, other: Callable | None = None) -> np.ndarray:
    """-log p of each position; `other` is also given the window's first position and its tokens."""
    parts = []
    for tokens, first, scored, targets in found:
        given = None if other is None else lambda weights, own, at=(first, tokens): other(*at, weights, own)
        log_p, _ = forward(tokens, given)
        parts.append(-log_p[scored - first :][range(len(targets)), targets])
    return np.concatenate(parts)


def numpy_means(run: LoadedRun, forward: Forward, corpus: Corpus, fit: int) -> tuple[dict, dict, np.ndarray]:
    """Means of the answers to tokens, to pairs that stand four times or more, and to all, over evenly spaced pieces."""
    context = run.model.context
    pieces, count = corpus.tokens // context, fit // context
    answers, everywhere = defaultdict(list), []
    for number in range(count):
        first = round(number * (pieces - 1) / (count - 1)) * context
        tokens = [corpus.eos, *corpus.read(0, corpus.tokens).tolist()][first : first + context]
        _, own = forward(tokens, None)
        everywhere.append(own)
        for before, token, answer in zip([None, *tokens], tokens, own, strict=False):
            answers[token].append(answer)
            if before is not None:
                answers[before, token].append(answer)
    means = {key: np.mean(found, axis=0) for key, found in answers.items()}
    bigrams = {key: mean for key, mean in means.items() if isinstance(key, tuple) and len(answers[key]) >= 4}
    return (
        {key: mean for key, mean in means.items() if not isinstance(key, tuple)},
        bigrams,
        np.concatenate(everywhere).mean(0),
    )


def probes_of(run: LoadedRun, corpus: Corpus, texts: list[str] = TEXTS) -> Probes:
    text, found = Text(documents(run, texts), run.tokenizer.eos), memories(run.model)
    return Probes(Reader(run.model, text), found, Means(run.model, found, corpus, text, FIT, quiet))


def scores(probes: Probes, name: str) -> np.ndarray:
    with getattr(probes, name)(probes.found):
        return probes.reader.nll(quiet)


def test_every_probe_is_that_of_a_forward_in_numpy(run: LoadedRun, corpus: Corpus) -> None:
    forward, found = numpy_model(run), numpy_windows(run, TEXTS)
    tokens, bigrams, everywhere = numpy_means(run, forward, corpus, FIT)
    probes = probes_of(run, corpus)
    (memory,) = probes.found
    table = memory.values.weight_KD
    width = table.shape[1]

    def compare(name: str, found_nll: np.ndarray, other: Callable | None) -> None:
        np.testing.assert_allclose(found_nll, numpy_nll(forward, found, other), atol=1e-9, err_msg=name)

    compare("real", probes.real(quiet), None)
    compare("zero", scores(probes, "zero"), lambda first, ids, weights, own: np.zeros_like(own))

    def of_token(token: int) -> np.ndarray:
        return tokens.get(token, everywhere)

    def token_mean(first: int, ids: list[int], *_: object) -> np.ndarray:
        return np.stack([of_token(token) for token in ids])

    compare("token_mean", scores(probes, "token_mean"), token_mean)
    taken = Counter()
    text_N = probes.reader.text.tokens_N.tolist()

    def bigram_mean(first: int, ids: list[int], *_: object) -> np.ndarray:
        taken.update(pair in bigrams for pair in itertools.pairwise(ids))
        taken["edge"] += (text_N[first - 1], ids[0]) in bigrams
        pairs = zip([None, *ids], ids, strict=False)
        return np.stack([bigrams.get(pair, of_token(pair[1])) for pair in pairs])

    compare("bigram_mean", scores(probes, "bigram_mean"), bigram_mean)
    assert min(taken[True], taken[False]) > 5, "pairs with a mean of their own, and without"
    assert taken["edge"], "and such pairs of which a window sees the second token only"
    assert set(text_N) - set(tokens), "tokens that the means have not seen"

    partner_N = partners(probes.reader.text.tokens_N, 10**9)
    own_N = np.zeros((len(text_N), width))
    for ids, first, scored, _ in found:
        own_N[scored : first + len(ids)] = forward(ids, None)[1][scored - first :]

    def same_token(first: int, ids: list[int], *_: object) -> np.ndarray:
        at = range(first, first + len(ids))
        return np.stack([own_N[partner_N[p]] if partner_N[p] >= 0 else of_token(text_N[p]) for p in at])

    compare("same_token", scores(probes, "same_token"), same_token)

    drawn: list[torch.Tensor] = []
    with probes.random_slots([memory]), ReadListener([(memory.tap, lambda slots, _: drawn.append(slots))]):
        random_nll = probes.reader.nll(quiet)
    rows = iter(torch.cat([slots.view(-1, 32, *slots.shape[1:]) for slots in drawn]))  # a window each, padded
    values = table.numpy()

    def random_slots(first: int, ids: list[int], weights: np.ndarray, own: np.ndarray) -> np.ndarray:
        return np.einsum("thk,thkd->td", weights, values[next(rows).numpy()[: len(ids)]])

    compare("random_slots", random_nll, random_slots)
    assert len(torch.cat(drawn).unique()) > 200, "of 256 slots"

    fresh: list[np.ndarray] = []
    with probes.redrawn_values([memory]):
        hook = memory.tap.register_forward_hook(lambda *_: fresh.append(memory.values.weight_KD.numpy()))
        redrawn_nll = probes.reader.nll(quiet)
        hook.remove()
    assert memory.values.weight_KD is table
    assert fresh[0].std() == pytest.approx(width**-0.5, rel=0.03)
    own_model = numpy_model(replace(run, model=redrawn(run, fresh[0])))
    np.testing.assert_allclose(redrawn_nll, numpy_nll(own_model, found), atol=1e-9)


def redrawn(run: LoadedRun, values: np.ndarray) -> nn.Module:
    """A stand-in for a model that has the run's weights but for the values."""
    weights = {**run.model.state_dict(), "blocks.1.parts.memory_pkm.values.weight_KD": torch.from_numpy(values)}
    module = nn.Module()
    module.state_dict = lambda: weights  # type: ignore[method-assign,assignment]
    return module


def probed(run: LoadedRun, texts: Path | None = None, **choice: str) -> dict:
    chosen = TextChoice(text=None if texts is None else str(texts), **choice)
    return probe_run(run, [], chosen, FIT, True)[0]


def test_a_memory_of_zeros_is_worth_nothing(trained) -> None:
    run = load_run(trained("product-key"))
    memories(run.model)[0].values.weight_KD.zero_()
    (memory,) = probed(run)["memories"]
    assert list(memory["probes"]) == list(PROBES)
    for name, probe in memory["probes"].items():
        assert probe["share"] is None
        if name != "redrawn_values":
            assert (probe["nats"], probe["low"], probe["high"]) == (0, 0, 0), name
    assert abs(memory["probes"]["redrawn_values"]["nats"]) > 1e-3


def test_of_a_memory_that_sees_only_the_token_its_mean_explains_all(trained, novels: Path, tmp_path: Path) -> None:
    run = load_run(trained("product-key"))
    run.model.positions.weight.zero_()
    for block in run.model.blocks:
        block.attention.out.weight.zero_()
    memories(run.model)[0].values.weight_KD.mul_(5)  # so that it counts
    text = tmp_path / "seen.txt"
    text.write_text((novels / "train.txt").read_text()[:6000])
    record = probe_run(run, [], TextChoice(text=str(text)), 10**6, True)[0]
    probes = record["memories"][0]["probes"]
    for name in ("token_mean", "bigram_mean", "same_token"):
        assert probes[name]["nats"] == pytest.approx(0, abs=1e-6), name
    assert all(abs(probes[name]["nats"]) > 1e-3 for name in ("zero", "redrawn_values", "random_slots"))


def test_the_means_know_nothing_of_the_text(run: LoadedRun, corpus: Corpus) -> None:
    """A text's scores do not depend on what else is scored, nor on how much."""
    alone, among = (probes_of(run, corpus, texts) for texts in (TEXTS[:2], TEXTS))
    for name in ("token_mean", "bigram_mean"):
        few, many = scores(alone, name), scores(among, name)
        np.testing.assert_allclose(few, many[: len(few)], atol=1e-12)


def test_hash_layers_are_probed_by_name_and_all_together(trained) -> None:
    run = load_run(trained("hash"))
    split = open_split(run.recipe.data.dir, "test", run.tokenizer)

    def documents_read() -> Documents:
        return documents_of_split(split, run.tokenizer)

    record = probed(run)
    assert [(each["layer"], each["memory"], each.get("part")) for each in record["memories"]] == [
        (None, "tables", "qkv"), (None, "tables", "ffn1"), (None, "tables", "ffn2"), (None, "all", None),
    ]  # fmt: skip
    real = score(run.model, documents_read(), run.tokenizer.eos)
    assert record["real"]["nats"] == pytest.approx(real.nats_per_token, rel=1e-9)
    groups = groups_of(memories(run.model))
    assert [len(group.memories) for group in groups] == [2, 2, 2, 6]
    for group, each in zip(groups, record["memories"], strict=True):
        tables = {memory: memory.values.weight_KD.clone() for memory in group.memories}
        for memory in tables:
            memory.values.weight_KD.zero_()
        without = score(run.model, documents_read(), run.tokenizer.eos)
        for memory, table in tables.items():
            memory.values.weight_KD.copy_(table)
        expected = without.nats_per_token - real.nats_per_token
        assert each["probes"]["zero"]["nats"] == pytest.approx(expected, abs=1e-9)
    qkv = memories(run.model)[0]
    probes = probes_of(run, open_split(run.recipe.data.dir, "train", run.tokenizer), TEXTS[:2])
    seen: list[torch.Tensor] = []
    with probes.random_slots([qkv]), ReadListener([(qkv.tap, lambda slots, _: seen.append(slots))]):
        probes.reader.nll(quiet)
    rows = torch.cat(seen)[..., 0]
    assert (rows // 16 == torch.arange(8)).all(), "each table of 16 rows reads its own"
    assert all(len(rows[:, table].unique()) == 16 for table in range(8))


@pytest.mark.parametrize("most", [10**9, 40])
def test_a_partner_is_a_random_other_position_of_the_token(most: int) -> None:
    tokens_N = np.random.default_rng(3).integers(0, 30, 200)
    tokens_N[7] = 99
    partner_N = partners(tokens_N, most)
    assert partner_N[7] == -1
    there = np.flatnonzero(partner_N >= 0)
    assert (tokens_N[partner_N[there]] == tokens_N[there]).all()
    assert (partner_N[there] != there).all()
    assert len(np.unique(partner_N[there])) <= most
    if most > 200:
        assert len(there) == sum(count for count in Counter(tokens_N.tolist()).values() if count > 1)
        times = np.bincount(partners(np.zeros(5000, int), most), minlength=5000)
        assert (times == 0).mean() == pytest.approx(math.exp(-1), abs=0.03), "as often as random draws leave out"


def test_intervals_are_those_of_resampled_documents() -> None:
    random = np.random.default_rng(0)
    tokens_U = random.integers(50, 500, 400)
    nats_U = random.normal(0.3, 0.1, 400)
    same, drawn = intervals(np.stack([0.25 * tokens_U, nats_U * tokens_U], axis=1), tokens_U)
    assert [same[key] for key in ("nats", "low", "high")] == pytest.approx([0.25] * 3)
    mean = (nats_U * tokens_U).sum() / tokens_U.sum()
    error = math.sqrt((((nats_U - mean) * tokens_U) ** 2).sum()) / tokens_U.sum()
    assert drawn["nats"] == pytest.approx(mean)
    assert (drawn["high"] - drawn["low"]) / 2 == pytest.approx(1.96 * error, rel=0.08)
    assert drawn["low"] < mean < drawn["high"]
    assert intervals(np.ones((1, 1)), np.array([4])) == [{"nats": 0.25, "low": None, "high": None}]
    few, tokens = np.array([[1.0], [2.0]]), np.array([4, 4])
    with_empty = np.concatenate([np.zeros((8, 1)), few]), np.concatenate([np.zeros(8, int), tokens])
    assert intervals(*with_empty) == intervals(few, tokens), "pieces of a prompt are no units"


def test_units_are_documents_or_pieces_of_few_documents() -> None:
    ids = [np.full(length, 5) for length in (2500, 0, 3)]
    few, many = Text(Documents("few", ids, 0, 0, 0), 1), Text(Documents("many", ids[2:] * 12, 0, 0, 0), 1)
    over, starts_U = few.units()
    assert (over, starts_U.tolist()) == ("pieces of 1,000 tokens", [0, 1000, 2000, 2500])
    assert many.units()[0] == "documents"
    assert many.units()[1].tolist() == list(range(0, 36, 3))
    assert few.tokens_N[[0, 1, 2499, 2500, 2501]].tolist() == [1, 5, 5, 1, 5]


class Reading(SparseMemory):
    """A memory of another kind: it reads one row, from a table that somebody else may own."""

    def __init__(self, layer: int, table: Values):
        super().__init__()
        self.tap = UsageTap(layer, "memory", "new", Addresses(4), 1)
        self.__dict__["values"] = table

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        rows = torch.zeros(x_BTD.shape[0] * x_BTD.shape[1], 1, 1, dtype=torch.int64)
        slots, weights = self.tap(rows, torch.ones(rows.shape))
        out: torch.Tensor = self.values(slots.flatten(1), weights.flatten(1))
        return out.view_as(x_BTD)

    def flops_per_token(self) -> int:
        return 0

    def saved_per_token(self) -> int:
        return 0


def test_a_table_that_several_memories_read_is_redrawn_for_the_probed_one_alone() -> None:
    table = Values(4, 3, std=1.0).requires_grad_(False)
    initialise(table, 1)
    first, second = Reading(1, table), Reading(2, table)
    x_BTD = torch.zeros(1, 2, 3)
    before = first(x_BTD)
    probes = Probes.__new__(Probes)
    probes.streams = streams_of([first, second])
    with probes.redrawn_values([first]):
        assert not torch.equal(first(x_BTD), before)
        assert torch.equal(second(x_BTD), before)
    with probes.redrawn_values([first, second]):
        assert torch.equal(first(x_BTD), second(x_BTD)), "one table, drawn once"
        assert not torch.equal(first(x_BTD), before)
    with probes.zero([first]):
        assert not first(x_BTD).any()
    assert torch.equal(first(x_BTD), before), "and all is as it was"


def test_what_cannot_be_probed_is_refused(trained) -> None:
    run = load_run(trained("dense"))
    with pytest.raises(UserError, match="no memory"):
        probed(run)
