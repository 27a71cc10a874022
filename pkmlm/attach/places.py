"""Where layers are put into a model of `transformers`: beside an FFN, in its place, or before a block.

B: sequences; T: positions; D: model width.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pkmlm.attach.hosts import block_owner, choose_blocks, find_blocks, find_ffn, override, text_config, vocabulary_of
from pkmlm.attach.layers import NGRAM, Layer, check_layer, make_layers, ngram_spec
from pkmlm.attach.ngrams import CALLS, ForwardWithIds, HostIds
from pkmlm.device import check_device
from pkmlm.errors import UserError
from pkmlm.kernels.matmul import Linear
from pkmlm.memory.base import SparseMemory
from pkmlm.memory.init import Constant, InitSpec, initialise
from pkmlm.memory.ngram.layer import NGramMemory
from pkmlm.memory.table import Pool

Mode = Literal["add", "replace"]
NAME = "pkmlm"  # of all that is attached, among the modules of its network


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
        self.gate = nn.Parameter(torch.zeros(())) if gated else None

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
        past = CALLS.get().get(self.ids)
        if past is None:
            message = "a block with an n-gram memory runs apart from its model (expected within the model's forward)"
            raise UserError(message, "turn gradient checkpointing off: model.gradient_checkpointing_disable()")
        x_BTD, *others = args or (options.pop("hidden_states"),)
        device = next(self.parameters()).device  # the block's; x may still be on that of the block before
        past = past._replace(ids_BTG=past.ids_BTG.to(device), places_BTj=past.places_BTj.to(device))
        x_BTD = x_BTD.to(device)
        return (x_BTD + self(x_BTD, past), *others), options


class Attached(nn.Module):
    """The layers of one attachment. Their parameters stay in fp32 when the network is converted to another dtype.

    Args:
        name: among what is attached to the network.
        host: the network.
        kind, arguments: of the layer at each place, as `settings_of` returns them.
        layers: blocks, counted from 1.
        mode: "add" beside the FFN (an n-gram memory: before the block), or "replace" the FFN.
        freeze: whether the network must not train.
        made: the layer itself, if the user has made it; None: one is made for each place, without initial weights.

    Attributes:
        ngram_ids: finds what n-gram memories need to know about the tokens; None: there are no n-gram memories.
        replaced: the FFNs in whose place the layers are.

    Raises:
        UserError: sizes do not match.
    """

    def __init__(
        self,
        name: str,
        host: nn.Module,
        kind: str,
        arguments: Mapping[str, Any],
        layers: Sequence[int],
        mode: Mode,
        freeze: bool,
        made: Layer | None,
    ):
        super().__init__()
        self.name, self.kind, self.arguments, self.mode, self.freeze = name, kind, dict(arguments), mode, freeze
        self.dim = text_config(host).hidden_size
        self.pool: Pool | None = None
        self.ngram_ids: HostIds | None = None
        chosen: dict[int, Any] = dict.fromkeys(layers, made)
        if made is None:
            chosen, self.pool = make_layers(kind, arguments, self.dim, layers)
        else:
            check_layer(made, self.dim, layers)
            made.tap.layer = layers[0]
        if kind == NGRAM:
            ids = self.ngram_ids = HostIds(vocabulary_of(host), ngram_spec(arguments), name)
            places: Iterable[Place] = (NGramPlace(each, ids) for each in chosen.values())
        else:
            places = (Place(each, mode == "add") for each in chosen.values())
        self.places = nn.ModuleDict(dict(zip(map(str, chosen), places, strict=True)))
        self.replaced: list[nn.Module] = []  # a plain list: they are modules of the network

    @property
    def layers(self) -> list[int]:
        """The blocks that have something attached, counted from 1."""
        return [int(layer) for layer in self.places]

    def flops_per_token(self) -> int:
        """Multiply-adds of a forward at all places: of linear maps, and with keys and rows of tables."""
        maps = sum(each.weight.numel() for each in self.modules() if isinstance(each, Linear))
        return maps + sum(each.flops_per_token() for each in self.modules() if isinstance(each, SparseMemory))

    def put_into(self, parts: Mapping[int, nn.Module]) -> Iterator[Callable[[], None]]:
        """Put each layer to its FFN (an n-gram memory: its block); yield what takes it away again."""
        for place, part in zip(self.places.values(), parts.values(), strict=True):
            assert isinstance(place, Place)
            place.to(next(part.parameters()).device)
            if isinstance(place, NGramPlace):
                yield part.register_forward_pre_hook(place.before, with_kwargs=True).remove
            elif self.mode == "add":
                yield part.register_forward_hook(place.beside).remove
            else:
                self.replaced.append(part)
                yield override(part, "forward", place.forward)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Attached":
        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(keep_dtype, recurse)


class Attachments(nn.ModuleDict):
    """All that is attached to a network, by name: a module of the network called `NAME`, for as long as there is some.

    Args:
        host: the network.

    Attributes:
        held: its parameters that do not train while something is attached, but did before.
    """

    host: Any

    def __init__(self, host: nn.Module):
        super().__init__()
        self.__dict__["host"] = host  # a plain attribute: as a submodule it would contain itself
        self.held: list[nn.Parameter] = []
        self.undo: list[Callable[[], None]] = []

    def attached(self) -> dict[str, Attached]:
        return {name: each for name, each in self.items() if isinstance(each, Attached)}

    def hold(self) -> None:
        """Let no gradient go to parameters that must not train, or that are of a replaced FFN; and to others again."""
        every = [each for _, each in base_parameters(self.host)]
        unused = {each for one in self.attached().values() for ffn in one.replaced for each in ffn.parameters()}
        still = set(every) if any(one.freeze for one in self.attached().values()) else unused
        for parameter in self.held:
            parameter.requires_grad_(True)
        self.held = [each for each in every if each in still and each.requires_grad]
        for parameter in self.held:
            parameter.requires_grad_(False)

    def watch(self) -> None:
        """While there are n-gram memories, let the network's calls tell them the ids; and warn of saving the network,
        which loses what is attached."""
        while self.undo:
            self.undo.pop()()
        if ids := [one.ngram_ids for one in self.attached().values() if one.ngram_ids is not None]:
            # If a model reads more than text, only its base model is called with ids.
            reads_more = text_config(self.host) is not self.host.config
            network = self.host.base_model if reads_more else block_owner(self.host)
            self.undo.append(override(network, "forward", ForwardWithIds(network, ids)))
        if len(self) and hasattr(self.host, "save_pretrained"):
            self.undo.append(override(self.host, "save_pretrained", partial(_save, self.host.save_pretrained)))


def _save(save_pretrained: Callable[..., Any], *args: Any, **options: Any) -> Any:
    message = (
        "a memory is attached to this model, and from_pretrained will not load it: save it by itself "
        "(Attachment.save), and the model after detach()"
    )
    warnings.warn(message, stacklevel=2)
    return save_pretrained(*args, **options)


def attachments_of(model: nn.Module) -> dict[str, Attached]:
    """What is attached to a network, by name."""
    return getattr(model, NAME).attached() if hasattr(model, NAME) else {}


def base_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a network without those of what is attached to it, by name."""
    return (pair for pair in model.named_parameters() if not pair[0].startswith(f"{NAME}."))


def insert(
    model: nn.Module,
    kind: str,
    arguments: Mapping[str, Any],
    layers: Iterable[int],
    mode: Mode,
    *,
    freeze: bool = True,
    seed: int | None = None,
    made: Layer | None = None,
) -> tuple[Attached, Callable[[], None]]:
    """Attach a new layer to each of the given blocks of a network.

    Args:
        layers: blocks, counted from 1.
        mode: "add" or "replace"; a replaced FFN stays in the network but is not called. An n-gram memory is added to
            the stream before the block; its canonical ids are each token's own number until they are filled in.
        freeze: whether the network must not train.
        seed: the initial weights depend on it and on their names alone; None: they stay uninitialized, to be loaded.
        made: the layer, with its weights; None: new ones.

    Returns:
        what was attached, and a function that removes it.

    Raises:
        UserError: a block does not exist, has no FFN, or is neither on the CPU nor on a CUDA device; sizes do not
            match; an FFN is replaced already.
    """
    if mode not in ("add", "replace"):
        raise UserError(f"mode is {mode} (expected add or replace)")
    if kind == NGRAM and mode == "replace":
        raise UserError("mode is replace (expected add: an n-gram memory comes before a block and replaces no FFN)")
    blocks, dim, chosen = find_blocks(model), text_config(model).hidden_size, choose_blocks(model, layers)
    others = attachments_of(model)
    taken = {layer for each in others.values() if mode == each.mode == "replace" for layer in each.layers}
    if both := taken.intersection(chosen):
        raise UserError(f"the FFN of block {min(both)} is replaced already", "call detach() on that first")
    parts = {layer: blocks[layer - 1] if kind == NGRAM else find_ffn(blocks[layer - 1], layer, dim) for layer in chosen}
    devices = dict.fromkeys(next(part.parameters()).device for part in parts.values())
    for device in devices:
        check_device(device)
    if len(devices) > 1 and arguments.get("share_values"):
        where = " and ".join(map(str, devices))
        raise UserError(f"memory: share_values needs all blocks on one device: found {where}", "leave share_values out")
    name = next(str(number) for number in range(1, len(others) + 2) if str(number) not in others)
    attached = Attached(name, model, kind, arguments, chosen, mode, freeze, made)
    if made is None:
        attached.to_empty(device=next(iter(devices)))
        if seed is not None:
            initialise(attached, seed)
    attached.train(model.training)
    if attached.ngram_ids is not None:
        host: Any = model
        attached.ngram_ids.to(host.get_input_embeddings().weight.device)
    undo = [*attached.put_into(parts)]
    if not others:
        model.add_module(NAME, Attachments(model))
    every = getattr(model, NAME)
    every[name] = attached
    every.hold()
    every.watch()

    def remove() -> None:
        for each in undo:
            each()
        del every[name]
        every.hold()
        every.watch()
        if not every:
            delattr(model, NAME)

    return attached, remove
