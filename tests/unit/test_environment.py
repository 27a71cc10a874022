"""The commit that results name, and memory that is kept."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from pkmlm.environment import child_command, source_commit, source_sha256
from tests import PATIENCE
from tests.conftest import pkmlm

COMMIT = "9eb039a7d1a1f9b2a7c3b1c6f0d5e4a3b2c1d0e9"


def write(git: Path, name: str, text: str) -> None:
    (git / name).parent.mkdir(parents=True, exist_ok=True)
    (git / name).write_text(text)


def test_a_commit_is_found_wherever_git_keeps_it(tmp_path: Path) -> None:
    (tmp_path / ".git").write_text("gitdir: elsewhere\n")  # a worktree's
    assert source_commit(tmp_path / ".git") is None
    write(tmp_path, "HEAD", f"{COMMIT}\n")  # detached
    assert source_commit(tmp_path) == COMMIT
    write(tmp_path, "HEAD", "ref: refs/heads/main\n")
    assert source_commit(tmp_path) is None  # no commit so far
    other = f"# pack-refs with: peeled\n{'0' * 40} refs/heads/x/refs/heads/main2\n"
    write(tmp_path, "packed-refs", f"{other}{COMMIT} refs/heads/main\n")
    assert source_commit(tmp_path) == COMMIT
    write(tmp_path, "refs/heads/main", f"{COMMIT[::-1]}\n")  # newer than what was packed
    assert source_commit(tmp_path) == COMMIT[::-1]


def test_a_branch_may_have_a_name_of_any_bytes(tmp_path: Path) -> None:
    branch = b"refs/heads/gr\xf6\xdfe"  # as another locale writes it
    (tmp_path / "HEAD").write_bytes(b"ref: " + branch + b"\n")
    assert source_commit(tmp_path) is None
    (tmp_path / "packed-refs").write_bytes(COMMIT.encode() + b" " + branch + b"\n")
    assert source_commit(tmp_path) == COMMIT


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
