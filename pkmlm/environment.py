"""What this process finds around it: a launcher's processes, usable cores, the commit of its code; free of torch."""

import ctypes
import os
import re
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from pkmlm.errors import UserError

SIZE = "WORLD_SIZE"  # a launcher such as torchrun sets it, for each process that it starts
TIMEOUT = "PKMLM_TIMEOUT"  # seconds that a rank waits for another; the environment may set it
PATIENCE = 1800.0


def launched_processes() -> int:
    """How many processes a launcher has started, this one among them; 1 without a launcher.

    Raises:
        UserError: the environment's is no such number.
    """
    text = os.environ.get(SIZE, "1")
    if not re.fullmatch("[1-9][0-9]{0,8}", text):
        raise UserError(
            f"{SIZE}: found {text[:40]!r} (expected how many processes a launcher has started)", f"unset {SIZE}"
        )
    return int(text)


def collective_timeout() -> float:
    """Seconds that a rank waits for the others.

    Raises:
        UserError: the environment's is no such number.
    """
    text = os.environ.get(TIMEOUT, str(PATIENCE))
    try:
        seconds = float(text)
        timedelta(seconds=seconds)
    except (ValueError, OverflowError):
        seconds = 0.0
    if not seconds > 0:
        raise UserError(f"{TIMEOUT}: found {text[:40]!r} (expected seconds, more than 0)")
    return seconds


def usable_cores() -> int:
    """The cores that this process may use: those of the machine, or fewer where it is held to some of them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def source_commit(git: Path | None = None) -> str | None:
    """The commit that a .git folder is at, by default that of this package's checkout; None where there is none."""
    git = git or Path(__file__).resolve().parents[1] / ".git"
    try:
        head = os.fsdecode((git / "HEAD").read_bytes()).strip()  # a branch's name is bytes, as that of a file is
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        if (git / name).exists():
            return (git / name).read_text().strip()
        packed = os.fsdecode((git / "packed-refs").read_bytes()).splitlines()
        return next((line.split()[0] for line in packed if line.endswith(f" {name}")), None)
    except OSError:
        return None


def keep_freed_memory() -> None:
    """Let glibc keep what a step frees for the next one, up to 2 GiB, instead of giving it back to the system.

    Each training step allocates and frees the same tensors, and memory that the system hands out anew is cleared page
    by page first: a tenth of a small model's step. The most that a run takes at a time stays the same. Other C
    libraries are left as they are.
    """
    with suppress(AttributeError, OSError, TypeError):  # not glibc
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version()
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD in malloc.h
        libc.mallopt(-3, 1 << 30) or libc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD; before glibc 2.35 at most 32 MiB
