"""The environment of this process: a launcher's processes, usable cores, the version of the code, and children that
run the same code. Needs no torch.
"""

import ctypes
import hashlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from pkmlm.errors import UserError

SIZE = "WORLD_SIZE"  # a launcher such as torchrun sets it for each process that it starts
TIMEOUT = "PKMLM_TIMEOUT"  # seconds that a rank waits for another; the environment may set it
PATIENCE = 1800.0


def launched_processes() -> int:
    """How many processes a launcher has started, including this one; 1 without a launcher.

    Raises:
        UserError: `WORLD_SIZE` is not such a number.
    """
    text = os.environ.get(SIZE, "1")
    if not re.fullmatch("[1-9][0-9]{0,8}", text):
        raise UserError(
            f"{SIZE}: found {text[:40]!r} (expected the number of processes that a launcher started)", f"unset {SIZE}"
        )
    return int(text)


def collective_timeout() -> float:
    """Seconds that a rank waits for the others.

    Raises:
        UserError: `PKMLM_TIMEOUT` is not such a number.
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


def work_offline_without_hub() -> None:
    """If the Hugging Face hub cannot be reached, tell its library (`HF_HUB_OFFLINE`), which would otherwise try for
    half a minute; before that is imported. What it has kept on this machine is used either way.
    """
    from urllib.parse import urlsplit
    from urllib.request import getproxies  # takes as long to import as the rest

    if "HF_HUB_OFFLINE" in os.environ or getproxies():
        return
    hub = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        socket.create_connection((hub.hostname or "", hub.port or (80 if hub.scheme == "http" else 443)), 5).close()
    except OSError:
        os.environ["HF_HUB_OFFLINE"] = "1"


def usable_cores() -> int:
    """How many cores this process may use: all of the machine's, or only those that its affinity allows."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def source_commit(folder: Path | None = None) -> str | None:
    """The commit that a folder of source has checked out, by default that of this package; None if it is not the top of
    a checkout, or without git.
    """
    git = (folder or Path(__file__).resolve().parents[1]) / ".git"  # asked by its name, git does not look further up
    command = ["git", f"--git-dir={git}", "rev-parse", "--verify", "--quiet", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def source_sha256(package: Path | None = None) -> str:
    """The sha256 of the paths and contents of a package's .py files, by default of this package's.

    It tells edited code apart that `source_commit` does not, and code that was installed without a .git folder.
    """
    package = package or Path(__file__).resolve().parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        for part in (os.fsencode(path.relative_to(package)), path.read_bytes()):
            digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def child_command(arguments: Sequence[str], source: str | None = None) -> list[str]:
    """The command line of a child of this process that runs a `pkmlm` command: with this process's interpreter, its
    path of imports and its code. (`python -m pkmlm` would import whatever lies in the working folder.) See
    `pkmlm.cli.launch`.

    Args:
        arguments: of the command, `["train", ...]` for example.
        source: the `source_sha256` of the code that the child must have; None: as the files are now.
    """
    begin = f"from pkmlm.cli.launch import main; main({os.getpid()}, {source or source_sha256()!r})"
    return [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!a}; {begin}", *arguments]


def keep_freed_memory() -> None:
    """Make glibc keep the memory that a training step frees for the next step, up to 2 GiB, instead of returning it.

    Each step allocates and frees the same tensors, and the system clears every page that it hands out, which takes a
    tenth of a small model's step. The peak of a run's memory stays the same. Other C libraries are not affected.
    """
    with suppress(AttributeError, OSError, TypeError):  # not glibc
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version()
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD in malloc.h
        libc.mallopt(-3, 1 << 30) or libc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD; before glibc 2.35 at most 32 MiB
