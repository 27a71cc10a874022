"""Files of tensors: those of a checkpoint, whose tables may be stored in parts and held in others.

K: rows of a table. Of P parts of a checkpoint, each holds the next of P equal runs of a table's columns; so do ranks.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pkmlm.distributed import World
from pkmlm.errors import UserError
from pkmlm.runs.files import sync_file, write_errors
from pkmlm.train.shard import fill

DTYPES = {torch.float32: "F32", torch.int64: "I64"}  # what a checkpoint holds, as its files say it
Tables = dict[str, World]  # the ranks that hold the columns of each tensor that is a table


def part_name(name: str, part: int, parts: int) -> str:
    """The file of part `part` (from 0) of those tensors of the file `name` that are divided."""
    file = Path(name)
    return f"{file.stem}-{part + 1}-of-{parts}{file.suffix}"


def parts_of(path: Path) -> list[Path]:
    """The files in which the tables of the file `path` are; none where it holds them itself."""
    first = [file.stem.rpartition("-of-")[2] for file in path.parent.glob(f"{path.stem}-1-of-*{path.suffix}")]
    count = int(first[0]) if len(first) == 1 and first[0].isdecimal() else 0
    return [path.with_name(part_name(path.name, part, count)) for part in range(count)]


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write tensors as safetensors, and sync the file."""
    with write_errors(path):
        try:
            save_file(tensors, path, metadata)
        except SafetensorError as error:
            raise UserError(f"cannot write {path}: {error}", exit_code=1) from None
    sync_file(path)  # the library makes files that only their owner can read


@torch.no_grad()
def copy_tensors(path: Path, expected: dict[str, Tensor], tables: Tables, *, others: bool = False) -> None:
    """Copy a safetensors file and its parts into tensors of the same names, shapes and dtypes, one at a time; into
    tables, of which these tensors hold the columns of one rank, those columns.

    Raises:
        UserError: a file is damaged, lacks a tensor or, unless `others`, holds others; then nothing has been copied.
    """
    with tensors_of(path, expected, tables, others=others) as (whole, parts):
        for name, tensor in expected.items():
            ranks = tables.get(name)
            if ranks is None or (not parts and ranks.size == 1):
                fill(tensor, whole.get_tensor(name))
                continue
            for part, stored, held in pieces(tensor.shape[1], ranks, max(1, len(parts))):
                file = parts[part] if parts else whole
                tensor[:, held].copy_(file.get_slice(name)[:, stored])


def pieces(width: int, ranks: World, parts: int) -> Iterator[tuple[int, slice, slice]]:
    """Where this rank's `width` columns of a table lie: part, columns of the part, and columns of this rank."""
    first, stored = ranks.rank * width, width * ranks.size // parts
    for part in range(first // stored, (first + width - 1) // stored + 1):
        low, high = max(first, part * stored), min(first + width, (part + 1) * stored)
        start = part * stored
        yield part, slice(low - start, high - start), slice(low - first, high - first)


@contextmanager
def tensors_of(
    path: Path, expected: dict[str, Tensor], tables: Tables, *, others: bool = False
) -> Iterator[tuple[Any, list[Any]]]:
    """Open a safetensors file and its parts, which hold these tensors and, unless `others`, no others; see
    `copy_tensors` for what is raised.
    """
    with opened(path) as (whole, parts):
        shapes = {name: list(tensor.shape) for name, tensor in expected.items()}
        for name, ranks in tables.items():
            shapes[name][1] = shapes[name][1] * ranks.size // max(1, len(parts))
        divided = {name: shapes.pop(name) for name in tables} if parts else {}
        dtypes = {name: DTYPES.get(tensor.dtype) for name, tensor in expected.items()}
        check_tensors(path, whole, shapes, dtypes, others)
        for file, part in zip(parts_of(path), parts, strict=True):
            check_tensors(file, part, divided, dtypes, others)
        yield whole, parts


def stored_names(path: Path) -> set[str]:
    """The names of the tensors in a safetensors file and its parts.

    Raises:
        UserError: (exit code 1) a file is damaged.
    """
    with opened(path) as (whole, parts):
        return {name for file in (whole, *parts) for name in file.keys()}  # noqa: SIM118


@contextmanager
def opened(path: Path) -> Iterator[tuple[Any, list[Any]]]:
    """A safetensors file and its parts, open.

    Raises:
        UserError: (exit code 1) one is damaged, or cannot be read, now or later.
    """
    try:
        with ExitStack() as stack:
            whole, *parts = (stack.enter_context(safe_open(name, framework="pt")) for name in (path, *parts_of(path)))
            yield whole, parts
    except (SafetensorError, OSError) as error:
        raise UserError(f"cannot read {path}: {error}", exit_code=1) from None


def check_tensors(
    path: Path, file: Any, shapes: dict[str, list[int]], dtypes: dict[str, str | None], others: bool
) -> None:
    """Check that an open file holds tensors of these names, shapes and dtypes and, unless `others`, no others.

    Raises:
        UserError: it does not.
    """
    found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    for name in sorted(shapes.keys() - found.keys() if others else shapes.keys() ^ found.keys()):
        where = "is not in the model" if name in found else "is missing"
        hint = "the recipe and the weights do not belong together"
        raise UserError(f"{path}: tensor {name[:100]} {where}", hint)
    for name, expected in shapes.items():
        shape, dtype = found[name].get_shape(), found[name].get_dtype()
        if expected != shape:
            raise UserError(f"{path}: tensor {name} has shape {shape} (expected {expected})")
        if dtypes[name] != dtype:
            raise UserError(f"{path}: tensor {name} is {dtype} (expected {dtypes[name]})")
