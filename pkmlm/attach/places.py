"""Where layers are put into a model of `transformers`: beside an FFN, in its place, or before a block.

B: sequences; T: positions; D: model width.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from pkmlm.attach.hosts import block_owner, choose_blocks, find_blocks, find_ffn, override, text_config, vocabulary_of
from pkmlm.attach.specs import MODES, Mode, check_layer, place_of
from pkmlm.attach.tokens import ForwardWithIds, HostIds
from pkmlm.device import check_device
from pkmlm.errors import UserError, memory_errors
from pkmlm.kernels.matmul import Linear
from pkmlm.memory.base import SparseMemory, memories
from pkmlm.memory.gate import Gate
from pkmlm.memory.init import initialise
from pkmlm.memory.spec import Place, Site, Spec, SpecError
from pkmlm.memory.table import Pool
from pkmlm.seeds import derived_seed

NAME = "pkmlm"  # of all that is attached, among the modules of its network


class Placed(nn.Module):
    """What is attached to one block: a layer in the FFN's place, or one that is added.

    It computes in fp32, whatever the network's dtype or autocast.

    Args:
        layer: maps (B, T, D) to (B, T, D); with `ids`, it also takes a `Past`.
        place: "beside" the FFN, in place of the "ffn", or "before" the block.
        ids: finds the tokens before each token; None: the layer reads the stream alone.
        dim: width of the stream (D).
        gated: whether each token decides how much of a layer's output is used.
    """

    ids: HostIds | None

    def __init__(self, layer: nn.Module, place: Place, ids: HostIds | None, dim: int, gated: bool):
        super().__init__()
        self.layer, self.place = layer, place
        self.gate = Gate(dim) if gated else None
        self.__dict__["ids"] = ids  # a plain attribute: as a submodule it would be stored twice

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) to (B, T, D), in the input's dtype and on its device, which may be another than the layer's.

        Raises:
            UserError: the block runs apart from its model, as gradient checkpointing may rerun it, and the layer needs
                the tokens.
        """
        device = next(self.parameters()).device
        others = () if self.ids is None else (self.ids.found(device),)
        with torch.autocast(device.type, enabled=False):
            own_BTD = x_BTD.to(device, torch.float32)
            out_BTD: Tensor = self.layer(own_BTD, *others)
            if self.gate is not None:
                out_BTD = self.gate(out_BTD, own_BTD)
        return out_BTD.to(x_BTD)

    def put_into(self, part: nn.Module) -> Callable[[], None]:
        """Put this to an FFN or a block; return what takes it away again."""
        self.to(next(part.parameters()).device)
        if self.place == "before":
            return part.register_forward_pre_hook(self.before, with_kwargs=True).remove
        if self.place == "beside":
            return part.register_forward_hook(self.beside, with_kwargs=True).remove
        return override(part, "forward", self.forward)

    def beside(self, ffn: nn.Module, args: tuple[Any, ...], options: dict[str, Any], out_BTD: Tensor) -> Tensor:
        """The FFN's output plus this one's, both of the FFN's first input: a forward hook of the FFN."""
        x_BTD, *_ = [*args, *options.values()]
        return out_BTD + self(x_BTD).to(out_BTD.device)

    def before(
        self, block: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """This one's output, added to the stream that a block reads: a forward pre-hook of the block."""
        x_BTD, *others = args or (options.pop("hidden_states"),)
        return (x_BTD + self(x_BTD), *others), options


class Attached(nn.Module):
    """The layers of one attachment. Their parameters stay in fp32 when the network is converted to another dtype.

    Args:
        name: among what is attached to the network, and of the memory in reports.
        host: the network.
        spec: of the memory.
        layers: blocks, counted from 1.
        place: of the memory in a block, as for `Placed`.
        freeze: whether the network must not train.
        made: the layer itself, if the user has made it; None: one is made for each place, without initial weights.

    Attributes:
        mode: "add" or "replace".
        token_ids: finds what the memory needs to know about the tokens; None: it reads the stream alone.
        parts: the FFN or block that each layer was put to, by block; a plain mapping: they are modules of the network.
        undo: what takes each layer away again.

    Raises:
        UserError: sizes do not match.
    """

    def __init__(
        self,
        name: str,
        host: nn.Module,
        spec: Spec,
        layers: Sequence[int],
        place: Place,
        freeze: bool,
        made: SparseMemory | None,
    ):
        super().__init__()
        self.name, self.place, self.freeze = name, place, freeze
        self.spec = spec if place == "ffn" or made is not None else replace(spec, start="zero")
        self.mode, self.dim = MODES[place], text_config(host).hidden_size
        self.pool: Pool | None = None
        self.token_ids: HostIds | None = None
        chosen: dict[int, nn.Module] = {}
        if made is not None:
            check_layer(made, self.dim, vocabulary_of(host), layers)
            made.tap.layer, made.tap.name, chosen = layers[0], name, {layers[0]: made}
        else:
            chosen = self.build(host, layers)
        if spec.lookback is not None:
            self.token_ids = HostIds(vocabulary_of(host), spec.lookback, name)
        gated = spec.gate == "token"
        self.places = nn.ModuleDict(
            {str(layer): Placed(each, self.place, self.token_ids, self.dim, gated) for layer, each in chosen.items()}
        )
        self.parts: Mapping[int, nn.Module] = {}
        self.undo: list[Callable[[], None]] = []

    def build(self, host: nn.Module, layers: Sequence[int]) -> dict[int, nn.Module]:
        """A layer for each of the blocks, and the pool that they share, if they do; without initial weights."""
        share, built = (2 * len(find_blocks(host))) ** -0.5, {}
        try:
            self.spec.check(self.dim)
            with torch.device("meta"):
                self.pool = self.spec.new_pool(self.dim, tuple(layers))
                for layer in layers:
                    site = Site(self.dim, layer, self.name, vocabulary_of(host), share, momentum=0.0, pool=self.pool)
                    built[layer] = self.spec.build(site, (self.place,))[self.place]
        except SpecError as error:
            raise UserError(f"memory: {error}") from None
        return built

    @property
    def layers(self) -> list[int]:
        """The blocks that have something attached, counted from 1."""
        return [int(layer) for layer in self.places]

    def flops_per_token(self) -> int:
        """Multiply-adds of a forward at all places: of linear maps, and with keys and rows of tables."""
        maps = sum(each.weight.numel() for each in self.modules() if isinstance(each, Linear))
        return maps + sum(each.flops_per_token() for each in memories(self))

    def put_into(self, parts: Mapping[int, nn.Module]) -> None:
        """Put each layer to its FFN or block."""
        self.parts = parts
        for layer, part in parts.items():
            placed = self.places[str(layer)]
            assert isinstance(placed, Placed)
            self.undo.append(placed.put_into(part))

    def check(self, host: nn.Module, blocks: nn.Module | None) -> None:
        """Refuse a network that has changed since: a call would pass by a layer, or read rows that are not there.

        Args:
            blocks: its list of blocks as it is now; None: it is gone.

        Raises:
            UserError: a block or an FFN is no longer there (it may be wrapped in another module); the vocabulary has
                changed.
        """
        now = [*blocks.children()] if blocks is not None else []
        for layer, part in self.parts.items():
            if not any(part is each for block in now[layer - 1 : layer] for each in block.modules()):
                message = f"block {layer} of the model, to which {self.name} was attached, has been replaced or moved"
                raise UserError(message, "detach() before you change the blocks, and attach again")
        known = None if self.token_ids is None else len(self.token_ids.ids_V)
        if known not in (None, vocabulary_of(host)):
            message = f"the model has {vocabulary_of(host)} tokens (expected {known}, as when {self.name} was attached)"
            raise UserError(message, "detach() before you change the vocabulary, and attach again")

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
        network: what maps ids to hidden states in it.
        path: of its list of blocks.
        held: its parameters that do not train while something is attached, but did before.
    """

    host: Any
    network: nn.Module

    def __init__(self, host: Any):
        super().__init__()
        # If a model reads more than text, only its base model is called with ids.
        network = block_owner(host) if text_config(host) is host.config else host.base_model
        self.__dict__.update(host=host, network=network)  # plain attributes: as submodules they would contain this
        blocks = find_blocks(host)
        self.path = next(path for path, each in host.named_modules() if each is blocks)
        self.held: list[nn.Parameter] = []
        self.undo: list[Callable[[], None]] = []

    def attached(self) -> dict[str, Attached]:
        return {name: each for name, each in self.items() if isinstance(each, Attached)}

    def hold(self) -> None:
        """Let no gradient go to parameters that must not train, or that are of a replaced FFN; and to others again."""
        every = [each for _, each in base_parameters(self.host)]
        replaced = [ffn for one in self.attached().values() if one.place == "ffn" for ffn in one.parts.values()]
        unused = {each for ffn in replaced for each in ffn.parameters()}
        still = set(every) if any(one.freeze for one in self.attached().values()) else unused
        for parameter in self.held:
            parameter.requires_grad_(True)
        self.held = [each for each in every if each in still and each.requires_grad]
        for parameter in self.held:
            parameter.requires_grad_(False)

    def watch(self) -> None:
        """While something is attached, check each call of the network, let it tell the tokens to memories that need
        them, and warn of saving the network, which loses what is attached."""
        while self.undo:
            self.undo.pop()()
        if not len(self):
            return
        self.undo.append(self.network.register_forward_pre_hook(self.check).remove)
        if ids := [one.token_ids for one in self.attached().values() if one.token_ids is not None]:
            self.undo.append(override(self.network, "forward", ForwardWithIds(self.network, ids)))
        for model in dict.fromkeys((self.host, getattr(self.host, "base_model", self.host))):
            if hasattr(model, "save_pretrained"):
                self.undo.append(override(model, "save_pretrained", partial(_save, model.save_pretrained)))

    def check(self, network: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Refuse a call that what is attached would not take part in: a forward pre-hook of the network.

        Raises:
            UserError: a copy of the network's modules is called, or these have changed (see `Attached.check`).
        """
        if network is not self.network:  # whose hooks and forwards are those of the original
            message = "a replica of the model runs, as torch's DataParallel makes them (expected the model itself)"
            raise UserError(message, "use DistributedDataParallel, or one GPU: CUDA_VISIBLE_DEVICES=0")
        try:
            blocks = self.host.get_submodule(self.path)
        except AttributeError:
            blocks = None
        for one in self.attached().values():
            one.check(self.host, blocks)

    def remove(self, name: str) -> None:
        """Take away what is attached under a name, and with the last one this module."""
        attached = self.attached()[name]
        while attached.undo:
            attached.undo.pop()()
        del self[name]
        self.hold()
        self.watch()
        if not len(self):
            delattr(self.host, NAME)


def _save(save_pretrained: Callable[..., Any], *args: Any, **options: Any) -> Any:
    message = (
        "a memory is attached to this model, and from_pretrained will not load it: save it by itself "
        "(Attachment.save), and the model after detach(); `pkmlm help attach` shows the way back"
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
    spec: Spec,
    layers: Iterable[int],
    mode: Mode,
    *,
    freeze: bool = True,
    seed: int | None = None,
    made: SparseMemory | None = None,
) -> Attached:
    """Attach a new layer to each of the given blocks of a network.

    Args:
        layers: blocks, counted from 1.
        mode: "add" or "replace"; a replaced FFN stays in the network but is not called.
        freeze: whether the network must not train.
        seed: the initial weights depend on it and on their names alone; None: they stay uninitialized, to be loaded.
        made: the layer, with its weights; None: new ones.

    Returns:
        what was attached, where each token's id is its own number until it is filled in.

    Raises:
        UserError: a block does not exist, has no FFN, or is neither on the CPU nor on a CUDA device; the memory cannot
            be put there, or sizes do not match; an FFN is replaced already.
    """
    place = place_of(spec, mode)
    blocks, dim, chosen = find_blocks(model), text_config(model).hidden_size, choose_blocks(model, layers)
    others = attachments_of(model)
    taken = {layer for each in others.values() if place == each.place == "ffn" for layer in each.layers}
    if both := taken.intersection(chosen):
        raise UserError(f"the FFN of block {min(both)} is replaced already", "call detach() on that first")
    parts = {
        layer: blocks[layer - 1] if place == "before" else find_ffn(blocks[layer - 1], layer, dim, mode)
        for layer in chosen
    }
    devices = dict.fromkeys(next(part.parameters()).device for part in parts.values())
    for device in devices:
        check_device(device)
    if len(devices) > 1 and spec.shares:
        where = " and ".join(map(str, devices))
        raise UserError(f"memory: share_values needs all blocks on one device: found {where}", "leave share_values out")
    names = (f"memory-{number}" if number > 1 else "memory" for number in count(1))
    name = next(name for name in names if name not in others)
    attached = Attached(name, model, spec, chosen, place, freeze, made)
    if made is None:
        with memory_errors("not enough memory for what is to be attached", "give it fewer or narrower slots"):
            attached.to_empty(device=next(iter(devices)))
        if seed is not None:
            initialise(attached, seed if name == "memory" else derived_seed(seed, name))  # no memory is another's copy
    attached.train(model.training)
    if attached.token_ids is not None:
        host: Any = model
        attached.token_ids.to(host.get_input_embeddings().weight.device)
    if not others:
        model.add_module(NAME, Attachments(model))
    attached.put_into(parts)
    every = getattr(model, NAME)
    every[name] = attached
    every.hold()
    every.watch()
    return attached
