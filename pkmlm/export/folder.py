"""A model as a folder for `transformers`: config.json, weights, tokenizer, the code that runs them, and a card.

The weights have the names of our own model below "model."; an untied head is "lm_head". A table in 8 or 4 bits,
`weight_KD`, is stored as `codes_KC` and `scale_K` (`kernels.reference.Quantized`). manifest.json holds the size
and sha256 of each file except the card and generation_config.json, which the user may edit.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from typing_extensions import TypedDict

from pkmlm.data.canonical import ids_sha256
from pkmlm.data.tokenizer import Tokenizer
from pkmlm.data.tokenizer_file import TOKENIZERS, tokenizer_file
from pkmlm.device import DTYPES, is_finite
from pkmlm.errors import UserError
from pkmlm.export.bundle import MODEL, TOKENIZER, bundle
from pkmlm.export.config import (
    CONFIG,
    MODEL_TYPE,
    Origin,
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
from pkmlm.model.transformer import Transformer, build_model, kept_in_fp32
from pkmlm.recipe.constraints import require_softmax
from pkmlm.recipe.schema import Recipe
from pkmlm.runs.checkpoint import check_tensors, open_safetensors, write_tensors

VERSION = 1
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
TOKENIZER_CONFIG = "tokenizer_config.json"
OTHERS = {INDEX, "generation_config.json", TOKENIZER_CONFIG, "README.md"}
TABLE = "weight_KD"  # the last part of the name of a table
BLOCK = 1 << 16  # rows quantized at a time
HINT = "it is damaged or was changed: export the run again"
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
    known = {*bundle(*MODEL, TOKENIZER), CONFIG, *TOKENIZERS, MANIFEST, *OTHERS, *listed(path)}
    foreign = [name for name in entries if name not in known and not SHARD.fullmatch(name)]
    if foreign:
        raise UserError(f"-o {path} holds {foreign[0]}, which no export wrote", "choose another folder")
    try:
        found = read_json(path / CONFIG, "the model's configuration").get("model_type")
    except (UserError, AttributeError):
        found = None
    if entries and found != MODEL_TYPE:
        expected = f"expected {CONFIG} with model_type {MODEL_TYPE!r}"
        raise UserError(f"-o {path} is not an export that --force could replace ({expected})", "choose another folder")


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
    dtype: str = "fp32",
    table_bits: int | None = None,
    force: bool = False,
) -> int:
    """Write a model, completely or not at all; return the size of its weights in bytes.

    Args:
        path: the folder; see `check_free` for what it may hold.
        card: the text of README.md.
        dtype: of the weights: "fp32", "bf16" or "fp16"; what memories have besides tables stays in fp32.
        table_bits: of an entry of a table, 8 or 4; None: tables are in `dtype`.

    Raises:
        UserError: `path` is not free; the attention is not softmax; (exit code 1) a weight does not fit the dtype, or
            the folder cannot be written.
    """
    check_free(path, force)
    require_softmax(recipe.model, origin.run, "be exported")
    rows = model.embedding.num_embeddings
    with writing_folder(path, replace=force) as folder:
        write_weights(folder / WHOLE, model, dtype, table_bits)
        size = (folder / WHOLE).stat().st_size
        hashes = ids_hashes(model)
        write_json(folder / CONFIG, config_of(recipe, rows, tokenizer, origin, dtype, table_bits, hashes))
        spare = list(range(tokenizer.size, rows))  # rows of the embedding without a piece
        generation = special_ids(tokenizer) | ({"suppress_tokens": spare} if spare else {})
        write_json(folder / "generation_config.json", generation)
        settings = tokenizer_config(tokenizer, recipe.model.context)
        write_json(folder / TOKENIZER_CONFIG, settings)
        with writing(folder / tokenizer.file) as file:
            file.write(tokenizer.model_bytes)
        code = bundle(*MODEL, *([TOKENIZER] if "auto_map" in settings else []))
        for name, text in code.items():
            write_text(folder / name, text)
        write_text(folder / "README.md", card)
        hashed = [WHOLE, CONFIG, tokenizer.file, TOKENIZER_CONFIG, *code]
        entries = {name: entry_of(folder / name) for name in hashed}
        write_json(folder / MANIFEST, {"version": VERSION, "files": entries})
    return size


def ids_hashes(model: Transformer) -> dict[str, str]:
    """The sha256 of each map of token ids."""
    return {name: ids_sha256(ids.get_buffer("ids_V").cpu()) for name, ids in model.token_ids.items()}


def exported_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of our model that an export holds, by their names there."""
    return {
        name.replace("untied_head.", "lm_head.") if name.startswith("untied_head.") else f"model.{name}": tensor
        for name, tensor in model.state_dict().items()
    }


def write_weights(file: Path, model: nn.Module, dtype: str, table_bits: int | None) -> None:
    """Write the weights.

    Raises:
        UserError: (exit code 1) a weight does not fit the dtype.
    """
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
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            raise UserError(f"{name} does not fit {dtype}", "use --dtype fp32 or bf16", exit_code=1)
    write_tensors(file, tensors, {"format": "pt"})


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
        tokenizer = Tokenizer.load(tokenizer_file(path))
    except UserError as error:
        raise UserError(error.message, error.hint or HINT, exit_code=1) from None
    rows = recipe.model.vocab_size or tokenizer.size
    with open_weights(path, exported_tensors(build_model(recipe, rows, "meta", table_bits=table_bits))) as weights:
        model = build_model(recipe, rows, device, init_weights=False, table_bits=table_bits)
        with torch.no_grad():
            for name, tensor in exported_tensors(model).items():
                tensor.copy_(weights[name][...])
    if ids_hashes(model) != read_json(path / CONFIG, "the model's configuration").get("ids_sha256"):
        raise UserError(f"{path}: its ids of tokens do not match {CONFIG} (ids_sha256)", HINT, exit_code=1)
    return Export(recipe, origin, model.eval(), tokenizer)


def verify(path: Path) -> None:
    """Check the files that manifest.json lists.

    Raises:
        UserError: (exit code 1) one is missing or was changed, or the manifest is not one of this version of an export.
    """
    files = read_manifest(path, "export", VERSION, CHANGED, version_exit_code=1)["files"]
    if CONFIG not in files or files.keys().isdisjoint(TOKENIZERS) or any("/" in name for name in files):
        raise UserError(f"{path / MANIFEST} is not the manifest of an export", CHANGED, exit_code=1)
    for name in files:
        if not (path / name).exists():  # deleting the manifest would not help
            raise UserError(f"{path / name} is missing", HINT, exit_code=1)
    check_files(path, files, files, CHANGED)


@contextlib.contextmanager
def open_weights(path: Path, expected: dict[str, Tensor]) -> Iterator[dict[str, Any]]:
    """The weights of a folder by name, as slices of its open files.

    Args:
        expected: tensors with the names, shapes and kinds that the weights must have; meta tensors will do.

    Raises:
        UserError: (exit code 1) a file is missing or damaged, or holds other tensors.
    """
    names = {WHOLE}
    if (path / INDEX).exists() and not (path / WHOLE).exists():
        index = read_json(path / INDEX, "the index of the weights", HINT, exit_code=1, schema=WeightIndex)
        names = set(index["weight_map"].values())
        if not all(map(SHARD.fullmatch, names)):
            raise UserError(f"{path / INDEX} is not an index of weights", HINT, exit_code=1)
    with contextlib.ExitStack() as stack:
        try:
            files = [stack.enter_context(open_safetensors(path / name)) for name in names]
        except (SafetensorError, OSError) as error:
            raise UserError(f"cannot read the weights of {path}: {error}", HINT, exit_code=1) from None
        found = {name: file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118
        shapes = {name: list(tensor.shape) for name, tensor in expected.items()}
        dtypes = {name: CODES.get(tensor.dtype, FLOATS) for name, tensor in expected.items()}
        check_tensors(path, found, shapes, dtypes, hint=HINT, exit_code=1)
        yield found
