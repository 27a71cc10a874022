"""The script that tells what a model learns of invented facts, and what it forgets."""

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT

SCRIPT = ROOT / "recipes" / "slotwise" / "facts.py"


@pytest.mark.slow
def test_facts_are_learnt_and_what_is_forgotten_is_told(trained, tmp_path):
    small = [
        "--seeds",
        1,
        "--facts",
        6,
        "--steps",
        8,
        "--sequences",
        4,
        "--top",
        20,
        "--batches",
        9,
        "--old-tokens",
        500,
    ]
    command = [sys.executable, SCRIPT, trained("product-key"), "-o", tmp_path / "out", *small]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "", "CUDA_VISIBLE_DEVICES": "", "HOME": str(tmp_path)}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "out/results.json").read_text())
    methods = results["methods"]
    assert set(methods) == {"full", "values", "tfidf", "kl", "low-rank"}
    for name, method in methods.items():
        ends = {rate: curves[0][-1] for rate, curves in method["curves"].items()}
        best = ends[f"{method['rate']:g}"]
        assert best["choosing_nats"] == min(end["choosing_nats"] for end in ends.values())
        assert best["trained_nats"] < results["before"]["trained_nats"], name
        assert [point["step"] for point in method["curve"]] == [0, 1, 2, 4, 8]
    moved = {name: method["curve"][-1]["slots_moved"] for name, method in methods.items()}
    assert moved["low-rank"] == 0
    assert 20 <= max(moved["tfidf"], moved["kl"]) <= 160 < moved["values"]
    assert (tmp_path / "out/learnt-forgotten.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "out/table.md").read_text().count("\n|") >= 7
