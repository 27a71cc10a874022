"""`bin/pkmlm-slurm` with stand-ins for SLURM's commands: what is started, what is requeued, how the job ends."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests import PATIENCE
from tests.conftest import ROOT

SCRIPT = ROOT / "bin" / "pkmlm-slurm"
# Like SLURM's, as far as the script uses them. srun leaves the run.json of $FACTS, as a run would that training has
# ended, and ends with torchrun's exit code; without $FACTS it leaves things as they are.
SRUN = """#!/bin/sh
printf '%s\\n' "$@" > "$RECORD/words"
env > "$RECORD/environment"
if [ -n "${FACTS:-}" ]; then
    mkdir -p run
    printf '%s' "$FACTS" > run/new.json
    mv run/new.json run/run.json
fi
exit "$TORCHRUN"
"""
SCONTROL = """#!/bin/sh
case $1 in
    show) [ "$2" = hostnames ] && printf '%s\\n' alpha beta ;;
    *) echo "$@" > "$RECORD/requeued" ;;
esac
"""


@pytest.fixture
def job(tmp_path):
    """A function that runs the script as a job; returns its exit code and what was recorded."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(*arguments, exit_code=None, torchrun=1, **environment):
        slurm = {"SLURM_JOB_ID": "4321", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2"}
        slurm |= {"SLURM_GPUS_ON_NODE": "4", "SLURM_CPUS_ON_NODE": "32", "PYTHON": sys.executable}
        slurm |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RECORD": str(tmp_path), "TORCHRUN": str(torchrun)}
        if exit_code is not None:
            slurm["FACTS"] = json.dumps({"status": "ended", "exit_code": exit_code})
        inherited = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
        done = subprocess.run(
            [SCRIPT, *arguments],
            cwd=tmp_path,
            env={**inherited, **slurm, **environment},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        told = tmp_path / "requeued"
        requeued = told.read_text() if told.exists() else None
        told.unlink(missing_ok=True)
        return done, requeued

    return run


def test_75_requeues(job):
    for arguments in (["-o", "run"], ["-qo", "run"], ["-orun"], ["--output", "run"], ["--output=run"]):
        done, requeued = job("my.yaml", *arguments, exit_code=75)
        assert (done.returncode, requeued) == (75, "requeue 4321\n")
        assert done.stdout == "requeued: run has saved a checkpoint and goes on from there\n"
        assert done.stderr == ""


@pytest.mark.parametrize(("exit_code", "torchrun"), [(0, 0), (1, 1), (2, 1), (3, 1), (130, 1)])
def test_nothing_else_does(job, tmp_path, exit_code, torchrun):
    if sys.version_info >= (3, 11):
        (tmp_path / "json.py").write_text("raise SystemExit('code of the working folder')\n")
    done, requeued = job("my.yaml", "-o", "run", exit_code=exit_code, torchrun=torchrun)
    assert (done.returncode, requeued, done.stderr) == (exit_code, None, "")


def test_an_earlier_75_is_not_taken_for_this_jobs(job, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.json").write_text('{"exit_code": 75}')
    done, requeued = job("my.yaml", "-o", "run", torchrun=1)  # a recipe that is wrong, say
    assert (done.returncode, requeued) == (1, None)


def test_a_run_that_was_killed_is_not_requeued(job, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.json").write_text('{"exit_code": 75}')
    facts = json.dumps({"status": "running", "exit_code": None})
    done, requeued = job("my.yaml", "-o", "run", torchrun=1, FACTS=facts)
    assert (done.returncode, requeued) == (1, None)
    done, requeued = job("my.yaml", "-o", "run", torchrun=1, FACTS="{")
    assert (done.returncode, requeued) == (1, None)


def test_what_is_started(job, tmp_path):
    job("my recipe.yaml", "-o", "run", "-s", "name=a b", torchrun=0, SLURM_RESTART_COUNT="2")
    words = (tmp_path / "words").read_text().splitlines()
    assert words[:4] == ["--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=32", "--cpu-bind=none"]
    launcher = [sys.executable, "-m", "torch.distributed.run"]
    at = words.index(sys.executable)
    assert words[at : at + 3] == launcher
    assert {"--nnodes=2", "--nproc-per-node=4", "--max-restarts=0", "--rdzv-backend=c10d"} < set(words)
    assert {"--rdzv-id=4321-2", "--rdzv-endpoint=alpha:24321"} < set(words)
    end = ["-m", "pkmlm", "train", "my recipe.yaml", "-o", "run", "-s", "name=a b"]
    assert words[-len(end) :] == end
    environment = dict(
        line.split("=", 1) for line in (tmp_path / "environment").read_text().splitlines() if "=" in line
    )
    assert environment["OMP_NUM_THREADS"] == "8"
    assert int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < 300
    assert environment["PKMLM_TIMEOUT"] == "600"
    assert environment["NCCL_DEBUG"] == "WARN"
    assert environment["PYTHONSAFEPATH"] == "1", "no code of the working folder is run"
    job("my.yaml", "-o", "run", torchrun=0, NCCL_DEBUG="INFO", PKMLM_PROCESSES="2")
    assert "--nproc-per-node=2" in (tmp_path / "words").read_text().splitlines()
    assert "NCCL_DEBUG=INFO\n" in (tmp_path / "environment").read_text()


def test_a_run_directory_is_needed(job):
    done, requeued = job("my.yaml")
    assert (done.returncode, requeued) == (2, None)
    assert done.stderr == "error: no run directory (expected -o RUN)\n"


def test_the_script_is_sound():
    assert os.access(SCRIPT, os.X_OK)
    assert subprocess.run(["bash", "-n", SCRIPT], capture_output=True, timeout=PATIENCE, check=True).stderr == b""
    if checker := shutil.which("shellcheck"):
        subprocess.run([checker, SCRIPT], timeout=PATIENCE, check=True)
