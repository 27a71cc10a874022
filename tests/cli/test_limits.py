"""Limits of the shell (`ulimit -n`, `ulimit -v`): one line and exit code 1, never a traceback."""

import os
import resource
import subprocess
import sys

import pytest

from tests import PATIENCE
from tests.conftest import ROOT, pkmlm


@pytest.fixture
def no_more_files():
    """No file can be opened but with the numbers that are free below the next one."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("command", ["eval", "train", "tokenize", "generate"])
def test_too_many_open_files_are_no_mistake_of_the_user(command, trained, tmp_path, novels, write_recipe, request):
    run, recipe = trained("dense"), write_recipe(tmp_path, "dense")
    pkmlm("generate", run, "a", "-n", 1)  # all is imported
    words = {
        "eval": (run,),
        "train": (recipe, "-o", tmp_path / "run"),
        "tokenize": (novels / "valid.txt", "-o", tmp_path / "tokens"),
        "generate": (run, "a"),
    }
    request.getfixturevalue("no_more_files")
    said = pkmlm(command, *words[command], code=1).stderr
    assert said.startswith("error: ")
    assert "open files" in said


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not hold address space to a limit")
def test_too_little_address_space_ends_in_a_line(trained):
    """It is not enough to load torch."""
    limit = 300 << 20
    words = [sys.executable, "-m", "pkmlm", "generate", str(trained("dense")), "a", "-n", "1"]
    done = subprocess.run(
        words,
        cwd=ROOT,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "error: " in done.stderr
