"""`pkmlm probe` on small trained runs."""

import json
import re
import shutil
from pathlib import Path

import pytest

from pkmlm.runs.directory import RunDirectory
from tests.conftest import pkmlm

PROBES = ["zero", "redrawn_values", "random_slots", "token_mean", "bigram_mean", "same_token"]
FEW = ("--fit-tokens", 3000)


def probe(*arguments: object) -> dict:
    return dict(json.loads(pkmlm("probe", *arguments, *FEW, "--json").stdout))


def test_the_shape_of_the_report_and_a_dense_twin(trained) -> None:
    found = probe(trained("product-key"), "--dense", trained("dense"))
    assert list(found) == [
        "run", "step", "split", "tokens", "documents", "fit_tokens", "interval", "real", "dense", "memories",
    ]  # fmt: skip
    assert (found["run"], found["step"], found["split"], found["documents"]) == ("product-key", 30, "test", 1)
    assert 2900 < found["fit_tokens"] <= 3000
    ((memory, layer, kind, probes),) = (each.values() for each in found["memories"])
    assert (memory, layer, kind) == ("pkm", 2, "product-key")
    assert list(probes) == PROBES
    for each in probes.values():
        assert list(each) == ["nats", "low", "high", "token_ppl", "share"]
        assert each["low"] <= each["nats"] <= each["high"]
    assert found["interval"]["over"] == "pieces of 1,000 tokens"
    assert found["interval"]["units"] == -(-found["tokens"] // 1000)
    evaluated = [
        json.loads(pkmlm("eval", trained(kind), "--json").stdout)["perplexity"] for kind in ("product-key", "dense")
    ]
    real, twin = (each["nll"] / each["tokens"] for each in evaluated)
    assert found["real"]["nats"] == pytest.approx(real, rel=1e-9)
    assert found["real"]["token_ppl"] == pytest.approx(evaluated[0]["token_ppl"])
    assert [(each["run"], each["step"]) for each in found["dense"]] == [("dense", 30)]
    assert found["dense"][0]["nats"] == pytest.approx(twin - real, abs=1e-9)
    assert found["dense"][0]["token_ppl"] == pytest.approx(evaluated[1]["token_ppl"])


def test_a_dense_twin_has_no_memory_and_as_many_tokens(trained, tmp_path: Path) -> None:
    told = pkmlm("probe", trained("product-key"), "--dense", trained("flat-key"), code=2).stderr
    assert "flat-key: it has a memory" in told
    shorter = tmp_path / "shorter"
    shutil.copytree(trained("dense"), shorter)
    for step in RunDirectory(shorter).steps()[1:]:
        shutil.rmtree(RunDirectory(shorter).checkpoint(step))
    (shorter / "latest").write_text(f"step-{RunDirectory(shorter).steps()[0]:08d}\n")
    told = pkmlm("probe", trained("product-key"), "--dense", shorter, "--fit-tokens", 3000).stderr
    assert re.search(r"warning: shorter has trained on [\d,]+ tokens, product-key on", told)


def test_a_dense_twin_of_another_context_is_named(trained, write_recipe, tmp_path: Path) -> None:
    settings = ("-s", "model.context=16", "-s", "train.steps=1", "-q")
    pkmlm("train", write_recipe(tmp_path, "dense"), "-o", tmp_path / "near", *settings)
    for twin, named in ((trained("dense"), False), (tmp_path / "near", True)):
        told = pkmlm("probe", trained("product-key"), "--dense", twin, "--fit-tokens", 3000).stderr
        assert ("near reads 16 tokens at once, product-key 32" in told) == named


def test_a_text_of_several_documents_and_what_people_read(trained, tmp_path: Path) -> None:
    text = tmp_path / "twelve.jsonl"
    lines = [f"He said that number {i} was nothing. " * (i + 1) for i in range(12)]
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    found = probe(trained("flat-key"), "--text", text)
    assert (found["split"], found["documents"]) == ("twelve.jsonl", 12)
    assert (found["interval"]["over"], found["interval"]["units"]) == ("documents", 12)
    arguments = (trained("flat-key"), "--text", text, "--dense", trained("dense"), *FEW)
    shown = pkmlm("probe", *arguments, "--plots", tmp_path / "plots").stdout
    assert all(len(line) <= 80 for line in shown.splitlines()), shown
    for name in ("real", "dense", *PROBES):
        assert name.replace("_", " ") in shown
    assert "12 documents" in shown
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["flat-key-probe-layer-2-flat.png"]
    pkmlm("probe", *arguments, "--plots", tmp_path / "plots", code=2)
    standard_input = pkmlm("probe", trained("flat-key"), "--text", "-", "--json", *FEW, stdin="He said. " * 9).stdout
    assert json.loads(standard_input)["tokens"] > 9


def test_an_export_is_probed_as_its_run(trained, tokens: Path, novels: Path, tmp_path: Path) -> None:
    pkmlm("export", trained("product-key"), "-o", tmp_path / "out")
    from_run, from_export = (probe(where, "--data", tokens) for where in (trained("product-key"), tmp_path / "out"))
    assert from_export["memories"] == from_run["memories"]
    by_text = probe(tmp_path / "out", "--text", novels / "test.txt", "--data", tokens)
    assert by_text["memories"] == from_run["memories"], "the text read as a file, the means from --data"
    arguments = ("--text", novels / "test.txt", "--data", tmp_path / "nowhere")
    refused = pkmlm("probe", tmp_path / "out", *arguments, code=2).stderr
    assert "train split" in refused
    assert "nowhere" in refused


def test_what_cannot_be_compared_is_refused(trained, novels: Path, write_recipe, tmp_path: Path) -> None:
    assert "memory" in pkmlm("probe", trained("dense"), code=2).stderr
    pkmlm("tokenize", novels / "train.txt", "-o", tmp_path / "other", "--vocab-size", 500, "-q")
    recipe = write_recipe(tmp_path, "dense")
    settings = ("-s", f"data.dir={tmp_path / 'other'}", "-s", "train.steps=1", "-q")
    pkmlm("train", recipe, "-o", tmp_path / "twin", *settings)
    refused = pkmlm("probe", trained("product-key"), "--dense", tmp_path / "twin", code=2).stderr
    assert "tokenizer" in refused
    assert "twin" in refused
