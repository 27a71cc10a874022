"""The layers that can be attached: memories of most kinds, from a recipe's keys or made by the user, and their control.

B: sequences; T: positions; D: model width.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn.functional import silu

from pkmlm.errors import UserError
from pkmlm.kernels.matmul import Linear
from pkmlm.memory.key_memory import KeyMemory
from pkmlm.memory.ngram.layer import NGramMemory
from pkmlm.memory.table import Pool
from pkmlm.model.transformer import KEY_MEMORIES
from pkmlm.recipe.constraints import Check, check_ngram
from pkmlm.recipe.schema import Memory, Model, NGram, expectation

DENSE, NGRAM = "dense", "ngram"
KINDS = (*KEY_MEMORIES, NGRAM)
Layer = KeyMemory | NGramMemory


class SwiGLU(nn.Module):
    """W3 (silu(W1 x) * W2 x), the control for a memory: a dense layer with as many operations (Shazeer 2020, eq. 6).

    Args:
        dim: width of the input and of the output (D).
        inner: width of the hidden layer.
    """

    def __init__(self, dim: int, inner: int):
        super().__init__()
        self.gate, self.up = (Linear(dim, inner, initial_std=dim**-0.5) for _ in range(2))
        self.down = Linear(inner, dim, initial_std=inner**-0.5)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        return self.down(silu(self.gate(x_BTD)) * self.up(x_BTD))


def settings_of(memory: object) -> tuple[str, dict[str, Any]]:
    """The kind of a memory and its arguments that differ from the defaults.

    Queries are normalised one by one ("rms" unless "layer" or "none" is chosen): batch statistics would let padding
    and the other texts of a batch change what a token reads.

    Args:
        memory: a recipe's keys, or a layer.

    Raises:
        UserError: it is neither; an unknown key, a value out of its range, or query_norm: batch.
    """
    checked: Memory | NGram
    if isinstance(memory, Layer):
        checked, kind = memory.spec, memory.tap.kind
    elif isinstance(memory, Mapping):
        kind, checked = _checked(dict(memory))
    else:
        known: list[type] = [*KEY_MEMORIES.values(), NGramMemory]
        layers = ", ".join(each.__name__ for each in known)
        found = type(memory).__name__ if isinstance(memory, nn.Module) else repr(memory)
        raise UserError(f"memory is {found} (expected a recipe's keys, a folder, or one of {layers})")
    if isinstance(checked, Memory) and checked.query_norm == "batch":
        hint = "use rms, or layer: batch statistics let padding change what a token reads"
        raise UserError("memory: query_norm is batch (expected rms, layer or none)", hint)
    default = asdict(type(checked)())
    chosen = {key: value for key, value in asdict(checked).items() if key != "kind" and value != default[key]}
    return kind, {key: list(value) if isinstance(value, tuple) else value for key, value in chosen.items()}


def _checked(given: dict[str, Any]) -> tuple[str, Memory | NGram]:
    kind = given.pop("kind", None)
    if kind not in KINDS:
        raise UserError(f"memory: kind is {kind} (expected {', '.join(KINDS)})")
    if "layers" in given:
        raise UserError("memory: layers is no key here", "give the blocks as the argument `layers`")
    try:
        return kind, ngram_spec(given) if kind == NGRAM else Memory(kind=kind, **{"query_norm": "rms", **given})
    except ValidationError as problem:
        error = problem.errors(include_url=False)[0]
        key = ".".join(map(str, error["loc"]))
        if error["type"] == "unexpected_keyword_argument":
            keys = [field.name for field in fields(NGram if kind == NGRAM else Memory) if field.name != "layers"]
            near = difflib.get_close_matches(key.lower(), keys, n=1)
            meant = f" (did you mean {near[0]}?)" if near else ""
            raise UserError(f"memory: unknown key {key}{meant}", f"known keys: {', '.join(keys)}") from None
        raise UserError(f"memory: {key} is {error['input']!r} (expected {expectation(error)})") from None


def ngram_spec(arguments: Mapping[str, Any]) -> NGram:
    """The recipe's section of an n-gram memory, from keys whose tuples may be lists.

    Raises:
        pydantic.ValidationError: a key is unknown, or a value is out of its range.
    """
    given: dict[str, Any] = {key: tuple(each) if isinstance(each, list) else each for key, each in arguments.items()}
    return NGram(**given)


def make_layers(
    kind: str, arguments: Mapping[str, Any], dim: int, layers: Sequence[int]
) -> tuple[dict[int, nn.Module], Pool | None]:
    """A layer for each of the blocks `layers`, without initial weights, and the tables that they share, if they do.

    Args:
        kind, arguments: as `settings_of` returns them; or of the control.
        dim: width of the model (D).

    Raises:
        UserError: sizes do not match.
    """
    try:
        with torch.device("meta"):
            if kind == DENSE:
                return {layer: SwiGLU(dim, **arguments) for layer in layers}, None
            if kind == NGRAM:
                spec = ngram_spec(arguments)
                check_ngram(Check({}), Model(dim=dim, ngram=spec))
                return {layer: NGramMemory(dim, **spec.arguments, layer=layer) for layer in layers}, None
            memory, of_kind = Memory(kind=kind, **arguments), KEY_MEMORIES[kind]  # type: ignore[arg-type]
            shares = memory.share_values and len(layers) > 1
            pool = Pool(of_kind.new_tables(dim, memory), tuple(layers)) if shares else None
            return {layer: of_kind(dim, **memory.arguments, pool=pool, layer=layer) for layer in layers}, pool
    except ValueError as error:
        raise UserError(f"memory: {error}") from None


def check_layer(layer: Layer, dim: int, layers: Sequence[int]) -> None:
    """Raise a UserError if a user's layer does not fit into a block of a model of width D."""
    name = type(layer).__name__
    if len(layers) != 1:
        raise UserError(f"layers is {list(layers)} (expected one block for a {name})", "attach one layer a block")
    if layer.dim != dim:
        raise UserError(f"memory: the {name} has width {layer.dim} (expected {dim}, the model's)")
    if layer.tap.pool:
        raise UserError(
            f"memory: the {name} reads a pool (expected tables of its own)", "give keys: share_values: True"
        )
    if other := next((each.dtype for each in layer.parameters() if each.dtype != torch.float32), None):
        raise UserError(f"memory: the {name} is in {other} (expected torch.float32)", "call its float()")
