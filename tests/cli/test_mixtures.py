"""Several memories in one model: each is found, counted and probed by its name."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.conftest import given, pkmlm

pytestmark = pytest.mark.slow

KEYS = "heads: 2, topk: 4, key_dim: 16, query_norm: layer"
MIXTURES = {
    "three kinds": f"""
    facts: {{kind: product-key, layers: 3, num_keys: 16, {KEYS}}}
    pairs: {{kind: ngram, layers: 1, orders: [1, 2], heads: 2, rows: 251, row_dim: 8}}
    words: {{kind: token, layers: all}}
    heads: {{kind: token, layers: [2, 4], into: values}}""",
    "pools": f"""
    shared: {{kind: product-key, layers: [1+, 3], num_keys: 16, {KEYS}, share_values: true}}
    alone: {{kind: peer, layers: [1+, 2, 4+], num_keys: 8, {KEYS}, share_values: true, value_dim: 24}}
    own: {{kind: flat-key, layers: 4+, num_keys: 4, {KEYS}}}""",
}
READ = [  # the memories of "three kinds" in the order in which a forward reads them, with their layers
    *(("pairs", 1), ("words", 1), ("words", 2), ("heads", 2)),
    *(("words", 3), ("facts", 3), ("words", 4), ("heads", 4)),
]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory, tokens):
    """A function that gives the finished run of a mixture, and its recipe."""
    folder = tmp_path_factory.mktemp("mixed")

    def run(name: str) -> tuple[Path, Path]:
        recipe, out = folder / f"{name}.yaml", folder / name
        if not recipe.exists():
            recipe.write_text(
                f"""name: mixed
data: {{dir: {tokens}}}
model:
  dim: 32
  layers: 4
  heads: 2
  context: 32
  memories:{MIXTURES[name]}
optim: {{lr: 3e-3, schedule: cosine, warmup_steps: 5}}
train: {{steps: 50, batch_tokens: 256, micro_batch: 4}}
eval: {{every: 25, tokens: 600}}
checkpoint: {{every: 25, keep: 5}}
"""
            )
            pkmlm("train", recipe, "-o", out, "-q")
        return out, recipe

    return run


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["event"] == "train"]


every = pytest.mark.parametrize("name", MIXTURES)


@every
def test_it_learns_and_resumes_to_the_bit(mixed, tmp_path, name):
    run, recipe = mixed(name)
    assert losses(run)[-1] < losses(run)[0] - 0.5
    resumed = tmp_path / "resumed"
    shutil.copytree(run, resumed)
    shutil.rmtree(resumed / "checkpoints/step-00000050")
    (resumed / "done").unlink()
    for pointer in ("latest", "best"):
        (resumed / pointer).unlink(missing_ok=True)
    pkmlm("train", recipe, "-o", resumed, "-q")
    for file in ("weights", "optimizer"):
        whole, again = (load_file(each / f"checkpoints/step-00000050/{file}.safetensors") for each in (run, resumed))
        assert whole.keys() == again.keys()
        assert all((whole[path] == again[path]).all() for path in whole)


@every
def test_two_ranks_learn_what_one_does(mixed, ranks, tmp_path, name):
    _, recipe = mixed(name)
    # Muon makes whole steps of what is rounding in its gradients.
    short = given("train.steps=8", "checkpoint.every=8", "optim.matrices=adamw")
    divided = given("train.micro_batch=2", "parallel.memory=2")
    ranks.pkmlm(2, "train", recipe, "-o", tmp_path / "two", "-q", *short, *divided)
    pkmlm("train", recipe, "-o", tmp_path / "one", "-q", *short)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)


def test_reports_call_each_memory_by_its_name(mixed):
    run, _ = mixed("three kinds")
    entries = json.loads(pkmlm("usage-report", run, "--format", "json").stdout)["runs"][0]["memories"]
    assert [(entry["memory"], entry["layer"]) for entry in entries] == READ
    probed = json.loads(pkmlm("probe", run, "--fit-tokens", 600, "--json").stdout)["memories"]
    names = dict.fromkeys(memory for memory, _ in READ)
    assert [*dict.fromkeys(entry["memory"] for entry in probed)] == [*names, "all"]
    for memory in names:
        assert pkmlm("slots", run, "--memory", memory, "--top", 3).stdout
