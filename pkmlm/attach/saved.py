"""What is attached to a network, as a folder: its weights, how it is attached, and which network it belongs to.

attached.json says how; attached.safetensors holds the weights, in fp32; manifest.json the size and sha256 of both. The
network itself is not saved, only its name and a digest of its weights.
"""

import hashlib
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn
from typing_extensions import TypedDict

from pkmlm import __version__
from pkmlm.attach.dense import DenseSpec
from pkmlm.attach.places import NAME, Attached, base_parameters
from pkmlm.attach.specs import Mode, arguments_of, spec_of
from pkmlm.errors import UserError
from pkmlm.export.config import ATTACHED, is_attached
from pkmlm.files import MANIFEST, check_files, entry_of, read_json, read_manifest, write_json, writing_folder
from pkmlm.memory.registry import SPECS
from pkmlm.memory.spec import Spec, SpecError
from pkmlm.runs.checkpoint import load_tensors, write_tensors

VERSION = 1
WEIGHTS = "attached.safetensors"
HINT = "it is damaged or was changed: save it again"


class Base(TypedDict):
    """The network that a folder belongs to: its class and name, and its weights' dtype and digest."""

    architecture: str
    name: str
    dtype: Literal["float32", "float64", "bfloat16", "float16"]
    sha256: str


class Facts(TypedDict):
    """What attached.json holds."""

    kind: str
    arguments: dict[str, Any]
    layers: list[int]
    mode: Mode
    dim: int
    step: int
    base: Base


def base_of(model: nn.Module) -> Base:
    """What a folder records about a network. The digest is of the names, shapes and fp32 values of all parameters and
    saved buffers, such as tables in few bits, so that it is the same for a network in bf16 and its copy in fp32.
    """
    digest = hashlib.sha256()
    parameters = dict(base_parameters(model))
    saved = model.state_dict()
    buffers = {name: x for name, x in model.named_buffers() if name in saved and not name.startswith(f"{NAME}.")}
    for name, tensor in sorted({**parameters, **buffers}.items()):
        tensor = tensor.detach()
        digest.update(f"{name} {list(tensor.shape)}\n".encode())
        for part in tensor.flatten().split(1 << 24):
            digest.update(part.to("cpu", torch.float32).contiguous().numpy())
    config = getattr(model, "config", None)
    dtype = cast(Any, str(next(iter(parameters.values())).dtype).removeprefix("torch."))
    name = str(getattr(config, "_name_or_path", "") or "")
    return {"architecture": type(model).__name__, "name": name, "dtype": dtype, "sha256": digest.hexdigest()}


def write_attached(path: Path, attached: Attached, model: nn.Module, step: int, *, replace: bool) -> None:
    """Write a folder, completely or not at all.

    Args:
        path: must be new or empty; with `replace`, it may also hold what this function has written.
        model: the network that it is attached to.
        step: optimizer steps that it was trained for.

    Raises:
        UserError: `path` is not free; (exit code 1) it cannot be written.
    """
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file (expected a new or empty folder)")
    if path.exists() and any(path.iterdir()) and not (replace and is_attached(path)):
        also = ", or pass replace=True to overwrite what it holds" if is_attached(path) else ""
        raise UserError(f"{path} is not empty", f"choose another folder{also}")
    for name in sorted(file.name for file in path.glob("*")):
        if name not in (ATTACHED, WEIGHTS, MANIFEST):
            raise UserError(f"{path} also holds {name}, which would be deleted", "choose another folder, or move it")
    facts: Facts = {
        "kind": attached.spec.kind,
        "arguments": arguments_of(attached.spec),
        "layers": attached.layers,
        "mode": attached.mode,
        "dim": attached.dim,
        "step": step,
        "base": base_of(model),
    }
    with writing_folder(path, replace=replace) as folder:
        tensors = {name: tensor.cpu().contiguous() for name, tensor in attached.state_dict().items()}
        write_tensors(folder / WEIGHTS, tensors, {"format": "pt"})
        write_json(folder / ATTACHED, {"pkmlm": __version__, **facts})
        files = {name: entry_of(folder / name) for name in (ATTACHED, WEIGHTS)}
        write_json(folder / MANIFEST, {"version": VERSION, "files": files})


def read_facts(path: Path) -> Facts:
    """The content of attached.json, once the files are found to be those that the manifest lists.

    Raises:
        UserError: it is not such a folder; (exit code 1) it is damaged or was changed.
    """
    if not is_attached(path):
        message = f"{path} is not the folder of an attached memory (no {ATTACHED} in it)"
        raise UserError(message, "a model that was saved with a memory attached: see `pkmlm help attach`, Saving it")
    files = read_manifest(path, "attached memory", VERSION, HINT)["files"]
    if files.keys() != {ATTACHED, WEIGHTS}:
        raise UserError(f"{path / MANIFEST} is not the manifest of an attached memory", HINT, exit_code=1)
    check_files(path, files, files, HINT)
    facts: Facts = read_json(path / ATTACHED, "the attached memory's description", HINT, exit_code=1, schema=Facts)
    return facts


def check_base(path: Path, facts: Facts, model: nn.Module) -> None:
    """Raise a UserError if `model` is not the network that a folder belongs to."""
    found, expected = base_of(model), facts["base"]
    if found["sha256"] != expected["sha256"]:
        what = "{architecture} {name!r} in {dtype}, weights {sha256:.12}".format
        raise UserError(
            f"{path} belongs to another network: {what(**expected)} (found {what(**found)})",
            "load the network that it was trained with, in the same dtype, before its weights are changed",
        )


def saved_spec(path: Path, facts: Facts) -> Spec:
    """The spec of what a folder with these facts holds: a memory, or the control of one.

    Raises:
        UserError: (exit code 1) it is not possible.
    """
    try:
        spec = spec_of({**facts["arguments"], "kind": facts["kind"]}, {**SPECS, "dense": DenseSpec})
        spec.check(facts["dim"])
    except (UserError, SpecError) as error:
        raise UserError(f"{path / ATTACHED}: {error}", HINT, exit_code=1) from None
    return spec


def read_weights(path: Path, facts: Facts, attached: Attached) -> None:
    """Load the weights of a folder with these facts into what is attached to a network.

    Raises:
        UserError: what is attached is of another kind or shape.
    """
    expected: dict[str, Any] = {**facts["arguments"], **facts}
    found = {"kind": attached.spec.kind, **arguments_of(attached.spec)}
    for key, value in {**found, "layers": attached.layers, "mode": attached.mode, "dim": attached.dim}.items():
        if value != expected.get(key):
            message = f"{path}: {key} is {expected.get(key)} (found {value} here)"
            raise UserError(message, "attach with the settings of the folder")
    load_tensors(path / WEIGHTS, attached.state_dict(), {})
