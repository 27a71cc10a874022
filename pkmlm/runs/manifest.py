"""What a folder's manifest.json says of its files: size and sha256 of each."""

from pathlib import Path
from typing import Any

from pkmlm.errors import read_errors
from pkmlm.runs.files import sha256_of, size_of
from pkmlm.runs.shapes import Shape

MANIFEST = "manifest.json"
ENTRIES: Shape = {str: {"bytes": (int,), "sha256": (str,)}}


def entry_of(path: Path) -> dict[str, Any]:
    """What the manifest says of a file."""
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def damage(folder: Path, files: dict[str, dict[str, Any]]) -> str:
    """Which file of a folder is missing, or has another size or other bytes than `files` says; or nothing.

    Raises:
        UserError: (exit code 1) a file cannot be read, which proves nothing.
    """
    for name, expected in files.items():
        file = folder / name
        with read_errors(file, exit_code=1):
            size = size_of(file)
        if size is None:
            return f"{file} is missing"
        if size != expected["bytes"]:
            return f"{file}: {size} bytes (expected {expected['bytes']})"
        found = sha256_of(file)
        if found != expected["sha256"]:
            wanted = expected["sha256"]
            digits = next(n for n in range(12, 66) if found[:n] != wanted[:n])
            return f"{file}: sha256 {found[:digits]} (expected {wanted[:digits]})"
    return ""
