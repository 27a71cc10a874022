"""`pkmlm train --nproc 2`, and `bin/pkmlm-slurm` with torchrun: real launchers, stopped and killed."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from torch.distributed.elastic.multiprocessing import ProcessFailure

from pkmlm.cli import cli, main
from pkmlm.cli.launch import outcome
from pkmlm.errors import UserError
from pkmlm.runs.directory import RunDirectory
from tests.conftest import ROOT, pkmlm

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def recipe(write_recipe, tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("launch"), "product-key")


class Launched:
    """A launcher that trains in two processes, in the background; its messages are in a file beside the run."""

    def __init__(self, recipe, run, *options, script=None):
        self.run, self.said, self.ranks = run, run.parent / "said.txt", []
        words = [str(recipe), "-o", str(run), *map(str, options)]
        alone = [sys.executable, "-m", "pkmlm", "train", *words, "--nproc", "2"]
        with open(self.said, "w") as said:
            self.process = subprocess.Popen(
                alone if script is None else [ROOT / "bin" / "pkmlm-slurm", *words],
                env=ENVIRONMENT | (script or {}),
                stdout=said,
                stderr=said,
            )

    def until_step(self, step):
        """Wait for it; then `ranks` are the training processes, by rank."""
        until = time.monotonic() + 60
        while f'"step": {step},' not in self.metrics() and time.monotonic() < until:
            assert self.process.poll() is None, self.said.read_text()
            time.sleep(0.02)
        children = psutil.Process(self.process.pid).children(recursive=True)
        by_rank = {child.environ()["RANK"]: child for child in children if "RANK" in child.environ()}
        self.ranks = [by_rank[rank] for rank in sorted(by_rank)]
        assert len(self.ranks) == 2
        return self

    def metrics(self):
        path = self.run / "metrics.jsonl"
        return path.read_text() if path.exists() else ""

    def end(self, seconds=40):
        """The exit code, all processes having ended, and the last facts of run.json."""
        try:
            code = self.process.wait(seconds)
        finally:
            print(self.said.read_text())  # pytest shows it where a test fails
        assert not [rank for rank in self.ranks if rank.is_running()]
        facts = json.loads((self.run / "run.json").read_text()) if (self.run / "run.json").exists() else {}
        return code, facts


ENDLESS = ("-s", "train.steps=100000", "-s", "eval.every=100000", "-s", "log.every=1")


def test_a_killed_rank_ends_all_and_ctrl_c_saves_first(recipe, tmp_path):
    often = ("-s", "checkpoint.every=5")
    running = Launched(recipe, tmp_path / "run", *ENDLESS, *often).until_step(8)
    began = time.monotonic()
    running.ranks[1].kill()
    code, facts = running.end(30)
    assert time.monotonic() - began < 30
    assert code == 1
    assert (facts["status"], facts["exit_code"], facts["rank"]) == ("killed (SIGKILL)", 1, 1)
    said = running.said.read_text()
    assert "error: rank 1 was killed (SIGKILL), and the others were ended\nhint: " in said
    assert "Traceback" not in said
    again = Launched(recipe, tmp_path / "run", *ENDLESS, *often, "--resume", "must").until_step(facts["step"] + 20)
    again.process.send_signal(signal.SIGINT)
    code, later = again.end()
    assert (code, later["exit_code"], later["status"], later["rank"], later["ranks"]) == (130, 130, "stopped", None, 2)
    assert (tmp_path / "run" / "latest").read_text() == f"step-{later['step']:08d}\n"
    said = again.said.read_text()
    assert f"resuming at step {facts['step']} in" in said
    assert "Traceback" not in said
    assert "Warning" not in said


def test_ranks_whose_launcher_is_killed_save_and_stop(recipe, tmp_path):
    running = Launched(recipe, tmp_path / "run", *ENDLESS).until_step(3)
    running.process.kill()
    _, alive = psutil.wait_procs(running.ranks, 30)
    assert not alive
    _, facts = running.end()
    assert (facts["status"], facts["exit_code"]) == ("stopped", 75)
    assert (tmp_path / "run" / "latest").read_text() == f"step-{facts['step']:08d}\n"


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
        ([(1, 0), (-signal.SIGKILL, 30)], "rank 1 did not answer, and was ended", "failed"),
        ([(-signal.SIGKILL, 30), (-signal.SIGKILL, 0)], r"rank 1 was killed \(SIGKILL\)", "killed (SIGKILL)"),
    ],
)
def test_the_rank_that_ended_all_is_named(tmp_path, ends, message, status):
    RunDirectory(tmp_path).note(status="running")
    with pytest.raises(UserError, match=message) as told:
        outcome({rank: failed(rank, *end) for rank, end in enumerate(ends)}, [], str(tmp_path))
    facts = RunDirectory(tmp_path).facts()
    assert (facts["status"], facts["exit_code"], told.value.exit_code) == (status, 1, 1)
    assert f"rank {facts['rank']} " in told.value.message


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


def test_the_slurm_script_requeues_what_torchrun_has_trained(recipe, tmp_path):
    commands = {
        "srun": """while [ "${1#--}" != "$1" ]; do shift; done; exec "$@" """,
        "scontrol": """[ "$1" = show ] && echo 127.0.0.1 || echo "scontrol $*" """,
    }
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "node1", "SLURM_GPUS_ON_NODE": "2"}
    slurm |= {"PYTHON": sys.executable, "PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    running = Launched(recipe, tmp_path / "run", *ENDLESS, script=slurm).until_step(2)
    (torchrun,) = psutil.Process(running.process.pid).children()
    torchrun.send_signal(signal.SIGTERM)
    code, facts = running.end()
    assert (code, facts["exit_code"], facts["status"]) == (75, 75, "stopped")
    assert f"scontrol requeue {os.getpid()}\n" in running.said.read_text()


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


def test_ranks_that_cannot_meet_say_so_in_a_line(recipe, tmp_path):
    place = {"MASTER_ADDR": "no.such.host.invalid", "MASTER_PORT": "29876", "PKMLM_TIMEOUT": "2"}
    rank = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}
    words = [sys.executable, "-m", "pkmlm", "train", str(recipe), "-o", str(tmp_path / "run")]
    done = subprocess.run(words, env=ENVIRONMENT | place | rank, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("error: rank 1 ")
    assert "no.such.host.invalid:29876" in done.stderr
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
    assert "error: --nproc 2 within a launcher that has started 3 processes" in error
