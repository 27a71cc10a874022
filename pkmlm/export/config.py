"""config.json of an exported model: from a recipe to a `transformers` configuration, and back."""

import base64
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pkmlm.data.tokenizer_file import KEPT, SENTENCEPIECE_FILE
from pkmlm.errors import UserError
from pkmlm.files import read_json
from pkmlm.model.convert import ARCHITECTURES, Architecture
from pkmlm.recipe.constraints import check_recipe
from pkmlm.recipe.load import bind, merge
from pkmlm.recipe.nodes import Node
from pkmlm.recipe.schema import Model, Recipe

if TYPE_CHECKING:
    from pkmlm.data.tokenizer import Tokenizer

CONFIG = "config.json"
ATTACHED = "attached.json"  # in the folder of what is attached to a `transformers` model
CODE = ("configuration_pkmlm.py", "modeling_pkmlm.py")  # and the files of pkmlm that they import
MODEL_TYPE = "pkmlm"
TABLE_BITS = (8, 4)
DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class Origin(NamedTuple):
    """Where exported weights come from: the name of the run, its step, and the tokens trained on until then."""

    run: str
    step: int
    tokens: int


def is_attached(path: Path) -> bool:
    """Whether a folder holds what is attached to a `transformers` model."""
    return (path / ATTACHED).is_file()


def is_export(path: Path) -> bool:
    """Whether a folder is an export, even an incomplete one, or holds what is attached to a `transformers` model: no
    results are written into it. A run directory is neither."""
    return any((path / name).is_file() for name in (CONFIG, *CODE, ATTACHED)) and not (path / "recipe.yaml").exists()


def is_pretrained(path: Path) -> bool:
    """Whether a folder holds a model of an architecture that transformers has, and that is read without its code."""
    try:
        config = read_json(path / CONFIG, "the model's configuration")
    except UserError:
        return False
    return isinstance(config, dict) and str(config.get("model_type")) in ARCHITECTURES


def config_of(
    recipe: Recipe,
    rows: int,
    tokenizer: "Tokenizer",
    origin: Origin,
    dtype: str,
    table_bits: int | None,
) -> dict[str, Any]:
    """The content of config.json: the recipe's `model` key by key, the rest of the recipe under `trained`, with what
    `model` says about training.

    Args:
        rows: of the embedding.
        dtype: of the weights, a key of `DTYPE_NAMES`.
        table_bits: of an entry of a table, one of `TABLE_BITS`; None: tables are in `dtype`.
    """
    whole = asdict(recipe)
    shape = whole["model"] | {"vocab_size": rows}
    del shape["attention_options"]  # softmax has none
    learning = {name: {"optim": memory.pop("optim")} for name, memory in shape["memories"].items()}
    return {
        "architectures": ["PkmlmForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_pkmlm.PkmlmConfig",
            "AutoModel": "modeling_pkmlm.PkmlmModel",
            "AutoModelForCausalLM": "modeling_pkmlm.PkmlmForCausalLM",
        },
        "model_type": MODEL_TYPE,
        "dtype": DTYPE_NAMES[dtype],
        "table_bits": table_bits,
        **special_ids(tokenizer),
        **shape,
        "trained": {**origin._asdict(), "recipe": whole | {"model": {"memories": learning}}},
    }


def config_as(
    architecture: Architecture, recipe: Recipe, section: Model, tokenizer: "Tokenizer", origin: Origin, dtype: str
) -> dict[str, Any]:
    """The content of config.json of a model of an architecture that transformers has.

    Args:
        section: the recipe's, with `vocab_size`; it is of this architecture.
    """
    return {
        "architectures": [architecture.CLASS],
        "model_type": architecture.TYPE,
        "dtype": DTYPE_NAMES[dtype],
        **special_ids(tokenizer),
        **(architecture.config(section) or {}),
        "trained": {**origin._asdict(), "recipe": {"data": asdict(recipe.data)}},
    }


def special_ids(tokenizer: "Tokenizer") -> dict[str, int]:
    """The special tokens."""
    return {
        "bos_token_id": tokenizer.begin,
        "eos_token_id": tokenizer.eos,
        "pad_token_id": tokenizer.pad,
    }


def tokenizer_config(tokenizer: "Tokenizer", context: int) -> dict[str, Any]:
    """The content of tokenizer_config.json; a model that continues texts is padded on the left."""
    named = {"bos": tokenizer.begin, "eos": tokenizer.eos, "pad": tokenizer.pad, "unk": tokenizer.unknown}
    found: dict[str, Any] = {f"{name}_token": tokenizer.piece(i) for name, i in named.items() if i >= 0}
    if tokenizer.file == SENTENCEPIECE_FILE:
        found[KEPT] = base64.b64encode(tokenizer.model_bytes).decode()
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **found,
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": context,
        "padding_side": "left",
    }


def read_config(path: Path) -> tuple[Recipe, Origin, int | None]:
    """The recipe, the origin and the bits of tables in a config.json; missing keys have the recipe's defaults.

    Raises:
        UserError: another kind of model; (exit code 1) not a model's configuration, or a model that cannot be built.
    """
    config = read_json(path, "the model's configuration", exit_code=1)
    found = config.get("model_type") if isinstance(config, dict) else None
    if found != MODEL_TYPE:
        message = f"{path}: model_type {found!r} (expected {MODEL_TYPE!r})"
        raise UserError(message, "`pkmlm export` writes such folders", exit_code=1 if found is None else 2)
    table_bits = config.get("table_bits")
    if table_bits not in (None, *TABLE_BITS):
        raise UserError(f"{path}: table_bits: found {table_bits!r} (expected null, 8 or 4)", exit_code=1)
    shape = {field.name: config[field.name] for field in fields(Model) if field.name in config}
    places: dict[str, str] = {}
    try:
        rest = trained_of(config).get("recipe") or {}
        tree = merge(node_of(rest, str(path)), node_of({"model": shape}, str(path)))
        recipe: Recipe = bind(tree, Recipe, "", places)
        return check_recipe(recipe, places), origin_of(config, path.parent), table_bits
    except UserError as error:
        raise UserError(error.message, error.hint, exit_code=1) from None
    except RecursionError:
        raise UserError(f"{path}: nested too deeply", exit_code=1) from None


def trained_of(config: dict[str, Any]) -> dict[str, Any]:
    """What a configuration says of the model's training: its run, step and tokens, and the rest of its recipe."""
    found = config.get("trained")
    return found if isinstance(found, dict) else {}


def origin_of(config: dict[str, Any], folder: Path) -> Origin:
    """Where the weights of a folder come from: without a run, the folder itself."""
    trained = trained_of(config)
    return Origin(trained.get("run") or folder.resolve().name, trained.get("step") or 0, trained.get("tokens") or 0)


def node_of(value: Any, place: str) -> Node:
    """A JSON value as a recipe's node."""
    if isinstance(value, dict):
        return Node({key: node_of(child, place) for key, child in value.items()}, place)
    if isinstance(value, list):
        return Node([node_of(child, place) for child in value], place)
    return Node(value, place, quoted=True) if isinstance(value, str) else Node(json.dumps(value), place)
