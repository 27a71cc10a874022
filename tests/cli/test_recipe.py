"""`pkmlm recipe` as a user runs it."""

import json
import re
from pathlib import Path

import pytest

from pkmlm.memory.registry import SPECS
from pkmlm.recipe.load import load_recipe
from pkmlm.recipe.schema import Recipe, list_keys
from pkmlm.recipe.shipped import find_recipe
from tests.conftest import ROOT, pkmlm

SMALL = "name: small\nmodel: {dim: 64, heads: 4, context: 32}\ntrain: {batch_tokens: 512}\n"


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of its own, on a terminal of 80 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


def test_check_says_ok(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(SMALL)
    (tmp_path / "b[red].yaml").write_text(
        "base: a.yaml\nmodel: {memories: {pkm: {kind: product-key, layers: [2, 4+], num_keys: 64}}}"
    )
    done = pkmlm("recipe", "check", "a.yaml", "b[red].yaml")
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "ok  a.yaml: small",
        "ok  b[red].yaml: small",
    ]


@pytest.mark.parametrize("words", [["recipe", "check"], ["train", "--dry-run"]])
def test_a_grid_is_told_as_one(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "grid.yaml").write_text("base: a.yaml\naxes: {dim: {64: {}}}\n")
    error, hint = pkmlm(*words, "grid.yaml", code=2).stderr.splitlines()
    assert "grid.yaml is a grid" in error
    assert "pkmlm sweep grid.yaml" in hint


def test_a_recipe_is_told_as_one(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(SMALL)
    error, hint = pkmlm("sweep", "a.yaml", "-o", "s", "--dry-run", code=2).stderr.splitlines()
    assert "a.yaml is a recipe" in error
    assert "pkmlm train a.yaml" in hint


def test_check_goes_on_after_a_wrong_recipe_and_names_each(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(SMALL + "optim:\n  learning_rate: 1\n")
    (tmp_path / "c.yaml").write_text("model: {layers: 1, heads: 7}\ntrain: {steps: 1}\noptim: {warmup_steps: 1}\n")
    done = pkmlm("recipe", "check", "a.yaml", "missing.yaml", "c.yaml", "-s", "model.heads=8", code=2)
    assert done.stdout == "ok  c.yaml: unnamed\n"
    told = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert told[0] == "error: a.yaml:5:3: unknown key optim.learning_rate (did you mean optim.lr?)"
    assert told[1].count("missing.yaml") == 1
    assert "hint: keys of optim: lr, matrices, muon, " in done.stderr
    assert pkmlm("recipe", "check", "./a.yaml", code=2).stderr.startswith("error: a.yaml:5:3: unknown key")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/b.yaml").write_text("nokey: 1\n")
    (tmp_path / "b.yaml").write_text("base: sub/b.yaml\n")
    assert pkmlm("recipe", "check", "b.yaml", code=2).stderr.startswith(
        "error: b.yaml: sub/b.yaml:1:1: unknown key nokey"
    )
    wrong = pkmlm("recipe", "check", "c.yaml", "-s", "model.heads=7", code=2).stderr
    assert wrong.startswith("error: c.yaml: -s model.heads=7: model.heads: 7 heads do not divide model.dim 512 ")


def test_a_warm_up_longer_than_training_is_warned_of(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(SMALL)
    done = pkmlm("recipe", "check", "a.yaml", "-s", "train.steps=150")
    told = "200 for 150 steps of training: the learning rate ends at 75% of its peak"
    assert done.stderr.splitlines() == [f"warning: a.yaml: optim.warmup_steps: {told}"]
    for kind in ("product-key", "hash"):
        memory = f"model.memories.mine={{kind: {kind}, layers: 2, optim: {{warmup_steps: 5000}}}}"
        said = pkmlm("recipe", "check", "a.yaml", "-s", "train.steps=4500", "-s", memory).stderr
        told = "5,000 for 4,500 steps of training: the learning rate ends at 90% of its peak"
        assert f"model.memories.mine.optim.warmup_steps: {told}" in said
    assert pkmlm("recipe", "check", "a.yaml", "-s", "train.steps=4000").stderr == ""


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "a\x1b[31m.yaml").write_text(SMALL)
    done = pkmlm("recipe", "check", "a\x1b[31m.yaml")
    wrong = pkmlm("recipe", "check", "a\x1b[31m.yaml", "-s", "name=\x1b[31m", code=2)
    assert "\x1b" not in done.stdout + wrong.stderr
    assert "\\x1b" in done.stdout


def test_show_prints_a_recipe_that_reads_back_equal(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(SMALL)
    done = pkmlm("recipe", "show", "a.yaml", "-s", "optim.lr=3e-4")
    (tmp_path / "shown.yaml").write_text(done.stdout)
    assert load_recipe(tmp_path / "shown.yaml") == load_recipe(tmp_path / "a.yaml", ["optim.lr=3e-4"])
    assert "\n  lr: 0.0003\n" in done.stdout


def test_keys_lists_every_key() -> None:
    listed = json.loads(pkmlm("recipe", "keys", "--format", "json").stdout)
    names = [row["key"] for row in listed]
    topk = {f"model.memories.<{kind}>.topk" for kind in ("product-key", "flat-key", "peer")}
    assert topk <= set(names)
    assert {"name", "model.memories.<ngram>.optim.lr_scale", "checkpoint.keep"} <= set(names)
    assert len(names) == len(set(names))
    assert all(set(row) == {"key", "type", "default", "help"} for row in listed)
    assert "| model.memories.\\<peer>.topk | int | 32 |" in pkmlm("recipe", "keys", "--format", "md").stdout


@pytest.mark.parametrize("columns", [80, 100])
def test_keys_are_shown_by_section_and_those_that_kinds_share_once(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = pkmlm("recipe", "keys").stdout
    assert max(map(len, shown.splitlines())) <= columns
    assert f"  steps: {Recipe().train.steps} " in shown
    assert shown.count("  topk: 32 ") == 1
    sections = dict(section.split(":\n", 1) for section in shown.split("\n\n"))
    for kind in SPECS:
        assert f"model.memories.<{kind}> (<{kind}>: the name of a memory of that kind)" in sections
    words = {section.partition(" ")[0]: set(re.findall(r"\w+", rows)) for section, rows in sections.items()}
    for key in list_keys():
        section, _, leaf = key.name.rpartition(".")
        assert leaf in words[section or "(top"], "shared keys are named where they are not explained"


def test_recipes_that_come_along_are_found_by_name():
    listed = pkmlm("recipe", "list").stdout
    files = sorted((ROOT / "recipes").rglob("*.yaml"))
    assert len(files) > 30
    for file in files:
        name = file.relative_to(ROOT / "recipes").with_suffix("").as_posix()
        assert re.search(rf"^{name} ", listed, re.M), name
        assert find_recipe(name) == file
    assert pkmlm("recipe", "show", "demo").stdout == pkmlm("recipe", "show", ROOT / "recipes/demo.yaml").stdout
    Path("demo").mkdir()  # as `make demo` leaves it
    assert find_recipe("demo") == ROOT / "recipes/demo.yaml"
    Path("demo").rmdir()
    Path("demo").write_text("name: mine")
    assert "name: mine" in pkmlm("recipe", "show", "demo").stdout
    assert "nowhere" in pkmlm("recipe", "show", "nowhere", code=2).stderr
    Path("elsewhere.yaml").write_text("base: pkm/cpu\nname: mine\n")
    assert "layers: 6" in pkmlm("recipe", "show", "elsewhere.yaml").stdout
    Path("tiny.yaml").write_text("name: tiny")
    assert "did you mean tiny.yaml?" in pkmlm("recipe", "show", "tiny", code=2).stderr
    assert "No such file" in pkmlm("recipe", "show", Path("tiny").absolute(), code=2).stderr, "not that of another name"
    Path("mine.yaml").write_text("name: mine")
    for misspelt, meant in (("pkm/cp", "pkm/cpu"), ("demo.yml", "demo"), ("mime.yaml", "mine.yaml")):
        assert re.search(rf"hint: did you mean .*\b{meant}\b", pkmlm("recipe", "show", misspelt, code=2).stderr)
