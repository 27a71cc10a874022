"""Memories in a model of `transformers`: finds its blocks and their FFNs, and attaches a layer to each.

B: sequences; T: positions; D: model width.
"""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from functools import partial
from typing import Any, Literal

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn.functional import silu

from pkmlm.attach.ngrams import HostIds
from pkmlm.device import check_device
from pkmlm.errors import UserError
from pkmlm.kernels.matmul import Linear
from pkmlm.model.init import Constant, InitSpec, initialise
from pkmlm.model.memory.base import SparseMemory
from pkmlm.model.memory.ngram import NGramMemory
from pkmlm.model.memory.values import Pool
from pkmlm.model.transformer import KEY_MEMORIES
from pkmlm.recipe.constraints import Check, check_ngram
from pkmlm.recipe.schema import Memory, Model, NGram, expectation

Mode = Literal["add", "replace"]
NAME = "pkmlm"  # of what is attached, among the modules of its network
FFNS = ("mlp", "feed_forward", "ffn", "parts.ffn")  # what a block may call its FFN; the last is for our exports
DENSE, NGRAM = "dense", "ngram"
KINDS = (*KEY_MEMORIES, NGRAM)


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


class Place(nn.Module):
    """What is attached to one block: a layer beside its FFN, behind a gate that starts at 0, or in the FFN's place.

    It computes in fp32, whatever the network's dtype or autocast.

    Args:
        layer: maps (B, T, D) to (B, T, D).
        gated: whether it has the gate.
    """

    def __init__(self, layer: nn.Module, gated: bool):
        super().__init__()
        self.layer = layer
        self.gate = nn.Parameter(torch.empty(())) if gated else None

    def init_spec(self) -> dict[str, InitSpec]:
        return {} if self.gate is None else {"gate": Constant(0.0)}

    def forward(self, x_BTD: Tensor, *others: Any) -> Tensor:
        """(B, T, D) to (B, T, D), in the input's dtype; `others` go to the layer."""
        with torch.autocast(x_BTD.device.type, enabled=False):
            out_BTD: Tensor = self.layer(x_BTD.float(), *others)
            if self.gate is not None:
                out_BTD = self.gate * out_BTD
        return out_BTD.to(x_BTD.dtype)

    def beside(self, ffn: nn.Module, inputs: tuple[Tensor], out_BTD: Tensor) -> Tensor:
        """The FFN's output plus this one's: a forward hook of the FFN."""
        return out_BTD + self(inputs[0])


class NGramPlace(Place):
    """An n-gram memory before a block.

    Args:
        layer: the memory. With fusion "add" it needs no gate: its rows start at zero.
        ids: finds the tokens before each token.
    """

    ids: HostIds

    def __init__(self, layer: NGramMemory, ids: HostIds):
        super().__init__(layer, layer.gated)
        self.__dict__["ids"] = ids  # a plain attribute: as a submodule it would be stored twice

    def before(
        self, block: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Add this memory's output to the stream that a block reads: a forward pre-hook of the block.

        Raises:
            UserError: the block runs apart from its model, as gradient checkpointing may rerun it.
        """
        past = self.ids.past
        if past is None:
            message = "a block with an n-gram memory runs apart from its model (expected within the model's forward)"
            raise UserError(message, "turn gradient checkpointing off: model.gradient_checkpointing_disable()")
        x_BTD, *others = args or (options.pop("hidden_states"),)
        device = next(self.parameters()).device  # the block's; x may still be on that of the block before
        past = past._replace(ids_BTG=past.ids_BTG.to(device), places_BTj=past.places_BTj.to(device))
        x_BTD = x_BTD.to(device)
        return (x_BTD + self(x_BTD, past), *others), options


class Attached(nn.Module):
    """All that is attached to a network, as one module of it, called `NAME`. Its parameters stay in fp32 when the
    network is converted to another dtype.

    Args:
        dim: width of the network (D).
        vocab_size: rows of its embedding.
        kind, arguments: of the layer at each place, as `layer_kind` returns them.
        layers: blocks, counted from 1.
        mode: "add" beside the FFN (an n-gram memory: before the block), or "replace" the FFN.

    Attributes:
        ngram_ids: finds what n-gram memories need to know about the tokens; None: there are no n-gram memories.

    Raises:
        UserError, ValueError: sizes do not match.
    """

    def __init__(
        self, dim: int, vocab_size: int, kind: str, arguments: Mapping[str, Any], layers: Sequence[int], mode: Mode
    ):
        super().__init__()
        self.dim, self.kind, self.arguments, self.mode = dim, kind, dict(arguments), mode
        self.pool: Pool | None = None
        self.ngram_ids: HostIds | None = None
        places: dict[int, Place]
        if kind == NGRAM:
            spec = ngram_spec(arguments)
            check_ngram(Check({}), Model(dim=dim, ngram=spec))
            ids = self.ngram_ids = HostIds(vocab_size, spec)
            places = {layer: NGramPlace(NGramMemory(dim, **spec.arguments, layer=layer), ids) for layer in layers}
        elif kind == DENSE:
            places = {layer: Place(SwiGLU(dim, **arguments), mode == "add") for layer in layers}
        else:
            memory, of_kind = Memory(kind=kind, **arguments), KEY_MEMORIES[kind]  # type: ignore[arg-type]
            if memory.share_values and len(layers) > 1:
                self.pool = Pool(of_kind.new_tables(dim, memory), tuple(layers))
            made = {layer: of_kind(dim, **memory.arguments, pool=self.pool, layer=layer) for layer in layers}
            places = {layer: Place(each, mode == "add") for layer, each in made.items()}
        self.places = nn.ModuleDict({str(layer): place for layer, place in places.items()})

    @property
    def layers(self) -> list[int]:
        """The blocks that have something attached, counted from 1."""
        return [int(layer) for layer in self.places]

    def flops_per_token(self) -> int:
        """Multiply-adds of a forward at all places: of linear maps, and with keys and rows of tables."""
        maps = sum(each.weight.numel() for each in self.modules() if isinstance(each, Linear))
        return maps + sum(each.flops_per_token() for each in self.modules() if isinstance(each, SparseMemory))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Attached":
        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(keep_dtype, recurse)


def layer_kind(memory: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The kind of a memory and its arguments that differ from the defaults, from the recipe's keys.

    Queries are normalised one by one ("rms" unless "layer" or "none" is chosen): batch statistics would let padding
    and the other texts of a batch change what a token reads.

    Raises:
        UserError: an unknown key, a value out of its range, or query_norm: batch.
    """
    if not isinstance(memory, Mapping):
        raise UserError(f"memory is {memory!r} (expected the keys of a recipe's model.memory, or a folder)")
    given = dict(memory)
    kind = given.pop("kind", None)
    if kind not in KINDS:
        raise UserError(f"memory: kind is {kind} (expected {', '.join(KINDS)})")
    if given.get("query_norm") == "batch":
        hint = "use rms, or layer: batch statistics let padding change what a token reads"
        raise UserError("memory: query_norm is batch (expected rms, layer or none)", hint)
    if "layers" in given:
        raise UserError("memory: found layers (expected no such key)", "give the blocks as the argument `layers`")
    checked: Memory | NGram
    try:
        checked = ngram_spec(given) if kind == NGRAM else Memory(kind=kind, **{"query_norm": "rms", **given})
    except ValidationError as problem:
        error = problem.errors(include_url=False)[0]
        key = ".".join(map(str, error["loc"]))
        if error["type"] == "unexpected_keyword_argument":
            keys = [field.name for field in fields(NGram if kind == NGRAM else Memory) if field.name != "layers"]
            near = difflib.get_close_matches(key.lower(), keys, n=1)
            meant = f" (did you mean {near[0]}?)" if near else ""
            raise UserError(f"memory: unknown key {key}{meant}", f"known keys: {', '.join(keys)}") from None
        raise UserError(f"memory: {key} is {error['input']!r} (expected {expectation(error)})") from None
    default = asdict(type(checked)())
    chosen = {key: value for key, value in asdict(checked).items() if key != "kind" and value != default[key]}
    return kind, {key: list(value) if isinstance(value, tuple) else value for key, value in chosen.items()}


def ngram_spec(arguments: Mapping[str, Any]) -> NGram:
    """The recipe's section of an n-gram memory, from keys whose tuples may be lists.

    Raises:
        pydantic.ValidationError: a key is unknown, or a value is out of its range.
    """
    given: dict[str, Any] = {key: tuple(each) if isinstance(each, list) else each for key, each in arguments.items()}
    return NGram(**given)


def find_blocks(model: nn.Module) -> nn.ModuleList:
    """The blocks of a causal model of transformers: its only list with as many modules as its config has hidden layers.

    Raises:
        UserError: it has no config, or none or several such lists.
    """
    config = text_config(model)
    count = getattr(config, "num_hidden_layers", None)
    lists = {name: each for name, each in model.named_modules() if isinstance(each, nn.ModuleList)}
    fit = {name: each for name, each in lists.items() if len(each) == count}
    fit = {name: each for name, each in fit.items() if not any(name.startswith(f"{other}.") for other in fit)}
    if len(fit) != 1:
        found = ", ".join(f"{name} of {len(each)}" for name, each in list((fit or lists).items())[:8]) or "no list"
        expected = f"expected just one of {count} modules, its config's num_hidden_layers"
        raise UserError(f"{type(model).__name__}: found lists of modules {found} ({expected})")
    return next(iter(fit.values()))


def block_owner(model: nn.Module) -> nn.Module:
    """The module of a causal model that directly contains its list of blocks."""
    blocks = find_blocks(model)
    return next(each for each in model.modules() if blocks in list(each.children()))


def text_config(model: nn.Module) -> Any:
    """The config of a model of transformers; if it reads more than text, that of its language model.

    Raises:
        UserError: the model has no config, or the config has no width.
    """
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if not hasattr(config, "hidden_size"):
        raise UserError(f"{type(model).__name__} has no config with a hidden_size", "give a model of transformers")
    return config


def vocabulary_of(model: Any) -> int:
    """Rows of the embedding of a model of transformers."""
    return int(model.get_input_embeddings().num_embeddings)


def find_ffn(block: nn.Module, layer: int, dim: int) -> nn.Module:
    """The FFN of a block, tested with one token.

    Raises:
        UserError: the block has no FFN or several, or its FFN does not map (B, T, D) to (B, T, D).
    """
    found: dict[str, nn.Module] = {}
    for name in FFNS:
        with suppress(AttributeError):
            found[name] = block.get_submodule(name)
    if len(found) != 1:
        parts = ", ".join(found or dict(block.named_children()))
        raise UserError(f"block {layer}, a {type(block).__name__}, has {parts} (expected one of {', '.join(FFNS)})")
    (name, ffn), weight = next(iter(found.items())), next(filter(torch.is_floating_point, block.parameters()))
    try:
        with torch.no_grad(), torch.random.fork_rng([weight.device] if weight.is_cuda else []):
            out = ffn(torch.zeros(1, 1, dim, dtype=weight.dtype, device=weight.device))
    except (TypeError, RuntimeError) as error:
        raise UserError(f"block {layer}: its {name} does not take one tensor of width {dim}: {error}") from None
    if not isinstance(out, Tensor) or out.shape != (1, 1, dim):
        shape = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise UserError(f"block {layer}: its {name} maps (1, 1, {dim}) to {shape} (expected the same shape)")
    return ffn


def insert(
    model: nn.Module, kind: str, arguments: Mapping[str, Any], layers: Sequence[int], mode: Mode, seed: int | None
) -> tuple[Attached, Callable[[], None]]:
    """Attach a new layer to each of the given blocks of a network.

    Args:
        layers: blocks, counted from 1.
        mode: "add" or "replace"; a replaced FFN stays in the network but is not called. An n-gram memory is added to
            the stream before the block; its canonical ids are each token's own number until they are filled in.
        seed: the initial weights depend on it and on their names alone; None: they stay uninitialized, to be loaded.

    Returns:
        what was attached, and a function that removes it.

    Raises:
        UserError: a block does not exist, has no FFN, or is neither on the CPU nor on a CUDA device; sizes do not
            match; something is attached already.
    """
    if mode not in ("add", "replace"):
        raise UserError(f"mode is {mode} (expected add or replace)")
    if kind == NGRAM and mode == "replace":
        raise UserError("mode is replace (expected add: an n-gram memory comes before a block and replaces no FFN)")
    if hasattr(model, NAME):
        raise UserError(f"{type(model).__name__} already has something attached", "call detach() on that first")
    blocks, dim, chosen = find_blocks(model), text_config(model).hidden_size, choose_blocks(model, layers)
    at = {layer: blocks[layer - 1] if kind == NGRAM else find_ffn(blocks[layer - 1], layer, dim) for layer in chosen}
    devices = dict.fromkeys(next(part.parameters()).device for part in at.values())
    for device in devices:
        check_device(device)
    if len(devices) > 1 and arguments.get("share_values"):
        where = " and ".join(map(str, devices))
        raise UserError(f"memory: share_values needs all blocks on one device: found {where}", "leave share_values out")
    try:
        with torch.device("meta"):
            attached = Attached(dim, vocabulary_of(model), kind, arguments, chosen, mode)
    except ValueError as error:
        raise UserError(f"memory: {error}") from None
    attached.to_empty(device=next(at[chosen[0]].parameters()).device)
    if seed is not None:
        initialise(attached, seed)
    attached.train(model.training)
    host: Any = model
    undo = []
    if attached.ngram_ids is not None:
        attached.ngram_ids.to(host.get_input_embeddings().weight.device)
        # If a model reads more than text, only its base model is called with ids.
        reads_more = text_config(model) is not host.config
        undo += attached.ngram_ids.watch(host.base_model if reads_more else block_owner(model))
    for layer, part in at.items():
        place = attached.places[str(layer)]
        assert isinstance(place, Place)
        place.to(next(part.parameters()).device)
        if isinstance(place, NGramPlace):
            undo.append(part.register_forward_pre_hook(place.before, with_kwargs=True).remove)
        elif mode == "add":
            undo.append(part.register_forward_hook(place.beside).remove)
        else:
            trained = [parameter for parameter in part.parameters() if parameter.requires_grad]
            part.requires_grad_(False)  # no gradient ever reaches it
            undo.append(partial(put_back, part, trained, vars(part).get("forward")))
            part.forward = place.forward
    model.add_module(NAME, attached)

    def remove() -> None:
        for each in undo:
            each()
        delattr(model, NAME)

    return attached, remove


def choose_blocks(model: nn.Module, layers: object) -> list[int]:
    """The numbers of the chosen blocks, in order.

    Args:
        layers: as the user gave them, for `insert`.

    Raises:
        UserError: this is not a list of different blocks of the network.
    """
    blocks = len(find_blocks(model))
    given = list(layers) if isinstance(layers, Iterable) and not isinstance(layers, str) else []
    if not given or not all(type(layer) is int and 1 <= layer <= blocks for layer in given):
        raise UserError(f"layers is {layers!r} (expected a list of blocks, numbered from 1 to {blocks})")
    if len(set(given)) < len(given):
        raise UserError(f"layers is {given} (expected each block once)")
    return sorted(given)


def put_back(ffn: nn.Module, trained: list[nn.Parameter], forward: Callable[..., Tensor] | None) -> None:
    """Restore a replaced FFN: its own `forward` (None: its class's), and training of the parameters in `trained`."""
    if forward is None:
        del ffn.forward
    else:
        ffn.forward = forward
    for parameter in trained:
        parameter.requires_grad_(True)


def base_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a network without those of what is attached to it, by name."""
    return (pair for pair in model.named_parameters() if not pair[0].startswith(f"{NAME}."))
