"""`pkmlm compare`: on runs with numbers by hand and on trained runs."""

import csv
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from pkmlm.bench.steps import timed_part
from pkmlm.errors import UserError
from pkmlm.export.card import known_scores
from pkmlm.memory.address import entry_of
from pkmlm.recipe.load import load_recipe
from pkmlm.report.compare import comparable_with_dense, compare_runs
from pkmlm.report.equal import at_equal
from pkmlm.runs.directory import RunDirectory
from pkmlm.runs.record import Progress, checkpoint_digest
from pkmlm.runs.results import perplexity_file, tasks_file, usage_stem, write_evaluation, write_usage
from tests import PATIENCE
from tests.conftest import ROOT, pkmlm, write_checkpoint

Facts = dict[str, Any]
CONTEXT = 32
RECIPE = f"""name: r
model:
  dim: 16
  layers: 2
  heads: 2
  context: {CONTEXT}
  memories: {{pkm: {{kind: product-key, layers: 2, num_keys: 8, topk: 4, heads: 2, key_dim: 8}}}}
optim: {{lr: 1e-3}}
"""


def make(
    folder: Path,
    *settings: str,
    ppl: float | None = 7.0,
    data: Facts | None = None,
    status: str = "finished",
    size: tuple[int, int] = (1000, 2000),
) -> Path:
    """Write a run that has been evaluated at two of its checkpoints, and at one that is gone; the last line of its
    metrics is torn.

    Args:
        settings: overrides of RECIPE.
        ppl: of the test split; None: it was not scored.
        data: hashes of the data in its checkpoints.
        size: dense parameters, and those of the memory.
    """
    run = RunDirectory(folder)
    folder.mkdir(parents=True)
    run.recipe_file.write_text(RECIPE)
    recipe = load_recipe(run.recipe_file, settings)
    run.create(recipe)
    run.write_facts(status=status)
    parameters = {"dense": size[0], "memory": size[1], "read_per_token": 1100}
    events: list[Facts] = [
        {"event": "train", "step": step, "loss": 5.0, "tokens": 64 * step, "tokens_per_second": speed}
        for step, speed in ((1, 1.0), (2, 300.0), (200, 200.0))
    ]
    for step, loss in ((50, 4.0), (100, 3.0), (150, None), (200, 3.5)):
        events.append({"event": "valid", "step": step, "loss": loss, "token_ppl": 20.0, "bits_per_byte": 2.0})
    lines = "".join(json.dumps(event) + "\n" for event in events)
    run.metrics_file.write_text(lines + '{"event": "valid", "step": 210, "loss": 0.')
    for step in (90, 200, 300):
        write_checkpoint(folder, recipe, Progress(step, seconds=12.5, parameters=parameters, data=data or {}))
    if ppl is not None:
        keep_perplexity(folder, 90, 9.0)
        keep_perplexity(folder, 200, ppl)
    keep_perplexity(folder, 200, 5.0, stride=4)
    keep_perplexity(folder, 200, 6.0, split="valid")
    keep_perplexity(folder, 300, 1.0)
    keep_tasks(folder, 200, piqa={"acc": 0.6})
    memory = {
        **entry_of("pkm", 2, "product-key"),
        "slots": 64,
        "addresses": {"columns": 8, "tables": False},
        "mass": {"usage": 0.9, "kl": 0.5, "gini": 0.3},
        "uniform": {"usage": 1.0, "kl": 0.01},
        "uniform_mass": {"usage": 1.0, "kl": 0.02},
        "effective": None,
        "top_weight": None,
    }
    entry = measured(folder, 200) | {"split": "test", "source": {}, "memories": [memory], "warnings": []}
    write_usage(usage_stem(folder, "test", 200), entry, {})
    shutil.rmtree(run.checkpoint(300))
    return folder


def measured(run: Path, step: int) -> Facts:
    return {"step": step, "checkpoint": checkpoint_digest(RunDirectory(run).checkpoint(step))}


def keep_perplexity(
    run: Path, step: int, ppl: float, split: str = "test", stride: int = CONTEXT, source: Facts | None = None
) -> None:
    scores = {"split": split, "token_ppl": ppl, "word_ppl": 2 * ppl, "bits_per_byte": 1.5}
    record = {"perplexity": scores, "stride": stride, "source": source, "tasks": {}}
    file = perplexity_file(split, step, None if stride == CONTEXT else stride)
    write_evaluation(run, file, measured(run, step) | record)


def keep_tasks(run: Path, step: int, limit: int | None = None, **tasks: Facts) -> Path:
    """Write an evaluation of tasks into a run; returns its file."""
    scored = {name: {"chance": None, "num_fewshot": 0, **found} for name, found in tasks.items()}
    rest = {"tasks": scored, "harness": {"limit": limit}, "perplexity": None, "stride": None, "source": None}
    record = measured(run, step) | rest
    write_evaluation(run, tasks_file(record), record)
    return run / "eval" / tasks_file(record)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make(tmp_path / "runs" / "mine")


def facts(*arguments: object) -> list[Facts]:
    runs: list[Facts] = json.loads(pkmlm("compare", *arguments, "--format", "json").stdout)["runs"]
    return runs


def test_json_gathers_what_the_run_holds(run: Path) -> None:
    (found,) = facts(run)
    usage = found.pop("usage")
    assert found == {
        "run": "mine",
        "kind": "product-key",
        "dim": 16,
        "layers": 2,
        "context": 32,
        "lr": 1e-3,
        "seed": 1,
        "init_from": None,
        "tokenizer": None,
        "train_tokens_sha256": None,
        "valid_tokens_sha256": None,
        "valid_tokens": None,
        "dense": 1000,
        "memory": 2000,
        "read_per_token": 1100,
        "total": 3000,
        "status": "finished",
        "step": 200,
        "tokens": 12800,
        "tokens_per_second": 200.0,
        "seconds": 12.5,
        "valid_step": 100,
        "valid_loss": 3.0,
        "valid_token_ppl": 20.0,
        "valid_bits_per_byte": 2.0,
        "test_step": 200,
        "test_token_ppl": 7.0,
        "test_word_ppl": 14.0,
        "test_bits_per_byte": 1.5,
        "test_text_sha256": None,
        "tasks_step": 200,
        "tasks": {"piqa": {"acc": 0.6, "chance": None, "num_fewshot": 0}},
        "average_acc": 0.6,
        "usage_step": 200,
    }
    assert usage[0]["mass"]["kl"] == 0.5


def test_tasks_of_several_files_are_merged(run: Path) -> None:
    def keep(step: int, age: int, **tasks: Facts) -> None:
        os.utime(keep_tasks(run, step, **tasks), (age, age))

    keep(200, 1, wsc={"acc": 0.5})
    keep(200, 2, wsc={"acc": 0.3}, boolq={"acc": 0.7})
    keep(200, 2**31, piqa={"acc": 0.2}, boolq={"acc": 0.1})  # newer than that of `make`
    keep(200, 2**31 + 1, piqa={"acc": 0.9, "num_fewshot": 2})
    keep(90, 2**31, copa={"acc": 0.1})
    (run / "eval" / "tasks-older-step-90.json").write_text("{")
    (found,) = facts(run)
    assert {name: task["acc"] for name, task in found["tasks"].items()} == {"piqa": 0.2, "boolq": 0.1, "wsc": 0.3}
    assert found["average_acc"] == pytest.approx(0.2)


def test_a_task_with_the_name_of_a_fact_does_not_replace_it(run: Path) -> None:
    keep_tasks(run, 200, memory={"acc": 0.25})
    (row,) = csv.DictReader(pkmlm("compare", run, "--format", "csv").stdout.splitlines())
    assert (row["memory"], row["memory_acc"]) == ("2000", "0.25")


def test_results_of_an_earlier_step_say_so(run: Path) -> None:
    assert pkmlm("compare", run).stdout.count("at step") == 2, "of validation and test, in every table"
    line = {"event": "train", "step": 300, "loss": 5.0}
    with open(run / "metrics.jsonl", "a") as file:
        file.write("\n" + json.dumps(line) + "\n")
    (found,) = facts(run)
    assert [found[f"{what}step"] for what in ("", "test_", "tasks_", "usage_")] == [300, 200, 200, 200]
    quality, _, _, tasks, usage = pkmlm("compare", run).stdout.split("\n\n")[1::2]
    assert [table.splitlines()[-1].split()[-1] for table in (quality, tasks, usage)] == ["200"] * 3
    assert tasks.splitlines()[0].split()[-2:] == ["at", "step"]


def test_a_model_with_an_ngram_memory_is_no_dense_one(tmp_path: Path) -> None:
    ngrams = "ngrams: {kind: ngram, layers: [1]}"
    (tmp_path / "recipe.yaml").write_text(f"model: {{memories: {{experts: {{kind: peer, layers: 2}}, {ngrams}}}}}\n")
    assert facts(tmp_path)[0]["kind"] == "peer + ngram"
    (tmp_path / "recipe.yaml").write_text(f"model: {{memories: {{{ngrams}}}}}\n")
    assert facts(tmp_path)[0]["kind"] == "ngram"


def test_missing_pieces_show_as_a_dash(run: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "recipe.yaml").write_text("model: {memories: {tables: {kind: hash}}}\n")
    (found,) = facts(bare)
    assert found["kind"] == "hash"
    known = {key for key, value in found.items() if value not in (None, [], {})}
    assert known == {"run", "kind", "dim", "layers", "context", "lr", "seed"}
    assert pkmlm("compare", bare).stdout.splitlines()[-1].split() == ["bare", "hash"] + ["-"] * 4
    text = pkmlm("compare", run, bare).stdout
    assert [line.split()[1:3] for line in text.splitlines() if line.startswith("bare")] == [
        ["-", "-"],
        ["hash", "-"],
        ["-", "-"],
        ["-", "-"],
    ]
    assert "Zero-shot" in text
    assert "Zero-shot" not in pkmlm("compare", bare).stdout
    assert all(len(line) <= 80 for line in text.splitlines())


def test_csv_and_markdown(run: Path) -> None:
    (row,) = csv.DictReader(io.StringIO(pkmlm("compare", run, "--format", "csv").stdout))
    assert (row["run"], row["test_token_ppl"], row["piqa"], row["mean_kl"]) == ("mine", "7.0", "0.6", "0.5")
    assert "| mine | product-key | 1,000 | 2,000 | 3,000 |" in pkmlm("compare", run, "--format", "md").stdout
    assert r"mine & product-key & 1,000 & 2,000 & 3,000 & 1,100 \\" in pkmlm("compare", run, "--format", "latex").stdout


def test_runs_that_differ_in_their_seed_are_one_row(run: Path, tmp_path: Path) -> None:
    seeds = ((11, 8.0), (10, 7.0), (3, None))
    runs = [make(tmp_path / f"mine-{number}", f"train.seed={number}", ppl=ppl) for number, ppl in seeds]
    record = json.loads(pkmlm("compare", *runs[:2], run, "--format", "json").stdout)
    assert [found["run"] for found in record["runs"]] == ["mine-11", "mine-10", "mine"], "each by itself, too"
    (group,) = record["groups"]
    assert (group["runs"], group["seeds"]) == (["mine", "mine-10", "mine-11"], [1, 10, 11])
    sd = math.sqrt(((7 - 22 / 3) ** 2 * 2 + (8 - 22 / 3) ** 2) / 2)  # of 7, 7, 8
    assert group["mean"]["test_token_ppl"] == pytest.approx(22 / 3)
    assert group["spread"]["test_token_ppl"] == pytest.approx(sd)
    assert (group["mean"]["mean_kl"], group["spread"]["piqa"]) == (0.5, 0.0)
    RunDirectory(runs[0]).write_facts(status="patience")
    text = pkmlm("compare", *runs[:2]).stdout
    assert "mine-{10,11}" in text
    assert "finished, patience" in text.replace("\n", " ")
    assert "7.50 +-0.71" in text.replace("\n", " ") or re.search(r"7\.50.*\n.*\+-0\.71", text)
    assert "(n=1)" in pkmlm("compare", *runs[1:], "--format", "md").stdout, "one of two seeds was evaluated"
    (row,) = csv.DictReader(io.StringIO(pkmlm("compare", *runs[:2], "--format", "csv").stdout))
    shown = {
        "run": "mine-{10,11}",
        "seeds": "2",
        "status": "finished, patience",
        "test_token_ppl": "7.5",
        "test_token_ppl_spread": str(math.sqrt(0.5)),
        "dense": "1000",
    }
    assert row.items() >= shown.items()
    assert "valid_loss_spread" not in row, "in which they agree"
    (row,) = csv.DictReader(io.StringIO(pkmlm("compare", *runs[1:], "--format", "csv").stdout))
    assert (row["test_token_ppl"], row["test_token_ppl_spread"], row["test_token_ppl_n"]) == ("7.0", "", "1")
    assert "valid_loss_n" not in row
    latex = pkmlm("compare", *runs[:2], "--format", "latex").stdout
    assert r"mine-\{10,11\} & 2 &" in latex
    assert r"7.50 $\pm\,$0.71" in latex


def test_a_longer_context_is_warned_of(run: Path, tmp_path: Path) -> None:
    longer = make(tmp_path / "longer", "model.context=64")
    assert "different contexts" in pkmlm("compare", run, longer).stderr
    assert "different contexts" not in pkmlm("compare", run, make(tmp_path / "seed", "train.seed=2")).stderr


def test_no_curve_is_drawn_over_seconds_that_are_not_known(run: Path, tmp_path: Path, monkeypatch) -> None:
    def fail(over, *rest):
        raise UserError("memory does not hold all models together", exit_code=1)

    monkeypatch.setattr("pkmlm.bench.steps.step_amounts", fail)
    pkmlm("compare", run, "--over", "seconds", "--plots", tmp_path / "plots", code=1)
    assert not list(tmp_path.glob("plots/*seconds*"))


def test_runs_that_differ_in_more_are_rows_of_their_own(run: Path, tmp_path: Path) -> None:
    again, unfinished = make(tmp_path / "a", "train.seed=1"), make(tmp_path / "b", "train.seed=2", status="stopped")
    wider = make(tmp_path / "c", "train.seed=3", "eval.every=7")
    retold = make(tmp_path / "d", "train.seed=4", data={"train": "another text"})
    for other in (again, unfinished, wider, retold):
        record = json.loads(pkmlm("compare", run, other, "--format", "json").stdout)
        assert [group["runs"] for group in record["groups"]] == [["mine"], [other.name]]


def test_runs_of_one_name_are_told_apart_and_doubles_dropped(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "mine"
    other.mkdir(parents=True)
    (other / "recipe.yaml").write_text("{}\n")
    assert [found["run"] for found in facts(run, other, run)] == [str(run), str(other)]
    third = other.rename(other.parent / "third")
    other.mkdir()
    (other / "recipe.yaml").write_text("{}\n")
    assert [found["run"] for found in facts(run, other, third)] == [str(run), str(other), str(third)]


def test_among_several_what_is_no_run_is_left_out(run: Path) -> None:
    (run.parent / "notes.txt").write_text("notes")
    (run.parent / "failed" / "checkpoints").mkdir(parents=True)
    several = [run.parent / name for name in ("failed", "mine", "notes.txt")]
    done = pkmlm("compare", *several, "--format", "json")
    assert [found["run"] for found in json.loads(done.stdout)["runs"]] == ["mine"]
    warned = done.stderr.splitlines()
    assert len(warned) == 2
    assert all(str(path) in line for path, line in zip((several[0], several[2]), warned, strict=True))
    assert "failed" in pkmlm("compare", several[0], several[2], code=2).stderr, "no path is a run"
    assert "mien" in pkmlm("compare", run, run.parent / "mien", code=2).stderr
    (run / "recipe.yaml").unlink()
    assert facts(run, make(run.with_name("other")))[0]["run"] == "mine", "its checkpoints hold it, too"


def warnings(*runs: Path) -> list[str]:
    return pkmlm("compare", *runs).stderr.splitlines()


def test_what_cannot_be_compared_is_named(run: Path, tmp_path: Path) -> None:
    same = {"tokenizer": "a", "train": "b", "valid": "c"}
    like, twin = (make(tmp_path / name, data=same) for name in ("like", "twin"))
    assert warnings(run, like, twin) == [], "what is not known is taken to be alike"
    code = make(tmp_path / "code", data={"tokenizer": "x", "train": "its tokens", "valid": "its tokens"})
    (warned,) = warnings(like, twin, code)
    assert "tokenizers" in warned
    assert "(like, twin; code)" in warned
    longer, partly = (
        make(tmp_path / "longer", data=same | {"train": "x"}),
        make(tmp_path / "p", "eval.tokens=64", data=same),
    )
    train, valid = warnings(like, partly, longer)
    assert "train" in train
    assert "(like, p; longer)" in train
    assert "validation" in valid
    assert "(like, longer; p)" in valid
    for folder, sha256 in ((like, "d"), (twin, "e")):
        keep_perplexity(folder, 200, 9.0, source={"sha256": sha256})
    (warned,) = warnings(run, like, twin)
    assert "test" in warned
    assert "(like; twin)" in warned
    broken = make(tmp_path / "d", data={"valid": ["c"]})
    damaged = pkmlm("compare", broken, like, "--format", "json", code=1)
    assert re.search("^warning: left out d: .*state.json.*valid", damaged.stderr, re.MULTILINE)
    assert [each["run"] for each in json.loads(damaged.stdout)["runs"]] == ["like"]
    assert "error: " in pkmlm("compare", broken, code=1).stderr


def test_runs_that_started_from_others_weights_are_named(run: Path, tmp_path: Path) -> None:
    sources = (("more", "runs/mine"), ("again", "runs/mine"), ("third", "runs/other"))
    runs = [make(tmp_path / name, f"train.init_from={source}") for name, source in sources]
    (warned,) = warnings(run, *runs)
    assert "(more, again from runs/mine; third from runs/other)" in warned
    assert [found["init_from"] for found in facts(run, runs[0])] == [None, "runs/mine"]


def test_accuracies_are_averaged_over_shared_tasks(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, more := tmp_path / "more")
    shutil.copytree(run, none := tmp_path / "none")
    keep_tasks(more, 200, piqa={"acc": 0.4}, wsc={"acc": 0.8})
    keep_tasks(none, 200, piqa={"acc": 0.6}).unlink()
    shown = pkmlm("compare", run, more, none).stdout.partition("Zero-shot")[2]
    table = shown.partition("Memory")[0].splitlines()
    assert table[2].split() == ["Run", "piqa", "wsc", "average"]
    assert [line.split()[-1] for line in table[4:7]] == ["0.600", "0.400", "-"]
    assert "tasks that all runs have: piqa\n" in shown
    assert [found["average_acc"] for found in facts(run, more, none)] == [0.6, 0.4, None]
    table = pkmlm("compare", more, none).stdout.partition("Zero-shot")[2].splitlines()
    assert table[2].split() == ["Run", "piqa", "wsc", "average"]
    assert table[4].split()[-1] == "0.600"
    keep_tasks(more, 200, piqa={"acc": 0.4}, wsc={"acc": 0.8, "chance": 0.5})  # and piqa without one: of another kind
    table = pkmlm("compare", more, none).stdout.partition("Zero-shot")[2].splitlines()
    assert table[4].split()[-3:] == ["0.400", "0.800", "-"]


@pytest.mark.parametrize(
    ("mine", "yours", "named"),
    [({"data": {"sha256": "a"}}, {"data": {"sha256": "b"}}, "mine"), ({}, {"num_fewshot": 5}, "mine, plain")],
)
def test_tasks_that_were_asked_in_other_ways_are_named(run, tmp_path, mine, yours, named) -> None:
    folders = [Path(shutil.copytree(run, tmp_path / name)) for name in ("mine", "yours", "plain")]
    for folder, how in zip(folders, (mine, yours, {}), strict=True):
        keep_tasks(folder, 200, own={"acc": 0.5, **how})
    (warned,) = warnings(*folders)
    assert f"own ({named}; yours)" in warned


def test_a_run_that_has_ended_early_or_lost_the_end_of_its_metrics_is_named(run: Path) -> None:
    done = pkmlm("compare", run)
    assert "Status" not in done.stdout
    assert done.stderr == ""
    (run / "run.json").write_text('{"status": "diverged"}')
    assert "diverged" in pkmlm("compare", run).stdout
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:2]) + lines[2][:20])
    (warned,) = warnings(run)
    assert "metrics.jsonl" in warned


def test_results_of_a_part_of_a_task_are_left_out_with_a_warning(run: Path) -> None:
    tasks = {name: {"acc": 0.1} for name in ("copa", "piqa", "wsc")}
    for step, limit, names in (
        (200, 3, ("wsc",)),
        (200, 3, ("copa", "wsc")),
        (90, 3, ("piqa",)),
        (90, None, ("piqa", "wsc")),
    ):
        keep_tasks(run, step, limit, **{name: tasks[name] for name in names})
    done = pkmlm("compare", run)
    assert done.stderr.count("copa") == done.stderr.count("warning") == 1
    assert "copa" not in done.stdout


def test_plots(run: Path, tmp_path: Path) -> None:
    done = pkmlm("compare", run, "--plots", tmp_path / "p")
    assert (tmp_path / "p" / "learning-curves.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "p" / "perplexity-and-use-over-tokens.png").exists()
    assert str(tmp_path / "p") in done.stderr
    paper = ("--plot-format", "pdf,svg", "--plot-width", "3.3")
    pkmlm("compare", run, "--plots", tmp_path / "paper", *paper, "--over", "tokens")
    assert {path.suffix for path in (tmp_path / "paper").iterdir()} == {".pdf", ".svg"}
    assert "--plots" in pkmlm("compare", run, *paper, code=2).stderr, "nothing would be drawn"
    for wrong in ("--plot-format=png,jpeg", "--plot-width=0", "--over=tokens,epochs"):
        pkmlm("compare", run, "--plots", tmp_path / "wrong", wrong, code=2)
    assert str(tmp_path / "p") in pkmlm("compare", run, "--plots", tmp_path / "p", code=2).stderr
    other = make(tmp_path / "other", "train.seed=2")
    (run / "metrics.jsonl").unlink()
    pkmlm("compare", run, "--plots", tmp_path / "q")
    assert not (tmp_path / "q").exists()
    pkmlm("compare", run, other, "--plots", tmp_path / "q")  # the group's first seed has no curve
    assert (tmp_path / "q" / "perplexity-and-use-over-tokens.png").exists()


def test_pictures_are_drawn_though_nobody_reads_the_tables(run: Path, tmp_path: Path) -> None:
    command = f"{sys.executable} -m pkmlm compare {run} --plots {tmp_path / 'p'} | true"
    subprocess.run(["bash", "-c", command], check=True, timeout=PATIENCE, cwd=ROOT)
    assert (tmp_path / "p" / "learning-curves.png").exists()


def test_whole_numbers_of_several_seeds_are_shown_whole(run: Path, tmp_path: Path) -> None:
    """Their means need not be: here the best validations lie at steps 100, 100 and 50."""
    metrics = (run / "metrics.jsonl").read_text()
    for seed in (2, 3):
        other = make(tmp_path / f"seed-{seed}", f"train.seed={seed}")
        if seed == 3:
            lower = metrics.replace('"step": 50, "loss": 4.0', '"step": 50, "loss": 2.0')
            assert lower != metrics
            (other / "metrics.jsonl").write_text(lower)
    shown = pkmlm("compare", run, tmp_path / "seed-2", tmp_path / "seed-3").stdout
    assert "83 +-29" in shown or re.search(r"\b83\b.*\n.*\+-29\b", shown)
    assert "83.3" not in shown


def test_branches_belong_to_the_run_that_they_left(run: Path) -> None:
    branch = ("train.steps=220", "optim.decay_steps=20")
    make(run.with_name("mine-200"), *branch)
    make(run.with_name("other"), "train.steps=200", "optim.lr=2e-3")
    paths = [str(run.with_name(name)) for name in ("mine-200", "mine", "other")]
    assert compare_runs(paths).branches() == {"mine": ["mine-200"], "other": []}
    assert compare_runs(paths[:1]).branches() == {"mine-200": []}, "alone it is a run as others"
    again = make(run.with_name("again"), *branch)
    second = make(run.with_name("2nd"), "train.seed=2", "optim.decay_steps=20")
    repeats = [paths[0], str(again)]
    assert compare_runs(repeats).branches() == {"mine-200": [], "again": []}, "neither left the other"
    assert compare_runs([*paths, str(second)]).branches() == {"mine": ["mine-200"], "other": [], "2nd": []}


def test_only_what_was_validated_on_the_same_tokens_is_ahead_of_the_dense_model(run: Path, tmp_path: Path) -> None:
    known = {"tokenizer": "a", "valid": "b"}
    folders = {
        "dense": make(tmp_path / "dense", "model.memories=null", data=known),
        "like": make(tmp_path / "like", data=known),
        "fewer": make(tmp_path / "fewer", "eval.tokens=64", data=known),
        "text": make(tmp_path / "text", data=known | {"valid": "c"}),
        "tokens": make(tmp_path / "tokens", data={"tokenizer": "d", "valid": "d"}),
    }
    comparison = compare_runs([str(run), *map(str, folders.values())])
    dense, comparable = comparable_with_dense(comparison.groups)
    assert dense is not None
    assert (dense.name, [group.name for group in comparable]) == ("dense", ["mine", "dense", "like"])
    assert comparable_with_dense(compare_runs([str(run)]).groups) == (None, [])
    for other, by_token in (("like", True), ("tokens", False)):
        shown = pkmlm("compare", folders["dense"], folders[other], "--format", "md", "--over", "tokens").stdout
        assert [column in shown for column in ("Valid (nats)", "Valid ppl", "Test ppl")] == [by_token] * 3
        assert shown.count("the tokenizers differ") == (0 if by_token else 2), "in each table that leaves something out"
        assert shown.count("Valid bits/byte") == 2
        assert "word ppl" in shown
        both = compare_runs([str(folders["dense"]), str(folders[other])])
        assert both.by_byte is not by_token
        for name, [(_, events)] in both.curves("tokens").items():
            measured = [event for event in both.metrics[name] if event["event"] == "valid"]
            unit = 1 if by_token else next(each["bits_per_byte"] / each["loss"] for each in measured if each["loss"])
            drawn = [event["loss"] for event in events if event["event"] == "valid"]
            assert drawn == [None if event["loss"] is None else event["loss"] * unit for event in measured]


def test_a_perplexity_of_an_older_checkpoint_is_told(run: Path) -> None:
    assert warnings(run) == []
    (run / "eval/test-step-200.json").unlink()
    (warned,) = warnings(run)
    assert "mine: test perplexity is that of step 90" in warned


@pytest.mark.slow
def test_runs_at_equal_seconds_of_steps_timed_in_turn(trained: Callable[[str], Path], tmp_path: Path) -> None:
    names = ("dense", "product-key", "hash")
    folders = [Path(shutil.copytree(trained(name), tmp_path / name, symlinks=True)) for name in names]
    over = ("--over", "tokens,operations,seconds", "--format", "json")
    done = pkmlm("compare", *folders[:2], *over, "--plots", tmp_path / "p")
    record = json.loads(done.stdout)
    dense, memory = record["runs"]
    assert {path.name for path in (tmp_path / "p").iterdir()} == {
        "perplexity-and-use-over-tokens.png",
        *(f"learning-curves-over-{each}.png" for each in ("tokens", "operations", "seconds")),
    }
    assert record["equal"]["tokens"] == {"amount": 30 * 256, "shortest": "dense"}
    for found in (dense, memory):
        assert found["tokens_per_step"] == 256
        assert found["equal_tokens_valid_loss"] == found["valid_loss"], "the last is the best"
        assert (found["equal_tokens_step"], found["equal_tokens_between"]) == (30, 0)
        assert found["equal_operations_step"] <= 30
    cost = json.loads(pkmlm("cost", folders[1] / "recipe.yaml", "--json").stdout)
    assert memory["operations_per_step"] == 256 * cost["flops_per_token"]
    times = json.loads((folders[0] / "steps.json").read_text())
    assert {len(seconds) for seconds in times["steps"].values()} == {7}
    assert sorted(map(median, times["steps"].values())) == sorted(one["seconds_per_step"] for one in (dense, memory))
    fast = min(dense, memory, key=lambda one: one["seconds_per_step"])
    assert record["equal"]["seconds"] == {
        "amount": pytest.approx(30 * fast["seconds_per_step"]),
        "shortest": fast["run"],
    }
    # Later calls, also for fewer runs, read what was timed; for more, all are timed together anew.
    assert json.loads(pkmlm("compare", *folders[:2], *over).stdout) == record
    pkmlm("compare", folders[1], "--over", "seconds")
    assert json.loads((folders[1] / "steps.json").read_text()) == times
    assert "At equal seconds" in pkmlm("compare", *folders, "--over", "seconds").stdout
    assert len(json.loads((folders[2] / "steps.json").read_text())["steps"]) == 3
    (folders[0] / "steps.json").write_text("{")
    done = pkmlm("compare", folders[0], "--over", "seconds")
    assert str(folders[0] / "steps.json") in done.stderr
    assert len(json.loads((folders[0] / "steps.json").read_text())["steps"]) == 1, "it was timed anew"


def test_seeds_of_a_recipe_are_timed_once_and_busy_machines_named(trained, tmp_path: Path, monkeypatch) -> None:
    runs = [Path(shutil.copytree(trained("dense"), tmp_path / str(number), symlinks=True)) for number in (1, 2)]
    recipe = RunDirectory(runs[0]).recipe()
    write_checkpoint(runs[1], replace(recipe, train=replace(recipe.train, seed=2)), Progress(30))
    monkeypatch.setattr("psutil.cpu_percent", lambda interval: 100.0)
    done = pkmlm("compare", *runs, "--over", "seconds", "--format", "json")
    assert len(json.loads((runs[1] / "steps.json").read_text())["steps"]) == 1
    assert "other programs" in done.stderr
    assert "other programs" in pkmlm("compare", *runs, "--over", "seconds").stderr, "and later, too"
    monkeypatch.setattr("pkmlm.bench.steps.machine", lambda: {"device": "another"})
    pkmlm("compare", *runs, "--over", "seconds")
    times = json.loads((runs[0] / "steps.json").read_text())
    assert times["timed_on"] == {"device": "another"}, "those of another machine say nothing of this one"
    write_checkpoint(runs[1], replace(recipe, optim=replace(recipe.optim, lr=0.1, decay_steps=5)), Progress(30))
    first, second = (timed_part(RunDirectory(run).recipe(), 9, recipe.train.batch_tokens) for run in runs[:2])
    assert first == second, "by its rates no step takes longer"


def test_a_loss_whose_perplexity_no_float_holds_has_none() -> None:
    curve = [{"event": "valid", "step": 10, "loss": 800.0}]
    found = at_equal("tokens", {"wild": 4.0}, {"wild": curve})
    assert found is not None
    wild = found.facts["wild"]
    assert (wild["equal_tokens_valid_loss"], wild["equal_tokens_valid_token_ppl"]) == (800.0, None)


def test_times_that_cannot_be_kept_are_still_told(trained, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained("dense"), tmp_path / "run", symlinks=True))
    (run / "steps.json").mkdir()
    done = pkmlm("compare", run, "--over", "seconds")
    assert "At equal seconds" in done.stdout
    assert "not kept" in done.stderr


def test_torch_is_not_needed(run: Path) -> None:
    program = (
        "import sys; from pkmlm.cli import cli; cli.main(sys.argv[1:], standalone_mode=False);"
        "assert not {'torch', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", program, "compare", str(run)], check=True, capture_output=True, timeout=PATIENCE
    )


def test_the_card_of_an_export_says_what_a_validation_read(run: Path) -> None:
    """The first 64 tokens, until the run was resumed with the whole split."""
    assert known_scores(RunDirectory(run), 200)["test split"]["token_ppl"] == 7.0
    events = [{"event": "valid", "step": step, "token_ppl": 20.0, "bits_per_byte": 2.0} for step in (90, 200)]
    lines = [json.dumps(event | {"tokens": tokens}) for event, tokens in zip(events, (64, 900), strict=True)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert list(known_scores(RunDirectory(run), 90)) == ["test split", "first 64 tokens of the valid split"]
    (run / "eval" / "valid-step-200.json").unlink()
    assert "valid split" in known_scores(RunDirectory(run), 200)


def test_damaged_results_are_left_out_and_named(run: Path) -> None:
    for damaged in ("{", '{"step": 200, "perplexity": [1]}'):
        (run / "eval" / "test-step-200.json").write_text(damaged)
        assert re.search("warning: .*test-step-200.json.* left out", pkmlm("compare", run).stderr)
        assert facts(run)[0]["test_step"] == 90
    assert "none" in pkmlm("compare", run / "none", code=2).stderr


def test_trained_runs(trained: Callable[[str], Path], tmp_path: Path) -> None:
    found = facts(trained("dense"), trained("hash"))
    assert [one["kind"] for one in found] == ["dense", "hash"]
    for one in found:
        assert one["step"] == 30
        assert 0.9 * 30 * 256 < one["tokens"] <= 30 * 256, "what ends a document predicts nothing"
        assert min(one[key] for key in ("tokens_per_second", "seconds", "valid_loss", "dense")) > 0
    assert found[0]["memory"] == 0 < found[1]["memory"]
    shutil.copytree(trained("dense"), tmp_path / "run", ignore=shutil.ignore_patterns("step-*"))
    assert facts(tmp_path / "run")[0]["seconds"] == found[0]["seconds"], "kept also without checkpoints"
