"""config.json of an exported model: from a recipe to a `transformers` configuration, and back."""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from typing_extensions import NotRequired, TypedDict

from pkmlm.errors import UserError
from pkmlm.files import check_json, read_json
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


class Trained(TypedDict):
    """What config.json holds about the model's training."""

    recipe: NotRequired[dict[str, Any] | None]
    run: NotRequired[str | None]
    step: NotRequired[int | None]
    tokens: NotRequired[int | None]


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


def config_of(
    recipe: Recipe,
    rows: int,
    tokenizer: "Tokenizer",
    origin: Origin,
    dtype: str,
    table_bits: int | None,
    ids_sha256: dict[str, str],
) -> dict[str, Any]:
    """The content of config.json: the recipe's `model` key by key, the rest of the recipe under `trained`, with what
    `model` says about training.

    Args:
        rows: of the embedding.
        dtype: of the weights, a key of `DTYPE_NAMES`.
        table_bits: of an entry of a table, one of `TABLE_BITS`; None: tables are in `dtype`.
        ids_sha256: of the maps of token ids that memories read by, by their kinds.
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
        "ids_sha256": ids_sha256,
        **special_ids(tokenizer),
        **shape,
        "trained": {**origin._asdict(), "recipe": whole | {"model": {"memories": learning}}},
    }


def special_ids(tokenizer: "Tokenizer") -> dict[str, int]:
    """The special tokens: the end-of-document token begins and ends a text."""
    return {
        "bos_token_id": tokenizer.eos,
        "eos_token_id": tokenizer.eos,
        "pad_token_id": tokenizer.pad,
    }


def tokenizer_config(tokenizer: "Tokenizer", context: int) -> dict[str, Any]:
    """The content of tokenizer_config.json; a model that continues texts is padded on the left."""
    return {**tokenizer.transformers_config, "model_max_length": context, "padding_side": "left"}


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
    trained = config.get("trained", {})
    try:
        check_json(trained, Trained)
    except TypeError as problem:
        raise UserError(f"{path}: trained: {problem}", exit_code=1) from None
    table_bits = config.get("table_bits")
    if table_bits not in (None, *TABLE_BITS):
        raise UserError(f"{path}: table_bits: found {table_bits!r} (expected null, 8 or 4)", exit_code=1)
    origin = Origin(trained.get("run") or path.parent.name, trained.get("step") or 0, trained.get("tokens") or 0)
    shape = {field.name: config[field.name] for field in fields(Model) if field.name in config}
    places: dict[str, str] = {}
    try:
        tree = merge(node_of(trained.get("recipe") or {}, str(path)), node_of({"model": shape}, str(path)))
        recipe: Recipe = bind(tree, Recipe, "", places)
        return check_recipe(recipe, places), origin, table_bits
    except UserError as error:
        raise UserError(error.message, error.hint, exit_code=1) from None
    except RecursionError:
        raise UserError(f"{path}: nested too deeply", exit_code=1) from None


def node_of(value: Any, place: str) -> Node:
    """A JSON value as a recipe's node."""
    if isinstance(value, dict):
        return Node({key: node_of(child, place) for key, child in value.items()}, place)
    if isinstance(value, list):
        return Node([node_of(child, place) for child in value], place)
    return Node(value, place, quoted=True) if isinstance(value, str) else Node(json.dumps(value), place)
