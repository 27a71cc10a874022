"""`pkmlm train --nproc 2`, and `bin/pkmlm-slurm` with torchrun: real launchers, stopped and killed."""

import json
import os
import re
import signal
import sys
import time

import psutil
import pytest
from torch.distributed.elastic.multiprocessing import ProcessFailure

from pkmlm.cli import cli, main
from pkmlm.cli.launch import outcome
from pkmlm.errors import UserError
from pkmlm.recipe.schema import Recipe
from pkmlm.runs.directory import RunDirectory
from tests.conftest import ROOT, pkmlm

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def recipe(write_recipe, tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("launch"), "product-key")


ENDLESS = ("-s", "train.steps=100000", "-s", "eval.every=100000", "-s", "log.every=1")


def wait_for(text, file, process):
    """Wait until a process has written a text to a file; return the processes below it."""
    until = time.monotonic() + 300  # on a busy machine
    while not (file.exists() and text in file.read_text()):
        assert process.is_running(), "it has ended"
        assert time.monotonic() < until
        time.sleep(0.02)
    return process.children(recursive=True)


def facts_of(run):
    return json.loads((run / "run.json").read_text())


@pytest.mark.slow
def test_a_killed_rank_ends_all_and_ctrl_c_saves_first(recipe, tmp_path, ranks):
    run = tmp_path / "run"
    words = ["train", str(recipe), "-o", str(run), "--nproc", "2", *ENDLESS, "-s", "checkpoint.every=2"]
    running = ranks.start(1, "command", words=words)
    below = wait_for("step-", run / "latest", psutil.Process(running.pids[0]))
    started = {process.environ().get("RANK"): process for process in below}
    assert {"0", "1"} <= started.keys()
    started["1"].kill()
    (ended,) = running.end()
    assert not psutil.wait_procs(started.values(), 30)[1]
    facts = facts_of(run)
    assert (ended.code, facts["status"], facts["exit_code"], facts["rank"]) == (1, "killed (SIGKILL)", 1, 1)
    assert re.search(r"^error: rank 1 was killed .*\nhint: ", ended.stderr, re.MULTILINE)
    assert "Traceback" not in ended.stderr
    again = ranks.start(1, "command", words=[*words, "--resume", "must"])
    wait_for(f"resuming at step {facts['step']} in", run / "train.log", psutil.Process(again.pids[0]))
    again.signal(signal.SIGINT)
    (ended,) = again.end()
    later = facts_of(run)
    assert (ended.code, later["exit_code"], later["status"], later["ranks"]) == (130, 130, "stopped", 2)
    assert later["rank"] is None
    assert (run / "latest").read_text() == f"step-{later['step']:08d}\n"
    assert "Traceback" not in ended.stderr
    assert "Warning" not in ended.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has died")
def test_a_rank_whose_launcher_is_killed_saves_and_stops(recipe, tmp_path, ranks):
    run = tmp_path / "run"
    launcher = ranks.start(1, "launch_a_rank", words=["train", str(recipe), "-o", str(run), *ENDLESS])
    (rank,) = wait_for('"step": 2,', run / "metrics.jsonl", psutil.Process(launcher.pids[0]))
    launcher.signal(signal.SIGKILL)
    assert [ended.code for ended in launcher.end()] == [-signal.SIGKILL]
    assert not psutil.wait_procs([rank], 30)[1]
    facts = facts_of(run)
    assert (facts["status"], facts["exit_code"]) == ("stopped", 75)
    assert (run / "latest").read_text() == f"step-{facts['step']:08d}\n"


def failed(rank, exitcode, seconds):
    """How a rank ended, so many seconds after the first."""
    failure = ProcessFailure(local_rank=rank, pid=1, exitcode=exitcode, error_file="nowhere")
    failure.timestamp = 1_000_000 + seconds
    return failure


@pytest.mark.parametrize(
    ("ends", "passed", "code"),
    [
        ([(1, 0), (-signal.SIGTERM, 1)], [], 1),
        ([(130, 0), (-signal.SIGINT, 0)], [signal.SIGINT], 130),
        ([(3, 0), (3, 1)], [], 3),
        ([(-signal.SIGINT, 0), (-signal.SIGINT, 0)], [signal.SIGINT], 130),
    ],
)
def test_ranks_agree_on_an_exit_code(ends, passed, code):
    assert outcome({rank: failed(rank, *end) for rank, end in enumerate(ends)}, passed, None) == code


@pytest.mark.parametrize(
    ("ends", "message", "status"),
    [
        ([(1, 0), (-signal.SIGKILL, 30)], "rank 1 did not answer after the end of rank 0", "failed"),
        ([(-signal.SIGKILL, 30), (-signal.SIGKILL, 0)], r"rank 1 was killed \(SIGKILL\)", "killed (SIGKILL)"),
        ([(0, 1), (-35, 0)], r"rank 1 was killed \(signal 35\)", "killed (signal 35)"),
    ],
)
def test_the_rank_that_ended_all_is_named(tmp_path, ends, message, status):
    RunDirectory(tmp_path).create(Recipe())
    RunDirectory(tmp_path).write_facts(status="running")
    with pytest.raises(UserError, match=message) as told:
        outcome({rank: failed(rank, *end) for rank, end in enumerate(ends)}, [], str(tmp_path))
    facts = RunDirectory(tmp_path).facts()
    assert (facts["status"], facts["exit_code"], told.value.exit_code) == (status, 1, 1)
    assert f"rank {facts['rank']} " in told.value.message


def test_a_rank_that_has_said_why_it_failed_stays_named(tmp_path):
    """Another did not answer afterwards, and was killed."""
    run = RunDirectory(tmp_path)
    run.create(Recipe())
    run.write_facts(status="failed", rank=1, message="out of memory")
    with pytest.raises(UserError, match="rank 0 did not answer after the end of rank 1"):
        outcome({0: failed(0, -signal.SIGKILL, 31), 1: failed(1, 1, 0)}, [], str(tmp_path))
    assert (run.facts()["rank"], run.facts()["message"]) == (1, "out of memory")


def test_a_rank_that_was_killed_before_there_was_a_run_leaves_none(tmp_path):
    with pytest.raises(UserError, match="rank 0 was killed"):
        outcome({0: failed(0, -signal.SIGKILL, 0)}, [], str(tmp_path / "run"))
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(("rank", "said"), [("0", "\ninterrupted\n"), ("1", "")])
def test_an_interruption_is_told_once(monkeypatch, capsys, rank, said):
    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(cli, "main", interrupted)
    with pytest.raises(SystemExit) as end:
        main()
    assert (end.value.code, capsys.readouterr().err) == (130, said)


@pytest.mark.slow
def test_the_slurm_script_requeues_what_torchrun_has_trained(recipe, tmp_path):
    commands = {
        "srun": """while [ "${1#--}" != "$1" ]; do shift; done; exec "$@" """,
        "scontrol": """[ "$1" = show ] && echo 127.0.0.1 || echo "scontrol $*" """,
    }
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "node1", "SLURM_GPUS_ON_NODE": "1"}
    slurm |= {"PYTHON": sys.executable, "PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    run, said = tmp_path / "run", tmp_path / "said.txt"
    words = [ROOT / "bin" / "pkmlm-slurm", recipe, "-o", run, *ENDLESS]
    with open(said, "w") as file:
        job = psutil.Popen(words, env=ENVIRONMENT | slurm, stdout=file, stderr=file)
    try:
        wait_for('"step": 2,', run / "metrics.jsonl", job)
        (torchrun,) = job.children()
        torchrun.send_signal(signal.SIGTERM)
        assert job.wait(40) == 75
    finally:
        for process in (job, *job.children(recursive=True)) if job.is_running() else ():
            process.kill()
    facts = facts_of(run)
    assert (facts["exit_code"], facts["status"]) == (75, "stopped")
    assert f"scontrol requeue {os.getpid()}\n" in said.read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-s", "train.micro_batch=8"], "micro-batches of 8"),
        (["-s", "data.dir=nosuch"], "nosuch"),
    ],
)
def test_a_mistake_is_told_before_anything_is_started(recipe, tmp_path, monkeypatch, options, message):
    monkeypatch.setattr("pkmlm.cli.train.launch", None)
    error = pkmlm("train", recipe, "-o", tmp_path / "run", "--nproc", 2, *options, code=2).stderr
    assert message in error
    assert error.lower().count("error: ") == 1
    assert not (tmp_path / "run").exists()


def test_ranks_that_cannot_meet_say_so_in_a_line(recipe, tmp_path, ranks):
    place = {"MASTER_ADDR": "no.such.host.invalid", "MASTER_PORT": "29876", "PKMLM_TIMEOUT": "2"}
    rank = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}
    words = ["train", str(recipe), "-o", str(tmp_path / "run")]
    (done,) = ranks.run(1, "command_with", 1, words=words, environment=place | rank)
    assert done.stderr.startswith("error: rank 1 ")
    assert "no.such.host.invalid:29876: " in done.stderr, "and what torch says of it"
    assert done.stderr.count("\n") == 2


@pytest.mark.parametrize(("name", "text"), [("WORLD_SIZE", "two"), ("PKMLM_TIMEOUT", "soon")])
def test_a_strange_environment_is_told_before_anything_is_started(recipe, tmp_path, monkeypatch, name, text):
    monkeypatch.setattr("pkmlm.cli.train.launch", None)
    monkeypatch.setenv(name, text)
    error = pkmlm("train", recipe, "-o", tmp_path / "run", "--nproc", 2, code=2).stderr
    assert name in error


def test_another_launcher_has_started_another_number(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    error = pkmlm("train", recipe, "-o", tmp_path / "run", "--nproc", 2, code=2).stderr
    assert "error: --nproc 2 under a launcher that has started 3 processes" in error
