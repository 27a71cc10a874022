"""What is in a run's folder, or on the standard streams, is not as a command expects: one line, no traceback."""

import json
import os
import re
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pkmlm.recipe.schema import flatten
from pkmlm.runs.directory import RunDirectory
from pkmlm.train.resume_check import CHANGES_NO_NUMBERS, CHANGES_NUMBERS, change_warnings
from pkmlm.train.step import TrainState
from tests import PATIENCE
from tests.conftest import after_step, pkmlm, recipe_2019


@pytest.fixture(scope="module")
def begun(tmp_path_factory, write_recipe):
    """The recipe, and a run of it that has finished its 8 steps; copy it to write into it."""
    folder = tmp_path_factory.mktemp("begun")
    recipe = write_recipe(folder, "product-key")
    given = ["-s", "train.steps=8", "-s", "checkpoint.every=4", "-s", "eval.every=4", "-q"]
    pkmlm("train", recipe, "-o", folder / "run", *given)
    return recipe, folder / "run", given


@pytest.fixture
def copy(begun, tmp_path):
    return Path(shutil.copytree(begun[1], tmp_path / "run"))


def on(begun, run, *arguments, code=0):
    """Train on, in a copy."""
    recipe, _, given = begun
    return pkmlm("train", recipe, "-o", run, *given, *arguments, code=code)


def test_training_overwrites_nothing_that_is_no_run_s(begun, tmp_path):
    for name in ("recipe.yaml", "checkpoints"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_text("mine")
        assert name in on(begun, folder, code=2).stderr
        assert os.listdir(folder) == [name]
        assert (folder / name).read_text() == "mine"
    (tmp_path / "notes.txt").write_text("mine")
    assert "notes.txt" in on(begun, tmp_path / "notes.txt", code=2).stderr
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("harm", ["damaged", "gone"])
def test_a_finished_run_without_its_last_checkpoint_is_not_complete(begun, copy, harm):
    assert "is already complete at step 8" in on(begun, copy).stdout
    last = copy / "checkpoints/step-00000008"
    if harm == "gone":
        shutil.rmtree(last)
    else:
        (last / "weights.safetensors").write_bytes(b"")
    said = on(begun, copy, "--resume", "must")
    assert "complete" not in said.stdout
    assert ("damaged-step-00000008" in said.stderr) == (harm == "damaged")
    sound = begun[1] / "checkpoints/step-00000008"
    for name in ("weights.safetensors", "optimizer.safetensors"):
        assert (last / name).read_bytes() == (sound / name).read_bytes()
    assert RunDirectory(copy).done() == 8


def test_a_run_s_name_cannot_drive_the_terminal(begun, copy):
    named = copy.rename(copy.with_name("run\x1b[31m"))
    assert "run\\x1b[31m is already complete" in on(begun, named).stdout
    said = pkmlm("\x07eval", named, code=2).stderr
    assert "No such command '\\x07eval'" in said


def test_only_proven_damage_is_moved_aside(begun, copy):
    manifest = copy / "checkpoints/step-00000008/manifest.json"
    stored = manifest.read_text()
    manifest.unlink()
    manifest.mkdir()  # cannot be read, like a file of another user
    assert "manifest.json" in on(begun, copy, "-s", "train.steps=9", code=1).stderr
    manifest.rmdir()
    assert RunDirectory(copy).steps() == [4, 8]
    manifest.write_text(stored)
    on(begun, copy, "-s", "train.steps=9")


def test_another_machine_is_warned_of(begun, copy):
    facts = json.loads((copy / "run.json").read_text())
    changed = {"source_sha256": "0" * 64, "device": "cpu, 64 threads"}
    changed["versions"] = {**facts["versions"], "torch": "1.0", "numpy": "0"}
    (copy / "run.json").write_text(json.dumps({**facts, **changed}))
    said = on(begun, copy, "-s", "train.steps=9").stderr
    for change in ("torch was 1.0", "numpy was 0", "device was cpu, 64 threads", "the code of pkmlm has changed"):
        assert change in said
    kept = json.loads((copy / "run.json").read_text())
    assert kept["versions"] == facts["versions"]
    assert [(each["until_step"], each["versions"]["torch"]) for each in kept["earlier"]] == [(8, "1.0")]
    assert "code of pkmlm" not in on(begun, copy, "-s", "train.steps=10").stderr
    assert len(json.loads((copy / "run.json").read_text())["earlier"]) == 1


def test_changed_keys_are_listed_in_one_warning(begun, copy):
    keys = ["-s", "train.steps=9", "-s", "train.micro_batch=2", "-s", "eval.tokens=300", "-s", "log.every=1"]
    (warned,) = [line for line in on(begun, copy, *keys).stderr.splitlines() if "is now" in line]
    for change in ("train.steps was 8", "train.micro_batch was 4 and is now 2", "eval.tokens was 600 and is now 300"):
        assert change in warned
    assert "log.every" not in warned


def test_keys_that_decide_a_runs_numbers_are_fixed():
    may_change = {key for key in flatten(recipe_2019()) if key.startswith(CHANGES_NUMBERS + CHANGES_NO_NUMBERS)}
    decisive = {key for key in may_change if key.partition(".")[0] in ("model", "optim", "train", "finetune")}
    free = {f"train.{key}" for key in ("steps", "epochs", "micro_batch", "recompute", "init_from")}
    assert decisive == free | {"optim.decay_steps", "finetune.background"}


def test_only_what_changes_numbers_is_listed():
    versions = {"torch": "2", "numpy": "2"}
    facts = {"versions": versions, "source_sha256": "a", "device": "cpu", "cpu": "A", "precision": "fp32", "ranks": 1}
    plain = recipe_2019()
    longer = replace(plain, train=replace(plain.train, steps=2 * plain.train.steps))
    cosine, long_cosine = (replace(each, optim=replace(each.optim, schedule="cosine")) for each in (plain, longer))
    decaying = replace(longer, optim=replace(longer.optim, decay_steps=9))
    divided = replace(plain, parallel=replace(plain.parallel, memory=2), train=replace(plain.train, recompute=True))
    assert change_warnings(plain, replace(plain, name="other"), facts, facts) == []
    assert change_warnings(plain, longer, facts, facts) == [], "no learning rate depends on the length"
    assert change_warnings(plain, plain, {}, facts) == []
    for before, now, after, changed in (
        (plain, plain, facts | {"ranks": 2}, ["ranks was 1 and is now 2"]),
        (plain, plain, facts | {"device": "cuda"}, ["device was cpu and is now cuda"]),
        (plain, plain, facts | {"cpu": "B"}, ["cpu was A and is now B"]),
        (plain, plain, facts | {"source_sha256": "b"}, ["the code of pkmlm has changed"]),
        (cosine, long_cosine, facts, ["train.steps was"]),
        (plain, decaying, facts, ["train.steps was", "optim.decay_steps was 0 and is now 9"]),
        (plain, divided, facts, ["train.recompute was false and is now true", "parallel.memory was 1"]),
    ):
        (warning,) = change_warnings(before, now, facts, after)
        assert all(text in warning for text in changed)


def test_a_run_that_is_made_anew_meanwhile_gets_nothing_of_the_old_one(begun, tmp_path, monkeypatch):
    run = tmp_path / "run"

    def replace_it(state: TrainState) -> None:
        shutil.rmtree(run)
        with RunDirectory(run).locked():
            RunDirectory(run).create(state.recipe)

    after_step(monkeypatch, 3, replace_it)
    said = on(begun, run, code=1).stderr
    assert "replaced" in said
    assert RunDirectory(run).steps() == []
    assert not {"run.json", "latest", "best"} & {path.name for path in run.iterdir()}


def test_the_clock_does_not_matter(begun, copy, tmp_path, monkeypatch):
    sound = Path(shutil.copytree(copy, tmp_path / "sound"))
    for age, step in enumerate(RunDirectory(copy).steps()):
        os.utime(RunDirectory(copy).checkpoint(step), (1e9 - age, 1e9 - age))
    on(begun, sound, "-s", "train.steps=10")
    clock = iter(range(2_000_000_000, 0, -100))
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    on(begun, copy, "-s", "train.steps=10")
    assert RunDirectory(copy).resolve("latest") == 10
    for name in ("weights.safetensors", "optimizer.safetensors"):
        assert len({(run / "checkpoints/step-00000010" / name).read_bytes() for run in (copy, sound)}) == 1
    pkmlm("compare", copy, sound)


@pytest.mark.parametrize("name", ["recipe.yaml", "run.json"])
def test_checkpoints_without_their_record_or_recipe_are_still_a_run(begun, copy, name):
    (copy / ".lock").unlink()  # as `cp -r run/* elsewhere/` leaves it behind
    (copy / name).unlink()
    on(begun, copy, "-s", "train.steps=9")
    assert RunDirectory(copy).done() == 9
    assert (copy / name).exists()


def test_another_s_damaged_checkpoint_begins_no_run(begun, copy, tmp_path):
    for path in copy.glob("checkpoints/*/weights.safetensors"):
        path.write_bytes(b"")
    said = on(begun, tmp_path / "new", "-s", f"train.init_from={copy}", code=1).stderr
    assert re.match(r"error: train.init_from: \S+weights.safetensors: 0 bytes .*\nhint: start from another run", said)
    assert not (tmp_path / "new/recipe.yaml").exists()


@pytest.fixture(scope="module")
def measured(begun, tmp_path_factory):
    run = Path(shutil.copytree(begun[1], tmp_path_factory.mktemp("measured") / "run"))
    pkmlm("eval", run, "-q")
    pkmlm("usage-report", run, "-q")
    return run


def strange(run: Path, name: str, text: str | bytes) -> None:
    (run / name).write_bytes(text if isinstance(text, bytes) else text.encode())


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("run.json", "[]", "it is '[]'"),
        ("eval/test-step-8.json", '{"step": 8, "checkpoint": 5}', "checkpoint is '5'"),
        ("usage/test-step-8.json", '{"step": "x"}', "step is 'x'"),
    ],
)
def test_strange_json_in_a_run_is_told_in_one_line(measured, tmp_path, name, text, told):
    run = Path(shutil.copytree(measured, tmp_path / "run"))
    strange(run, name, text)
    refused = name == "run.json"  # results are left out
    said = pkmlm("compare", run, code=1 if refused else 0).stderr
    what, file = "error" if refused else "warning", re.escape(Path(name).name)
    assert re.search(rf"^{what}: the \S.* \S+{file} is not .*{re.escape(told)}(; it is left out)?\n", said, re.M), said


def test_strange_events_and_pointers_are_passed_over(begun, copy):
    events = [
        *("[]", "5", '{"event": "valid"}', '{"event": "valid", "step": "4"}', '{"event": "train", "st', "[" * 100_000),
    ]
    before = list(RunDirectory(copy).metrics())
    with open(copy / "metrics.jsonl", "a") as file:
        file.write("\n".join(events) + "\n")
    assert list(RunDirectory(copy).metrics()) == before
    (copy / "best").write_bytes(b"\xff")
    pkmlm("compare", copy)
    pkmlm("usage-report", copy, "--html", copy / "page.html")
    assert RunDirectory(copy).best() is None
    assert "no checkpoint at step" in pkmlm("eval", copy, "--step", "9" * 5000, code=2).stderr
    on(begun, copy, "-s", "train.steps=9")


def test_a_text_that_is_no_text(copy):
    said = pkmlm("generate", copy, "-n", 2, stdin=b"\xff\xfe", code=2).stderr
    assert "UTF-8 at byte 0" in said
    assert "PROMPT" in pkmlm("generate", copy, "\udce9", code=2).stderr


@pytest.mark.parametrize("command", ["eval", "usage-report"])
@pytest.mark.slow
def test_an_output_that_takes_nothing_loses_nothing_else(command, copy, tmp_path, ranks):
    if command == "eval":
        (tmp_path / "piqa.jsonl").write_text(json.dumps({"goal": "a", "sol1": "b", "sol2": "c", "label": 1}) + "\n")
        files = ["samples"]
        options = ["--tasks", "piqa", "--task-data", tmp_path, "--log-samples", tmp_path / "samples"]
        kept = copy / "eval" / "tasks-piqa-step-8.json"
    else:
        files = ["page.html", "counts.npz", "pictures/run-slot-mass.png"]
        options = ["--html", tmp_path / files[0], "--export", tmp_path / files[1], "--plots", tmp_path / "pictures"]
        kept = copy / "usage" / "test-step-8.json"
    words = [command, str(copy), *map(str, options), "-q"]
    (done,) = ranks.run(1, "command_into", 1, words=words, stdout="/dev/full", limit=300)
    assert "error: cannot write to standard output" in done.stderr
    assert "Traceback" not in done.stderr
    assert kept.exists()
    assert all((tmp_path / file).stat().st_size for file in files)


def test_training_outlives_its_terminal_and_saves_when_it_hangs_up(begun, tmp_path, ranks):
    """Standard error is closed after its first line, as by `2>&1 | head -1`; SIGHUP comes later."""
    recipe, run = begun[0], tmp_path / "run"
    words = ["train", str(recipe), "-o", str(run), "-s", "train.steps=100000", "-s", "checkpoint.every=100000"]
    training = ranks.start(1, "command_without_reader", words=[*words, "-s", "log.every=1"])
    until = time.monotonic() + PATIENCE
    while len(list(RunDirectory(run).metrics())) < 20 and training.running() and time.monotonic() < until:
        time.sleep(0.05)
    training.signal(signal.SIGHUP)
    assert [ended.code for ended in training.end()] == [75]
    facts = json.loads((run / "run.json").read_text())
    assert (facts["status"], facts["exit_code"]) == ("stopped", 75)
    assert RunDirectory(run).steps()[-1] == facts["step"]
    assert facts["step"] >= 15
    assert f"stopped on request at step {facts['step']}" in (run / "train.log").read_text()
