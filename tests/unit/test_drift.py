"""Drift: what training read and moved, against what the weights and a plain count say."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pkmlm.data.batches import Batches
from pkmlm.measure import drift as drifting
from pkmlm.measure.drift import RECORD, Drift
from pkmlm.memory.base import memories
from pkmlm.memory.product_key.spec import ProductKeySpec
from pkmlm.model.transformer import build_model
from pkmlm.recipe.load import load_recipe
from pkmlm.recipe.schema import Eval, Train
from pkmlm.runs.directory import RunDirectory
from pkmlm.train.step import TrainState, train_step
from tests.conftest import given, model_2019, pkmlm, recipe_2019
from tests.golden.test_curves import Stream

MEMORY = ProductKeySpec(layers=("2",), num_keys=32, heads=2, topk=2, key_dim=8)
MODEL = model_2019(dim=16, layers=2, heads=2, context=16, memories={"pkm": MEMORY})


class Events:
    """A log that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[dict] = []

    def event(self, name: str, step: int, **numbers: object) -> None:
        self.told.append({"event": name, "step": step, **numbers})


@pytest.fixture
def watched(tmp_path: Path, write_recipe, monkeypatch: pytest.MonkeyPatch):
    """A model with 256 slots, what is noted of it, and a function that reads slots as training does."""
    monkeypatch.setattr(drifting, "SAMPLE", 100)
    recipe = load_recipe(write_recipe(tmp_path, "product-key"))
    model = build_model(recipe, 600)

    def read(drift: Drift, *slots: int) -> None:
        tap = drift.memories[0].tap
        with drift:
            tap(torch.tensor(slots).view(-1, 1, 1), torch.ones(len(slots), 1, 1))

    return recipe, model, read


def test_slots_die_wake_and_stay_unread(watched) -> None:
    recipe, model, read = watched
    log, drift = Events(), Drift(recipe, model)
    for step in range(1, 31):
        if step <= 15:
            read(drift, 1, 2, 3)
        else:
            read(drift, 3, 4)
        drift.record(step, log.event)
    first, second = (line["memories"][0] for line in log.told)
    assert [(line["step"], line["since"]) for line in log.told] == [(15, 0), (30, 15)]
    assert (first["read"], first["died"], first["woke"], first["never"]) == (3, 0, 0, 253)
    assert (second["read"], second["died"], second["woke"], second["never"]) == (2, 2, 1, 252)
    drift.memories[0].tap(torch.tensor([[[9]]]), torch.ones(1, 1, 1))
    assert not drift.memories[0].read(RECORD).any(), "reads outside of training steps are not noted"


@pytest.mark.parametrize(("every", "recorded"), [(1, [*range(1, 31)]), (12, [12, 24, 30]), (13, [13, 26]), (0, [30])])
def test_the_last_window_is_recorded_unless_it_is_short(watched, every: int, recorded) -> None:
    recipe, model, _ = watched
    recipe = replace(recipe, eval=replace(recipe.eval, every=every))
    log, drift = Events(), Drift(recipe, model)
    for step in range(1, 31):
        drift.record(step, log.event)
    assert [line["step"] for line in log.told] == recorded


def test_moved_is_the_distance_of_sampled_values(watched) -> None:
    recipe, model, read = watched
    log, drift = Events(), Drift(recipe, model)
    table = drift.memories[0].values.weight_KD
    before = table.detach().clone()
    read(drift, *range(256))
    with torch.no_grad():
        table += torch.arange(256)[:, None] * 0.001
    drift.record(15, log.event)
    way = (table.detach() - before).norm(dim=1)
    sample = drift.memories[0].sample_S
    assert len(sample.unique()) == 100
    assert log.told[0]["memories"][0]["moved"] == pytest.approx(
        float((way / before.norm(dim=1))[sample].median()), rel=1e-4
    )
    read(drift, *range(256))
    drift.record(30, log.event)
    assert log.told[1]["memories"][0]["moved"] == 0.0, "since the record before"
    drift.record(45, log.event)
    assert log.told[2]["memories"][0]["moved"] is None, "nothing was read since"


@pytest.mark.parametrize("value", [3e38, float("nan")])
def test_values_beyond_measure_have_moved_by_no_number(watched, value: float) -> None:
    recipe, model, read = watched
    log, drift = Events(), Drift(recipe, model)
    drift.memories[0].values.weight_KD.data.fill_(value)
    read(drift, *range(256))
    drift.record(15, log.event)
    assert log.told[0]["memories"][0]["moved"] is None


def test_going_on_from_a_checkpoint_changes_no_record(watched) -> None:
    recipe, model, read = watched
    told = []
    for stop in (None, 10, 15):  # between records, and at one
        log, drift = Events(), Drift(recipe, model)
        for step in range(1, 31):
            read(drift, step % 7, 50 + step)
            drift.record(step, log.event)
            if step == stop:
                kept = {name: tensor.clone() for name, tensor in drift.tensors().items()}
                drift = Drift(recipe, model)
                drift.load(kept)
        told.append(log.told)
    assert told[0] == told[1] == told[2]


@pytest.mark.parametrize("kind", ["product-key", "hash", "dense"])
def test_training_records_drift(trained, kind: str) -> None:
    run = trained(kind)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    drift = [line for line in lines if line["event"] == "drift"]
    memories = {"product-key": 1, "hash": 6, "dense": 0}[kind]
    assert [line["step"] for line in drift] == ([15, 30] if memories else [])
    for line in drift:
        assert len(line["memories"]) == memories
        for memory in line["memories"]:
            assert 0 < memory["read"] <= memory["slots"]
            assert memory["read"] + memory["never"] <= memory["slots"]
            assert memory["moved"] > 0
    for step in RunDirectory(run).steps():
        assert (RunDirectory(run).checkpoint(step) / "drift.safetensors").exists() == bool(memories)
    assert pkmlm("compare", run).stdout, "other readers of metrics.jsonl pass over it"


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("micro_batch", [8, 4])
def test_the_progress_line_tells_the_share_of_the_last_whole_window(monkeypatch, recompute, micro_batch):
    monkeypatch.setattr(drifting, "WINDOW", 3)
    train = Train(steps=9, batch_tokens=128, micro_batch=micro_batch, recompute=recompute)
    recipe = recipe_2019(model=MODEL, train=train, eval=Eval(every=2))
    model = build_model(recipe, 40)
    state = TrainState(recipe, model, Batches(Stream(), 16, 8, 1), "fp32")
    (memory,) = memories(model)
    tap, drift, seen = memory.tap, Drift(recipe, model), []
    tap.register_forward_hook(lambda _, inputs, out: seen.append(out[0].flatten()))
    told = []
    for step in range(1, 7):
        with drift:
            train_step(state, step)
        if step in (1, 4):
            model.eval()
            model(torch.arange(16)[None])  # no training: nobody counts it
            seen.pop()
        told.append(drift.after_step())
        drift.record(step, Events().event)  # begins another window, but not of the progress line
    half = len(seen) // 2
    shares = [len(torch.cat(part).unique()) / tap.slots for part in (seen[:half], seen[half:])]
    first, second = (f"layer 2 pkm reads {share:.0%}  " for share in shares)
    assert told == ["", "", first, first, first, second]


def test_values_that_were_zero_have_not_moved_by_a_share_of_themselves(write_recipe, tmp_path: Path) -> None:
    keys = given("model.memories.pkm.layers=[2+]", "model.memories.pkm.start=zero", "train.steps=20", "eval.every=10")
    pkmlm("train", write_recipe(tmp_path, "product-key"), "-o", tmp_path / "run", "-q", *keys)
    records = [
        line["memories"][0]["moved"] for line in RunDirectory(tmp_path / "run").metrics() if line["event"] == "drift"
    ]
    assert records[0] is None
    assert 0 < records[-1] < 100
