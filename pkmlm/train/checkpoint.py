"""Checkpoints: everything that a run needs to go on to the bit, written whole or not at all.

A checkpoint is a folder: weights.safetensors (parameters and buffers by path), optimizer.safetensors (each parameter's
state as "path|key"), state.json (step, scaler), and manifest.json with the size and sha256 of each. There is no
random state to save: a step's random numbers follow from the seed and its number.
"""

import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from pkmlm.errors import UserError
from pkmlm.runtime.files import disk_errors, read_json, sha256_of, write_json, writing_folder
from pkmlm.runtime.rundir import RunDirectory
from pkmlm.train.optim import Group

VERSION = 1
FILES = ("weights.safetensors", "optimizer.safetensors", "state.json")


@dataclass
class Progress:
    """How far a run is.

    Attributes:
        step: steps taken.
        tokens: training tokens scored.
        skips: fp16 steps skipped in a row.
        scaler: state of the gradient scaler; empty without one.
        seconds: time spent in training steps.
    """

    step: int = 0
    tokens: int = 0
    skips: int = 0
    scaler: dict[str, Any] | None = None
    seconds: float = 0.0


def save(run: RunDirectory, model: nn.Module, groups: list[Group], progress: Progress) -> None:
    """Write the checkpoint of `progress.step`, read it back, and point `latest` at it.

    Raises:
        UserError: (exit code 1) a weight is not finite, or the disk refused; earlier checkpoints are untouched.
    """
    path = run.checkpoint(progress.step)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    bad = [name for name, tensor in weights.items() if not torch.isfinite(tensor).all()]
    if bad:
        raise UserError(f"step {progress.step} is not saved: {bad[0]} is not finite", exit_code=1)
    with writing_folder(path) as folder:
        write_tensors(folder / FILES[0], weights)
        write_tensors(folder / FILES[1], optimizer_state(groups))
        write_json(folder / FILES[2], asdict(progress))
        files = {name: {"bytes": (folder / name).stat().st_size, "sha256": sha256_of(folder / name)} for name in FILES}
        write_json(folder / "manifest.json", {"version": VERSION, "step": progress.step, "files": files})
    verify(path)
    run.point("latest", progress.step)


def prune(run: RunDirectory, keep: int) -> None:
    """Delete all but the `keep` newest checkpoints and the best one."""
    steps, best = run.steps(), run.best()
    for step in steps[:-keep]:
        if step != best:
            shutil.rmtree(run.checkpoint(step))


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    with disk_errors(path):
        try:
            save_file(tensors, path, metadata)
        except SafetensorError as error:
            raise UserError(f"cannot write {path}: {error}", exit_code=1) from None
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(path, 0o666 & ~mask)  # the library makes files that only their owner can read
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def optimizer_state(groups: list[Group]) -> dict[str, Tensor]:
    """Every optimizer's tensors by "path of the parameter|key"."""
    return {
        f"{name}|{key}": tensor.contiguous()
        for group in groups
        for name, parameter in group.parameters.items()
        for key, tensor in (group.optimizer.state[parameter] or empty_state(group.optimizer, parameter)).items()
    }


def verify(path: Path) -> dict[str, Any]:
    """Check a checkpoint against its manifest; return the manifest.

    Raises:
        UserError: (exit code 1) a file is missing, has another size or other bytes, or the version is unknown.
    """
    hint = "the checkpoint is damaged: delete its folder to go on from the one before"
    manifest: dict[str, Any] = read_json(path / "manifest.json", "the checkpoint's manifest", hint)
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict) or "version" not in manifest:
        raise UserError(f"{path / 'manifest.json'} is no manifest", hint, exit_code=1)
    if manifest["version"] != VERSION:
        found = manifest["version"]
        raise UserError(f"{path}: checkpoint version {found} (this build reads {VERSION})", exit_code=1)
    for name in FILES:
        expected = manifest["files"].get(name)
        file = path / name
        if expected is None or not file.is_file():
            raise UserError(f"{file} is missing", hint, exit_code=1)
        if file.stat().st_size != expected["bytes"]:
            raise UserError(f"{file}: {file.stat().st_size} bytes (expected {expected['bytes']})", hint, exit_code=1)
        found = sha256_of(file)
        if found != expected["sha256"]:
            raise UserError(f"{file}: sha256 {found[:12]} (expected {expected['sha256'][:12]})", hint, exit_code=1)
    return manifest


def load_weights(path: Path, model: nn.Module) -> None:
    """Fill a model from a verified checkpoint folder.

    Raises:
        UserError: names, shapes or dtypes are not those of the model.
    """
    copy_tensors(path / FILES[0], dict(model.state_dict()))


def load(path: Path, model: nn.Module, groups: list[Group]) -> Progress:
    """Fill model and optimizers from a checkpoint folder, checked against its manifest first."""
    verify(path)
    load_weights(path, model)
    expected = {}
    for group in groups:
        for name, parameter in group.parameters.items():
            state = group.optimizer.state[parameter] = empty_state(group.optimizer, parameter)
            expected.update({f"{name}|{key}": tensor for key, tensor in state.items()})
    copy_tensors(path / FILES[1], expected)
    return Progress(**read_json(path / FILES[2], "the checkpoint's state"))


def empty_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """The shape of an Adam state: what the optimizer itself makes at its first step."""
    fused = any(group.get("fused") for group in optimizer.param_groups)
    step = torch.zeros((), device=parameter.device) if fused else torch.zeros((), dtype=torch.int64)
    return {"step": step, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}


@torch.no_grad()
def copy_tensors(path: Path, expected: dict[str, Tensor]) -> None:
    """Copy a safetensors file into tensors of the same names, shapes and dtypes, one at a time.

    Raises:
        UserError: the file is damaged or holds other tensors; with other names or shapes, nothing has been copied.
    """
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            for name in sorted(expected.keys() ^ found.keys()):
                where = "is not in the model" if name in found else "is missing"
                raise UserError(f"{path}: tensor {name} {where}", "the recipe and the weights do not belong together")
            for name, tensor in expected.items():
                shape = found[name].get_shape()
                if list(tensor.shape) != shape:
                    raise UserError(f"{path}: tensor {name} has shape {shape} (expected {list(tensor.shape)})")
            for name, tensor in expected.items():
                loaded = file.get_tensor(name)
                if loaded.dtype != tensor.dtype:
                    raise UserError(f"{path}: tensor {name} is {loaded.dtype} (expected {tensor.dtype})")
                tensor.copy_(loaded)
    except (SafetensorError, OSError) as error:
        raise UserError(f"cannot read {path}: {error}", exit_code=1) from None
