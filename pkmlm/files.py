"""The one place where pkmlm changes files: what it writes is whole or absent, and survives a power cut.

A file is written under a temporary name in its own folder, synced, and renamed; so is a folder. Readers therefore see
the old content or the new, never a part. Temporary names begin with `.tmp-`; a killed process may leave one behind.
Only logs grow in place, a line at a time. A manifest says what a folder's files hold, and a lock keeps a second
process out.
"""

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from pkmlm.console import warn
from pkmlm.errors import UserError, read_errors

MANIFEST = "manifest.json"
MAKE_AGAIN = "it is damaged: make it again"  # hints
IN_USE = "wait for it, stop it, or choose another -o"
TEMPORARY = ".tmp-"  # what the names of unfinished files and folders begin with
LOCK_PATIENCE = 0.2  # seconds; `abandoned` holds a lock for less


class Damaged(UserError):
    """A file is missing, or is not what was written."""


# Writing.


@contextmanager
def writing(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for writing bytes; it appears under `path` only when the block ends without an error.

    Raises:
        UserError: (exit code 1) the system refused a write: disk full, no permission, file too large.
    """
    temporary = temporary_name(path)
    with write_errors(path):
        try:
            with open(temporary, "xb") as file:
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
    """Yield a temporary folder that is renamed to `path` when the block ends without an error.

    The temporary folder is locked, so that a second process is refused; what a killed process left in it is deleted.
    Where `path` is a link, the folder that it points to is written. Writers must sync the files in the folder, as
    `writing` does.

    Args:
        replace: whether to replace a folder at `path`, once the new one is complete.

    Raises:
        UserError: there is a folder that may not be replaced; (exit code 1) another process is writing it, or the
            system refused a write.
    """
    path = Path(os.path.realpath(path)) if path.is_symlink() else path
    new, old = (path.with_name(f"{TEMPORARY}{mark}-{path.name}") for mark in ("new", "old"))

    def restore_old() -> None:
        if old.is_dir() and not path.exists():  # an error or a kill came between the two renames below
            os.rename(old, path)
        shutil.rmtree(old, ignore_errors=True)

    with write_errors(path):
        make_folder(path.parent)
        new.mkdir(exist_ok=True)
        with locked_folder(new, path):
            try:
                restore_old()
                for leftover in new.iterdir():
                    shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
                yield new
                sync_folder(new)
                if replace and path.is_dir():
                    os.rename(path, old)
                try:
                    os.rename(new, path)
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        raise
                    hint = "it did not when this began: choose another -o, or replace it with --force"
                    raise UserError(f"{path} already exists", hint) from None
                sync_folder(path.parent)
            except BaseException:
                restore_old()
                shutil.rmtree(new, ignore_errors=True)
                raise
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def locked_folder(new: Path, path: Path) -> Iterator[None]:
    """Lock the folder that becomes `path`, if its file system has locks.

    Raises:
        UserError: (exit code 1) another process has locked it.
    """
    descriptor = os.open(new, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process is writing {path}", IN_USE, exit_code=1) from None
        except OSError:
            pass
        if not os.path.samestat(os.fstat(descriptor), new.stat()):  # it was renamed to `path` meanwhile
            raise UserError(f"another process has written {path}", exit_code=1)
        yield
    finally:
        os.close(descriptor)


def temporary_name(path: Path) -> Path:
    """A new temporary name beside `path`."""
    return path.with_name(f"{TEMPORARY}{secrets.token_hex(4)}-{path.name}")


def remove_leftovers(folder: Path) -> None:
    """Delete what killed processes left half-written in a folder; the caller holds a lock that keeps others out."""
    for place in folder.glob(f"{TEMPORARY}*"):
        with suppress(OSError):
            shutil.rmtree(place) if place.is_dir() else place.unlink()


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents, and sync them; a folder that exists is left as it is."""
    with write_errors(path):
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for folder in reversed(missing):
            sync_folder(folder.parent)


def rename(path: Path, new: Path) -> None:
    """Rename a file or a folder within its folder, replacing what has the new name."""
    if new.is_dir():
        remove_folder(new)
    with write_errors(new):
        os.replace(path, new)
        sync_folder(new.parent)


def remove_folder(path: Path) -> None:
    """Delete a folder so that a kill leaves either all of it or nothing under its name. What cannot be deleted (say, a
    file that another process has open on a cluster's file system) is left under a temporary name.
    """
    with write_errors(path):
        gone = temporary_name(path)
        os.rename(path, gone)
        shutil.rmtree(gone, ignore_errors=True)


def remove_file(path: Path) -> None:
    with write_errors(path):
        path.unlink(missing_ok=True)


def open_log(path: Path) -> IO[str]:
    """Open a log, to which lines are appended in place: each is passed to the system when it is written."""
    with write_errors(path):
        return open(path, "a", encoding="utf-8", newline="\n", buffering=1)


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn the system's refusals to write (OSError) into one line that names the file."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        raise UserError(f"cannot write {where}: {error.strerror or error}", exit_code=1) from error


def sync_folder(path: Path) -> None:
    """Make renames in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    with writing(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON; NaN and infinity, which JSON does not have, are refused."""
    write_text(path, json_text(value))


def json_text(value: Any) -> str:
    """What `write_json` writes."""
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


# Reading.


def size_of(path: Path) -> int | None:
    """The size of a file in bytes; None where there is none. If it cannot be examined, OSError is raised."""
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return None


def open_file(path: str | Path, mode: str = "rb", **options: Any) -> IO[Any]:
    """Open a regular file for reading, as `open` does; all of pkmlm reads files through this. Anything else (a folder,
    a pipe, a device) raises OSError: reading it might wait for a writer or never end.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return open(path, mode, **options)


def read_bytes(path: str | Path) -> bytes:
    """The bytes of a regular file; raises OSError if it cannot be read or is something else."""
    with open_file(path) as file:
        data: bytes = file.read()
    return data


def read_json(path: Path, what: str, hint: str = MAKE_AGAIN, exit_code: int = 2, *, schema: Any = None) -> Any:
    """Read a JSON file.

    Args:
        what: what errors call it (say, "the token index").
        exit_code: of errors.
        schema: the type that its content must have; see `check_json`.

    Raises:
        Damaged: it is missing, not JSON, or of another type.
        UserError: it cannot be read.
    """
    with read_errors(f"{what} {path}", exit_code):
        try:
            text = read_bytes(path)
        except (FileNotFoundError, NotADirectoryError):
            raise Damaged(f"{what} is missing: {path}", hint, exit_code) from None
    try:
        value = json.loads(text)
        return value if schema is None else check_json(value, schema)
    except TypeError as error:
        raise Damaged(f"{what} {path} is not as it was written: {error}", hint, exit_code) from None
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{what} {path} is not valid JSON: {error}", hint, exit_code) from None


def check_json(value: Any, schema: Any) -> Any:
    """Return a JSON value if it has the type `schema`, or the dataclass that it makes if `schema` is one. An object may
    have other keys than its TypedDict or dataclass. Nothing is converted, except that an int passes for a float.

    Raises:
        TypeError: it does not; the message says where, and what was found there.
    """
    adapter = _adapter(schema)
    try:
        if is_dataclass(schema):
            return adapter.validate_json(json.dumps(value), strict=True)
        adapter.validate_python(value, strict=True)
    except ValidationError as problem:
        error = problem.errors(include_url=False)[0]
        place, found = list(error["loc"]), f"is {str(error['input'])[:40]!r}"
        if error["type"] == "missing":
            found = f"has no {place.pop()}"
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part:.40}" for part in place)
        raise TypeError(f"{where.removeprefix('.') or 'it'} {found}") from None
    return value


@cache
def _adapter(schema: Any) -> TypeAdapter[Any]:
    return TypeAdapter(schema)  # building one takes long


def sha256_of(path: Path) -> str:
    """The sha256 of a file's bytes, in hexadecimal.

    Raises:
        UserError: (exit code 1) the file cannot be read.
    """
    digest = hashlib.sha256()
    with read_errors(path, exit_code=1), open_file(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


# Manifests.


class ManifestEntry(TypedDict):
    """What a manifest says of a file."""

    bytes: int
    sha256: str


class Manifest(TypedDict):
    """What manifests hold."""

    version: int
    files: dict[str, ManifestEntry]


def entry_of(path: Path) -> ManifestEntry:
    """What the manifest says of a file."""
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def read_manifest(folder: Path, what: str, version: int, hint: str, schema: Any = Manifest) -> Any:
    """The manifest of a folder.

    Args:
        what: what errors call the folder (say, "checkpoint").
        version: the version that this build reads.
        schema: the type of the manifest.

    Raises:
        Damaged: (exit code 1) it is missing, or not what was written.
        UserError: it is of another version; (1) it cannot be read.
    """
    found = read_json(folder / MANIFEST, f"the {what}'s manifest", hint, exit_code=1, schema=schema)
    if found["version"] != version:
        raise UserError(f"{folder / MANIFEST}: {what} version {found['version']} (this build reads {version})")
    return found


def check_files(folder: Path, files: dict[str, ManifestEntry], names: Iterable[str], hint: str) -> None:
    """Compare files with what the manifest says of them.

    Raises:
        Damaged: (exit code 1) one is missing, or has another size or other bytes.
        UserError: (exit code 1) one cannot be read, which proves nothing.
    """
    for name in names:
        file, expected = folder / name, files[name]
        with read_errors(file, exit_code=1):
            size = size_of(file)
        if size is None:
            raise Damaged(f"{file} is missing", hint, exit_code=1)
        if size != expected["bytes"]:
            raise Damaged(f"{file}: {size} bytes (expected {expected['bytes']})", hint, exit_code=1)
        found, wanted = sha256_of(file), expected["sha256"]
        if found != wanted:
            raise Damaged(f"{file}: sha256 {found[:16]}... (expected {wanted[:16]}...)", hint, exit_code=1)


# Locks.
#
# Not the package `filelock`: where a file system has no locks, it refuses or leaves a file that outlives a kill; and it
# cannot look at a lock without taking it.


@contextmanager
def locked(path: Path, what: str) -> Iterator[Callable[[], bool]]:
    """Hold a lock file for this process; the kernel releases it however the process ends.

    Yields:
        a function that tells whether the lock still keeps others out; it does not once the file has been deleted.

    Raises:
        UserError: (exit code 1) another process holds it; `what` names what is locked.
    """
    with write_errors(path):
        file = open(path, "a+b", buffering=0)  # noqa: SIM115 (closing releases the lock)
    with file:
        for last in (False, True):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if last:
                    file.seek(0)
                    holder = file.read(100).decode(errors="replace").strip() or "another process"
                    raise UserError(f"{what} is in use by {holder}", IN_USE, exit_code=1) from None
                time.sleep(LOCK_PATIENCE)
            except OSError:  # often on a cluster's file system
                warn(f"{path.parent}: this file system has no locks, so nothing keeps a second process out of {what}")
                break
        with write_errors(path):
            file.truncate(0)
            file.write(f"process {os.getpid()}{here()}".encode())

        def keeps() -> bool:
            with suppress(OSError):
                return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
            return False

        yield keeps


def abandoned(path: Path) -> bool:
    """Whether a process of this machine held the file last, and nobody holds it now. (On a cluster's file system, the
    locks of another machine's processes may not be seen.)
    """
    try:
        with open_file(path) as file:
            if not file.read(100).decode(errors="replace").endswith(here()):
                return False
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # held, or no locks, or no such file
        return False
    return True


def here() -> str:
    """This machine, as a lock file names it."""
    return f" on {socket.gethostname()}"
