"""What the commands make of a model with Memory+ (two layers share a table, behind gates), and of one with PEER."""

import json
from pathlib import Path

import pytest
import torch

from pkmlm.evaluate.load import load_run
from pkmlm.measure.slots import LogitLens, find_memory
from tests.conftest import given, pkmlm


@pytest.mark.parametrize("kind", ["memory-plus", "peer"])
def test_validation_and_comparison_tell_the_weights(trained, kind: str) -> None:
    run = trained(kind)
    valid = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if '"valid"' in line]
    assert all(1 <= memory["effective"] <= 4 for event in valid for memory in event["usage"])
    pkmlm("usage-report", run)
    facts = json.loads(pkmlm("compare", run, "--format", "json").stdout)["runs"][0]
    assert facts["kind"] == ("product-key" if kind == "memory-plus" else "peer")
    text = pkmlm("compare", run).stdout
    assert len(facts["usage"]) == (3 if kind == "memory-plus" else 1)
    assert all(len(line) <= 80 for line in text.splitlines())


def test_slots_speak_through_the_map_and_the_gate_is_told(trained) -> None:
    run = trained("memory-plus")
    found = json.loads(pkmlm("slots", run, "--layer", 1, "--top", 3, "--json").stdout)
    assert found["left_out"] == ["gate"]
    slot = found["slots"][0]
    loaded = load_run(run)
    memory = find_memory(loaded.model, "1")
    with torch.no_grad():
        row = loaded.model.pools["memory_plus"].values.weight_KD[slot["slot"]]
        v = memory.output.weight @ row
        v = (v - v.mean()) / v.std(correction=0)
        logits = (loaded.model.norm.weight * v) @ loaded.model.embedding.weight.T
        logits = logits[: loaded.tokenizer.size] - logits[: loaded.tokenizer.size].mean()
    top = slot["raises"][0]
    assert top["token"] == loaded.tokenizer.piece(int(logits.argmax()))
    assert top["logit"] == pytest.approx(float(logits.max()), rel=1e-4)
    assert LogitLens(loaded.model, memory, loaded.tokenizer.size, loaded.tokenizer.piece).applies
    text = pkmlm("slots", run, "--layer", 1, "--slot", slot["slot"]).stdout
    assert "gate" in text.partition("\n\n")[2]
    assert all(len(line) <= 80 for line in text.splitlines())
    plain = json.loads(pkmlm("slots", trained("peer"), "--top", 3, "--json").stdout)
    assert plain["left_out"] == ["activation"]
    assert "activation left out" in pkmlm("slots", trained("peer"), "--slot", plain["slots"][0]["slot"]).stdout
    assert plain["slots"][0]["subkeys"][0] < 16


def test_a_run_may_start_from_tables_of_another_shape_of_memory(trained, write_recipe, tmp_path: Path) -> None:
    """A pool is no table of a layer: it is drawn anew, and said to be; scores that weigh otherwise are told."""
    source = f"train.init_from={trained('memory-plus')}"
    changes = given(source, "train.steps=1", "model.memories.plus.scores=relu")
    recipe = write_recipe(tmp_path, "memory-plus")
    pkmlm("train", recipe, "-o", tmp_path / "pool", *changes)
    log = (tmp_path / "pool/train.log").read_text()
    assert "model.memories.plus.scores is softmax there and relu here" in log
    assert "left out" not in log.partition("train.init_from")[2].splitlines()[0]
    pkmlm("train", recipe, "-o", tmp_path / "own", *changes, "-s", "model.memories.plus.share_values=false")
    told = next(line for line in (tmp_path / "own/train.log").read_text().splitlines() if "train.init_from" in line)
    assert ": plus.values.weight_KD (layers 1, 2)" in told
    assert "left out: plus.values.weight_KD" in told
