"""Models with other attention than softmax on the command line: trained, resumed, measured; not generated from."""

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.conftest import given, pkmlm
from tests.task_rows import write_rows

OPTIONS = ["model.attention_options.features=12", "model.attention_options.block=8", "model.attention_options.rank=4"]
KINDS = {"linformer": "dense", "cosformer": "hash", "performer": "product-key"}


def arguments(attention: str, *more: str) -> list[str]:
    changes = [f"model.attention={attention}", *OPTIONS, "optim.schedule=constant", "train.steps=12", "eval.every=6"]
    changes += ["checkpoint.every=6", *more]
    return given(*changes)


@pytest.fixture(scope="module", params=KINDS)
def run(request, tmp_path_factory, write_recipe) -> tuple[str, Path, Path]:
    """The kind of attention, a recipe, and its run, stopped at step 6 and resumed."""
    folder, attention = tmp_path_factory.mktemp("attention"), request.param
    recipe = write_recipe(folder, KINDS[attention])
    pkmlm("train", recipe, "-o", folder / "run", "-q", *arguments(attention, "train.steps=6"))
    pkmlm("train", recipe, "-o", folder / "run", "-q", *arguments(attention))
    return attention, recipe, folder / "run"


def test_a_resumed_run_is_the_straight_one(run, tmp_path):
    attention, recipe, folder = run
    pkmlm("train", recipe, "-o", tmp_path / "straight", "-q", *arguments(attention))
    name = "checkpoints/step-00000012/weights.safetensors"
    ours, straight = load_file(folder / name), load_file(tmp_path / "straight" / name)
    assert {key: value.tobytes() for key, value in ours.items()} == {k: v.tobytes() for k, v in straight.items()}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["event"] == "train"]
    assert losses[-1] < losses[0] - 0.2
    if attention == "performer":
        directions = "blocks.0.attention.efficient.directions_Me"
        first = load_file(folder / "checkpoints/step-00000006/weights.safetensors")
        assert ours[directions].shape == (12, 16)
        assert (ours[directions] == first[directions]).all()


def test_perplexity_and_tasks(run, tmp_path):
    attention, _, folder = run
    write_rows(tmp_path / "tasks")
    found = json.loads(pkmlm("eval", folder, "--json").stdout)
    assert 1 < found["perplexity"]["token_ppl"] < 600
    done = pkmlm("eval", folder, "--tasks", "piqa", "--task-data", tmp_path / "tasks", "--limit", 4, "--json")
    assert json.loads(done.stdout)["tasks"]["piqa"]["n"] == 4
    if attention == "performer":
        usage = json.loads(pkmlm("usage-report", folder, "--format", "json").stdout)
        assert usage["runs"][0]["memories"][0]["reads"] > 0


def test_what_needs_a_cache_or_an_export_is_refused(run, tmp_path):
    attention, recipe, folder = run
    done = pkmlm("generate", folder, "The old house", code=2)
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: {folder}: {attention} attention")
    assert f"{attention} attention" in pkmlm("export", folder, "-o", tmp_path / "export", code=2).stderr
    assert not (tmp_path / "export").exists()
    done = pkmlm("train", recipe, "-o", tmp_path / "run", *arguments(attention, "eval.sample=The"), code=2)
    assert f"eval.sample: {attention} attention" in done.stderr


def test_benchmarks_time_what_needs_no_cache(tmp_path, write_recipe):
    sized = ["-s", "model.vocab_size=100", *arguments("cosformer")]
    recipe = write_recipe(tmp_path, "dense")
    done = pkmlm("bench", "train", recipe, *sized, "--rounds", 1, "--only", "dense", "--json")
    (model,) = json.loads(done.stdout)["models"]
    assert [each["what"] for each in model["times"]] == ["forward", "step"], "a token needs a cache"
    assert all(each["median"] > 0 for each in model["times"])
    assert "cosformer attention" in pkmlm("bench", "generate", recipe, *sized, code=2).stderr
