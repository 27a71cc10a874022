"""The index of slots: against plain Python, on reads that are given and on a trained model."""

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from pkmlm.errors import UserError
from pkmlm.evaluate.documents import documents_of_texts
from pkmlm.evaluate.load import LoadedRun, load_run
from pkmlm.evaluate.perplexity import score, windows
from pkmlm.measure.counters import ReadListener, UsageCounters
from pkmlm.measure.slot_contexts import (
    AFTER,
    BEFORE,
    Context,
    TopContexts,
    contexts_at,
    find_pattern,
)
from pkmlm.measure.slots import (
    LogitLens,
    SlotDetails,
    count_patterns,
    find_memory,
    index_slots,
    page_slots,
    report_prompt,
    slot_details,
    slot_number,
)
from pkmlm.memory.address import Addresses
from pkmlm.memory.base import Tap, UsageTap, memories
from pkmlm.train.step import TrainState
from tests.conftest import after_step, given, pkmlm

TEXTS = ["It was a dark night.\n", "He said nothing; " * 40, "x", "The end of the road was near, she said. " * 12]


@pytest.fixture(scope="module")
def run(trained) -> LoadedRun:
    return load_run(trained("product-key"), "latest")


def documents(run: LoadedRun):
    return documents_of_texts("four", [np.array(run.tokenizer.encode(text)) for text in TEXTS], TEXTS)


@pytest.mark.parametrize("contexts", [1, 3, 50])
def test_the_kept_positions_are_those_of_a_full_sort(contexts: int) -> None:
    random = torch.Generator().manual_seed(0)
    tap = UsageTap(1, "pkm", "flat-key", Addresses(12), 2)
    reads, position = defaultdict(lambda: defaultdict(float)), 0
    tops = TopContexts(tap, torch.device("cpu"), contexts)
    one = TopContexts(tap, torch.device("cpu"), contexts, slot=7)
    with ReadListener([(tap, tops.add), (tap, one.add)]):
        for tokens in (5, 1, 40, 17):
            slots_NHk = torch.rand(tokens, 2, 12, generator=random).topk(3).indices
            weights_NHk = torch.randint(0, 4, (tokens, 2, 3), generator=random) / 4  # many ties, zeros too
            tap(slots_NHk, weights_NHk)
            for token in range(tokens):
                for slot, weight in zip(slots_NHk[token].flatten(), weights_NHk[token].flatten(), strict=True):
                    reads[int(slot)][position] += float(weight)
                position += 1
    top = tops.positions()
    assert top.weights_Kc.shape == top.positions_Kc.shape == (12, contexts), "however long the text"
    for slot in range(12):
        expected = sorted(((-weight, at) for at, weight in reads[slot].items()))[:contexts]
        kept = top.positions_Kc[slot] >= 0
        assert top.positions_Kc[slot][kept].tolist() == [at for _, at in expected]
        assert top.weights_Kc[slot][kept].tolist() == [-weight for weight, _ in expected]
        assert (top.weights_Kc[slot][~kept] == -np.inf).all()
    assert one.positions().positions_Kc.shape == (1, contexts), "however many slots"
    assert one.positions().of(7) == top.of(7) != []


def reads_of(run: LoadedRun, tokens: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    with ReadListener([(memories(run.model)[0].tap, lambda *pair: seen.append(pair))]), torch.no_grad():
        run.model.hidden(torch.from_numpy(tokens)[None])
    return seen[0]


def test_index_equals_one_forward_a_window(run: LoadedRun) -> None:
    ((_, usage, top, _),) = index_slots(run, documents(run), contexts=4)
    reads, places, position = defaultdict(list), [], 0
    for ids in documents(run).ids:
        for window in windows(ids, run.tokenizer.eos, run.model.context, run.model.context):
            slots_THk, weights_THk = reads_of(run, window.tokens)
            for place in range(len(window.tokens) - len(window.targets), len(window.tokens)):
                places.append(place)
                coefficients = defaultdict(float)
                for slot, weight in zip(slots_THk[place].flatten(), weights_THk[place].flatten(), strict=True):
                    coefficients[int(slot)] += float(weight)
                for slot, weight in coefficients.items():
                    reads[slot].append((weight, position))
                position += 1
    for slot in range(usage.slots):
        found = sorted(reads[slot], key=lambda pair: -pair[0])[:4]
        kept = top.positions_Kc[slot] >= 0
        np.testing.assert_allclose(top.weights_Kc[slot][kept], [weight for weight, _ in found], rtol=1e-4)
        weight_at = {at: weight for weight, at in reads[slot]}
        there = [weight_at[at] for at in top.positions_Kc[slot][kept].tolist()]
        np.testing.assert_allclose(there, [weight for weight, _ in found], rtol=1e-4)
    contexts = contexts_at(np.arange(position), documents(run), run)
    assert [contexts[p].place for p in range(position)] == places


def test_a_read_of_any_weight_has_a_context(run: LoadedRun) -> None:
    """Where scores are weights (`scores: none`), a slot may only be read with weights below -1."""
    tap = memories(run.model)[0].tap
    tops = TopContexts(tap, run.device, 2)
    with ReadListener([(tap, tops.add)]):
        tap(torch.tensor([[[3, 5]], [[3, 7]]]), torch.tensor([[[-2.0, -1.0]], [[-1.5, 0.5]]]))
    top = tops.positions()
    assert top.positions_Kc[[3, 5, 7, 9]].tolist() == [[1, 0], [0, -1], [1, -1], [-1, -1]]


def test_contexts_are_the_text_around_a_position(run: LoadedRun) -> None:
    found = contexts_at(np.arange(-1, 10**4), documents(run), run)
    position = 0
    for number, ids in enumerate(documents(run).ids):
        text = TEXTS[number]
        for at in range(len(ids)):
            context = found[position]
            said = run.tokenizer.decode(ids[:at].tolist())
            if at > 0:
                assert said.endswith(context.before + context.token)
            assert (text[len(said) :]).startswith(context.after)
            assert context.after.startswith(context.next)
            assert len(run.tokenizer.encode(context.before)) <= BEFORE + 2
            assert context.after == run.tokenizer.decode(ids[at : at + AFTER].tolist())
            assert (context.position, context.document) == (position, number)
            position += 1
        assert found[position - len(ids)].token == "</s>"
    assert len(found) == position


def test_the_lens_ranks_tokens_as_a_large_value_does(run: LoadedRun) -> None:
    lens = LogitLens(run.model, memories(run.model)[0], run.tokenizer.size, run.tokenizer.piece)
    slots = [0, 7, 255]
    for slot, (raises, lowers) in zip(slots, lens.words(slots, 3), strict=True):
        value_D = run.model.blocks[1].parts["memory_pkm"].values.weight_KD[slot].detach()
        norm_D, rows_VD = run.model.norm.weight.detach(), run.model.embedding.weight.detach()
        centred_D = value_D - value_D.mean()
        logits = {
            run.tokenizer.piece(token): float((centred_D / centred_D.std(correction=0) * norm_D) @ row)
            for token, row in enumerate(rows_VD[: run.tokenizer.size])
        }
        mean = sum(logits.values()) / len(logits)
        order = sorted(logits, key=logits.__getitem__)
        assert [word.token for word in raises] == order[:-4:-1]
        assert [word.token for word in lowers] == order[:3]
        assert raises[0].logit == pytest.approx(logits[order[-1]] - mean, rel=1e-3)


def test_rows_that_do_not_reach_the_stream_say_nothing(trained) -> None:
    hashed = load_run(trained("hash"), "latest")
    size, piece = hashed.tokenizer.size, hashed.tokenizer.piece
    found = [LogitLens(hashed.model, memory, size, piece).applies for memory in memories(hashed.model)[:3]]
    assert found == [False, False, True]
    index = index_slots(hashed, documents(hashed))[0]
    ((slot,),) = slot_details(hashed, [index], [[17]], documents(hashed))
    assert (slot.raises, slot.address, slot.name) == (None, {"table": 2, "row": 1}, "2:1")
    assert slot.reads == index.usage.counts_HK[1, 1]


def test_a_memory_whose_reads_have_no_weight_holds_nothing(run: LoadedRun) -> None:
    (index,) = index_slots(run, documents(run))
    usage = replace(index.usage, masses_HK=np.zeros_like(index.usage.masses_HK))
    (held,) = page_slots(run, [index._replace(usage=usage)], documents(run))
    assert held.slots == []
    assert held.first_K is not None
    assert ((held.first_K >= 0) == (usage.counts_S > 0)).all()
    lens = LogitLens(run.model, index.memory, run.tokenizer.size, run.tokenizer.piece)
    assert lens.top_tokens(np.zeros(0, np.int64)).size == 0


def test_a_prompt_gives_the_strongest_slots_of_each_token(run: LoadedRun) -> None:
    memory, ids = memories(run.model)[0], run.tokenizer.encode(TEXTS[1])
    assert len(ids) > run.model.context, "more than one window"
    tokens = report_prompt(run, memory, TEXTS[1], 3)["tokens"]
    assert [token["token"] for token in tokens] == ["</s>", *map(run.tokenizer.piece, ids)]
    for token in tokens:
        weights = [slot["weight"] for slot in token["slots"]]
        assert weights == sorted(weights, reverse=True)
        assert len(weights) == 3


def test_find_memory_by_layer_and_name(trained) -> None:
    hashed = load_run(trained("hash"), "latest").model
    all_of_them = memories(hashed)
    names = (None, "1", "1:qkv", "2:ffn1", "1:tables:ffn2", "tables", "tables:qkv")
    assert [all_of_them.index(find_memory(hashed, name)) for name in names] == [5, 2, 0, 4, 2, 5, 3]
    for wrong in ("3", "3:qkv", "1:ffn3", "other", "", "1:"):
        with pytest.raises(UserError, match="expected 1:tables:qkv, 1:tables:ffn1"):
            find_memory(hashed, wrong)
    with pytest.raises(UserError, match="no memory"):
        find_memory(nn.Linear(1, 1), None)


def test_slot_names_go_there_and_back() -> None:
    tables = Addresses(32, 8, tables=True)
    for addresses in (Addresses(64, 8), Addresses(10), tables):
        slots = addresses.slots
        for slot in range(slots):
            assert slot_number(addresses.name(slot), addresses) == slot
            assert slot_number(str(slot), addresses) == slot
        for wrong in ("-1", str(slots), "1:99", "99:1", "", "1:2:3", "9" * 5000):
            with pytest.raises(UserError, match="--slot"):
                slot_number(wrong, addresses)
    with pytest.raises(UserError, match="4:7"):
        slot_number("0:3", tables)


def context(token: str = "t", next: str = "n", previous: str = "p", place: int = 0) -> Context:
    return Context(0, 0, place, 0.5, "", token, "", previous, next)


def slot_with(contexts: list[Context]) -> SlotDetails:
    return SlotDetails(0, "0", {}, 1, 1.0, 0.1, [], None, None, find_pattern(contexts), contexts)


def test_a_pattern_is_what_half_of_the_contexts_share() -> None:
    different = [context(*(f"{kind}{i}" for kind in "tnp"), i) for i in range(10)]
    assert find_pattern(different) is None
    five = [c._replace(next="same") if i < 5 else c for i, c in enumerate(different)]
    assert find_pattern(five) == ("next", "same", 5, 10)
    assert find_pattern([c._replace(next="same") if i < 4 else c for i, c in enumerate(different)]) is None
    six = [c._replace(place=99) if i > 3 else c for i, c in enumerate(five)]
    assert find_pattern(six) == ("place", "99", 6, 10), "the one that more contexts share"
    assert find_pattern([context()] * 10) == ("token", "t", 10, 10), "the first of equals"
    assert find_pattern([context()] * 2) is None, "two are no pattern"
    assert find_pattern([]) is None
    assert find_pattern(five + different) == find_pattern(five), "ten are looked at"


def test_shuffling_deals_the_same_contexts() -> None:
    apart = [slot_with([context(f"t{i}", f"n{i}{j}", f"p{i}{j}", 100 * i + j) for j in range(10)]) for i in range(20)]
    found = count_patterns(apart)
    assert (found["slots"], found["patterned"], found["kinds"]) == (20, 20, {"token": 20})
    assert found["shuffled"] == 0.0
    alike = [slot_with([context("t", f"n{j}", f"p{j}", j) for j in range(10)]) for _ in range(5)]
    assert count_patterns(alike)["shuffled"] == 5.0
    assert count_patterns([]) == {"slots": 0, "patterned": 0, "kinds": {}, "shuffled": 0.0}
    assert json.dumps(found)


@pytest.mark.parametrize("kind", ["product-key", "memory-plus", "ngram", "hash"])
def test_nothing_is_left_on_a_model(kind: str, trained, write_recipe, tmp_path: Path, monkeypatch) -> None:
    run, states = load_run(trained(kind), "latest"), list[TrainState]()
    after_step(monkeypatch, 2, states.append)
    pkmlm("train", write_recipe(tmp_path, kind), "-o", tmp_path / "run", "-q", *given("train.steps=2", "eval.every=1"))
    assert score(run.model, documents(run), run.tokenizer.eos)
    assert index_slots(run, documents(run))
    with pytest.raises(KeyboardInterrupt), UsageCounters(run.model):
        raise KeyboardInterrupt
    for model in (states[0].model, run.model):
        taps = [module for module in model.modules() if isinstance(module, Tap)]
        assert taps
        assert not any(tap.listeners for tap in taps)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
