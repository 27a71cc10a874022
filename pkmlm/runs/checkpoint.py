"""Checkpoints: everything that a run needs to resume bit for bit, written completely or not at all.

A checkpoint is a folder: weights.safetensors (parameters and buffers by path), optimizer.safetensors (each parameter's
state as "path|key"), drift.safetensors (what recording drift needs, if the model has memories), recipe.yaml, state.json
(`Progress`), and manifest.json with the size and sha256 of each. Where P ranks divide the columns of a run's tables,
each writes its columns, and their moments, into files of its own (weights-1-of-P.safetensors ...), and rank 0 writes
the rest; any number of ranks can read what any other number wrote. There is no random state to save: a step's random
numbers follow from the seed, its number and the rank.

Models and optimizers are passed as dicts of tensors (`model.state_dict()`, `train.optim.optimizer_state`). `tables`
maps the names of those of a model's tensors that are tables to the ranks that divide their columns
(`memory.table.table_ranks`).

Not torch.distributed.checkpoint: its metadata is a pickle, its files have no digests, and a tensor in it belongs to a
mesh of ranks.
"""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from pkmlm.distributed import World
from pkmlm.errors import UserError, first_line
from pkmlm.files import (
    MANIFEST,
    Damaged,
    ManifestEntry,
    check_files,
    open_file,
    remove_folder,
    rename,
    writing,
)
from pkmlm.runs.directory import RunDirectory
from pkmlm.runs.record import Progress, damaged_hint, read_checkpoint_manifest, read_progress

WEIGHTS, OPTIMIZER, DRIFT = "weights.safetensors", "optimizer.safetensors", "drift.safetensors"
# The names in safetensors files of the dtypes that pkmlm writes.
DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
Tables = dict[str, World]


class Differences(NamedTuple):
    """The names of tensors that only the model has (`missing`), and that only the files have (`unexpected`)."""

    missing: set[str]
    unexpected: set[str]


# Writing.


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> ManifestEntry:
    """Write tensors as safetensors and sync the file; returns what a manifest says of it.

    With the library's `save_file`, the file would have to be read again for its digest: here a thread hashes each
    tensor while it is written.
    """
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so that each is aligned
    place = 0
    for name in names:
        tensor = tensors[name]
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [place, place + tensor.nbytes],
        }
        place += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    content = (memory_of(tensors[name]) for name in names)
    with writing(path) as file:
        for part in chain([len(text).to_bytes(8, "little") + text], content):
            hashing = threading.Thread(target=digest.update, args=(part,), daemon=True)
            hashing.start()
            file.write(part)
            hashing.join()
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def memory_of(tensor: Tensor) -> Any:
    """The bytes of a tensor; one on a GPU is copied to main memory."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def prune(run: RunDirectory, keep: int, best: int | None) -> None:
    """Delete all but the `keep` newest checkpoints and the best one."""
    for step in run.steps()[:-keep]:
        if step != best:
            remove_folder(run.checkpoint(step))


# Reading.


def load(path: Path, weights: dict[str, Tensor], optimizer: dict[str, Tensor], tables: Tables) -> Progress:
    """Copy a verified checkpoint folder into the tensors of a model and its optimizers.

    Raises:
        UserError: it is of another model or optimizer, or (exit code 1) a file cannot be read.
    """
    load_weights(path, weights, tables)
    load_tensors(path / OPTIMIZER, optimizer, moments_of(tables))
    return read_progress(path)


def load_drift(path: Path) -> dict[str, Tensor]:
    """What a verified checkpoint holds for `measure.drift`; empty where the model has no memory."""
    return load_file(path / DRIFT) if (path / DRIFT).exists() else {}


def load_weights(path: Path, weights: dict[str, Tensor], tables: Tables, *, strict: bool = True) -> Differences:
    """Copy the weights of a verified checkpoint folder into those of a model; see `load_tensors`."""
    return load_tensors(path / WEIGHTS, weights, tables, strict=strict)


def check_weights(path: Path, weights: dict[str, Tensor], tables: Tables) -> Differences:
    """Check what `load_weights` would load, unless it is strict. The model may be on the device "meta": nothing of its
    size is allocated.
    """
    with open_tensors(path / WEIGHTS, weights, tables, strict=False) as (differences, *_):
        return differences


def verify(path: Path, *, optimizer: bool = True) -> None:
    """Check a checkpoint against its manifest, and its manifest against its name.

    Args:
        optimizer: whether to check the optimizer's files too, two thirds of the bytes, which only training reads.

    Raises:
        Damaged: (exit code 1) a file is missing, or is not what was written.
        UserError: (1) a file cannot be read, which proves nothing; (2) the checkpoint is of another version.
    """
    files, hint = read_checkpoint_manifest(path), damaged_hint(path)
    for name in (WEIGHTS, OPTIMIZER):
        if name not in files:
            raise Damaged(f"{path / MANIFEST} does not list {name}", hint, exit_code=1)
    names = [name for name in files if optimizer or not name.startswith(Path(OPTIMIZER).stem)]
    check_files(path, files, names, hint)


def quarantine_damaged_checkpoints(run: RunDirectory) -> list[str]:
    """Rename the damaged checkpoints that are newer than the newest intact one; return a warning for each.

    Raises:
        UserError: none is intact, or one cannot be read (exit code 1), or one is of another version (2); nothing has
            been moved.
    """
    damaged: dict[int, str] = {}
    for step in reversed(run.steps()):
        try:
            verify(run.checkpoint(step))
        except Damaged as error:
            damaged[step] = error.message
            continue
        break
    else:
        if damaged:
            first = next(iter(damaged.values()))
            hint = "copy the run's folder again, or train it from the start under another -o"
            raise UserError(f"no checkpoint of run {run.path} is intact: {first}", hint, exit_code=1)
    warnings = []
    for step, problem in damaged.items():
        quarantine = run.checkpoints / f"damaged-step-{step:08d}"
        rename(run.checkpoint(step), quarantine)
        warnings.append(f"the checkpoint of step {step} is damaged ({problem}): moved to {quarantine}")
    return warnings


# Files of tensors, and the columns of tables in them.


def part_name(name: str, part: int, parts: int) -> str:
    """The file of part `part` (from 0) of the tables that belong to the file `name`. A table's columns are divided into
    `parts` equal ranges, one for each part, in order.
    """
    file = Path(name)
    return f"{file.stem}-{part + 1}-of-{parts}{file.suffix}"


def parts_of(path: Path) -> list[Path]:
    """The files that hold the tables of the file `path`; none where it holds them itself."""
    first = [file.stem.rpartition("-of-")[2] for file in path.parent.glob(f"{path.stem}-1-of-*{path.suffix}")]
    count = int(first[0]) if len(first) == 1 and first[0].isdecimal() else 0
    return [path.with_name(part_name(path.name, part, count)) for part in range(count)]


def moments_of(tables: Tables) -> Tables:
    """The tables among the optimizer's tensors: both moments of each table."""
    return {f"{name}|{key}": ranks for name, ranks in tables.items() for key in ("exp_avg", "exp_avg_sq")}


@torch.no_grad()
def load_tensors(path: Path, tensors: dict[str, Tensor], tables: Tables, *, strict: bool = True) -> Differences:
    """Copy a safetensors file and its parts into tensors of the same names, shapes and dtypes, one at a time.

    Args:
        tables: those of `tensors` that hold one rank's columns of a table, with the ranks.
        strict: whether the files must have the same tensors and no others; if not, those that both have are copied.

    Raises:
        UserError: a file is damaged (exit code 1), or does not hold these tensors; then nothing has been copied.
    """
    with open_tensors(path, tensors, tables, strict=strict) as (differences, whole, parts):
        for name, tensor in tensors.items():
            ranks = tables.get(name)
            if name in differences.missing:
                continue
            if ranks is None or (not parts and ranks.size == 1):
                tensor.copy_(whole.get_tensor(name))
                continue
            files, held = parts or [whole], tensor.shape[1]  # columns that this rank holds, of those in each file
            first, stored = ranks.rank * held, held * ranks.size // len(files)
            for part in range(first // stored, (first + held - 1) // stored + 1):
                low, high = max(first, part * stored), min(first + held, (part + 1) * stored)
                columns = files[part].get_slice(name)[:, low - part * stored : high - part * stored]
                tensor[:, low - first : high - first].copy_(columns)
    return differences


def open_safetensors(path: Path) -> Any:
    """`safe_open` of a file.

    Raises:
        SafetensorError, OSError: it is damaged, or cannot be opened.
    """
    open_file(path).close()  # safe_open would wait for a pipe's writer
    try:
        return safe_open(path, framework="pt")
    except RuntimeError as error:  # torch maps the file, which has been deleted since safetensors opened it
        raise OSError(first_line(error)) from None


@contextmanager
def open_tensors(
    path: Path, tensors: dict[str, Tensor], tables: Tables, *, strict: bool
) -> Iterator[tuple[Differences, Any, list[Any]]]:
    """Open and check a safetensors file and its parts; see `load_tensors`."""
    try:
        with ExitStack() as stack:
            paths = parts_of(path)
            whole, *parts = (stack.enter_context(open_safetensors(place)) for place in (path, *paths))
            names = {name for file in (whole, *parts) for name in file.keys()}  # noqa: SIM118
            differences = Differences(tensors.keys() - names, names - tensors.keys())
            if not strict:
                tensors = {name: tensor for name, tensor in tensors.items() if name in names}
                if not tensors:
                    raise UserError(f"{path} has no tensor of this model")
            shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
            for name in tables.keys() & shapes.keys():
                shapes[name][1] = shapes[name][1] * tables[name].size // max(1, len(parts))
            divided = {name: shapes.pop(name) for name in tables if name in shapes} if parts else {}
            dtypes = {name: (str(DTYPES.get(tensor.dtype)),) for name, tensor in tensors.items()}
            for place, file in zip((path, *paths), (whole, *parts), strict=True):
                found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                check_tensors(place, found, shapes if place == path else divided, dtypes, strict=strict)
            yield differences, whole, parts
    except (SafetensorError, OSError) as error:
        raise UserError(f"cannot read {path}: {error}", exit_code=1) from None


def check_tensors(
    path: Path,
    found: dict[str, Any],
    shapes: dict[str, list[int]],
    dtypes: Mapping[str, tuple[str, ...]],
    *,
    strict: bool = True,
    hint: str = "the recipe and the weights do not belong together",
    exit_code: int = 2,
) -> None:
    """Check the names, shapes and dtypes of stored tensors.

    Args:
        path: where they are stored, for errors.
        found: their safetensors slices by name.
        shapes, dtypes: the expected shape and possible dtypes of each, as safetensors names them.
        strict: whether to refuse other tensors.
        hint, exit_code: of errors.

    Raises:
        UserError: one is missing, not expected, or of another shape or dtype.
    """
    for name in sorted(shapes.keys() ^ found.keys() if strict else shapes.keys() - found.keys()):
        where = "is not in the model" if name in found else "is missing"
        raise UserError(f"{path}: tensor {name[:100]} {where}", hint, exit_code)
    for name, expected in shapes.items():
        shape, dtype = found[name].get_shape(), found[name].get_dtype()
        if shape != expected:
            raise UserError(f"{path}: tensor {name} has shape {shape} (expected {expected})", hint, exit_code)
        if dtype not in dtypes[name]:
            raise UserError(f"{path}: tensor {name} is {dtype} (expected {', '.join(dtypes[name])})", hint, exit_code)
