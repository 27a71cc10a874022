"""Benchmarks time what they say: the plain layer is the memory, the models are a recipe's."""

import gc
import itertools
from dataclasses import replace
from weakref import ref

import pytest
import torch

from pkmlm.bench import LAYERS, memory, rounds
from pkmlm.bench import steps as bench_steps
from pkmlm.bench.memory import Shape, contender, contenders, inputs, product_key_layer, reads_of, time_memory
from pkmlm.bench.models import (
    ModelTimes,
    RandomBatches,
    chosen_models,
    decode,
    prefilled,
    random_tokens,
    random_training,
    variants,
)
from pkmlm.bench.peaks import peak_of
from pkmlm.bench.rounds import Timing, interleaved
from pkmlm.errors import UserError
from pkmlm.evaluate.generate import Sampling, generate
from pkmlm.memory.hash.spec import HashSpec
from pkmlm.memory.ngram.spec import NGramSpec
from pkmlm.memory.product_key.spec import ProductKeySpec
from pkmlm.memory.spec import Spec
from pkmlm.model.transformer import build_model
from pkmlm.recipe.schema import Parallel, Recipe, Train
from pkmlm.train.step import train_step
from tests.conftest import model_2019, recipe_2019

CPU = torch.device("cpu")
SHAPE = Shape(num_keys=16, dim=24, heads=2, topk=4, key_dim=8, tokens=40)
PKM = ProductKeySpec(layers=("2",), num_keys=8, heads=2, topk=4, key_dim=16)
RECIPE = recipe_2019(
    model=model_2019(dim=32, layers=2, heads=2, context=16, memories={"pkm": PKM}),
    train=Train(batch_tokens=64, micro_batch=2),
)


def quiet(text: str) -> None:
    pass


def with_memories(**memories: Spec) -> Recipe:
    return replace(RECIPE, model=replace(RECIPE.model, vocab_size=50, memories=memories))


def test_a_training_that_chooses_slots_by_a_background_is_timed_without_it():
    model = replace(RECIPE.model, vocab_size=64)
    spec = replace(RECIPE.finetune, slots="kl", top=3, background="gone.npz")
    state = random_training(replace(RECIPE, model=model, finetune=spec), "fp32")
    assert train_step(state, 1).loss > 0
    assert state.slot_choice.top == 3


def test_models_that_were_timed_are_gone_before_a_gpus_memory_is_given_back(monkeypatch):
    made, left = [], []

    def remembered(*given):
        state = random_training(*given)
        made.append(ref(state.model))
        return state

    monkeypatch.setattr(bench_steps, "random_training", remembered)
    monkeypatch.setattr(bench_steps, "give_back", lambda device: (gc.collect(), left.extend(each() for each in made)))
    recipe = with_memories(pkm=PKM)
    bench_steps.time_steps({"one": recipe, "two": recipe}, quiet, 1)
    assert left == [None, None]


@pytest.mark.parametrize(
    "changes",
    [
        {"train": replace(RECIPE.train, only="values")},
        {"finetune": replace(RECIPE.finetune, slots="count", top=3)},
        {"parallel": Parallel(memory=2)},
    ],
)
def test_models_without_the_memory_follow_from_any_recipe_of_one(changes):
    found = variants(replace(RECIPE, **changes), 64, [], ["dense", "memory", "double"])
    assert [one.name for one in found] == ["dense-2L", "memory-64", "dense-4L"]
    assert found[1].recipe.train.only == replace(RECIPE, **changes).train.only, "its own is trained as it says"


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    """It takes a minute or two, and whether its results are right is for torch to test."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


@pytest.mark.parametrize("name", ["plain-adam", "plain-fused", "plain-compiled", "plain-sparse"])
def test_the_plain_layer_is_the_memory(name):
    source = product_key_layer(SHAPE, CPU)
    one = contender(name, SHAPE, source)
    plain = one.layer
    x, grad = inputs(SHAPE, CPU)
    found = []
    reads = reads_of(source, x)
    if name != "plain-compiled":
        torch.testing.assert_close(one.values(*reads).view_as(x), plain(x), rtol=0, atol=1e-5)
    for layer in (source, plain):
        x.grad = None
        out = layer(x)
        out.backward(grad)
        values = source.values.weight_KD  # of both
        found.append((out.detach(), x.grad, values.grad.to_dense()))
        sparse, values.grad = values.grad.is_sparse, None
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-5)
    keys, plain_keys = dict(source.named_parameters()), dict(plain.named_parameters())
    torch.testing.assert_close(keys["subkeys_H2nf"].grad, plain_keys["subkeys_H2nf"].grad, rtol=0, atol=1e-5)
    torch.testing.assert_close(keys["query.map.weight"].grad, plain_keys["query.weight"].grad, rtol=0, atol=1e-4)
    assert sparse == (name == "plain-sparse")


def test_row_adam_and_sparse_adam_move_the_same_rows_alike():
    moved = []
    for name in ("pkmlm", "plain-sparse"):
        source = product_key_layer(SHAPE, CPU)
        before = source.values.weight_KD.detach().clone()
        one = contender(name, SHAPE, source)
        x, grad = inputs(SHAPE, CPU)
        one.backward(x, grad, update=True)
        moved.append(source.values.weight_KD.detach() - before)
    assert (moved[0] != 0).any(1).sum() > 100
    torch.testing.assert_close(moved[0], moved[1], rtol=0, atol=5e-5)  # of 1e-3


def test_all_memories_train_one_table_with_one_pair_of_moments():
    source = product_key_layer(SHAPE, CPU)
    values = source.values.weight_KD
    layers = contenders(LAYERS, SHAPE, source).values()
    x, grad = inputs(SHAPE, CPU)
    for one in layers:
        one.backward(x, grad, update=True)
        assert all(parameter.grad is None for parameter in one.layer.parameters())
        assert not source.values.gradient
    states = [optimizer.state[values] for one in layers for optimizer in one.optimizers if values in optimizer.state]
    assert len(states) == len(LAYERS) - 1, "one of each layer but the FFN"
    for name in ("exp_avg", "exp_avg_sq"):
        assert len({id(state[name]) for state in states}) == 1
    assert [int(state["step"]) for state in states] == [1] * len(states)


def test_a_round_times_every_phase_of_every_layer():
    result = time_memory(SHAPE, LAYERS, 2, quiet)
    assert len(result.times) == 4 * 4 + 2 * 3, (
        "four phases; three of the FFN, which has no values, and of what compiles"
    )
    assert all(len(timing.seconds) == 2 and min(timing.seconds) > 0 for timing in result.times.values())
    assert result.ratio("pkmlm", "step") == 1
    assert 0 < result.touched <= SHAPE.tokens * SHAPE.heads * SHAPE.topk
    least = SHAPE.least_bytes(result.touched)
    rows = SHAPE.tokens * 2 * 4 * 24 * 4
    assert least["values"] == rows + SHAPE.tokens * 24 * 4
    assert least["forward"] == rows + 2 * SHAPE.tokens * 24 * 4
    assert least["backward"] == 2 * rows + 2 * SHAPE.tokens * 24 * 4
    assert least["step"] - least["backward"] == 6 * result.touched * 24 * 4
    assert result.bytes_per_second("ffn", "step") is None


def test_the_compiled_layer_is_timed_on_a_gpu_or_where_it_is_named(monkeypatch):
    timed, compiled = [], []
    monkeypatch.setattr(memory, "time_memory", lambda shape, names, rounds, say: timed.append(names))
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled.append(options) or function)
    memory.time_sizes([SHAPE], (), 1, quiet)
    memory.time_sizes([SHAPE], ("plain-compiled", "pkmlm"), 1, quiet)
    assert timed == [[name for name in LAYERS if name != "plain-compiled"], ["pkmlm", "plain-compiled"]]
    contender("plain-compiled", SHAPE, product_key_layer(SHAPE, CPU))
    assert compiled[-1] == {"dynamic": False}
    assert len(compiled) == 2, "once to see whether it works"
    monkeypatch.setattr(memory, "check_compiler", lambda *asked: None)
    monkeypatch.setattr(memory, "default_device", lambda: torch.device("cuda"))
    memory.time_sizes([SHAPE], (), 1, quiet)
    assert timed[-1] == [*LAYERS]


def test_mfu_where_the_peak_is_known():
    for name, precision, peak in (
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA H100 80GB HBM3", "fp32", 67e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA A100-SXM4-40GB", "bf16", 312e12),
        ("NVIDIA L4", "fp16", 121e12),
        ("NVIDIA L40", "fp16", None),
        ("cpu, 2 threads", "fp32", None),
    ):
        assert peak_of(name, precision) == peak, name
    models = variants(RECIPE, 50, [], ["dense", "memory"])
    values_only = replace(models[1].recipe, train=replace(models[1].recipe.train, only="values"))
    models[1] = replace(models[1], recipe=values_only)
    batches = {"forward": 1, "step": models[0].recipe.sequences}
    times = {(phase, index, each): Timing([1.0, 2.0, 3.0]) for index in (0, 1) for phase, each in batches.items()}
    timed = {"forward": ("a forward", 8), "step": ("steps", 8)}
    dense = ModelTimes(models, times, timed, {"precision": "bf16"}, 1e9, peak=1e6)
    assert dense.mfu(0) == pytest.approx(6 * models[0].cost.flops_per_token * 64 / 2.0 / 1e6)
    assert dense.mfu(1) is None, "it has a smaller backward"
    assert [each["mfu"] for each in dense.as_json()["models"]] == [dense.mfu(0), None]
    forward, steps = dense.tables()
    assert [column.name for column in steps.columns][-1] == "MFU"
    assert [row[-1] for row in steps.rows] == [dense.mfu(0), None]
    assert "MFU" not in [column.name for column in forward.columns]
    on_cpu = replace(dense, peak=None)
    assert "mfu" not in on_cpu.as_json()["models"][0]
    assert "MFU" not in [column.name for column in on_cpu.tables()[1].columns]


def test_more_than_the_machine_has_is_one_error():
    with pytest.raises(UserError, match=r"slots of width 24 need .* GB, .* GB are free"):
        time_memory(replace(SHAPE, num_keys=1 << 20), ["pkmlm"], 1, quiet)


def test_rounds_are_interleaved_and_the_first_is_not_counted():
    order: list[str] = []
    actions = {name: lambda name=name: order.append(name) for name in "abc"}
    said: list[str] = []
    times = interleaved(actions, 2, CPU, said.append)
    assert "".join(order) == "abc" + "bca" + "cab"
    assert [len(timing.seconds) for timing in times.values()] == [2, 2, 2]
    assert said == ["warming up", "round 1 of 2", "round 2 of 2"]


@pytest.mark.parametrize(
    ("device", "least", "waits", "runs"), [("cpu", 7, 2, 1), ("cuda", 0.5, 2, 1), ("cuda", 7, 4, 8)]
)
def test_short_work_on_a_gpu_is_queued_many_times_for_one_time(monkeypatch, device, least, waits, runs):
    """The host must not wait for each: that would be timed, too."""
    now, done = itertools.count(), []
    monkeypatch.setattr(rounds, "MIN_SECONDS", least)
    monkeypatch.setattr(rounds, "synchronize", lambda device: done.append("wait"))
    monkeypatch.setattr(rounds.time, "perf_counter", lambda: next(now))
    (timing,) = interleaved({"a": lambda: done.append("run")}, 1, torch.device(device), quiet).values()
    counted = done[len(done) // 2 :]  # after the first round
    assert (counted.count("wait"), counted.count("run")) == (waits, runs)
    assert counted[-1] == "wait"
    assert timing.seconds == [1 if waits == 2 else 1 / 7]


def test_models_follow_from_the_recipe():
    found = variants(RECIPE, 50, [], ("dense", "memory", "double", "hash"))
    models = [one.recipe.model for one in found]
    assert [model.kinds for model in models] == [[], ["product-key"], [], ["hash"]]
    assert [model.layers for model in models] == [2, 2, 4, 2]
    for one in found:
        built = build_model(one.recipe, 50)
        assert one.cost.dense + one.cost.memory == sum(parameter.numel() for parameter in built.parameters())
    compiled = replace(RECIPE, train=replace(RECIPE.train, compile=True))
    assert all(one.recipe.train.compile for one in variants(compiled, 50, [], ("dense", "hash")))
    with pytest.raises(UserError, match="no memory to time"):
        variants(with_memories(), 50, [], ["memory"])


def test_a_size_in_slots_is_that_of_the_memories_with_sub_keys():
    both = with_memories(pkm=PKM, ngrams=NGramSpec(layers=("1",), heads=2, rows=13, row_dim=8))
    found = variants(both, 50, [8, 16], ["memory"])
    assert [one.recipe.model.memories["pkm"].num_keys for one in found] == [8, 16]
    assert all(one.recipe.model.memories["ngrams"] == both.model.memories["ngrams"] for one in found)
    assert [one.name for one in found] == ["memory-64", "memory-256"]


def test_all_possible_models_are_chosen_once():
    def kinds(recipe: Recipe) -> list[str]:
        return [one.kind for one in chosen_models(recipe, [], ())]

    assert kinds(with_memories(pkm=PKM)) == ["dense", "memory", "double", "hash"]
    assert kinds(with_memories()) == ["dense", "double", "hash"]
    assert kinds(with_memories(tables=HashSpec(bits=4))) == ["dense", "memory", "double"]
    ngrams = NGramSpec(layers=("1",), heads=2, rows=13, row_dim=8)
    assert kinds(with_memories(ngrams=ngrams)) == ["dense", "memory", "double", "hash"]
    narrow = replace(RECIPE, model=replace(RECIPE.model, dim=20, vocab_size=50, memories={}))
    assert kinds(narrow) == ["dense", "double"], "8 bits do not divide the width"
    with pytest.raises(UserError, match="--slots"):
        chosen_models(with_memories(ngrams=ngrams), [16], ())


def test_decoding_a_batch_is_generation_of_each_sequence():
    model = build_model(RECIPE, 50).eval()
    prompts = random_tokens(50, 3, 8)
    filled = prefilled(model, prompts[:, :-1])
    found = decode(model, filled, prompts[:, -1:], 5)
    assert filled.length == 7
    for prompt, tokens in zip(prompts, found, strict=True):
        assert list(generate(model, prompt.tolist(), Sampling(temperature=0), 5, 50)) == tokens.tolist()
    assert torch.equal(decode(model, filled, prompts[:, -1:], 5), found)


def test_random_batches_score_every_target():
    batches = RandomBatches(RECIPE, 50)
    tokens, targets = batches.micro_batch(1, 0, 2)
    assert tokens.shape == targets.shape == (2, 16)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert batches.scored(1) == 64
    assert 0 <= int(targets.min()) <= int(targets.max()) < 50
    assert not torch.equal(tokens, batches.micro_batch(1, 1, 2).tokens_BT), "a step reads other slots in each"
    assert torch.equal(tokens, batches.micro_batch(2, 0, 2).tokens_BT)
