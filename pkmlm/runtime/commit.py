"""The commit that this package runs from."""

from pathlib import Path


def source_commit() -> str | None:
    """The commit of this package's checkout; None where it is installed or has no history."""
    return commit_of(Path(__file__).resolve().parents[2] / ".git")


def commit_of(git: Path) -> str | None:
    """The commit that a .git folder is at."""
    try:
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        if (git / name).exists():
            return (git / name).read_text().strip()
        packed = (git / "packed-refs").read_text().splitlines()
        return next((line.split()[0] for line in packed if line.endswith(f" {name}")), None)
    except OSError:
        return None
