"""The script that tells what a model learns of invented facts, and what it forgets."""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT, pkmlm

SCRIPT = ROOT / "recipes" / "slotwise" / "facts.py"


@pytest.mark.slow
def test_facts_are_learnt_and_what_is_forgotten_is_told(novels, write_recipe, tmp_path):
    splits = [f"--{split}={novels / split}.txt" for split in ("valid", "test")]
    pkmlm("tokenize", novels / "train.txt", *splits, "-o", tmp_path / "tokens", "--vocab-size", 3000, "-q")
    keys = ["-s", f"data.dir={tmp_path / 'tokens'}", "-s", "train.steps=10"]
    pkmlm("train", write_recipe(tmp_path, "product-key"), "-o", tmp_path / "run", "-q", *keys)
    small = ["--seeds", 1, "--facts", 6, "--steps", 8, "--sequences", 4, "--top", 20, "--batches", 9]
    small += ["--old-tokens", 500, "--methods", "full", "kl", "low-rank"]
    command = [sys.executable, SCRIPT, tmp_path / "run", "-o", tmp_path / "out", *small]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "out/results.json").read_text())
    methods = results["methods"]
    assert list(methods) == ["full", "kl", "low-rank"]
    for method in methods.values():
        ends = {rate: curves[0][-1] for rate, curves in method["curves"].items()}
        best = ends[f"{method['rate']:g}"]
        assert best == method["curve"][-1]
        assert best["choosing_nats"] == min(end["choosing_nats"] for end in ends.values())
        assert [point["step"] for point in method["curve"]] == [0, 1, 2, 4, 8]
    assert methods["full"]["curve"][-1]["trained_nats"] < results["before"]["trained_nats"] - 0.1
    full, kl, adapters = (method["curve"][-1]["slots_moved"] for method in methods.values())
    assert adapters == 0
    assert 20 <= kl <= 8 * 20 < full
    assert (tmp_path / "out/learnt-forgotten.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "out/table.md").read_text().count("\n|") == 2 + 4
