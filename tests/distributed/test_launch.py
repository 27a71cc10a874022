"""`pkmlm train --nproc 2`, and `bin/pkmlm-slurm` with torchrun: real launchers, stopped and killed."""

import json
import os
import signal
import socket
import sys
import time

import psutil
import pytest

from pkmlm.cli import cli, main
from tests import PATIENCE
from tests.conftest import ROOT, given, pkmlm

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def recipe(write_recipe, tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("launch"), "product-key")


@pytest.fixture
def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


ENDLESS = ("-s", "train.steps=100000", "-s", "eval.every=100000", "-s", "log.every=1")


def wait_for(text, file, process):
    """Wait until a process has written a text to a file; return the processes below it."""
    until = time.monotonic() + PATIENCE  # on a busy machine
    while not (file.exists() and text in file.read_text()):
        assert process.is_running(), "it has ended"
        assert time.monotonic() < until
        time.sleep(0.02)
    return process.children(recursive=True)


def facts_of(run):
    return json.loads((run / "run.json").read_text())


@pytest.mark.slow
def test_a_killed_rank_ends_all_and_ctrl_c_saves_first(recipe, tmp_path, ranks, foreign_code):
    """What lies in the working folder is in nobody's way."""
    run = tmp_path / "run"
    words = ["train", str(recipe), "-o", str(run), "--nproc", "2", *ENDLESS, "-s", "checkpoint.every=2"]
    running = ranks.start(1, "command", words=words, folder=foreign_code)
    below = wait_for("step-", run / "latest", psutil.Process(running.pids[0]))
    started = {process.environ().get("RANK"): process for process in below}
    assert {"0", "1"} <= started.keys()
    started["1"].kill()
    (ended,) = running.end()
    assert not psutil.wait_procs(started.values(), 30)[1]
    facts = facts_of(run)
    assert (ended.code, facts["status"], facts["exit_code"]) == (1, "failed", 1)
    assert ended.stderr.count("error: rank 1 was killed (SIGKILL)") == 1
    assert "Traceback" not in ended.stderr
    again = ranks.start(1, "command", words=[*words, "--resume", "must"])
    wait_for(f"resuming at step {facts['step']} in", run / "train.log", psutil.Process(again.pids[0]))
    again.signal(signal.SIGINT)
    (ended,) = again.end()
    later = facts_of(run)
    assert (ended.code, later["exit_code"], later["status"], later["ranks"]) == (130, 130, "stopped", 2)
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


@pytest.mark.slow
def test_ranks_and_launcher_end_with_one_exit_code(recipe, tmp_path, ranks):
    run, other = tmp_path / "run", tmp_path / "other"
    words = ["train", str(recipe), "-o", str(run), "--nproc", "2", *ENDLESS]
    running = ranks.start(1, "command", words=words)
    wait_for('"step": 2,', run / "metrics.jsonl", psutil.Process(running.pids[0]))
    running.signal(signal.SIGTERM)
    (stopped,) = running.end()
    facts = facts_of(run)
    assert (stopped.code, facts["exit_code"], facts["status"], facts["ranks"]) == (75, 75, "stopped", 2)
    assert (run / "latest").read_text() == f"step-{facts['step']:08d}\n"
    assert stopped.stderr.count("step 2/") == 1, "rank 0 alone tells of training"
    steps = f"train.steps={facts['step'] + 1}"
    (refused,) = ranks.run(1, "command", 2, words=[*words, "-s", steps, "--resume", "never"])  # as only the ranks know
    (diverged,) = ranks.run(1, "command", 3, words=[*words, "-o", str(other), *given("optim.lr=1000")])
    assert [ended.stderr.count("error: ") for ended in (refused, diverged)] == [1, 1]
    assert facts_of(run) == facts
    (done,) = ranks.run(1, "command", 0, words=[*words, "-s", steps])
    assert (run / "done").exists()
    for ended in (stopped, refused, diverged, done):  # torch/distributed: torchrun's log
        assert not any(word in ended.stderr for word in ("Traceback", "Warning", "torch/distributed"))


@pytest.mark.slow
def test_a_signal_that_comes_before_training_ends_all_with_its_code(recipe, tmp_path, ranks):
    running = ranks.start(1, "command", words=["train", str(recipe), "-o", str(tmp_path / "run"), "--nproc", "2"])
    launcher, below = psutil.Process(running.pids[0]), []
    while len(below) < 2:
        assert launcher.is_running(), "it has ended"
        below = launcher.children()
    running.signal(signal.SIGTERM)
    (ended,) = running.end()
    assert (ended.code, ended.stderr) == (75, "")
    assert not psutil.wait_procs(below, 30)[1]
    assert not (tmp_path / "run").exists()


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
        assert job.wait(PATIENCE) == 75
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


@pytest.mark.parametrize("rank", ["0", "1"])
def test_who_waits_for_others_says_so_and_can_be_interrupted(recipe, tmp_path, ranks, rank, free_port):
    """The variables of a launcher may be left over from another job."""
    left_over = {"WORLD_SIZE": "2", "RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
    words = ["train", str(recipe), "-o", str(tmp_path / "run")]
    waiting = ranks.start(1, "command_of_little_patience", words=words, environment=left_over)
    until = time.monotonic() + PATIENCE
    while f":{free_port}; " not in waiting.said(0)[1]:
        assert waiting.running(), waiting.said(0)
        assert time.monotonic() < until
        time.sleep(0.02)
    waiting.signal(signal.SIGINT)
    (ended,) = waiting.end()
    assert ended.code == -signal.SIGINT
    assert ended.stderr.count("\n") == 1
    for word in (f"rank {rank} ", " 2 processes", f"127.0.0.1:{free_port}", "unset WORLD_SIZE"):
        assert word in ended.stderr
    assert not (tmp_path / "run").exists()


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
