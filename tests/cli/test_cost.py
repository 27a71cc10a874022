"""`pkmlm cost` as a user runs it."""

import json
from pathlib import Path

import pytest

from tests.conftest import ROOT, pkmlm

TINY = ROOT / "recipes/memoryformer/tiny.yaml"


def test_the_table_of_memoryformer_tiny() -> None:
    done = pkmlm("cost", TINY)
    assert done.stderr == ""
    text = done.stdout
    assert max(map(len, text.splitlines())) <= 80
    row = next(line for line in text.splitlines() if line.startswith("1-6"))
    assert row.split()[:3] == ["1-6", "tables", "qkv"]
    assert row.split()[-6:] == ["3,328", "69,206,016", "4.65", "0.356", "4.7", "0.403"]
    assert ["parameters,", "memory", "values", "and", "tables", "415,236,096"] in [
        line.split() for line in text.splitlines()
    ]


def test_json_has_the_shape_of_the_contract() -> None:
    done = pkmlm("cost", TINY, "-s", "model.layers=2", "--json")
    cost = json.loads(done.stdout)
    assert set(cost["parameters"]) == {"dense", "memory", "read_per_token"}
    assert [block["layer"] for block in cost["block"]] == [1, 2]
    assert set(cost["block"][0]) == {"layer", "flops", "flops_without_attention", "table_bytes", "paper"}
    assert set(cost["block"][0]["paper"]) == {"flops", "flops_without_attention"}
    assert {"flops_per_token", "gather_bytes_per_token", "training_bytes"} <= set(cost)
    assert cost["gather_bytes_per_token"] == 2 * 344_064  # 344 KB a block and token
    assert cost["training_bytes"].pop("total") == sum(cost["training_bytes"].values())


def test_layers_with_a_memory_have_a_line_of_their_own() -> None:
    text = pkmlm("cost", ROOT / "recipes/pkm/16-layers.yaml").stdout
    layers = [line.split()[0] for line in text.splitlines()[4:] if line[:1].isdigit()]
    assert layers == ["1-5", "6", "7-11", "12", "13-16"]


def test_an_open_vocabulary_is_asked_for(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("model: {dim: 64, heads: 4, context: 32, tie_embeddings: true}\ntrain: {batch_tokens: 512}\n")
    error, hint = pkmlm("cost", recipe, code=2).stderr.splitlines()
    assert "model.vocab_size" in error
    assert "-s model.vocab_size=" in hint
    assert "nowhere" in pkmlm("cost", recipe, "-s", "data.dir=nowhere", code=2).stderr
    counted = json.loads(pkmlm("cost", recipe, "-s", "model.vocab_size=100", "--json").stdout)
    more = json.loads(pkmlm("cost", recipe, "-s", "model.vocab_size=101", "--json").stdout)
    assert more["parameters"]["dense"] - counted["parameters"]["dense"] == 64


def test_the_vocabulary_of_tokenized_data_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pkmlm.data.corpus import Index

    Index("uint16", 300, 1, 1, "0" * 64, None, {}, {}).write(tmp_path)
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "r.yaml"
    recipe.write_text("data: {dir: .}\nmodel: {dim: 64, heads: 4, context: 32}\ntrain: {batch_tokens: 512}\n")
    assert "with the head of 300" in pkmlm("cost", recipe).stdout


def test_wrong_usage() -> None:
    pkmlm("cost", code=2)
    assert "nothing.yaml" in pkmlm("cost", "nothing.yaml", code=2).stderr
