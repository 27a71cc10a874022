"""The commit that this package runs from."""

import os
from pathlib import Path


def source_commit() -> str | None:
    """The commit of this package's checkout; None where it is installed or has no history."""
    return commit_of(Path(__file__).resolve().parents[2] / ".git")


def commit_of(git: Path) -> str | None:
    """The commit that a .git folder is at."""
    try:
        head = text_of(git / "HEAD").strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        if (git / name).exists():
            return text_of(git / name).strip()
        packed = text_of(git / "packed-refs").splitlines()
        return next((line.split()[0] for line in packed if line.endswith(f" {name}")), None)
    except OSError:
        return None


def text_of(path: Path) -> str:
    """The text of a file of git's; names of branches in it are bytes, as those of files are."""
    return os.fsdecode(path.read_bytes())
