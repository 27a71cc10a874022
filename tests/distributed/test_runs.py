"""`pkmlm train` on several ranks: its run directory, and how it goes on, stops and fails."""

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from pkmlm.cost import bytes_held, cost_of
from pkmlm.recipe.load import load_recipe
from pkmlm.runs.directory import RunDirectory
from tests import PATIENCE
from tests.conftest import given, pkmlm
from tests.forks import Ended

STEPS = ["-s", "train.steps=8", "-s", "checkpoint.every=4", "-s", "checkpoint.keep=5", "-s", "eval.every=4"]


def losses(run: Path, event: str = "train") -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["event"] == event]


def tensors(run: Path, step: int) -> dict[str, np.ndarray]:
    """What both kinds of file of a checkpoint hold for all ranks together."""
    folder = run / f"checkpoints/step-{step:08d}"
    return {**load_file(folder / "weights.safetensors"), **load_file(folder / "optimizer.safetensors")}


def of(size: int, memory: int = 1, name: str = "pkm") -> list[str]:
    """What fits the recipe to so many ranks: two forwards of four sequences on all of them together."""
    norm = f"model.memories.{name}.query_norm=layer"
    return given(norm, f"train.micro_batch={4 // size}", f"parallel.memory={memory}")


def told(ended: list[Ended]) -> str:
    """What all ranks say on standard error."""
    return "".join(rank.stderr for rank in ended)


def wait_for(run: Path, step: int) -> None:
    until = time.monotonic() + PATIENCE
    while not (run / "metrics.jsonl").exists() or len(losses(run)) < step:
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, write_recipe) -> Path:
    return write_recipe(tmp_path_factory.mktemp("recipe"), "product-key")


@pytest.fixture(scope="module")
def alone(tmp_path_factory, recipe) -> Path:
    """A run of one process."""
    run = tmp_path_factory.mktemp("alone") / "run"
    pkmlm("train", recipe, "-o", run, "-q", *STEPS, *of(1))
    return run


@pytest.fixture(scope="module")
def divided(tmp_path_factory, recipe, ranks) -> Path:
    """The same run by two ranks that divide its tables."""
    run = tmp_path_factory.mktemp("divided") / "run"
    ranks.pkmlm(2, "train", recipe, "-o", run, *STEPS, *of(2, 2))
    return run


def half(run: Path, folder: Path) -> Path:
    """A copy of a run that ends with its first checkpoint."""
    shutil.copytree(run, folder / "run")
    shutil.rmtree(folder / "run/checkpoints/step-00000008")
    (folder / "run/done").unlink()
    return folder / "run"


def test_ranks_train_as_one_process_and_rank_0_alone_writes(alone, divided):
    assert losses(divided) == pytest.approx(losses(alone), rel=1e-5)
    assert losses(divided, "valid") == pytest.approx(losses(alone, "valid"), rel=1e-5)
    one, other = ([line["event"] for line in RunDirectory(run).metrics()] for run in (alone, divided))
    assert sorted(one) == sorted(other)
    first, second = ([event for event in events if event != "save"] for events in (one, other))
    assert first == second, "when a checkpoint stands depends on the disk"
    names = {path.name for path in (divided / "checkpoints/step-00000008").iterdir()}
    parts = {f"{kind}-{part}-of-2.safetensors" for kind in ("weights", "optimizer") for part in (1, 2)}
    whole = {f"{kind}.safetensors" for kind in ("weights", "optimizer", "drift")}
    assert names == parts | whole | {"state.json", "recipe.yaml", "manifest.json"}
    facts = json.loads((divided / "run.json").read_text())
    assert (facts["status"], facts["exit_code"], facts["step"], facts["ranks"]) == ("finished", 0, 8, 2)
    assert (divided / "done").exists()
    drift = [
        [line["memories"] for line in RunDirectory(run).metrics() if line["event"] == "drift"]
        for run in (alone, divided)
    ]
    assert drift[0][0][0]["read"] == drift[1][0][0]["read"]
    assert drift[0][0][0]["moved"] == pytest.approx(drift[1][0][0]["moved"], rel=1e-3)


@pytest.mark.slow
def test_more_ranks_go_on_with_what_others_have_saved(divided, recipe, ranks, tmp_path):
    run = half(divided, tmp_path)
    ranks.pkmlm(4, "train", recipe, "-o", run, *STEPS, *of(4, 4))
    assert losses(run)[4:] == pytest.approx(losses(divided)[4:], rel=1e-5)
    assert losses(run)[:4] == losses(divided)[:4]
    log = (run / "train.log").read_text()
    assert "resuming at step 4" in log
    (warning,) = [line for line in log.splitlines() if "warning: step 4: " in line]
    assert re.search(r"ranks\D+2\D+4\b", warning)


def test_ranks_go_on_with_what_one_process_has_saved(alone, recipe, ranks, tmp_path):
    run = half(alone, tmp_path)
    ranks.pkmlm(2, "train", recipe, "-o", run, *STEPS, *of(2, 2))
    assert losses(run) == pytest.approx(losses(alone), rel=1e-5)


def test_the_same_ranks_go_on_to_the_bit(divided, recipe, ranks, tmp_path):
    run = half(divided, tmp_path)
    ranks.pkmlm(2, "train", recipe, "-o", run, *STEPS, *of(2, 2))
    assert losses(run) == losses(divided)
    for path in (divided / "checkpoints/step-00000008").iterdir():
        if path.name not in ("state.json", "manifest.json"):  # which tell the seconds
            assert path.read_bytes() == (run / "checkpoints/step-00000008" / path.name).read_bytes(), path


@pytest.mark.parametrize(("kind", "name"), [("memory-plus", "plus"), ("peer", "experts"), ("mixed", "pkm")])
def test_every_table_is_divided_and_resumed(kind, name, write_recipe, ranks, tmp_path):
    """What two ranks have saved, one process goes on with."""
    recipe = write_recipe(tmp_path, kind)
    pkmlm("train", recipe, "-o", tmp_path / "alone", "-q", *STEPS, *of(1, name=name))
    divided = [*of(2, 2, name), "-s", "train.recompute=true"]
    ranks.pkmlm(2, "train", recipe, "-o", tmp_path / "run", *STEPS, *divided)
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
    assert losses(tmp_path / "run", "valid") == pytest.approx(losses(tmp_path / "alone", "valid"), rel=1e-5)
    run = half(tmp_path / "run", tmp_path / "half")
    ranks.pkmlm(2, "train", recipe, "-o", run, *STEPS, *divided)
    assert losses(run) == losses(tmp_path / "run")
    shutil.rmtree(tmp_path / "half")
    run = half(tmp_path / "run", tmp_path / "half")
    pkmlm("train", recipe, "-o", run, "-q", *STEPS, *of(1, name=name))
    assert losses(run) == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)


def test_divided_checkpoints_are_read_by_every_command(divided, alone, tmp_path, recipe):
    shutil.copytree(divided, tmp_path / "run")
    found = [json.loads(pkmlm("eval", run, "--json", "-q").stdout)["perplexity"] for run in (tmp_path / "run", alone)]
    assert found[0]["nll"] == pytest.approx(found[1]["nll"], rel=1e-5)
    usage = [json.loads(pkmlm("usage-report", run, "--format", "json").stdout) for run in (tmp_path / "run", alone)]
    one, two = (each["runs"][0]["memories"][0]["mass"]["usage"] for each in usage)
    assert one == pytest.approx(two, rel=0.02)
    pkmlm("export", tmp_path / "run", "-o", tmp_path / "export")
    exported = json.loads(pkmlm("eval", tmp_path / "export", "--json", "-q", "--split", "test").stdout)["perplexity"]
    assert exported["nll"] == pytest.approx(found[0]["nll"], rel=1e-6)
    init = [*of(1), "-s", f"train.init_from={divided}", "-s", "train.steps=1"]
    pkmlm("train", recipe, "-o", tmp_path / "more", "-q", *init)
    assert losses(tmp_path / "more")[0] < losses(alone)[0] - 0.1


@pytest.mark.slow
def test_ranks_start_from_a_part_of_another_run_as_one_does(divided, alone, recipe, ranks, tmp_path):
    """Of tables in parts and in one file, by ranks that divide tables or hold them whole."""
    add = ["-s", "model.memories.pkm.layers=[1+, 2]", "-s", "train.steps=2"]
    pkmlm("train", recipe, "-o", tmp_path / "one", "-q", *of(1), *add, "-s", f"train.init_from={divided}")
    assert losses(tmp_path / "one")[0] < losses(alone)[0] - 0.1
    for name, source, memory in (("a", divided, 2), ("b", alone, 2), ("c", divided, 1)):
        words = [*of(2, memory), "-s", f"train.init_from={source}"]
        ranks.pkmlm(2, "train", recipe, "-o", tmp_path / name, *add, *words)
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "one"), rel=1e-5), name


def test_a_damaged_part_is_named_and_set_aside(divided, recipe, ranks, tmp_path):
    shutil.copytree(divided, tmp_path / "run")
    (tmp_path / "run/done").unlink()
    part = tmp_path / "run/checkpoints/step-00000008/weights-2-of-2.safetensors"
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    said = told(ranks.pkmlm(2, "train", recipe, "-o", tmp_path / "run", *STEPS, *of(2, 2)))
    assert said.count("weights-2-of-2.safetensors: sha256") == 1
    assert losses(tmp_path / "run") == losses(divided)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_to_one_rank_stops_all_with_a_checkpoint(recipe, ranks, tmp_path, number, code):
    run = tmp_path / "run"
    words = ["train", str(recipe), "-o", str(run), *of(2, 2), "-s", "train.steps=100000"]
    started = ranks.start(2, "command", words=words)
    wait_for(run, 3)
    os.kill(started.pids[1], number)
    ended = started.end()
    assert [rank.code for rank in ended] == [code, code]
    facts = json.loads((run / "run.json").read_text())
    assert (facts["status"], facts["exit_code"]) == ("stopped", code)
    assert RunDirectory(run).steps()[-1] == facts["step"] == len(losses(run))
    assert told(ended).count("stopped on request") == 1


@pytest.mark.parametrize("memory", [1, 2])
def test_a_killed_rank_ends_the_others_which_say_where_they_were(recipe, ranks, tmp_path, memory):
    run = tmp_path / "run"
    words = ["train", str(recipe), "-o", str(run), *of(2, memory), "-s", "train.steps=100000"]
    started = ranks.start(2, "command", words=words)
    wait_for(run, 3)
    os.kill(started.pids[1], signal.SIGKILL)
    began = time.monotonic()
    ended = started.end()
    assert time.monotonic() - began < 20
    assert [rank.code for rank in ended] == [1, -signal.SIGKILL]
    assert re.match(r".*error: rank 0, step \d+: the connection to another rank is lost\nhint: ", ended[0].stderr, re.S)
    assert json.loads((run / "run.json").read_text())["status"] == "failed"


@pytest.mark.slow
def test_a_rank_that_does_not_answer_is_waited_for_so_long(recipe, ranks, tmp_path):
    run = tmp_path / "run"
    words = ["train", str(recipe), "-o", str(run), *of(2, 2), "-s", "train.steps=100000"]
    started = ranks.start(2, "command_with", words=words, environment={"PKMLM_TIMEOUT": "2"})
    wait_for(run, 3)
    os.kill(started.pids[1], signal.SIGSTOP)
    time.sleep(3)
    until = time.monotonic() + PATIENCE
    while "another rank did not answer in time\nhint: PKMLM_TIMEOUT=" not in started.said(0)[1]:
        assert time.monotonic() < until
        time.sleep(0.05)
    os.kill(started.pids[1], signal.SIGKILL)
    assert [rank.code for rank in started.end()] == [1, -signal.SIGKILL]


@pytest.mark.slow
def test_a_rank_waits_no_longer_for_its_neighbours_than_for_all(ranks):
    said = [rank.stdout.splitlines() for rank in ranks.run(4, "silent_neighbour", seconds="3")]
    assert [lines[0] for lines in said] == ["[0, 1] [0, 2]", "[0, 1] [1, 3]", "[2, 3] [0, 2]", "[2, 3] [1, 3]"]
    assert [lines[1:] for lines in said] == [[], [], ["rank 2: another rank did not answer in time"], []]


def test_a_part_that_cannot_be_written_leaves_nothing(recipe, ranks, tmp_path):
    run = tmp_path / "run"
    words = ["train", str(recipe), "-o", str(run), *of(2, 2), "-s", "train.steps=2"]
    ended = ranks.run(2, "failing_rank", code=1, words=words)
    assert told(ended).count("error: ") == 1
    assert "error: rank 1: cannot write " in ended[1].stderr
    assert not list((run / "checkpoints").iterdir())
    facts = json.loads((run / "run.json").read_text())
    assert (facts["exit_code"], facts["rank"]) == (1, 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["-s", "train.micro_batch=8"],
            "micro-batches of 8 on each of 2 processes",
        ),
        (["-s", "parallel.memory=4"], "parallel.memory"),
        (["-s", "data.dir=nowhere"], "nowhere"),
        (["--resume", "must"], "--resume must"),
    ],
)
def test_what_is_wrong_at_the_start_is_told_once(recipe, ranks, tmp_path, words, message):
    said = told(ranks.pkmlm(2, "train", recipe, "-o", tmp_path / "run", *words, code=2))
    assert said.count("error: ") == 1
    assert message in said
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_a_run_in_use_is_refused_once(recipe, ranks, tmp_path):
    with RunDirectory(tmp_path / "run").locked():
        said = told(ranks.pkmlm(2, "train", recipe, "-o", tmp_path / "run", *of(2), code=1))
    assert said.count("error: ") == 1
    assert "is in use by process" in said


def test_a_finished_run_and_a_dry_run_are_told_once(divided, recipe, ranks):
    ended = ranks.pkmlm(2, "train", recipe, "-o", divided, *STEPS, *of(2, 2))
    assert [rank.stdout.count("is already complete at step 8") for rank in ended] == [1, 0]
    ended = ranks.pkmlm(2, "train", recipe, "--dry-run", *of(2, 2))
    assert [rank.stdout.count("first step") for rank in ended] == [1, 0]
    assert "in 2 micro-batches of 2 on each of 2 processes" in " ".join(ended[0].stdout.split())


def test_a_dry_run_is_divided_as_the_run_is(recipe, ranks):
    changes = [*of(2, 2), "-s", "model.memories.pkm.num_keys=256"]
    ended = ranks.pkmlm(2, "train", recipe, "--dry-run", *changes)
    divided = load_recipe(recipe, changes[1::2])
    held = bytes_held(divided, cost_of(divided, 600))
    total, values = (f"{size / 1e6:,.1f}" for size in (sum(held.values()), held["moments"]))
    said = " ".join(ended[0].stdout.split())
    assert f"memory {total} MB to train on each of 2 processes: " in said
    assert f", moments {values}," in said
