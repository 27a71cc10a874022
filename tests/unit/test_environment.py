"""The commit that results name, and memory that is kept."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from pkmlm.environment import source_commit


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


def test_a_commit_is_that_of_the_checkout_and_says_whether_files_were_edited(tmp_path: Path) -> None:
    assert source_commit(tmp_path) is None  # no checkout
    git(tmp_path, "init", "-q")
    assert source_commit(tmp_path) is None  # no commit so far
    (tmp_path / "code.py").write_text("1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    git(tmp_path, "tag", "-a", "-m", "a tag", "v1")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert source_commit(tmp_path) == commit
    (tmp_path / "code.py").write_text("2\n")
    assert source_commit(tmp_path) == f"{commit}-dirty"


def test_a_worktree_has_its_own_commit_and_a_folder_within_a_checkout_has_none(tmp_path: Path) -> None:
    (checkout := tmp_path / "checkout").mkdir()
    git(checkout, "init", "-q")
    git(checkout, "commit", "-q", "--allow-empty", "-m", "first")
    git(checkout, "worktree", "add", "-q", "--detach", str(tmp_path / "tree"))
    git(tmp_path / "tree", "commit", "-q", "--allow-empty", "-m", "second")
    assert source_commit(tmp_path / "tree") == git(tmp_path / "tree", "rev-parse", "HEAD") != source_commit(checkout)
    (within := checkout / "site-packages").mkdir()
    assert source_commit(within) is None


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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert int(done.stdout) < 100  # 3,907 pages
