"""Where a command may write: nothing is overwritten unless `--force` says so."""

import os
from pathlib import Path

from pkmlm.errors import UserError


def free_file(option: str, path: str | None, force: bool) -> Path | None:
    """The file that an option names.

    Raises:
        UserError: it exists and `force` was not given, or no file can be there; (exit code 1) its folder is read-only.
    """
    if path is None:
        return None
    file = Path(path)
    if (file.exists() and not file.is_file()) or not file.parent.is_dir():
        raise UserError(f"{option} {path}: no file can be written there (expected a name in an existing folder)")
    refuse_read_only(f"{option} {path}", file.parent)
    if file.exists() and not force:
        raise UserError(f"{option} {path} already exists", "choose another name, or add --force to overwrite")
    return file


def refuse_read_only(what: str, folder: Path) -> None:
    """Refuse a folder that this user cannot write, before any work."""
    if not os.access(folder, os.W_OK):
        raise UserError(f"{what}: the folder {folder} is not writable", exit_code=1)


def refuse_fixed(shown: str, folder: Path) -> None:
    """Refuse, before any work, a folder that cannot be replaced by another of the same name.

    Args:
        shown: its name as the user gave it.
        folder: its real path, which need not exist.

    Raises:
        UserError: it is the working directory, a mount point or below a file; (exit code 1) its parent is read-only.
    """
    what = "the working directory" if folder == Path.cwd() else "a mount point" if folder.is_mount() else ""
    if what:
        raise UserError(f"-o {shown} is {what} (expected a folder that can be replaced)", "name a folder in it")
    above = next(each for each in folder.parents if each.exists())
    if not above.is_dir():
        raise UserError(f"-o {shown}: {above} is not a folder")
    refuse_read_only(f"-o {shown}", above)


def free_tokens(shown: str, force: bool) -> Path:
    """The folder to write. Refuses one that is not empty, before any work; with --force, one that holds anything but
    tokens.
    """
    from pkmlm.data.corpus import OWN_FILES

    folder = Path(os.path.realpath(shown))
    refuse_fixed(shown, folder)
    if not folder.exists():
        return folder
    if not folder.is_dir():
        raise UserError(f"-o {shown} is a file (expected a folder, or nothing)")
    names = sorted(entry.name for entry in folder.iterdir())
    if names and not force:
        raise UserError(f"-o {shown} already exists", "choose another folder, or replace it with --force")
    if strange := [name for name in names if not OWN_FILES.fullmatch(name)]:
        raise UserError(
            f"-o {shown} holds {strange[0]!r}, which tokenize did not write: it is not replaced",
            "move it away, or choose another folder",
        )
    return folder
