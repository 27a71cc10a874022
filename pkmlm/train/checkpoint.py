"""Checkpoints: everything that a run needs to go on to the bit, written whole or not at all.

A checkpoint is a folder: weights.safetensors (parameters and buffers by path), optimizer.safetensors (each parameter's
state as "path|key"), state.json (`Progress`), and manifest.json with the size and sha256 of each. Where P ranks
divide the tables of a run, each writes its columns, and their moments, into files of its own
(weights-1-of-P.safetensors ...), and the first writes the rest; any number of ranks reads what any other has written.
There is no random state to save: a step's random numbers follow from the seed, its number and the rank.
"""

from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from pkmlm.device import is_finite
from pkmlm.distributed import ProcessGroups
from pkmlm.errors import UserError
from pkmlm.model.memory.values import tables_of
from pkmlm.runs.directory import RunDirectory
from pkmlm.runs.files import read_json, remove_folder, write_json, writing_folder
from pkmlm.runs.manifest import MANIFEST, entry_of
from pkmlm.runs.shapes import NUMBER, Shape, misfit
from pkmlm.train.integrity import FILES, VERSION, file_names, verify
from pkmlm.train.optim import ParameterGroup
from pkmlm.train.row_adam import empty_state
from pkmlm.train.shard import full_tensor
from pkmlm.train.tensor_files import Tables, copy_tensors, part_name, stored_names, tensors_of, write_tensors

PROGRESS: Shape = {
    "step": (int,),
    "tokens": (int,),
    "skips": (int,),
    "scaler?": {str: NUMBER},
    "seconds": NUMBER,
    "data": {str: (str,)},
}


@dataclass
class Progress:
    """How far a run is.

    Attributes:
        step: steps taken.
        tokens: training tokens scored.
        skips: fp16 steps skipped in a row.
        scaler: state of the gradient scaler; empty without one.
        seconds: time spent in training steps.
        data: the sha256 of the tokenizer and of the splits that it was trained and validated on (`Corpus.hashes`).
    """

    step: int = 0
    tokens: int = 0
    skips: int = 0
    scaler: dict[str, Any] | None = None
    seconds: float = 0.0
    data: dict[str, str] = field(default_factory=dict)


def save(
    run: RunDirectory,
    model: nn.Module,
    groups: list[ParameterGroup],
    progress: Progress,
    ranks: ProcessGroups | None = None,
) -> None:
    """Write the checkpoint of `progress.step`, read it back, and point `latest` at it; all ranks together.

    Raises:
        UserError: a weight is not finite (exit code 3), or the disk refused (1); earlier checkpoints are untouched.
    """
    path, ranks = run.checkpoint(progress.step), ranks or ProcessGroups()
    world, lead = ranks.world, ranks.world.rank == 0
    weights = {name: full_tensor(tensor, lead).contiguous() for name, tensor in model.state_dict().items()}
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
        state = optimizer_state(groups, lead)
        contents = {FILES[0]: (weights, weight_tables(model)), FILES[1]: (state, state_tables(model))}
        with world.collective_errors():
            own = write_share(folder, contents, ranks)
            if lead:
                write_json(folder / FILES[2], asdict(progress))
                own[FILES[2]] = entry_of(folder / FILES[2])
        files = {name: entry for share in world.gather_objects(own) for name, entry in share.items()}
        with world.collective_errors():
            if lead:
                files = {name: files[name] for name in file_names(ranks.memory.size)}
                write_json(folder / MANIFEST, {"version": VERSION, "step": progress.step, "files": files})
                run.refuse_replaced()
                stack.close()
                verify(path)
                run.point("latest", progress.step)


def write_share(
    folder: Path, contents: dict[str, tuple[dict[str, Tensor], Tables]], ranks: ProcessGroups
) -> dict[str, Any]:
    """Write what this rank has to write, and return the manifest's entries for it: the first rank what all hold, the
    first ranks that hold different columns these."""
    parts, shares = ranks.memory.size, {}
    for name, (tensors, tables) in contents.items():
        divided = tables if parts > 1 else {}
        if ranks.world.rank == 0:
            shares[name] = {key: tensor for key, tensor in tensors.items() if key not in divided}
        if divided and ranks.data.rank == 0:
            shares[part_name(name, ranks.memory.rank, parts)] = {key: tensors[key] for key in divided}
    for file, share in shares.items():
        write_tensors(folder / file, share)
    return {file: entry_of(folder / file) for file in shares}


def weight_tables(model: nn.Module) -> Tables:
    """The tables among a model's tensors."""
    return {name: table.ranks for name, table in tables_of(model).items()}


def state_tables(model: nn.Module) -> Tables:
    """The tables among the tensors of the optimizers of a model."""
    return {f"{name}|{key}": ranks for name, ranks in weight_tables(model).items() for key in ("exp_avg", "exp_avg_sq")}


def prune(run: RunDirectory, keep: int) -> None:
    """Delete all but the `keep` newest checkpoints and the best one.

    Raises:
        UserError: (exit code 1) one cannot be deleted.
    """
    steps, best = run.steps(), run.best()
    for step in steps[:-keep]:
        if step != best:
            remove_folder(run.checkpoint(step))


def optimizer_state(groups: list[ParameterGroup], first: bool = True) -> dict[str, Tensor]:
    """Every optimizer's tensors by "path of the parameter|key", on the first rank all of each (see `full_tensor`)."""
    return {
        f"{name}|{key}": full_tensor(tensor, first).contiguous()
        for group in groups
        for name, parameter in group.parameters.items()
        for key, tensor in (group.optimizer.state[parameter] or empty_state(group.optimizer, parameter)).items()
    }


def load_weights(path: Path, model: nn.Module) -> None:
    """Fill a model, or this rank's columns of its tables, from a verified checkpoint folder.

    Raises:
        UserError: names, shapes or dtypes are not those of the model.
    """
    copy_tensors(path / FILES[0], dict(model.state_dict()), weight_tables(model))


def check_weights(path: Path, model: nn.Module) -> None:
    """Check that a checkpoint folder holds the weights of a model, which may be on the device "meta": nothing of their
    size is allocated.

    Raises:
        UserError: as `load_weights`.
    """
    with tensors_of(path / FILES[0], dict(model.state_dict()), weight_tables(model)):
        pass


def load_shared(path: Path, model: nn.Module) -> None:
    """As `load_weights`, those tensors of the model that the checkpoint has; it may hold others.

    Raises:
        UserError: one has another shape or dtype in the model; then nothing has been copied.
    """
    copy_tensors(path / FILES[0], *shared(path, model), others=True)


def check_shared(path: Path, model: nn.Module) -> None:
    """Check what `load_shared` would load, as `check_weights`.

    Raises:
        UserError: as `load_shared`.
    """
    with tensors_of(path / FILES[0], *shared(path, model), others=True):
        pass


def shared(path: Path, model: nn.Module) -> tuple[dict[str, Tensor], Tables]:
    """The tensors of a model whose names a checkpoint folder has, and the tables among them."""
    stored = stored_names(path / FILES[0])
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name in stored}
    return tensors, {name: ranks for name, ranks in weight_tables(model).items() if name in stored}


def load(path: Path, model: nn.Module, groups: list[ParameterGroup]) -> Progress:
    """Fill model and optimizers from a checkpoint folder, checked against its manifest first.

    Raises:
        UserError: it is damaged, strange or of another version (see `verify`), or of another model or optimizer.
    """
    verify(path)
    load_weights(path, model)
    expected = {}
    for group in groups:
        for name, parameter in group.parameters.items():
            state = group.optimizer.state[parameter] = empty_state(group.optimizer, parameter)
            expected.update({f"{name}|{key}": tensor for key, tensor in state.items()})
    copy_tensors(path / FILES[1], expected, state_tables(model))
    return progress_at(path)


def progress_at(path: Path) -> Progress:
    """How far the run was at a verified checkpoint folder."""
    return progress_of(read_json(path / FILES[2], "the checkpoint's state", exit_code=1), path / FILES[2])


def progress_of(state: Any, path: Path) -> Progress:
    """The content of state.json, checked.

    Raises:
        UserError: (exit code 1) it lacks keys, or has values of other types.
    """
    if problem := misfit(state, PROGRESS):
        raise UserError(f"{path} is not the state of a run: {problem}", exit_code=1)
    known = [field.name for field in fields(Progress) if state.get(field.name) is not None]
    return Progress(**{name: state[name] for name in known})
