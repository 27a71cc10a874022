"""Checkpoints: everything that a run needs to resume bit for bit, written completely or not at all.

A checkpoint is a folder: weights.safetensors (parameters and buffers by path), optimizer.safetensors (each parameter's
state as "path|key"), state.json (`Progress`), and manifest.json with the size and sha256 of each. Where P ranks divide
the columns of a run's tables, each writes its columns, and their moments, into files of its own
(weights-1-of-P.safetensors ...), and rank 0 writes the rest; any number of ranks can read what any other number wrote.
There is no random state to save: a step's random numbers follow from the seed, its number and the rank.

Models and optimizers are passed as dicts of tensors (`model.state_dict()`, `train.optim.optimizer_state`). `tables`
maps the names of those of a model's tensors that are tables to the ranks that divide their columns
(`model.memory.values.table_ranks`).
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pkmlm.device import is_finite
from pkmlm.distributed import ProcessGroups, World, is_shard, local_part
from pkmlm.errors import UserError, first_line
from pkmlm.files import (
    MANIFEST,
    Damaged,
    check_files,
    entry_of,
    open_file,
    remove_folder,
    rename,
    sync_file,
    write_errors,
    write_json,
    writing_folder,
)
from pkmlm.runs.directory import RunDirectory
from pkmlm.runs.results import CHECKPOINT_VERSION, STATE, damaged_hint, read_checkpoint_manifest, read_state

WEIGHTS, OPTIMIZER = "weights.safetensors", "optimizer.safetensors"
FILES = (WEIGHTS, OPTIMIZER, STATE)
DTYPES = {torch.float32: "F32", torch.int64: "I64"}  # what a checkpoint holds, by the names in its files
Tables = dict[str, World]


@dataclass
class Validations:
    """What the validations of a run have shown.

    Attributes:
        step: of the last one; None: there was none.
        best_step, best_loss: of the best one (nats per token).
        worse: validations since the best one.
        due: whether a stop request has cut short the validation of the saved step.
        tokens: number of tokens that each of them scored; None: not known. If it changes, the best is reset.
    """

    step: int | None = None
    best_step: int | None = None
    best_loss: float | None = None
    worse: int = 0
    due: bool = False
    tokens: int | None = None

    @classmethod
    def of(cls, events: Iterable[dict[str, Any]]) -> "Validations":
        """From the events of a log, for checkpoints of earlier versions, which do not hold it."""
        found = cls()
        for event in events:
            if event["event"] == "valid" and event.get("loss") is not None:
                found.add(event["step"], event["loss"], event.get("tokens"))
        return found

    def add(self, step: int, loss: float, tokens: int | None) -> bool:
        """Record a validation; return whether it is the best so far."""
        if tokens != self.tokens and self.tokens is not None:  # `eval.tokens` has changed: another text
            self.best_step, self.best_loss, self.worse = None, None, 0
        self.step, self.due, self.tokens = step, False, tokens
        if self.best_loss is None or loss < self.best_loss:
            self.best_step, self.best_loss, self.worse = step, loss, 0
            return True
        self.worse += 1
        return False


@dataclass
class Progress:
    """How far a run is, and which run it is. Checkpoints of earlier versions lack the last three.

    Attributes:
        step: steps taken.
        tokens: training tokens scored.
        skips: fp16 steps skipped in a row.
        scaler: state of the loss scaler; empty without one.
        seconds: time spent in training steps.
        data: the sha256 of all that a resume must find again, such as tokens and tokenizer (`train.job.hashes_of`).
        run: the "id" in the run's run.json.
        recipe: the keys that a resume may not change, and their values as YAML.
        validations: which determine the best checkpoint and the end of patience.
    """

    step: int = 0
    tokens: int = 0
    skips: int = 0
    scaler: dict[str, Any] | None = None
    seconds: float = 0.0
    data: dict[str, str] = field(default_factory=dict)
    run: str | None = None
    recipe: dict[str, str] | None = None
    validations: Validations | None = None


class Differences(NamedTuple):
    """The names of tensors that only the model has (`missing`), and that only the files have (`unexpected`)."""

    missing: set[str]
    unexpected: set[str]


# Writing.


def save(
    run: RunDirectory,
    progress: Progress,
    weights: dict[str, Tensor],
    optimizer: dict[str, Tensor],
    tables: Tables,
    ranks: ProcessGroups | None = None,
) -> None:
    """Write the checkpoint of `progress.step`, verify it on the disk, and point `latest` at it; all ranks call this.

    Args:
        weights, optimizer, tables: see the module's docstring; each rank passes its part of sharded tensors.
        ranks: the ranks that train together; None: this process alone.

    Raises:
        UserError: a weight is not finite (exit code 3), or a write failed (1); earlier checkpoints are untouched.
    """
    path, ranks = run.checkpoint(progress.step), ranks or ProcessGroups()
    world, lead = ranks.world, ranks.world.rank == 0
    weights = {name: full_tensor(tensor, lead).contiguous() for name, tensor in weights.items()}
    with world.collective_errors():
        bad = [name for name, tensor in weights.items() if not is_finite(tensor)]
        if bad:
            what = f"training diverged: {bad[0]} is not finite at step {progress.step}, which is not saved"
            raise UserError(what, exit_code=3)
    with ExitStack() as stack:
        with world.collective_errors():
            if lead:
                run.refuse_replaced()
                folder = stack.enter_context(writing_folder(path))
        folder = path.with_name(world.broadcast(folder.name if lead else None))
        optimizer = {name: full_tensor(tensor, lead).contiguous() for name, tensor in optimizer.items()}
        contents = {WEIGHTS: (weights, tables), OPTIMIZER: (optimizer, moments_of(tables))}
        with world.collective_errors():
            own: dict[str, dict[str, Tensor]] = {}  # the tensors that this rank writes, by file
            for name, (tensors, own_tables) in contents.items():
                divided = own_tables if ranks.memory.size > 1 else {}
                if lead:
                    own[name] = {key: tensor for key, tensor in tensors.items() if key not in divided}
                if divided and ranks.data.rank == 0:  # the first ranks that hold different columns
                    part = part_name(name, ranks.memory.rank, ranks.memory.size)
                    own[part] = {key: tensors[key] for key in divided if key in tensors}
            for name, tensors in own.items():
                write_tensors(folder / name, tensors)
            entries = {name: entry_of(folder / name) for name in own}
            if lead:
                write_json(folder / STATE, asdict(progress))
                entries[STATE] = entry_of(folder / STATE)
        files = {name: entry for share in world.gather_objects(entries) for name, entry in share.items()}
        with world.collective_errors():
            if lead:
                files = {name: files[name] for name in file_names(ranks.memory.size)}
                write_json(folder / MANIFEST, {"version": CHECKPOINT_VERSION, "step": progress.step, "files": files})
                run.refuse_replaced()
                stack.close()
                verify(path)
                run.point("latest", progress.step)


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write tensors as safetensors, and sync the file."""
    with write_errors(path):
        try:
            save_file(tensors, path, metadata)
        except SafetensorError as error:
            raise UserError(f"cannot write {path}: {error}", exit_code=1) from None
    sync_file(path)  # the library makes files that only their owner can read


def prune(run: RunDirectory, keep: int, best: int | None) -> None:
    """Delete all but the `keep` newest checkpoints and the best one.

    Raises:
        UserError: (exit code 1) one cannot be deleted.
    """
    for step in run.steps()[:-keep]:
        if step != best:
            remove_folder(run.checkpoint(step))


# Reading.


def load(path: Path, weights: dict[str, Tensor], optimizer: dict[str, Tensor], tables: Tables) -> Progress:
    """Verify a checkpoint folder, and copy it into the tensors of a model and its optimizers.

    Raises:
        UserError: it is damaged, of another version (see `verify`), or of another model or optimizer.
    """
    verify(path)
    load_weights(path, weights, tables)
    load_tensors(path / OPTIMIZER, optimizer, moments_of(tables))
    return read_progress(path)


def load_weights(path: Path, weights: dict[str, Tensor], tables: Tables, *, strict: bool = True) -> Differences:
    """Copy the weights of a verified checkpoint folder into those of a model; see `load_tensors`."""
    return load_tensors(path / WEIGHTS, weights, tables, strict=strict)


def check_weights(path: Path, weights: dict[str, Tensor], tables: Tables, *, strict: bool = True) -> Differences:
    """Check what `load_weights` would load. The model may be on the device "meta": nothing of its size is allocated."""
    with open_tensors(path / WEIGHTS, weights, tables, strict=strict) as (differences, *_):
        return differences


def read_progress(path: Path) -> Progress:
    """How far the run was at a checkpoint; raises as `read_state` does."""
    state: dict[str, Any] = {**read_state(path)}
    progress = Progress(**{name: state[name] for name in asdict(Progress()) if state.get(name) is not None})
    if found := state.get("validations"):
        progress.validations = Validations(**{name: found.get(name) for name in asdict(Validations())})
    return progress


def verify(path: Path, *, optimizer: bool = True) -> None:
    """Check a checkpoint against its manifest, and its manifest against its name.

    Args:
        optimizer: whether to check the optimizer's files too, two thirds of the bytes, which only training reads.

    Raises:
        Damaged: (exit code 1) a file is missing, or is not what was written.
        UserError: (1) a file cannot be read, which proves nothing; (2) the checkpoint is of another version.
    """
    files, hint = read_checkpoint_manifest(path), damaged_hint(path)
    if files.keys() != set(file_names(max(1, (len(files) - len(FILES)) // 2))):
        raise Damaged(f"{path / MANIFEST} is damaged: its files are {str(list(files))[:60]}", hint, exit_code=1)
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


def file_names(parts: int) -> tuple[str, ...]:
    """The files of a checkpoint whose tables are in `parts` parts, except its manifest."""
    divided = [part_name(name, part, parts) for part in range(parts) for name in (WEIGHTS, OPTIMIZER)]
    return (*FILES, *(divided if parts > 1 else []))


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
                value = whole.get_tensor(name)
                if is_shard(tensor):
                    from torch.distributed.tensor import distribute_tensor  # takes half as long as torch to import

                    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
                    value = distribute_tensor(value.to(tensor.device), mesh, placements, src_data_rank=None)
                tensor.copy_(value)
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


def full_tensor(tensor: Any, lead: bool) -> Tensor:
    """A whole tensor that may be divided among ranks, all of which call this: rank 0 (`lead`) gets it in main memory,
    the others keep their part.
    """
    if not is_shard(tensor):
        return tensor
    whole: Tensor = tensor.full_tensor()
    return whole.cpu() if lead else local_part(tensor)
