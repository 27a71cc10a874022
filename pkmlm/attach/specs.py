"""What can be attached: a memory, by its spec, whose place in a block is one that the mode asks for."""

import difflib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import Any, Literal

import torch
from torch import nn

from pkmlm.errors import UserError
from pkmlm.memory.base import SparseMemory
from pkmlm.memory.registry import SPECS
from pkmlm.memory.spec import Place, Spec, SpecError

Mode = Literal["add", "replace"]
MODES: dict[Place, Mode] = {"beside": "add", "before": "add", "ffn": "replace"}
ELSEWHERE = {
    "layers": "give the blocks as the argument `layers`",
    "start": "what is added starts at zero; what replaces an FFN is drawn",
    "optim": "give learning rates to the attachment's `optimizer`",
}


def spec_of(memory: object, kinds: Mapping[str, type[Spec]] = SPECS) -> Spec:
    """The spec of a memory that is given as a recipe's keys, in which a list stands for a tuple, or as a layer.

    Queries are normalised one by one unless the keys say otherwise ("rms"): batch statistics would let padding and the
    other texts of a batch change what a token reads.

    Args:
        kinds: that keys may name.

    Raises:
        UserError: it is neither; a key is unknown, or a value out of its range.
    """
    if not isinstance(memory, Mapping):
        spec = getattr(memory, "spec", None)
        if not isinstance(spec, Spec):
            found = type(memory).__name__ if isinstance(memory, nn.Module) else repr(memory)
            expected = "a recipe's keys, a folder, or a layer such as ProductKeyMemory"
            raise UserError(f"memory is {found} (expected {expected})")
        return spec
    keys = dict(memory)
    kind = keys.pop("kind", None)
    if not isinstance(kind, str) or kind not in kinds:
        raise UserError(f"memory: kind is {kind} (expected {', '.join(kinds)})")
    known = arguments_of(kinds[kind]())
    given: dict[str, Any] = {"query_norm": "rms"} if "query_norm" in known else {}
    for key, value in keys.items():
        if key in ELSEWHERE:
            raise UserError(f"memory: {key} cannot be given here", ELSEWHERE[key])
        if key not in known:
            near = difflib.get_close_matches(str(key).lower(), known, n=1)
            meant = f" (did you mean {near[0]}?)" if near else ""
            raise UserError(f"memory: unknown key {key}{meant}", f"keys of {kind}: {', '.join(known)}")
        given[key] = tuple(value) if isinstance(value, list) else value
    try:
        return kinds[kind](**given)
    except SpecError as error:
        raise UserError(f"memory: {error}") from None


def arguments_of(spec: Spec) -> dict[str, Any]:
    """The keys of a memory, besides its kind, that belong to it wherever it is attached; as JSON has them."""
    values = {each.name: getattr(spec, each.name) for each in fields(spec) if each.name not in ("kind", *ELSEWHERE)}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def place_of(spec: Spec, mode: Mode) -> Place:
    """Where in a block a memory is put.

    Raises:
        UserError: there is no such mode; the memory has no such place; or what it reads depends on the batch.
    """
    if mode not in MODES.values():
        raise UserError(f"mode is {mode} (expected add or replace)")
    if spec.keeps_statistics:
        hint = "use query_norm rms, or layer: batch statistics let padding change what a token reads"
        raise UserError("memory: query_norm is batch (expected rms, layer or none)", hint)
    every = [spec.places(False)]
    with suppress(SpecError):
        every.append(spec.places(True))
    possible = {MODES[places[0]]: places[0] for places in every if len(places) == 1 and places[0] in MODES}
    if not possible:
        found = f"kind {spec.kind} takes the place of {' and '.join(every[0])}"
        raise UserError(f"memory: {found}, which cannot be attached (expected one of {', '.join(MODES)})")
    if mode not in possible:
        (other,) = possible
        does = "takes the place of an FFN" if other == "replace" else "adds to the stream"
        raise UserError(f"mode is {mode} (expected {other}: kind {spec.kind} {does})")
    return possible[mode]


def check_layer(layer: SparseMemory, dim: int, vocab_size: int, layers: Sequence[int]) -> None:
    """Raise a UserError if a user's layer does not fit into a block of a model of width D and V tokens."""
    name = type(layer).__name__
    if len(layers) != 1:
        raise UserError(f"layers is {list(layers)} (expected one block for a {name})", "attach one layer a block")
    if layer.dim != dim:
        raise UserError(f"memory: the {name} has width {layer.dim} (expected {dim}, the model's)")
    found, wanted = layer.tap.slots, layer.spec.tables(dim, vocab_size)[-1].rows
    if found != wanted:
        raise UserError(f"memory: the {name} has {found:,} rows (expected {wanted:,}, for the model's vocabulary)")
    if layer.tap.pool:
        hint = "give keys: share_values: True"
        raise UserError(f"memory: the {name} reads a pool (expected tables of its own)", hint)
    if other := next((each.dtype for each in layer.parameters() if each.dtype != torch.float32), None):
        raise UserError(f"memory: the {name} is in {other} (expected torch.float32)", "call its float()")
