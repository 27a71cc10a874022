"""N-gram memories against plain Python over unbounded integers, and gradients in float64."""

import json
import math
import random
import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import silu

from pkmlm.data import canonical
from pkmlm.data.canonical import canonical_ids, canonical_text
from pkmlm.data.tokenizer import Tokenizer
from pkmlm.distributed import World
from pkmlm.evaluate.documents import TextChoice, chosen_documents
from pkmlm.evaluate.likelihood import Window, attention_layout, build_prefix_tree
from pkmlm.evaluate.load import load_run
from pkmlm.evaluate.perplexity import windows
from pkmlm.measure.counters import ReadListener
from pkmlm.measure.ngrams import NGrams, collisions
from pkmlm.memory.base import memories, usage_taps
from pkmlm.memory.ngram.layer import NGramMemory, gate_of
from pkmlm.memory.ngram.spec import NGramSpec
from pkmlm.memory.tokens import Past, TokenIds
from pkmlm.model.attention import KVCache
from pkmlm.model.transformer import Transformer, build_model
from pkmlm.recipe.schema import Train
from pkmlm.train.optim import parameter_groups
from tests.conftest import model_2019, optim_2019, pkmlm, recipe_2019

D = 12


def plain_rows(ids: list[int], multipliers: list[list[int]], rows: int) -> list[list[int]]:
    """The rows that each token of a document reads, `ids` from its end-of-document token (0) on."""
    found = []
    for t in range(len(ids)):
        row = []
        for table, factors in enumerate(multipliers):
            mixed = 0
            for back, factor in enumerate(factors):
                if t - back >= 0:
                    mixed ^= ids[t - back] * factor
            row.append(table * rows + mixed % rows)
        found.append(row)
    return found


def past_of(ids_BT: torch.Tensor, layer: NGramMemory) -> Past:
    """What a memory sees of canonical ids."""
    return TokenIds(int(ids_BT.max()) + 1, [layer.spec.lookback])(ids_BT, None, None)


def test_rows_are_those_of_plain_python_over_unbounded_integers():
    draw = random.Random(1)
    layer = NGramMemory(D, orders=(2, 3, 4), heads=3, rows=65537, row_dim=2)
    multipliers = [[int(m) for m in row[:order]] for row, order in zip(layer.multipliers_HG, layer.orders, strict=True)]
    assert all(m % 2 for row in multipliers for m in row)
    assert len({m for row in multipliers for m in row}) == 27
    checked = 0
    for largest in (50, 2**17, 2**31 - 1):  # the last: the largest vocabulary that a recipe may name
        while checked < 3400 * (1 + (largest > 50) + (largest > 2**17)):
            ids = [0, *(draw.randint(1, largest) for _ in range(draw.randint(1, 60)))]
            if largest == 2**31 - 1:
                ids[-1] = largest
            back = [[ids[t - i] if t >= i else 0 for i in range(4)] for t in range(len(ids))]
            assert layer.rows_of(torch.tensor([back]))[0].tolist() == plain_rows(ids, multipliers, 65537)
            checked += len(ids)
    assert checked > 10_000


def test_the_largest_multipliers_and_ids_do_not_overflow():
    layer = NGramMemory(D, orders=(2,), heads=1, rows=65537, row_dim=2)
    layer.multipliers_HG.fill_(2**32 - 1)
    ids = [2**31 - 1, 2**31 - 2]
    found = layer.rows_of(torch.tensor([[ids]]))
    assert found.item() == ((ids[0] * (2**32 - 1)) ^ (ids[1] * (2**32 - 1))) % 65537


def test_the_worked_example():
    """Ids 3, 5, 2; multipliers 7, 11, 13; prime 17: 14 XOR 55 = 57, row 6; 57 XOR 39 = 30, row 13."""
    layer = NGramMemory(D, orders=(2, 3), heads=1, rows=17, row_dim=2)
    layer.multipliers_HG.copy_(torch.tensor([[7, 11, 0], [7, 11, 13]]))
    past = past_of(torch.tensor([[3, 5, 2]]), layer)
    assert layer.rows_of(past.ids_BTG)[0, -1].tolist() == [6, 17 + 13]


@pytest.mark.parametrize("conv", [True, False])
def test_the_gate_is_its_formula(conv):
    """Token by token, in float64, documents apart; and every gradient, against finite differences."""
    ids = torch.tensor(
        [[4, 0, 3, 1, 2, 2, 1, 4, 3, 0, 1, 2, 3, 3, 3, 1], [0, 1, 2, 3, 4, 4, 3, 2, 1, 1, 2, 2, 3, 0, 1, 2]]
    )
    layer = NGramMemory(D, orders=(2, 3), heads=2, rows=11, row_dim=3, conv=conv).double()
    random = torch.Generator().manual_seed(3)
    for parameter in layer.parameters():
        parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=random, dtype=torch.float64))
    x = torch.randn(*ids.shape, D, generator=random, dtype=torch.float64)
    out = layer(x, past_of(ids, layer))
    w = dict(layer.named_parameters())

    def rms(vector, gain):
        return vector / (vector.square().mean() + 1e-6).sqrt() * gain

    multipliers = [[int(m) for m in row[:n]] for row, n in zip(layer.multipliers_HG, layer.orders, strict=True)]
    for b, row in enumerate(ids.tolist()):
        begin, normed = 0, []
        for t, token in enumerate(row):
            if token == 0:
                begin = t
            read = plain_rows(row[begin : t + 1], multipliers, 11)[-1]
            e = torch.cat([w["values.weight_KD"][i] for i in read])
            k, v = (w["gate.maps.weight"] @ e + w["gate.maps.bias"]).split(D)
            a = rms(x[b, t], w["gate.stream_norm.weight"]) @ rms(k, w["gate.key_norm.weight"]) / D**0.5
            u = torch.sigmoid(torch.sign(a) * a.abs().sqrt()) * v
            if conv:
                normed.append(rms(u, w["conv.norm.weight"]))
                taps = [normed[t - 3 * i] * w["conv.weight_iD"][i] for i in range(4) if t - 3 * i >= begin]
                u = u + silu(sum(taps))
            torch.testing.assert_close(out[b, t], u)

    names, values = zip(*w.items(), strict=True)

    def of(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x, past_of(ids, layer)))

    inputs = (x[:, :6].clone().requires_grad_(), *values)
    ids = ids[:, :6]
    assert torch.autograd.gradcheck(of, inputs, fast_mode=True)


def test_lite_adds_the_rows():
    layer = NGramMemory(D, orders=(2,), heads=1, rows=7, row_dim=D, fusion="add")
    x, ids = torch.randn(1, 6, D), torch.tensor([[0, 1, 2, 3, 0, 1]])
    assert not layer(x, past_of(ids, layer)).any()
    torch.nn.init.normal_(layer.values.weight_KD)
    rows = layer.rows_of(past_of(ids, layer).ids_BTG)[0, :, 0]
    assert rows[0] == rows[4]
    assert rows[1] == rows[5]
    torch.testing.assert_close(layer(x, past_of(ids, layer))[0], 0.1 * layer.values.weight_KD[rows])


def test_the_gate_has_finite_slopes_around_zero():
    score = torch.tensor(
        [0.0, -0.0, 1e-12, -1e-12, 9e-7, 1.1e-6, -1.1e-6, 1e-3], dtype=torch.float64, requires_grad=True
    )
    gate_of(score).sum().backward()
    alpha = gate_of(score.detach())
    assert (score.grad[:5] == 0).all()
    torch.testing.assert_close(score.grad[5:], alpha[5:] * (1 - alpha[5:]) / 2 / score.detach()[5:].abs().sqrt())
    assert torch.autograd.gradcheck(gate_of, (torch.tensor([-2.0, -1e-3, 1e-3, 0.5]).double().requires_grad_(),))


def test_ids_found_by_hand_are_the_tokens_own():
    assert torch.equal(TokenIds(50, [NGramSpec().lookback]).ids_V, torch.arange(50))


@pytest.mark.parametrize(
    ("name", "value"),
    [("dim", 0), ("orders", ()), ("orders", (2, 2)), ("rows", 4), ("rows", 65535)],
)
def test_a_layer_made_by_hand_refuses_what_a_recipe_does(name, value):
    with pytest.raises(ValueError, match=f"{name}: found"):
        NGramMemory(**{"dim": D, name: value})


def test_a_layer_maps_a_batch_without_tokens():
    layer = NGramMemory(D, rows=7)
    past = TokenIds(50, [layer.spec.lookback])(torch.zeros(2, 0, dtype=torch.int64), None, None)
    assert layer(torch.zeros(2, 0, D), past).shape == (2, 0, D)


def test_a_layer_without_ids_fails():
    layer = NGramMemory(D, rows=7)
    with pytest.raises((TypeError, AttributeError)):
        layer(torch.zeros(1, 2, D))
    with pytest.raises((TypeError, AttributeError)):
        layer(torch.zeros(1, 2, D), None)


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (["The", " the", "th\u00e9", "THE", "\uff34he"], "the"),
        ([" ", "\n", "\u00a0", "  \t"], " "),
        (["\ufb01t", "fit"], "fit"),
        (["a  b", " A\nB "], "a b"),
        (["\u0301"], ""),
    ],
)
def test_canonical_text(tokens, text):
    assert {canonical_text(token) for token in tokens} == {text}


def test_canonical_ids_merge_what_reads_alike(tokens):
    tokenizer = Tokenizer.load(tokens / "tokenizer.model")
    ids = canonical_ids(tokenizer, tokenizer.size + 3)
    of = {tokenizer.piece(token): int(ids[token]) for token in range(tokenizer.size)}
    assert [token for token in range(len(ids)) if ids[token] == 0] == [tokenizer.eos]
    assert of["the"] == of[" the"] if "the" in of else of[" he"] == of["he"]
    assert of["A"] == of["a"]
    assert of["<0x41>"] != of["<0x61>"]
    assert len(set(ids[-3:])) == 3
    assert sorted(set(ids.tolist())) == list(range(ids.max() + 1))
    assert 0.6 < (ids.max() + 1) / tokenizer.size < 0.95
    every = canonical_ids(tokenizer, tokenizer.size, merge=False)
    assert sorted(every) == list(range(tokenizer.size))
    assert every[tokenizer.eos] == 0


# The whole model: what stands before a token, wherever it is read.

NGRAMS = {
    "gate": {"ngrams": NGramSpec(layers=("1", "2"), orders=(1, 2, 3), heads=2, rows=101, row_dim=4)},
    "far": {"ngrams": NGramSpec(layers=("2",), orders=(4,), heads=3, rows=101, row_dim=4)},
    "lite": {"ngrams": NGramSpec(layers=("1", "2"), orders=(2,), heads=1, rows=101, row_dim=16, fusion="add")},
}
NGRAMS["two"] = {"far": NGRAMS["far"]["ngrams"], "near": replace(NGRAMS["lite"]["ngrams"], canonical=False)}


def model_of(kind: str, positions: str = "rotary", context: int = 24) -> Transformer:
    """A model in float64 whose n-gram memories and attention all tell; token 3 begins documents."""
    model = model_2019(dim=16, layers=2, heads=2, context=context, positions=positions, memories=NGRAMS[kind])
    built = build_model(recipe_2019(model=model, train=Train(batch_tokens=context, micro_batch=1)), 30).double().eval()
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, ids in built.token_ids.items():
            ids.ids_V.copy_(torch.arange(30) // (2 if name == "canonical" else 1) + 1)
            ids.ids_V[3] = 0
        for name, parameter in built.named_parameters():
            if "before" in name:
                parameter.add_(0.5 * torch.randn(parameter.shape, generator=random).double())
            elif "attention.qkv" in name:
                parameter.mul_(5)
    return built


class Rows:
    """The rows that each forward reads, by memory and layer: (B, T, H)."""

    def __init__(self, model: Transformer):
        self.read = {}
        for tap in usage_taps(model):
            tap.register_forward_hook(lambda tap, inputs, _: self.read.setdefault(tap.label, []).append(inputs[0]))

    def take(self, batch: int) -> list[torch.Tensor]:
        found = [torch.cat([part.view(batch, -1, part.shape[1]) for part in parts], 1) for parts in self.read.values()]
        self.read.clear()
        return found


def documents(draw: random.Random, length: int) -> list[int]:
    """A stream of documents, each after the token 3."""
    ids = [3]
    while len(ids) < length:
        ids += [draw.choice([0, 1, 2, *range(4, 30)]) for _ in range(draw.randint(0, 9))] + [3]
    return ids[:length]


@torch.no_grad()
@pytest.mark.parametrize("kind", NGRAMS)
def test_documents_of_a_stream_do_not_see_each_other(kind):
    draw, model = random.Random(2), model_of(kind)
    rows = Rows(model)
    for _ in range(10):
        ids = documents(draw, 24)
        model(torch.tensor([ids]))
        together = rows.take(1)
        starts = [i for i, token in enumerate(ids) if token == 3]
        for begin, end in zip(starts, [*starts[1:], 24], strict=True):
            model(torch.tensor([ids[begin:end]]))
            for whole, alone in zip(together, rows.take(1), strict=True):
                assert torch.equal(whole[:, begin:end], alone)


@torch.no_grad()
@pytest.mark.parametrize("kind", NGRAMS)
def test_every_cut_into_cache_steps_reads_the_same(kind):
    """Rows and logits, several texts at a time, of other lengths too: what is beyond a text's end changes nothing."""
    draw, model = random.Random(3), model_of(kind)
    rows = Rows(model)
    for _ in range(10):
        tokens = torch.tensor([documents(draw, 24) for _ in range(3)])
        logits, plain = model(tokens), rows.take(3)
        cache, place, parts = KVCache(model.context), 0, []
        while place < 24:
            step = min(24 - place, draw.choice([1, 1, 2, 5, 9]))
            parts.append(model(tokens[:, place : place + step], cache))
            place += step
        torch.testing.assert_close(torch.cat(parts, 1), logits)
        assert all(map(torch.equal, rows.take(3), plain))
        cut = draw.randint(1, 23)
        tokens[1, cut:] = 0
        model(tokens)
        for padded, whole in zip(rows.take(3), plain, strict=True):
            assert torch.equal(padded[1, :cut], whole[1, :cut])


@torch.no_grad()
@pytest.mark.parametrize("kind", NGRAMS)
def test_a_prefix_tree_reads_what_each_of_its_texts_reads(kind):
    draw, model = random.Random(4), model_of(kind, context=40)
    rows = Rows(model)
    for _ in range(10):
        texts = [documents(draw, 12)]
        for _ in range(draw.randint(1, 4)):
            shared = draw.choice(texts)
            texts.append(shared[: draw.randint(1, len(shared))] + documents(draw, draw.randint(2, 9))[1:])
        windows = [Window(np.array(text), np.array([0])) for text in texts]
        tree = build_prefix_tree(windows, range(len(windows)))
        longest = len(tree.tokens) + 2
        layout = attention_layout([tree], longest, torch.device("cpu"))
        hidden = model.hidden(torch.tensor([[*tree.tokens, 0, 0]]), layout=layout)[0]
        together = rows.take(1)
        for index, path in zip(tree.windows, tree.paths, strict=True):
            alone = model.hidden(torch.tensor([texts[index]]))[0]
            torch.testing.assert_close(hidden[path], alone)
            for whole, own in zip(together, rows.take(1), strict=True):
                assert torch.equal(whole[0, path], own[0])


def test_a_block_that_is_not_told_what_stands_before_fails():
    model = model_of("gate")
    with pytest.raises(ValueError, match="past"):
        model.blocks[0](torch.zeros(1, 2, 16, dtype=torch.float64), None, None)


@pytest.mark.parametrize("kind", NGRAMS)
def test_tables_train_by_their_own_optimizer_as_autograd_would(kind):
    """The group's rate is that of the recipe, and its row gradient the dense one."""
    optim = optim_2019(lr=1e-2, schedule="constant", warmup_steps=0)
    spec = model_2019(dim=16, layers=2, heads=2, context=24, memories=NGRAMS[kind])
    recipe = recipe_2019(model=spec, optim=optim, train=Train(batch_tokens=48, micro_batch=2))
    plain, ours = build_model(recipe, 30), build_model(recipe, 30)
    _, *groups = parameter_groups(ours, recipe)
    assert [group.name for group in groups] == list(spec.memories)
    tokens = torch.tensor([documents(random.Random(seed), 24) for seed in range(2)])
    for model in (plain, ours):
        model.loss(tokens, tokens.roll(-1, 1), 1 / 48).backward()
    for group in groups:
        places = spec.memories[group.name].layer_places(2)
        assert [*group.parameters] == [f"blocks.{at - 1}.before.memory_{group.name}.values.weight_KD" for at in places]
        dense = [plain.get_parameter(name) for name in group.parameters]
        for parameter, gradient in zip(dense, group.row_gradients, strict=True):
            torch.testing.assert_close(gradient.dense(), parameter.grad)
        group.step(1)
        torch.optim.Adam(dense, lr=5e-2, betas=optim.betas, eps=optim.eps).step()
        for mine, theirs in zip(group.parameters.values(), dense, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_rows_stay_those_of_the_same_tokens(trained, tmp_path, monkeypatch):
    """Where another Python's Unicode makes other ids of them: in a run that goes on, and in one that starts from it."""
    source, resumed = trained("ngram"), tmp_path / "resumed"
    shutil.copytree(source, resumed, symlinks=True)
    ids_V = load_run(source).model.token_ids["canonical"].ids_V
    monkeypatch.setattr(canonical, "canonical_text", lambda piece: piece)
    pkmlm("train", source / "recipe.yaml", "-o", resumed, "-q", "-s", "train.steps=31")
    start = ["-s", f"train.init_from={source}", "-s", "train.steps=1"]
    pkmlm("train", source / "recipe.yaml", "-o", tmp_path / "other", "-q", *start)
    pkmlm("train", source / "recipe.yaml", "-o", tmp_path / "new", "-q", "-s", "train.steps=1")
    found = [load_run(tmp_path / name, "latest").model.token_ids["canonical"].ids_V for name in ("resumed", "other")]
    assert all(torch.equal(each, ids_V) for each in found)
    assert not torch.equal(load_run(tmp_path / "new", "latest").model.token_ids["canonical"].ids_V, ids_V)


# What a memory holds.


def test_the_ngrams_of_a_row_are_those_that_read_it(trained):
    """As `pkmlm slots` counts them, against a plain count over the documents' windows."""
    run = trained("ngram")
    loaded = load_run(run)
    memory = memories(loaded.model)[0]
    said = json.loads(pkmlm("slots", run, "--layer", 1, "--slot", "4:40", "--top", 10_000, "--json").stdout)
    seen = Counter()
    canonical_V = loaded.model.token_ids["canonical"].ids_V.tolist()
    context = loaded.model.context
    for document in chosen_documents(TextChoice(), loaded).ids:
        for window in windows(document, loaded.tokenizer.eos, context, context):
            ids = [canonical_V[token] for token in window.tokens]
            for t in range(len(ids) - len(window.targets), len(ids)):
                seen[tuple(ids[i] if i >= 0 else 0 for i in range(t - 2, t + 1))] += 1
    first = {each: canonical_V.index(each) for each in set(canonical_V)}
    factors = [int(m) for m in memory.multipliers_HG[3]]
    rows = {ids: (ids[2] * factors[0] ^ ids[1] * factors[1] ^ ids[0] * factors[2]) % 251 for ids in seen}
    expected = {ids: count for ids, count in seen.items() if rows[ids] == 40}
    found = {tuple(each["tokens"]): each["count"] for each in said["ngrams"]}
    assert found == {tuple(loaded.tokenizer.piece(first[each]) for each in ids): n for ids, n in expected.items()}
    assert said["slots"][0]["reads"] == sum(found.values())
    (two, three) = said["collisions"]
    assert (two["order"], three["order"], three["distinct"]) == (2, 3, len(seen))
    for _ in range(2):  # measured, and kept
        usage = json.loads(pkmlm("usage-report", run, "--format", "json").stdout)
        assert [each for each in usage["runs"][0]["ngrams"] if each["layer"] == 1] == [
            {"memory": "ngrams", "layer": 1, "kind": "ngram", **each} for each in said["collisions"]
        ]


@torch.no_grad()
def test_ngrams_are_counted_as_they_are_seen_and_not_kept(monkeypatch):
    monkeypatch.setattr("pkmlm.measure.ngrams.LEAST_TO_COUNT", 64)
    model = model_of("far")
    token_ids = model.token_ids["canonical"]
    ngrams, expected, order = NGrams(token_ids), Counter(), token_ids.order
    with ReadListener([(ngrams.tap, ngrams.add)]) as counted:
        for seed in range(40):
            tokens = torch.randint(4, 10, (2, 16), generator=torch.Generator().manual_seed(seed))
            counted.only(torch.arange(32) % 3 > 0)
            model(tokens)
            for b, ids in enumerate(token_ids.ids_V[tokens].tolist()):
                for t in range(16):
                    if (16 * b + t) % 3:
                        expected[tuple(ids[t - back] if t >= back else 0 for back in range(order))] += 1
            assert len(ngrams._ids_UG) <= len(expected)
            assert sum(map(len, ngrams._seen)) <= max(64, len(expected))
    ngrams.gather(World())
    for short in range(1, order + 1):
        shorter = Counter()
        for ids, count in expected.items():
            shorter[(*ids[:short], *[0] * (order - short))] += count
        ids_UG, counts_U = ngrams.distinct(short)
        assert dict(zip(map(tuple, ids_UG.tolist()), counts_U.tolist(), strict=True)) == shorter


def test_the_share_that_is_alone_is_that_of_rows_drawn_at_random():
    layer = NGramMemory(D, orders=(3,), heads=4, rows=8191, row_dim=2)
    ngrams = NGrams(TokenIds(3000, [layer.spec.lookback]))
    ids = torch.randint(1, 3000, (6000, 3), generator=torch.Generator().manual_seed(1))
    ngrams._ids_UG, ngrams._counts_U = ids, torch.ones(len(ids), dtype=torch.int64)
    (found,) = collisions(layer, {"canonical": ngrams})
    assert found["distinct"] == 6000
    assert found["alone_expected"] == pytest.approx(math.exp(-6000 / 8191), rel=1e-3)
    assert found["alone"] == pytest.approx(found["alone_expected"], abs=0.01)
    assert found["alone_in_any"] == pytest.approx(found["alone_in_any_expected"], abs=0.01)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["far", "lite"])
def test_what_a_row_answers_is_what_it_adds_without_gate_and_conv(kind):
    """Rows of one token, read alone, in a layer with an open gate and no convolution."""
    layer = model_of(kind).blocks[1].before["memory_ngrams"]
    slots = torch.tensor([0, layer.tap.slots - 1])
    rows = layer.values.weight_KD[slots]
    if kind == "lite":
        expected = layer.scale.factor_1 * rows
    else:
        padded = torch.zeros(2, 3, 4, dtype=torch.float64)
        padded[0, 0], padded[1, 2] = rows
        maps = layer.gate.maps
        expected = (maps(padded.flatten(1)) - maps.bias)[:, 16:]
    torch.testing.assert_close(layer.answer(slots), expected, check_dtype=False, rtol=1e-5, atol=1e-5)


def test_rows_are_as_wide_as_what_they_are_added_to():
    assert NGramSpec(fusion="add").tables(48, 100)[0].width == 48
    assert NGramMemory(48, rows=31, fusion="add").values.width == 48
    assert NGramMemory(48, rows=31).values.width == 24
    with pytest.raises(ValueError, match="row_dim"):
        NGramMemory(48, rows=31, row_dim=24, fusion="add")
