"""The commit that results name, and memory that is kept."""

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pkmlm.environment import child_command, source_commit, source_sha256
from tests import PATIENCE
from tests.conftest import pkmlm


def write(git: Path, name: str, text: str) -> None:
    (git / name).parent.mkdir(parents=True, exist_ok=True)
    (git / name).write_text(text)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_commit_is_found_at_the_top_of_a_checkout_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main, tree = tmp_path / "main", tmp_path / "tree"

    def git(*words: object) -> str:
        who = ("-c", "user.name=x", "-c", "user.email=x@y")
        command = ["git", "-C", main, *who, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE).stdout.strip()

    (main / "inside").mkdir(parents=True)
    assert source_commit(main) is None
    git("init", "-q")
    assert source_commit(main) is None, "no commit so far"
    git("commit", "-q", "--allow-empty", "-m", "first")
    first = git("rev-parse", "HEAD")
    assert source_commit(main) == first
    assert source_commit(main / "inside") is None, "installed within another project"
    git("worktree", "add", "-q", tree)
    git("commit", "-q", "--allow-empty", "-m", "second")
    assert (source_commit(tree), source_commit(main)) == (first, git("rev-parse", "HEAD"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert source_commit(main) is None, "without git"


def test_the_digest_of_the_code_changes_with_its_files_alone(tmp_path: Path) -> None:
    write(tmp_path, "a.py", "x = 1\n")
    write(tmp_path, "sub/b.py", "y = 2\n")
    digest = source_sha256(tmp_path)
    write(tmp_path, "sub/__pycache__/b.pyc", "compiled")
    assert source_sha256(tmp_path) == digest
    write(tmp_path, "sub/b.py", "y = 3\n")
    edited = source_sha256(tmp_path)
    (tmp_path / "a.py").rename(tmp_path / "c.py")
    renamed = source_sha256(tmp_path)
    write(tmp_path, "c.py", "")
    assert len({digest, edited, renamed, source_sha256(tmp_path)}) == 4


def test_a_child_runs_this_code_wherever_it_works(foreign_code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["recipe", "show", "demo", "-s", "name=a'b", "--json"]
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])  # "" is the folder in which tests work
    for command, code in ((child_command(words[:3]), 0), (child_command(words), 2)):
        done = subprocess.run(command, cwd=foreign_code, capture_output=True, text=True, timeout=PATIENCE)
        here = pkmlm(*command[3:], code=code)
        assert (done.returncode, done.stdout, done.stderr) == (code, here.stdout, here.stderr)


def test_a_child_refuses_to_be_of_other_code() -> None:
    command = child_command(["recipe", "keys"], source="0" * 64)
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: the code of pkmlm in ")
    assert done.stderr.count("\n") == 2


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_memory_that_a_step_frees_is_not_asked_for_again() -> None:
    code = """
import resource, numpy
from pkmlm.environment import keep_freed_memory
keep_freed_memory()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
numpy.ones(4_000_000, numpy.float32)  # 16 MB
before = faults()
numpy.ones(4_000_000, numpy.float32)
print(faults() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert int(done.stdout) < 100  # 3,907 pages
