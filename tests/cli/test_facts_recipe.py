"""The script that tells what a pretrained model learns of invented facts, and what it forgets."""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT, pkmlm

SCRIPT = ROOT / "recipes" / "pretrained" / "facts.py"
METHODS = ("product-keys", "kl", "adapters", "full")


@pytest.mark.slow
def test_facts_are_learnt_and_what_is_forgotten_is_told(novels, write_recipe, tmp_path):
    splits = [f"--{split}={novels / split}.txt" for split in ("valid", "test")]
    pkmlm("tokenize", novels / "train.txt", *splits, "-o", tmp_path / "tokens", "--vocab-size", 3000, "-q")
    keys = ["-s", f"data.dir={tmp_path / 'tokens'}", "-s", "train.steps=10", "-s", "model.layers=4"]
    pkmlm("train", write_recipe(tmp_path, "dense"), "-o", tmp_path / "run", "-q", *keys)
    out = tmp_path / "out"
    small = ["--seeds", 1, 2, "--facts", 6, "--steps", 8, "--rows", 8, "--warm-steps", 4, "--old-tokens", 500]
    small += ["--methods", *METHODS, "--ways", "all-packed", "answers-single"]

    def start(*more):
        command = [sys.executable, SCRIPT, tmp_path / "run", "-o", out, *small, *more]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600, env=environment)

    def run():
        done = start()
        assert done.returncode == 0, done.stderr
        return json.loads((out / "results.json").read_text())

    results = run()
    groups = {(group[0]["method"], group[0]["way"], group[0]["gates"] > 0): group for group in results["best"]}
    ways = [(name, way, False) for name in METHODS for way in ("all-packed", "answers-single")]
    assert set(groups) == {*ways, ("product-keys", "answers-single", True)}
    for (name, way, gated), group in groups.items():
        assert [trial["seed"] for trial in group] == [1, 2]
        tried = [
            trial
            for trial in results["trials"]
            if (trial["method"], trial["way"], trial["gates"] > 0, trial["seed"]) == (name, way, gated, 1)
        ]
        assert len(tried) >= 3
        if not gated:
            assert group[0]["choosing"] == min(trial["choosing"] for trial in tried)
    before = results["before"]["base"]
    full = groups["full", "answers-single", False][0]
    assert full["nats"] < before["nats"] - 0.5, "all parameters learn something in a few steps"
    assert full["old"] != before["old"]
    assert (out / "learnt-forgotten.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "table.md").read_text().count("\n|") == 2 + 4 + 2 + 2 + len(groups)

    written = {file: file.stat().st_mtime_ns for file in (out / "trials").iterdir()}
    assert run()["trials"] == results["trials"]
    assert {file: file.stat().st_mtime_ns for file in (out / "trials").iterdir()} == written, "none is done again"
    refused = start("--steps", 9)
    assert refused.returncode == 1
    assert "choose another -o" in refused.stderr
