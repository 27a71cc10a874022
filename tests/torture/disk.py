"""A disk that crashes or fails before the n-th operation, and one that remembers their order.

Operations are what the project does to files through Python: open for writing, write, fsync, rename, mkdir,
unlink and rmdir. To be used in a process of its own: nothing is put back.
"""

import builtins
import errno
import os
import pathlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

CRASH = 137


class Disk:
    """Counts operations.

    Args:
        trace: the file that gets a line for each operation, as it is about to happen.
        at: the operation (from 1) before which something happens; 0: never.
        how: "crash" (the process is gone; of a write, half has happened), "EIO" (this operation fails), "ENOSPC" (this
            and every later one that needs room fails).
    """

    def __init__(self, trace: Path | None = None, at: int = 0, how: str = "crash"):
        self.at, self.how, self.count = at, how, 0
        self.trace = os.open(trace, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if trace else None

    def install(self) -> None:
        """Put every operation of this process under watch."""
        paths = getattr(pathlib, "_normal_accessor", None)  # Python 3.10's Path has references of its own
        for name in ("replace", "rename", "mkdir", "unlink", "rmdir", "fsync"):
            setattr(os, name, self._watched(name, getattr(os, name)))
            if hasattr(paths, name):
                setattr(paths, name, getattr(os, name))
        real = builtins.open

        def watched_open(path: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
            if not set(mode) & set("wax+"):
                return real(path, mode, *rest, **named)
            self.step("open", path)
            return WatchedFile(self, path, real(path, mode, *rest, **named))

        builtins.open = watched_open  # type: ignore[assignment]

    def step(self, name: str, path: Any, half: Callable[[], None] = lambda: None, other: Any = "") -> None:
        """An operation is about to happen."""
        self.count += 1
        if self.trace is not None:
            os.write(self.trace, f"{self.count} {name} {path} {other}\n".encode())
        room = name in ("open", "write", "mkdir")
        if self.at and (self.count == self.at or (self.how == "ENOSPC" and room and self.count > self.at)):
            half()
            if self.how == "crash":
                os._exit(CRASH)
            number = getattr(errno, self.how)
            raise OSError(number, os.strerror(number), None if name == "write" else str(path))

    def _watched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def watched(path: Any, *rest: Any, **named: Any) -> Any:
            shown = os.readlink(f"/proc/self/fd/{path}") if name == "fsync" else path
            self.step(name, shown, other=rest[0] if rest and name in ("replace", "rename") else "")
            return real(path, *rest, **named)

        return watched


class WatchedFile:
    """A file whose writes are counted; of one that does not happen, half has."""

    def __init__(self, disk: Disk, path: Any, file: Any):
        self.disk, self.path, self.file = disk, path, file

    def write(self, data: Any) -> Any:
        def half() -> None:
            self.file.write(data[: len(data) // 2])
            self.file.flush()

        self.disk.step("write", self.path, half)
        return self.file.write(data)

    def __enter__(self) -> "WatchedFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)
