"""A model as a folder for `transformers`: config.json, weights, tokenizer, the code that runs them, and a card. A dense
model of an architecture that transformers has is written as that: without code, as other programs read it, too.

With our code, the weights have the names of our own model below "model."; an untied head is "lm_head". A table in 8 or
4 bits, `weight_KD`, is stored as `codes_KC` and `scale_K` (`kernels.reference.Quantized`). manifest.json holds the size
and sha256 of each file except the card and generation_config.json, which the user may edit.
"""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from typing_extensions import TypedDict

from pkmlm.data.tokenizer import Tokenizer
from pkmlm.data.tokenizer_file import BYTE_LEVEL_FILE, TOKENIZER_CONFIG, TOKENIZERS
from pkmlm.device import DTYPES, is_finite
from pkmlm.errors import UserError
from pkmlm.export.bundle import MODEL, bundle
from pkmlm.export.config import (
    CONFIG,
    MODEL_TYPE,
    Origin,
    config_as,
    config_of,
    read_config,
    special_ids,
    tokenizer_config,
)
from pkmlm.files import (
    MANIFEST,
    check_files,
    entry_of,
    read_json,
    read_manifest,
    write_json,
    write_text,
    writing,
    writing_folder,
)
from pkmlm.kernels.reference import quantize
from pkmlm.model.convert import ARCHITECTURES, Architecture, parts_of
from pkmlm.model.transformer import Transformer, build_model, kept_in_fp32
from pkmlm.recipe.constraints import require_softmax
from pkmlm.recipe.schema import Model, Recipe
from pkmlm.runs.checkpoint import check_tensors, open_safetensors, write_tensors

VERSION = 1
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHTS = re.compile(r"model(\.\w+)?\.safetensors|model\.safetensors\.index(\.\w+)?\.json")
SHARD = re.compile(r"model(\.\w+)?(-\d{5}-of-\d{5})?\.safetensors")
EMBEDDING, HEAD = "model.embedding.weight", "lm_head.weight"
# What DistributedDataParallel, torch.compile and FSDP put into names.
WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module"}
OTHERS = {INDEX, "generation_config.json", TOKENIZER_CONFIG, "README.md"}
TABLE = "weight_KD"  # the last part of the name of a table
BLOCK = 1 << 16  # rows quantized at a time
HINT = "it is damaged or was changed: export the run again"
SAVE_AGAIN = "save the whole model and its tokenizer with save_pretrained, without adapters or attached memories"
CHANGED = f"{HINT}, or delete {MANIFEST} to use it as it is"
# Types of weights that are read, under the names of safetensors.
FLOATS = ("F64", "F32", "BF16", "F16")
CODES = {torch.int8: ("I8",), torch.uint8: ("U8",), torch.int64: ("I64",)}


def check_free(path: Path, force: bool) -> None:
    """Refuse a folder if something in it would be lost.

    Raises:
        UserError: it is a file; it is not empty, and `force` is false, it is not an export, or it holds other files.
    """
    if path.exists() and not path.is_dir():
        raise UserError(f"-o {path} is a file (expected a folder)")
    entries = sorted(entry.name for entry in path.iterdir()) if path.exists() else []
    if entries and not force:
        raise UserError(f"-o {path} is not empty", "choose another folder, or add --force to replace an export")
    known = {*bundle(*MODEL), CONFIG, *TOKENIZERS, MANIFEST, *OTHERS, *listed(path)}
    foreign = [name for name in entries if name not in known and not (SHARD.fullmatch(name) or WEIGHTS.fullmatch(name))]
    if foreign:
        raise UserError(f"-o {path} holds {foreign[0]}, which no export wrote", "choose another folder")
    try:
        found = read_json(path / CONFIG, "the model's configuration").get("model_type")
    except (UserError, AttributeError):
        found = None
    ours = found == MODEL_TYPE or (found in ARCHITECTURES and (path / MANIFEST).exists())
    if entries and not ours:
        message = f"-o {path} is not an export that --force could replace (expected what `pkmlm export` wrote)"
        raise UserError(message, "choose another folder")


def listed(path: Path) -> list[str]:
    """What the manifest of an export lists, if there is one: another release of pkmlm may have other files of code."""
    try:
        return [*read_json(path / MANIFEST, "the manifest")["files"]]
    except (UserError, TypeError, KeyError):
        return []


def write_export(
    path: Path,
    model: Transformer,
    recipe: Recipe,
    tokenizer: Tokenizer,
    origin: Origin,
    card: str,
    *,
    architecture: Architecture | None = None,
    dtype: str = "fp32",
    table_bits: int | None = None,
    force: bool = False,
) -> int:
    """Write a model, completely or not at all; return the size of its weights in bytes.

    Args:
        path: the folder; see `check_free` for what it may hold.
        card: the text of README.md.
        architecture: of transformers, as which the model is written (see `architecture_of`); None: with our code.
        dtype: of the weights: "fp32", "bf16" or "fp16"; what memories have besides tables stays in fp32.
        table_bits: of an entry of a table, 8 or 4; None: tables are in `dtype`.

    Raises:
        UserError: `path` is not free; the attention is not softmax; (exit code 1) a weight does not fit the dtype, or
            the folder cannot be written.
    """
    check_free(path, force)
    require_softmax(recipe.model, origin.run, "be exported")
    rows = model.embedding.num_embeddings
    if architecture is None:
        weights = weights_of(model, dtype, table_bits)
        config = config_of(recipe, rows, tokenizer, origin, dtype, table_bits)
        code = bundle(*MODEL)
    else:
        section = replace(recipe.model, vocab_size=rows)
        weights = weights_as(architecture, section, model, dtype)
        config = config_as(architecture, recipe, section, tokenizer, origin, dtype)
        code = {}
    files = {tokenizer.file: tokenizer.model_bytes, BYTE_LEVEL_FILE: tokenizer.as_json()}
    for name, tensor in weights.items():
        if not is_finite(tensor):
            raise UserError(f"{name} does not fit {dtype}", "use --dtype fp32 or bf16", exit_code=1)
    with writing_folder(path, replace=force) as folder:
        write_tensors(folder / WHOLE, weights, {"format": "pt"})
        size = (folder / WHOLE).stat().st_size
        write_json(folder / CONFIG, config)
        spare = list(range(tokenizer.size, rows))  # rows of the embedding without a piece
        generation = special_ids(tokenizer) | ({"suppress_tokens": spare} if spare else {})
        write_json(folder / "generation_config.json", generation)
        write_json(folder / TOKENIZER_CONFIG, tokenizer_config(tokenizer, recipe.model.context))
        for name, content in files.items():
            with writing(folder / name) as file:
                file.write(content)
        for name, text in code.items():
            write_text(folder / name, text)
        write_text(folder / "README.md", card)
        hashed = [WHOLE, CONFIG, TOKENIZER_CONFIG, *files, *code]
        entries = {name: entry_of(folder / name) for name in hashed}
        write_json(folder / MANIFEST, {"version": VERSION, "files": entries})
    return size


def exported_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of our model that an export holds, by their names there."""
    return {
        name.replace("untied_head.", "lm_head.") if name.startswith("untied_head.") else f"model.{name}": tensor
        for name, tensor in model.state_dict().items()
    }


def weights_of(model: nn.Module, dtype: str, table_bits: int | None) -> dict[str, Tensor]:
    """The weights of an export with our code, by their names there."""
    tensors: dict[str, Tensor] = {}
    whole = {f"model.{name}" for name in kept_in_fp32(model)}
    for name, tensor in exported_tensors(model).items():
        if table_bits is not None and name.endswith(TABLE):
            parts = [quantize(block, table_bits) for block in tensor.split(BLOCK)]
            tensors[name.replace(TABLE, "codes_KC")] = torch.cat([part.codes_KC for part in parts])
            tensors[name.replace(TABLE, "scale_K")] = torch.cat([part.scale_K for part in parts])
        else:
            kept = DTYPES["fp32" if name in whole else dtype]
            tensors[name] = (tensor.to(kept) if tensor.is_floating_point() else tensor).contiguous()
    return tensors


def weights_as(architecture: Architecture, section: Model, model: nn.Module, dtype: str) -> dict[str, Tensor]:
    """The weights of a model of an architecture of transformers, by their names there.

    Args:
        section: the recipe's, with `vocab_size`.
    """
    ours, found = model.state_dict(), {}
    for part in parts_of(architecture, section):
        for name, tensor in zip(part.sources, part.split(ours[part.name]), strict=True):
            found[name] = tensor.to(DTYPES[dtype]).contiguous()
    return found


class WeightIndex(TypedDict):
    """What the index must hold if the weights are in several files, as `transformers` saves large models."""

    weight_map: dict[str, str]


class Export(NamedTuple):
    """What a folder holds; `model` is in evaluation mode and in fp32, except for tables in few bits."""

    recipe: Recipe
    origin: Origin
    model: Transformer
    tokenizer: Tokenizer


def read_export(path: Path, device: torch.device) -> Export:
    """Read an exported model; no code in the folder is run, and `transformers` is not needed.

    Files are checked against manifest.json. A folder without one (a model that `transformers` has saved, say) is read
    as it is.

    Raises:
        UserError: another kind of model; (exit code 1) it is incomplete, damaged or changed.
    """
    if not (path / CONFIG).is_file():
        raise UserError(f"{path / CONFIG} is missing", HINT, exit_code=1)
    if (path / MANIFEST).exists():
        verify(path)
    recipe, origin, table_bits = read_config(path / CONFIG)
    try:
        tokenizer = Tokenizer.load(path)
    except UserError as error:
        raise UserError(error.message, error.hint or hint_of(path), exit_code=1) from None
    rows = recipe.model.vocab_size or tokenizer.size
    with open_slices(path, "model.", HEAD) as weights:
        check_weights(path, weights, recipe, rows, table_bits)
        model = build_model(recipe, rows, device, init_weights=False, table_bits=table_bits)
        with torch.no_grad():
            for name, tensor in exported_tensors(model).items():
                tensor.copy_(weights[name][...])
    return Export(recipe, origin, model.eval(), tokenizer)


def verify(path: Path) -> None:
    """Check the files that manifest.json lists.

    Raises:
        UserError: the export is of another version; (exit code 1) a file is missing or was changed.
    """
    files = read_manifest(path, "export", VERSION, CHANGED)["files"]
    if CONFIG not in files or files.keys().isdisjoint(TOKENIZERS) or any("/" in name for name in files):
        raise UserError(f"{path / MANIFEST} is not the manifest of an export", CHANGED, exit_code=1)
    for name in files:
        if not (path / name).exists():  # deleting the manifest would not help
            raise UserError(f"{path / name} is missing", HINT, exit_code=1)
    check_files(path, files, files, CHANGED)


def weight_files(path: Path) -> set[str]:
    """The names of the files of weights of a folder: one, or those that an index lists; with the name of a variant in
    them, if `transformers` was given one ("model.fp16.safetensors").

    Raises:
        UserError: (exit code 1) there are none, or several models' worth of them; the index is damaged.
    """
    found = sorted(file.name for file in path.iterdir() if WEIGHTS.fullmatch(file.name))
    if len(found) != 1:
        several = f"holds {' and '.join(found)}, which may be of different models (expected one of them)"
        reason = several if found else f"has no weights (expected {WHOLE} or {INDEX})"
        raise UserError(f"{path} {reason}", "delete those that are old" if found else hint_of(path), exit_code=1)
    if not found[0].endswith(".json"):
        return {*found}
    index = read_json(path / found[0], "the index of the weights", hint_of(path), exit_code=1, schema=WeightIndex)
    names = set(index["weight_map"].values())
    if not all(map(SHARD.fullmatch, names)):
        raise UserError(f"{path / found[0]} is not an index of weights", hint_of(path), exit_code=1)
    return names


@contextlib.contextmanager
def open_slices(path: Path, prefix: str, head: str) -> Iterator[dict[str, Any]]:
    """The weights of a folder as slices of its open files, by their names without those of modules that wrapped the
    model when its state dict was taken.

    Args:
        prefix: of the names of all weights but `head`; added where the model was saved without its head.

    Raises:
        UserError: (exit code 1) a file is missing or damaged.
    """
    with contextlib.ExitStack() as stack:
        names = weight_files(path)
        if missing := sorted(name for name in names if not (path / name).exists()):
            raise UserError(f"{path / missing[0]} is missing", "copy the folder again", exit_code=1)
        try:
            files = [stack.enter_context(open_safetensors(path / name)) for name in sorted(names)]
        except (SafetensorError, OSError) as error:
            raise UserError(f"cannot read the weights of {path}: {error}", hint_of(path), exit_code=1) from None
        found = {unwrapped(name): file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118
        if not any(name.startswith(prefix) for name in found):
            found = {name if name == head else f"{prefix}{name}": each for name, each in found.items()}
        yield found


def unwrapped(name: str) -> str:
    """The name of a tensor without those of wrappers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def check_weights(path: Path, weights: dict[str, Any], recipe: Recipe, rows: int, table_bits: int | None) -> None:
    """Check that the weights of a folder are those of a model, before anything of its size is built, and leave out a
    tied head that is stored beside or instead of the embedding.

    Args:
        weights: slices of safetensors files.
        recipe, rows, table_bits: of the model, its embedding and its tables.

    Raises:
        UserError: (exit code 1) they are others.
    """
    expected = exported_tensors(build_model(recipe, rows, "meta", table_bits=table_bits))
    if HEAD not in expected and HEAD in weights:
        head = weights.pop(HEAD)
        if not same(head, weights.setdefault(EMBEDDING, head)):
            message = f"{path}: {HEAD} is not {EMBEDDING} (expected the same: tie_embeddings is true in {CONFIG})"
            raise UserError(message, "if the model has a head of its own, set it to false", exit_code=1)
    shapes = {name: list(tensor.shape) for name, tensor in expected.items()}
    dtypes = {name: CODES.get(tensor.dtype, FLOATS) for name, tensor in expected.items()}
    check_tensors(path, weights, shapes, dtypes, hint=hint_of(path), exit_code=1)


def hint_of(path: Path) -> str:
    """What to do about weights of a folder that do not fit its configuration."""
    return HINT if (path / MANIFEST).exists() else SAVE_AGAIN


def same(one: Any, other: Any) -> bool:
    """Whether two slices of safetensors files hold the same numbers."""
    return one.get_shape() == other.get_shape() and bool((one[...] == other[...]).all())
