"""`pkmlm recipe` as a user runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pkmlm.recipe.load import load_recipe
from pkmlm.recipe.schema import Recipe

ROOT = Path(__file__).parents[2]
SMALL = "name: small\nmodel: {dim: 64, heads: 4, context: 32}\ntrain: {batch_tokens: 512}\n"


def pkmlm(*arguments: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    command = [sys.executable, "-m", "pkmlm", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


def test_check_says_ok_and_sums_up(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(SMALL)
    (tmp_path / "b[red].yaml").write_text(
        "base: a.yaml\nmodel: {memory: {kind: product-key, layers: [2, 4+], num_keys: 64}}"
    )
    done = pkmlm("recipe", "check", "a.yaml", "b[red].yaml", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "ok  a.yaml: small, 6 layers of 64, 20,000 steps of 512 tokens",
        "ok  b[red].yaml: small, 6 layers of 64, product-key memory of 4,096 slots at 2, 4+, "
        "20,000 steps of 512 tokens",
    ]


def test_check_stops_at_a_wrong_recipe_with_two_lines_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(SMALL + "optim:\n  learning_rate: 1\n")
    done = pkmlm("recipe", "check", "a.yaml", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    error, hint = done.stderr.splitlines()
    assert error == "error: a.yaml:5:3: unknown key optim.learning_rate"
    assert hint.startswith("hint: keys of optim: lr, betas, eps, schedule, warmup_steps, ")


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "a\x1b[31m.yaml").write_text(SMALL)
    done = pkmlm("recipe", "check", "a\x1b[31m.yaml", folder=tmp_path)
    assert done.returncode == 0
    wrong = pkmlm("recipe", "check", "a\x1b[31m.yaml", "-s", "name=\x1b[31m", folder=tmp_path)
    assert wrong.returncode == 2
    assert "\x1b" not in done.stdout + wrong.stderr
    assert "\\x1b" in done.stdout


def test_show_prints_a_recipe_that_reads_back_equal(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(SMALL)
    done = pkmlm("recipe", "show", "a.yaml", "-s", "optim.lr=3e-4", folder=tmp_path)
    (tmp_path / "shown.yaml").write_text(done.stdout)
    assert load_recipe(tmp_path / "shown.yaml") == load_recipe(tmp_path / "a.yaml", ["optim.lr=3e-4"])
    assert "\n  lr: 0.0003\n" in done.stdout


def test_keys_lists_every_key(tmp_path: Path) -> None:
    listed = json.loads(pkmlm("recipe", "keys", "--format", "json", folder=tmp_path).stdout)
    names = [row["key"] for row in listed]
    assert {"name", "model.memory.topk", "optim.values.lr", "checkpoint.keep"} <= set(names)
    assert len(names) == len(set(names))
    assert all(set(row) == {"key", "type", "default", "help"} for row in listed)
    shown = pkmlm("recipe", "keys", folder=tmp_path).stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert "model.memory:\n  kind: none " in shown
    assert f"  steps: {Recipe().train.steps} " in shown
    assert "| model.memory.topk | int | 32 |" in pkmlm("recipe", "keys", "--format", "md", folder=tmp_path).stdout


@pytest.mark.parametrize("command", [["recipe"], ["recipe", "check"], ["recipe", "show"], ["recipe", "keys"]])
def test_help_has_examples_and_fits_a_terminal(tmp_path: Path, command: list[str]) -> None:
    done = pkmlm(*command, "--help", folder=tmp_path)
    assert done.returncode == 0
    assert "Examples:\n    pkmlm recipe " in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
