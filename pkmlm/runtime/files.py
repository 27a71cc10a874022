"""The one place where pkmlm writes files: every write is whole or absent, and survives a power cut.

A file is written under a temporary name in its own folder, synced, and renamed; a folder likewise. Readers therefore
see the old content or the new, never a part. Leftovers of a killed process have names that begin with `.tmp-`. Only
logs grow in place, a line at a time.
"""

import ctypes
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from pkmlm.errors import UserError

TEMPORARY = ".tmp-"


@contextmanager
def writing(path: Path, mode: str = "wb") -> Iterator[IO[Any]]:
    """Open a file that appears under `path` only when the block ends well.

    Raises:
        UserError: (exit code 1) the system refused a write: disk full, no permission, file too large.
    """
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    with disk_errors(path):
        try:
            text = {} if "b" in mode else {"encoding": "utf-8", "newline": "\n"}
            with open(temporary, mode, **text) as file:  # type: ignore[call-overload]
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            sync_folder(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextmanager
def writing_folder(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `path` when the block ends well.

    The files in it must have been synced by their writers (`writing` does). An existing folder at `path` is an
    error, unless it is empty, or `replace` says that it goes once the new one is whole.
    """
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    old = path.with_name(f"{TEMPORARY}old-{path.name}")
    with disk_errors(path):
        if old.is_dir() and not path.exists():  # a kill came between the two renames of `exchange`
            os.rename(old, path)
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            make_folder(temporary)
            yield temporary
            sync_folder(temporary)
            if replace and path.exists():
                exchange(temporary, path, old)
            else:
                os.rename(temporary, path)
            sync_folder(path.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        shutil.rmtree(temporary, ignore_errors=True)  # what was at `path`
        shutil.rmtree(old, ignore_errors=True)


def exchange(new: Path, path: Path, aside: Path) -> None:
    """Let two folders change places: at once where the system can, else by way of a third name."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        here, both_stay = -100, 2  # AT_FDCWD, RENAME_EXCHANGE of linux/fs.h
        if libc.renameat2(here, os.fsencode(new), here, os.fsencode(path), both_stay) == 0:
            return
        if (number := ctypes.get_errno()) not in (errno.EINVAL, errno.ENOSYS):  # this file system cannot
            raise OSError(number, os.strerror(number), str(path))
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(path, aside)
    os.rename(new, path)


def make_folder(path: Path) -> None:
    """Make a folder, and those above it that are missing, to stay; a folder that is there is left as it is."""
    with disk_errors(path):
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for folder in reversed(missing):
            sync_folder(folder.parent)


def rename_folder(path: Path, new: Path) -> None:
    """Give a folder another name beside its own."""
    with disk_errors(new):
        os.rename(path, new)
        sync_folder(new.parent)


def remove_folder(path: Path) -> None:
    """Delete a folder so that a kill leaves it whole, or nothing under its name."""
    with disk_errors(path):
        gone = path.with_name(f"{TEMPORARY}gone-{path.name}")
        shutil.rmtree(gone, ignore_errors=True)
        os.rename(path, gone)
        shutil.rmtree(gone)


def remove_file(path: Path) -> None:
    """Delete a file, if it is there."""
    with disk_errors(path):
        path.unlink(missing_ok=True)


def appending(path: Path) -> IO[str]:
    """Open a log, to which lines are added in place: each goes to the system when it is written."""
    with disk_errors(path):
        return open(path, "a", encoding="utf-8", newline="\n", buffering=1)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn the system's refusals (OSError) into one line that names the file."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        raise UserError(f"cannot write {where}: {error.strerror or error}", exit_code=1) from error


def write_text(path: Path, text: str) -> None:
    with writing(path, "w") as file:
        file.write(text)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON; NaN and infinity are refused, as JSON has none."""
    write_text(path, json_text(value))


def json_text(value: Any) -> str:
    """What `write_json` writes."""
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def read_json(path: Path, what: str, hint: str = "it is damaged: make it again", exit_code: int = 2) -> Any:
    """Read a JSON file; `what` names it in errors ("the token index", say).

    Raises:
        UserError: (with `exit_code`) the file is missing, unreadable, or not JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{what} is missing: {path}", hint, exit_code) from None
    except OSError as error:
        raise UserError(f"cannot read {what} {path}: {error.strerror}", exit_code=exit_code) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{what} {path} is not valid JSON: {error}", hint, exit_code) from None


def sync_file(path: Path) -> None:
    """Make what another writer has put into a file durable, and give it the permissions of a new file."""
    with disk_errors(path):
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(path, 0o666 & ~mask)
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make renames in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """The sha256 of a file's bytes, in hexadecimal.

    Raises:
        UserError: (exit code 1) the file cannot be read.
    """
    try:
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        return digest.hexdigest()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", exit_code=1) from None


def remove_leftovers(folder: Path) -> None:
    """Delete what an earlier, killed process left half-written in a folder."""
    for path in folder.glob(f"{TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
