"""A file that one process at a time holds.

Not the package `filelock`: its older versions empty the file that says who holds the lock, where a file system has no
locks it refuses or leaves a file that outlives a kill, and it cannot look at a lock without taking it.
"""

import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from pkmlm.errors import UserError
from pkmlm.runs.files import no_link, write_errors

PATIENCE = 0.2  # seconds; `abandoned` holds a lock for less


@contextmanager
def locked(path: Path, what: str) -> Iterator[Callable[[], bool]]:
    """Hold a lock file for this process; the kernel releases it however the process ends.

    Yields:
        whether it still keeps others out: no longer once somebody has deleted the file.

    Raises:
        UserError: (exit code 1) another process holds it; `what` names what is locked.
    """
    with write_errors(path):
        file = open(path, "a+b", buffering=0, opener=no_link)  # noqa: SIM115 (closing releases the lock)
    with file:
        if not acquire(file):
            file.seek(0)
            holder = file.read(100).decode(errors="replace").strip() or "another process"
            raise UserError(f"{what} is in use by {holder}", "wait for it, stop it, or choose another -o", exit_code=1)
        with write_errors(path):
            file.truncate(0)
            file.write(f"process {os.getpid()}{here()}".encode())

        def keeps() -> bool:
            with suppress(OSError):
                return os.path.samestat(os.fstat(file.fileno()), os.lstat(path))
            return False

        yield keeps


def acquire(file: IO[bytes]) -> bool:
    """Take the lock, unless another process keeps it for longer than `PATIENCE`."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            time.sleep(PATIENCE / 20)
        except OSError:
            return True  # a file system without locks (a cluster's, often): nobody can be kept out
        else:
            return True


def abandoned(path: Path) -> bool:
    """Whether a process of this machine held the file last, and nobody holds it now. (On a cluster's file system, the
    locks of another machine's processes may not be seen.)
    """
    try:
        with open(path, "rb") as file:
            if not file.read(100).decode(errors="replace").endswith(here()):
                return False
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # held, or no locks, or no such file
        return False
    return True


def here() -> str:
    return f" on {socket.gethostname()}"
