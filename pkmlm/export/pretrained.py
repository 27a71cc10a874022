"""A pretrained model of `transformers`, from its folder (configuration, weights in safetensors, tokenizer) to a run. No
file of the folder is run, and `transformers` is not needed.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pkmlm import __version__
from pkmlm.cost import cost_of
from pkmlm.data.canonical import canonical_ids
from pkmlm.data.tokenizer import Tokenizer
from pkmlm.device import is_finite
from pkmlm.distributed import ProcessGroups
from pkmlm.errors import UserError, printable
from pkmlm.export.config import CONFIG, MODEL_TYPE, Origin, node_of, origin_of, trained_of
from pkmlm.export.folder import FLOATS, WHOLE, Export, open_slices, same, verify
from pkmlm.files import MANIFEST, read_json, sha256_of, writing_folder
from pkmlm.model.convert import ARCHITECTURES, Architecture, parts_of
from pkmlm.model.convert.asked import EVERYWHERE, Asked
from pkmlm.model.convert.weights import Part
from pkmlm.model.transformer import build_model
from pkmlm.recipe.constraints import check_recipe
from pkmlm.recipe.load import bind
from pkmlm.recipe.schema import Recipe
from pkmlm.runs.directory import IMPORTED, RunDirectory
from pkmlm.runs.record import Progress
from pkmlm.runs.saving import Saver

PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "consolidated.00.pth")
DAMAGED = "copy the folder again"
BATCH_TOKENS = 8_192  # of a step of the recipe that comes of it, and
OPTIM = {"lr": 1e-4, "matrices": "adamw", "warmup_steps": 20}  # how it trains further


class Pretrained(NamedTuple):
    """What a folder holds.

    Attributes:
        recipe: a checked recipe of its model, with `model.vocab_size`.
        architecture: the name of its class in transformers.
        tokenizer: at most as large as the embedding.
        weights: our model's parameters by name, in fp32.
        origin: the run that it was exported from; without one, its folder.
    """

    recipe: Recipe
    architecture: str
    tokenizer: Tokenizer
    weights: dict[str, Tensor]
    origin: Origin

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of our model by name: its parameters, and the ids by which it knows tokens."""
        rows = self.recipe.model.vocab_size or 0
        asked = {lookback.ids for lookback in self.recipe.model.lookbacks}
        ids = {each: torch.from_numpy(canonical_ids(self.tokenizer, rows, each == "canonical")) for each in asked}
        return {**self.weights, **{f"token_ids.{name}.ids_V": ids_V for name, ids_V in ids.items()}}


def read_pretrained_model(folder: Path, device: torch.device) -> Export:
    """Read a pretrained model, ready to be measured; raises as `read_pretrained` does."""
    found = read_pretrained(folder)
    model = build_model(found.recipe, found.recipe.model.vocab_size or 0, device, init_weights=False)
    model.load_state_dict(found.tensors())
    return Export(found.recipe, found.origin, model.eval(), found.tokenizer)


def read_pretrained(folder: Path) -> Pretrained:
    """Read a pretrained model. What the configuration asks for is compared with the names and shapes of the weights
    before any of them is read.

    Raises:
        UserError: the folder is not one of such a model, asks for what our model has not, or has no tokenizer that
            loses nothing; (exit code 1) a file is missing or damaged.
    """
    file = folder / CONFIG
    if not file.is_file():
        what = f"holds no {CONFIG}" if folder.is_dir() else "is not a folder"
        hint = "it is a run: commands take it as it is" if RunDirectory(folder).recipe_file.is_file() else ""
        raise UserError(f"{printable(str(folder))} {what} (expected a pretrained model of transformers)", hint)
    config = read_json(file, "the model's configuration", DAMAGED, exit_code=1)
    found = config.get("model_type") if isinstance(config, dict) else None
    if found == MODEL_TYPE:
        raise UserError(f"{folder} is an export of pkmlm", "commands read it as it is; to train it, use the run")
    if not isinstance(found, str) or found not in ARCHITECTURES:
        message = f"{file}: model_type {printable(repr(found))[:100]} (expected {', '.join(ARCHITECTURES)})"
        raise UserError(message, "attach a memory to it in Python: pkmlm help attach")
    if (folder / MANIFEST).exists():
        verify(folder)
    architecture = ARCHITECTURES[found]
    origin = origin_of(config, folder)
    recipe = recipe_of(architecture, config, folder)
    tokenizer = Tokenizer.load(folder)
    rows = recipe.model.vocab_size or 0
    if tokenizer.size > rows:
        message = f"{tokenizer.name} has {tokenizer.size:,} tokens (expected at most {rows:,}, vocab_size in {CONFIG})"
        raise UserError(message, "give the model's own tokenizer")
    weights: dict[str, Tensor] = {}
    with open_theirs(folder, architecture, recipe) as (parts, slices):
        for part in parts:
            weights[part.name] = part.join([slices[name][...].float() for name in part.sources]).contiguous()
            if not is_finite(weights[part.name]):
                message = f"{folder}: {' or '.join(part.sources)} holds numbers that are not finite"
                raise UserError(message, DAMAGED, exit_code=1)
        check_tied(folder, architecture, recipe, slices)
    return Pretrained(recipe, architecture.CLASS, tokenizer, weights, origin)


def recipe_of(architecture: Architecture, config: dict[str, Any], folder: Path) -> Recipe:
    """The recipe of a configuration: its model, and steps that its context allows.

    Raises:
        UserError: the configuration asks for what our model has not, or for what cannot be.
    """
    file = str(folder / CONFIG)
    asked = Asked(config, file)
    asked.without(*EVERYWHERE)
    keys = architecture.keys(asked)
    context = keys["context"]
    sequences = max(1, BATCH_TOKENS // context)
    train = {"batch_tokens": sequences * context, "micro_batch": sequences}
    name = re.sub(r"[^\w.+-]", "-", folder.resolve().name, flags=re.ASCII).lstrip(".+-")[:100] or "imported"
    places: dict[str, str] = {}
    trained = trained_of(config).get("recipe") or {}
    tree = node_of(
        {
            "name": name,
            "data": trained.get("data", {}),
            "model": {**keys, "init": "small"},
            "optim": OPTIM,
            "train": train,
        },
        file,
    )
    recipe: Recipe = bind(tree, Recipe, "", places)
    return check_recipe(recipe, places)


@contextlib.contextmanager
def open_theirs(
    folder: Path, architecture: Architecture, recipe: Recipe
) -> Iterator[tuple[list[Part], dict[str, Any]]]:
    """The parts of our model, and slices of all tensors in the folder, by their whole names. Names and shapes are those
    that the recipe needs.

    Raises:
        UserError: the weights are not in safetensors, or are of another model; (exit code 1) a file is missing or
            damaged.
    """
    refuse_pickles(folder)
    with open_slices(folder, architecture.PREFIX, architecture.HEAD) as slices:
        parts, needed = [], set()
        for part in parts_of(architecture, recipe.model):
            for name, shape in part.sources.items():
                check_slice(folder, name, slices.get(name), shape)
                needed.add(name)
            parts.append(part)
        ignored = re.compile(architecture.IGNORED)
        for name in sorted(slices.keys() - needed - {architecture.HEAD}):
            if not ignored.search(name):
                message = (
                    f"{folder}: tensor {printable(name)[:100]} has no place in a {architecture.CLASS} of its {CONFIG}"
                )
                raise UserError(message, "it is not a model of that configuration")
        yield parts, slices


def refuse_pickles(folder: Path) -> None:
    """Refuse a folder whose weights are only in a file that can run code when it is opened."""
    pickle = next((name for name in PICKLES if (folder / name).exists()), None)
    if pickle is not None and not any(folder.glob("*.safetensors")):
        message = f"{folder} holds weights only as {pickle}, a pickle, which can run code (expected {WHOLE})"
        raise UserError(message, "save them in safetensors, where you trust the file: model.save_pretrained(FOLDER)")


def check_slice(folder: Path, name: str, found: Any, shape: tuple[int, ...]) -> None:
    """Refuse a tensor that is missing, or has another shape or dtype than the configuration's."""
    if found is None:
        raise UserError(f"{folder}: tensor {name} is missing", DAMAGED, exit_code=1)
    if tuple(found.get_shape()) != shape:
        message = f"{folder}: tensor {name} has shape {found.get_shape()} (expected {list(shape)}, by its {CONFIG})"
        raise UserError(message, "weights and configuration do not belong together")
    if found.get_dtype() not in FLOATS:
        message = f"{folder}: tensor {name} is {found.get_dtype()} (expected {', '.join(FLOATS)})"
        raise UserError(message, "save the model without quantization")


def check_tied(folder: Path, architecture: Architecture, recipe: Recipe, slices: dict[str, Any]) -> None:
    """Refuse a head of its own in a model whose head is its embedding, unless they are equal."""
    head = slices.get(architecture.HEAD)
    if not recipe.model.tie_embeddings or head is None:
        return
    (embedding,) = next(iter(parts_of(architecture, recipe.model))).sources
    if not same(head, slices[embedding]):
        message = f"{folder}: {architecture.HEAD} differs from the embedding, although tie_word_embeddings is true"
        raise UserError(message, f"set tie_word_embeddings to false in {CONFIG}, if the model has a head of its own")


def write_run(path: Path, found: Pretrained, source: str) -> int:
    """Write a pretrained model as a run with one checkpoint, at step 0, completely or not at all.

    Args:
        path: of the run directory, which does not exist or is empty.
        source: the folder, as run.json names it.

    Returns:
        the number of its parameters.

    Raises:
        UserError: (exit code 1) it cannot be written.
    """
    recipe, tokenizer = found.recipe, found.tokenizer
    rows = recipe.model.vocab_size or 0
    parameters = cost_of(recipe, rows).as_json()["parameters"]
    progress = Progress(vocab_size=rows, parameters=parameters, data={"tokenizer": tokenizer.sha256})
    with writing_folder(path, replace=path.is_dir()) as folder:
        run = RunDirectory(folder)
        run.create(recipe)
        run.write_tokenizer(tokenizer.file, tokenizer.model_bytes)
        with Saver(run, recipe, ProcessGroups(), say=lambda line: None) as saver:
            saver.save(progress, found.tensors(), {}, {}, {}, committed=lambda seconds: None)
            saver.wait()
        for pointer in ("latest", "best"):
            run.set_pointer(pointer, 0)
        origin = {
            "folder": source,
            "architecture": found.architecture,
            "config_sha256": sha256_of(Path(source) / CONFIG),
        }
        versions = {"pkmlm": __version__, "torch": torch.__version__}
        run.write_facts(status=IMPORTED, exit_code=0, imported=origin, versions=versions, parameters=parameters)
    return int(parameters["dense"])
