"""The one place where pkmlm writes files: every write is whole or absent, and survives a power cut.

A file is written under a temporary name in its own folder, synced, and renamed; a folder likewise. Readers therefore
see the old content or the new, never a part; of two processes that write one name, the last one's is there, whole.
Temporary names begin with `.tmp-` and are no other process's; a lock tells those of the living from the leftovers of a
killed one, which the next write of the same name deletes. Only logs grow in place, a line at a time.
"""

import ctypes
import errno
import fcntl
import glob
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from pkmlm.errors import UserError, read_errors

TEMPORARY = ".tmp-"
OWN_NAME = re.compile(rf"{re.escape(TEMPORARY)}[0-9a-f]{{8}}-")


@contextmanager
def writing(path: Path, mode: str = "wb") -> Iterator[IO[Any]]:
    """Open a file that appears under `path` only when the block ends well.

    Raises:
        UserError: (exit code 1) the system refused a write: disk full, no permission, file too large; or there is
            something at `path` that is no file.
    """
    with disk_errors(path):
        refuse_special(path)
        remove_leftovers(path.parent, path.name)
        temporary, file = new_file(path, mode)
        try:
            with file:
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
    """Yield a temporary folder that is renamed to `path` when the block ends well; of a link, the folder it names.

    The files in it must have been synced by their writers (`writing` does). An existing folder at `path` goes once
    the new one is whole, if it is empty or `replace` says so.

    Raises:
        UserError: there is one that may not go; (exit code 1) the system refused a write.
    """
    with disk_errors(path):
        path = Path(os.path.realpath(path)) if path.is_symlink() else path
        old = path.with_name(f"{TEMPORARY}old-{short_name(path.name)}")
        if old.is_dir() and not path.exists():  # a kill came between the two renames of `exchange`
            os.rename(old, path)
        remove_leftovers(path.parent, path.name)
        temporary, descriptor = new_folder(path)
        try:
            yield temporary
            sync_folder(temporary)
            put_in_place(temporary, path, old if replace else None)
            sync_folder(path.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        finally:
            os.close(descriptor)
        shutil.rmtree(temporary, ignore_errors=True)  # what was at `path`
        shutil.rmtree(old, ignore_errors=True)


def own_name(path: Path) -> Path:
    """A temporary name beside `path` that no other process has."""
    return path.with_name(f"{TEMPORARY}{secrets.token_hex(4)}-{short_name(path.name)}")


def short_name(name: str) -> str:
    """What stands for a name in temporary names, which are 14 bytes longer: itself, or its hash if 255 are too few."""
    whole = os.fsencode(name)
    return name if len(whole) <= 241 else hashlib.sha256(whole).hexdigest()


def new_file(path: Path, mode: str) -> tuple[Path, IO[Any]]:
    """A new file under an `own_name`, held while it is open."""
    text = {} if "b" in mode else {"encoding": "utf-8", "newline": "\n"}
    while True:
        temporary = own_name(path)
        file = open(temporary, mode.replace("w", "x"), **text)  # type: ignore[call-overload]  # noqa: SIM115
        hold(file.fileno())
        if temporary.exists():  # else another process deleted it as a leftover before we locked it
            return temporary, file
        file.close()


def new_folder(path: Path) -> tuple[Path, int]:
    """A new folder under an `own_name`, held while the descriptor is open."""
    while True:
        temporary = own_name(path)
        try:
            make_folder(temporary)
            descriptor = os.open(temporary, os.O_RDONLY)
        except FileNotFoundError:  # another process has deleted it as a leftover before we could open it
            continue
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        hold(descriptor)
        if temporary.exists():
            return temporary, descriptor
        os.close(descriptor)


def hold(descriptor: int) -> None:
    """Tell other processes that this one uses a file or folder, until it closes it or ends."""
    with suppress(OSError):  # a file system without locks: nobody deletes what cannot be locked
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Delete what killed processes left half-written in a folder, of the file or folder `name` or of all."""
    name = name and short_name(name)
    for place in folder.glob(f"{TEMPORARY}*{glob.escape(name or '')}"):
        begins = OWN_NAME.match(place.name)
        if begins and name in (None, place.name[begins.end() :]):
            with suppress(OSError):  # a link, or one that cannot be deleted
                remove_abandoned(place)


def remove_abandoned(path: Path) -> None:
    """Delete a file or folder that no process holds; one that cannot be locked is taken for held."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    finally:
        os.close(descriptor)


def refuse_special(path: Path) -> None:
    """Refuse to write over a device, a pipe or a socket."""
    with suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode) or stat.S_ISDIR(mode)):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))


def put_in_place(new: Path, path: Path, aside: Path | None) -> None:
    """Give a new folder its name; one of that name that is not empty changes places with it if it may, by `aside`."""
    try:
        os.rename(new, path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if aside is None:
            hint = "it was not when this began: name another -o, or replace it with --force"
            raise UserError(f"{path} is there already", hint) from None
        exchange(new, path, aside)


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
        if link := next(filter(Path.is_symlink, missing), None):
            message = f"{link} is a link to {os.readlink(link)}, where nothing is"
            raise UserError(message, "make that folder, or name another")
        path.mkdir(parents=True, exist_ok=True)
        for folder in reversed(missing):
            sync_folder(folder.parent)


def refuse_link(path: Path) -> None:
    """Refuse a link where a run has a folder of its own: what is written there would go elsewhere.

    Raises:
        UserError: it is one.
    """
    if path.is_symlink():
        raise UserError(f"{path} is a link (expected a folder)", "put the whole run where there is room, by its -o")


def rename_folder(path: Path, new: Path) -> None:
    """Give a folder another name beside its own."""
    with disk_errors(new):
        os.rename(path, new)
        sync_folder(new.parent)


def remove_folder(path: Path) -> None:
    """Delete a folder so that a kill leaves it whole, or nothing under its name."""
    with disk_errors(path):
        gone = own_name(path)
        os.rename(path, gone)
        shutil.rmtree(gone)


def remove_file(path: Path) -> None:
    """Delete a file, if it is there."""
    with disk_errors(path):
        path.unlink(missing_ok=True)


def appending(path: Path) -> IO[str]:
    """Open a log, to which lines are added in place: each goes to the system when it is written."""
    with disk_errors(path):
        return open(path, "a", encoding="utf-8", newline="\n", buffering=1, opener=own_file)


def own_file(path: str, flags: int) -> int:
    """Open a file that changes in place (an `opener` of `open`), following no link to another's."""
    return regular(path, flags | os.O_NOFOLLOW)


def regular(path: str, flags: int) -> int:
    """Open a regular file (an `opener` of `open`); others are refused, and a pipe is not waited for."""
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", path)
    return descriptor


def read_bytes(path: Path) -> bytes:
    """The bytes of a regular file.

    Raises:
        OSError: it cannot be read, or it is none.
    """
    with open(path, "rb", opener=regular) as file:
        return file.read()


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
        return json.loads(read_bytes(path), parse_constant=no_number)
    except FileNotFoundError:
        raise UserError(f"{what} is missing: {path}", hint, exit_code) from None
    except OSError as error:
        raise UserError(f"cannot read {what} {path}: {error.strerror}", exit_code=exit_code) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{what} {path} is not valid JSON: {error}", hint, exit_code) from None


def no_number(name: str) -> None:
    """Refuse NaN and Infinity, which JSON has not (a `parse_constant` of `json.loads`)."""
    raise ValueError(f"it holds {name}")


def sync_file(path: Path) -> None:
    """Make what another writer has put into a file of a new folder durable, and give it the permissions of a new file,
    as the folder has them: the process's umask can be read only by changing it, also for other threads.
    """
    with disk_errors(path):
        os.chmod(path, path.parent.stat().st_mode & 0o666)
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
    digest = hashlib.sha256()
    with read_errors(path, exit_code=1), open(path, "rb", opener=regular) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
