"""Whether a checkpoint's folder is whole: its files, and what its manifest.json says of them."""

import json
from pathlib import Path
from typing import Any

from pkmlm.errors import UserError
from pkmlm.runs.directory import RunDirectory
from pkmlm.runs.files import json_text, read_bytes
from pkmlm.runs.manifest import ENTRIES, MANIFEST, damage
from pkmlm.runs.shapes import Shape, misfit
from pkmlm.train.tensor_files import part_name

VERSION = 1
FILES = ("weights.safetensors", "optimizer.safetensors", "state.json")
WHOLE: Shape = {"version": (int,), "step": (int,), "files": ENTRIES}


def file_names(parts: int) -> tuple[str, ...]:
    """The files of a checkpoint whose tables are in so many parts, but for its manifest."""
    divided = [part_name(name, part, parts) for part in range(parts) for name in FILES[:2]]
    return (*FILES, *(divided if parts > 1 else []))


def verify(path: Path, moments: bool = True) -> None:
    """Check a checkpoint against its manifest, and its manifest against its name.

    Args:
        moments: also the optimizer's files, two thirds of the bytes; who does not read them needs no check of them.

    Raises:
        UserError: (exit code 1) it is damaged or cannot be read; (2) it is of another version, or holds a strange file.
    """
    if problem := damage_of(path, moments):
        hint = "the checkpoint is damaged: `pkmlm train` goes on from the one before it"
        raise UserError(problem, hint, exit_code=1)


def damage_of(path: Path, moments: bool = True) -> str:
    """What is damaged of a checkpoint: a file that is missing, or has another size or other bytes; or nothing. See
    `verify` for `moments`.

    Raises:
        UserError: (exit code 1) it cannot be read, which proves nothing; (2) see `verify`.
    """
    try:
        stored = read_bytes(path / MANIFEST)
        manifest = json.loads(stored)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return f"the checkpoint's manifest is missing: {path / MANIFEST}"
    except OSError as error:
        raise UserError(f"cannot read {path / MANIFEST}: {error.strerror}", exit_code=1) from None
    except (ValueError, RecursionError) as error:
        return f"the checkpoint's manifest {path / MANIFEST} is not valid JSON: {error}"
    if isinstance(manifest, dict) and type(manifest.get("version")) is int and manifest["version"] != VERSION:
        raise UserError(f"{path / MANIFEST}: checkpoint version {manifest['version']} (this build reads {VERSION})")
    problem = contradiction(manifest, path.name)
    if not problem and stored != json_text(manifest).encode():
        problem = "it is not as it was written"
    if problem:
        return f"{path / MANIFEST} is damaged: {problem}"
    for strange in sorted(set(path.glob("[!.]*")) - {path / name for name in (*manifest["files"], MANIFEST)}):
        raise UserError(f"{strange} is not a part of the checkpoint", "move it elsewhere")
    of_moments = Path(FILES[1]).stem
    return damage(
        path, {name: e for name, e in manifest["files"].items() if moments or not name.startswith(of_moments)}
    )


def contradiction(manifest: Any, name: str) -> str:
    """What cannot be true of the manifest in the folder `name`, or nothing."""
    if problem := misfit(manifest, WHOLE):
        return problem
    if name != f"step-{manifest['step']:08d}":
        return f"it is that of step {str(manifest['step'])[:20]}"
    files = manifest["files"]
    if files.keys() != set(file_names(max(1, (len(files) - len(FILES)) // 2))):
        return f"its files are {str(list(files))[:60]}"
    return ""


def fall_back(run: RunDirectory) -> list[str]:
    """Set the checkpoints aside that are damaged and newer than the newest whole one; return what to warn of.

    Raises:
        UserError: none is whole, or one cannot be read (exit code 1), or one is of another version or holds a strange
            file (2); nothing has been moved.
    """
    damage: dict[int, str] = {}
    for step in reversed(run.steps()):
        problem = damage_of(run.checkpoint(step))
        if not problem:
            return [f"{problem}; moved to {run.set_aside(bad)}" for bad, problem in damage.items()]
        damage[step] = problem
    if damage:
        first = next(iter(damage.values()))
        hint = "copy the run's folder again, or train it from the start under another -o"
        raise UserError(f"no checkpoint of run {run.path} is whole: {first}", hint, exit_code=1)
    return []
