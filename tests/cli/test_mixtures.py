"""Several memories in one model, from training to export: each is found, counted and probed by its name."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file

from pkmlm.evaluate.load import load_run
from tests.conftest import given, pkmlm

pytestmark = pytest.mark.slow

KEYS = "heads: 2, topk: 4, key_dim: 16, query_norm: layer"
MIXTURES = {
    "three kinds": f"""
    facts: {{kind: product-key, layers: 3, num_keys: 16, {KEYS}}}
    pairs: {{kind: ngram, layers: 1, orders: [1, 2], heads: 2, rows: 251, row_dim: 8}}
    words: {{kind: token, layers: all}}
    heads: {{kind: token, layers: [2, 4], into: values}}""",
    "two sizes": f"""
    small: {{kind: product-key, layers: 2, num_keys: 8, {KEYS}}}
    large:
      {{kind: product-key, layers: [2+, 3], num_keys: 16, {KEYS}, optim: {{lr: 2e-3, keys: {{lr_scale: 0.1}}}}}}""",
    "hybrid": """
    tables: {kind: hash, layers: 2, bits: 4, extra_bits: 2}
    pairs:
      {kind: ngram, layers: [2, 3], orders: [2], heads: 1, rows: 251, row_dim: 32, fusion: add, canonical: false}""",
    "pools": f"""
    shared: {{kind: product-key, layers: [1+, 3], num_keys: 16, {KEYS}, share_values: true}}
    alone: {{kind: peer, layers: [1+, 2, 4+], num_keys: 8, {KEYS}, share_values: true, value_dim: 24}}
    own: {{kind: flat-key, layers: 4+, num_keys: 4, {KEYS}}}""",
}
READ = {  # the memories in the order in which a forward reads them, with their layers; then the shared tables
    "three kinds": [
        *(("pairs", 1), ("words", 1), ("words", 2), ("heads", 2)),
        *(("words", 3), ("facts", 3), ("words", 4), ("heads", 4)),
    ],
    "two sizes": [("small", 2), ("large", 2), ("large", 3)],
    "hybrid": [*(("pairs", 2), *(("tables", 2),) * 3), ("pairs", 3)],
    "pools": [*(("shared", 1), ("alone", 1), ("alone", 2), ("shared", 3), ("alone", 4), ("own", 4))],
}


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


@every
def test_reports_call_each_memory_by_its_name(mixed, name):
    run, _ = mixed(name)
    entries = json.loads(pkmlm("usage-report", run, "--format", "json").stdout)["runs"][0]["memories"]
    found = [(entry["memory"], entry["layer"]) for entry in entries if "layers" not in entry]
    assert found == READ[name]
    pools = {entry["memory"]: [each["layer"] for each in entry["layers"]] for entry in entries if "layers" in entry}
    assert pools == ({"shared": [1, 3], "alone": [1, 2, 4]} if name == "pools" else {})
    probed = json.loads(pkmlm("probe", run, "--json").stdout)["memories"]
    names = dict.fromkeys(memory for memory, _ in READ[name])
    assert [*dict.fromkeys(entry["memory"] for entry in probed)] == [*names, "all"]
    for memory in names:
        assert pkmlm("slots", run, "--memory", memory, "--top", 3).stdout


@every
def test_an_export_computes_and_generates_the_same(mixed, tmp_path, name):
    run, _ = mixed(name)
    pkmlm("export", run, "-o", tmp_path / "exported")
    from transformers import AutoModelForCausalLM

    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", trust_remote_code=True).eval()
    ours = load_run(run, "latest").model
    tokens = torch.randint(600, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(exported(tokens).logits, ours(tokens), rtol=0, atol=1e-5)
        cached, whole = (exported.generate(tokens, max_new_tokens=8, use_cache=use) for use in (True, False))
    assert torch.equal(cached, whole)
    texts = [pkmlm("generate", path, "It was", "-n", 20, "--seed", 5).stdout for path in (run, tmp_path / "exported")]
    assert texts[0] == texts[1]
