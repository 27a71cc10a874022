"""manifest.json, which says of a folder's files how long they are and what their sha256 is."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from pkmlm.errors import UserError, read_errors
from pkmlm.runs.files import Damaged, check_json, read_json, sha256_of, size_of

MANIFEST = "manifest.json"


class Entry(TypedDict):
    """What a manifest says of a file."""

    bytes: int
    sha256: str


class Version(TypedDict):
    """What the manifests of all versions hold."""

    version: int


class Manifest(Version):
    """What the manifests of this version hold."""

    files: dict[str, Entry]


def entry_of(path: Path) -> Entry:
    """What the manifest says of a file."""
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def read_manifest(
    folder: Path, what: str, version: int, hint: str, *, schema: Any = Manifest, version_exit_code: int = 2
) -> Any:
    """The manifest of a folder.

    Args:
        what: what errors call the folder ("checkpoint", say).
        version: the version that this build reads; another is a UserError with `version_exit_code`.
        schema: of the manifest.

    Raises:
        Damaged: (exit code 1) it is missing, or not what was written.
        UserError: it is of another version; (1) it cannot be read.
    """
    path = folder / MANIFEST
    manifest = read_json(path, f"the {what}'s manifest", hint, exit_code=1, schema=Version)
    if manifest["version"] != version:
        message = f"{path}: {what} version {manifest['version']} (this build reads {version})"
        raise UserError(message, exit_code=version_exit_code)
    try:
        return check_json(manifest, schema)
    except TypeError as error:
        raise Damaged(f"the {what}'s manifest {path} is not as it was written: {error}", hint, exit_code=1) from None


def check_files(folder: Path, files: dict[str, Entry], names: Iterable[str], hint: str) -> None:
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
