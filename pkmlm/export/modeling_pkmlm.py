"""A pkmlm model for `transformers`. It computes with pkmlm's own files, which an export holds beside this one.

B: sequences; T: new positions; S: all positions so far; D: model width; V: vocabulary; h: heads; e: width of a head.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from pkmlm.export.configuration_pkmlm import PkmlmConfig
from pkmlm.kernels.matmul import Linear
from pkmlm.memory.base import memories
from pkmlm.memory.init import Constant, Normal, fill, init_spec_of, linear_std
from pkmlm.memory.query import QueryBatchNorm
from pkmlm.memory.registry import SPECS
from pkmlm.memory.spec import Spec
from pkmlm.memory.table import Values, tables_of
from pkmlm.model.attention import AttentionLayout, KVCache, positions_of
from pkmlm.model.transformer import Block as OwnBlock
from pkmlm.model.transformer import Network, build_parts, kept_in_fp32
from pkmlm.recipe.shape import Shape

# What this release of transformers calls the cache: `cache` since 5.24.
CACHE = "cache" if "cache" in {field.name for field in fields(CausalLMOutputWithPast)} else "past_key_values"


class Section(Shape):
    """The recipe's section `model`, from a configuration.

    The network has no head of its own: `PkmlmForCausalLM` has it.
    """

    def __init__(self, config: PkmlmConfig):
        self.__dict__.update(vars(config))
        self.tie_embeddings = True
        self.rotary_scaling = SimpleNamespace(**config.rotary_scaling)
        self.memories = {name: spec_of(keys) for name, keys in config.memories.items()}


def spec_of(keys: Mapping[str, Any]) -> Spec:
    """A memory, from its keys as JSON has them."""
    kind: Any = SPECS[keys["kind"]]
    spec: Spec = kind(**{key: tuple(each) if isinstance(each, list) else each for key, each in keys.items()})
    return spec


class SharedCache(KVCache):
    """Our cache, kept in one of `transformers`, so that whatever is done to that (reordering, cropping, copying) is
    done to all of it. What is not keys and values is in layers after those of attention.

    Args:
        cache: a `Cache`.
        blocks: the number of attention layers.
        room: positions that it can hold.
    """

    def __init__(self, cache: Any, blocks: int, room: int):
        super().__init__(room, int(cache.get_seq_length()))
        self.cache, self.blocks = cache, blocks
        self.names: list[str] = []

    def extend(self, block: int, k_BhTe: Tensor, v_BhTe: Tensor) -> tuple[Tensor, Tensor]:
        """As in the base class; a cache of fixed size is cut to the positions so far."""
        total = self.length + k_BhTe.shape[2]
        # In early releases of transformers 5, a cache of fixed size needs the places.
        place = {"cache_position": torch.arange(self.length, total, device=k_BhTe.device)}
        k_BhSe, v_BhSe = self.cache.update(k_BhTe, v_BhTe, block, place)
        if getattr(self.cache.layers[block], "max_cache_len", None) is None:  # one of fixed size has more, unused
            self.check(k_BhSe.shape[2], total)
        return k_BhSe[:, :, :total], v_BhSe[:, :, :total]

    def append(self, name: str, x: Tensor, dim: int = 1) -> Tensor:
        """As in the base class, along dimension 1; every forward appends the same names in the same order."""
        place = self.blocks + len(self.names)
        self.names.append(name)
        layers = self.cache.layers
        if not self.length:
            del layers[place:]  # early releases of transformers 5 leave something in a cache that they reset
        while len(layers) <= place:
            layer: Any = DynamicLayer()
            layer.max_batch_size = len(x)  # they also compare what a cache of fixed size has room for in all layers
            layer.max_cache_len = getattr(layers[0], "max_cache_len", None) if layers else None
            layers.append(layer)
        x_B1TX = x.reshape(len(x), 1, x.shape[1], -1)
        x_BSX = layers[place].update(x_B1TX, x_B1TX[..., :1])[0][:, 0]
        self.check(x_BSX.shape[1], self.length + x.shape[1])
        return x_BSX.reshape(*x_BSX.shape[:2], *x.shape[2:])

    def check(self, found: int, expected: int) -> None:
        """Refuse a cache whose layers do not all hold the same positions."""
        if found != expected:
            what = f"a layer of the cache holds {found} positions (expected {expected})"
            raise ValueError(f"{what}: an earlier call was interrupted; start with an empty cache")


def documents(positions_BT: Tensor | None, mask_BT: Tensor | None) -> Tensor | None:
    """The number of each token's document: one begins wherever positions do not go on from those of the token before by
    one, or, over padding between the two, by as many places at most. None: there is only one in each row.

    Args:
        mask_BT: false for padding, which begins none; None: there is none.
    """
    if positions_BT is None or positions_BT.shape[1] == 1:
        return None
    if mask_BT is None:
        mask_BT = torch.ones_like(positions_BT)
    place_T = torch.arange(positions_BT.shape[1], device=positions_BT.device)
    last_BT = torch.where(mask_BT.bool(), place_T, -1).cummax(1).values  # the last token up to here
    before_BT = pad(last_BT[:, :-1], (1, 0), value=-1)
    step_BT = positions_BT - positions_BT.expand_as(before_BT).gather(1, before_BT.clamp(min=0))
    follows_BT = (step_BT >= 1) & (step_BT <= place_T - before_BT)
    document_BT = (mask_BT.bool() & (before_BT >= 0) & ~follows_BT).cumsum(1)
    return document_BT if bool(document_BT[:, -1].any()) else None


def seen_by(mask: Tensor | None, document_BT: Tensor | None, in_order_1T: Tensor) -> Tensor:
    """What each new token sees of all positions so far: (B or 1, T, S), bool.

    Args:
        mask: (B, S), false for padding; or (B, 1, T, S), false or below 0 for what is not seen; None: no padding.
        document_BT: the number of each token's document, where nothing is past; None: all are of one.
        in_order_1T: the places of the new tokens.

    Raises:
        ValueError: a mask for each head.
    """
    query_T1 = in_order_1T.T
    key_S = torch.arange(int(query_T1[-1]) + 1, device=query_T1.device)
    if mask is not None and mask.ndim == 4:
        if mask.shape[1] > 1:
            raise ValueError(f"attention_mask has {mask.shape[1]} heads (expected one mask for all)")
        seen_BTS = mask[:, 0, :, : len(key_S)]
        return seen_BTS if seen_BTS.dtype == torch.bool else seen_BTS == 0
    seen_BTS = (key_S <= query_T1)[None]
    if document_BT is not None:
        seen_BTS = seen_BTS & (document_BT[:, :, None] == document_BT[:, None, :])
    if mask is not None:
        seen_BTS = seen_BTS.expand(len(mask), -1, -1).clone()
        seen_BTS[..., : mask.shape[1]] &= mask[:, None, : len(key_S)].bool()
        seen_BTS |= key_S == query_T1  # padding sees itself: a row that sees nothing would be NaN
    return seen_BTS


def seen_by_the_next(seen_BTS: Tensor) -> Tensor:
    """Which positions so far the one after each sees: (B or 1, S), bool; from what the new tokens see."""
    before = seen_BTS.shape[2] - seen_BTS.shape[1] - 1  # the place before the first new token
    of_new_BT = seen_BTS.diagonal(before, 1, 2)
    of_old_BS = seen_BTS[:, 0, : max(0, before)]  # what the first new token sees is real
    return pad(torch.cat([of_old_BS, of_new_BT], 1), (0, 1), value=True)


def layout_of(seen_BTS: Tensor, positions_BT: Tensor | None, mask_BT: Tensor | None) -> AttentionLayout:
    """Mask and positions; positions that only count what each token sees are left out. Those of padding are ignored."""
    if positions_BT is None:
        return AttentionLayout(None, seen_BTS)
    count_BT = seen_BTS.sum(-1) - 1
    counts_BT = (positions_BT == count_BT) | (count_BT <= 0)
    if mask_BT is not None:
        counts_BT |= ~mask_BT.bool()
    return AttentionLayout(None if bool(counts_BT.all()) else positions_BT, seen_BTS)


@torch.no_grad()
def resize_table(table: Values, rows: int) -> None:
    """Leave out the last rows of a table, or add rows of zeros."""
    for name, tensor in [*table.named_parameters(), *table.named_buffers()]:
        kept = tensor[:rows]
        resized = torch.cat([kept, kept.new_zeros(rows - len(kept), *kept.shape[1:])])
        setattr(table, name, nn.Parameter(resized, tensor.requires_grad) if name == "weight_KD" else resized)


class Block(GradientCheckpointingLayer, OwnBlock):
    """Our block, whose activations `transformers` can recompute in the backward pass (gradient checkpointing)."""


class PkmlmPreTrainedModel(PreTrainedModel):
    """What the two models share: how `transformers` may treat them, and the initial weights of a new one."""

    config_class = PkmlmConfig
    base_model_prefix = "model"
    _input_embed_layer = "embedding"
    _supports_sdpa = True
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012 (as the library has it)
    _skip_keys_device_placement = [CACHE]  # noqa: RUF012

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """As in the library; so are the ids that memories read by, of which a new token's is its own number, and tables
        with a row for each token, of which a new one's is 0.
        """
        before = self.config.vocab_size
        embedding = super().resize_token_embeddings(*args, **kwargs)
        for memory in memories(self):
            shapes = (memory.spec.tables(self.config.dim, rows) for rows in (before, embedding.num_embeddings))
            for table, old, new in zip(memory.read_tables(), *shapes, strict=False):
                if old.rows != new.rows:
                    resize_table(table, new.rows)
        for ids in self.base_model.token_ids.values():
            kept_V = ids.ids_V[: embedding.num_embeddings]
            ids.ids_V = torch.cat([kept_V, torch.arange(len(kept_V), embedding.num_embeddings, device=kept_V.device)])
        return embedding

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise a new model; to train one from scratch, use pkmlm itself."""
        stated = init_spec_of(module)
        random = torch.Generator().manual_seed(int(torch.randint(2**63 - 1, (), device="cpu")))
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if name not in stated:  # of a layer that transformers has made, or of a table in few bits
                stated[name] = Normal(linear_std(*tensor.shape)) if name == "weight" else Constant(0)
            if not getattr(tensor, "_is_hf_initialized", False):  # read from a file
                fill(tensor, stated[name], random)


class PkmlmModel(PkmlmPreTrainedModel, Network):
    """Tokens to hidden states."""

    def __init__(self, config: PkmlmConfig):
        super().__init__(config)
        if config.attention != "softmax":
            raise ValueError(f"attention {config.attention!r} is not known here (expected 'softmax')")
        if config.table_bits not in (None, 8, 4):
            raise ValueError(f"table_bits {config.table_bits!r} is not known here (expected None, 8 or 4)")
        section: Any = Section(config)
        self.assemble(section, config.vocab_size, *build_parts(section, config.vocab_size))
        for block in self.blocks:
            block.__class__ = Block
        self.reads_tokens = section.smear or any(memory.lookback for memory in section.memories.values())
        for table in tables_of(self).values():
            if config.table_bits is not None:
                table.hold_bits(config.table_bits)
            table.register_forward_hook(on_the_device_of_the_weights)
        for path, module in self.blocks.named_modules():
            name = path.rpartition(".")[2]
            if name.startswith("memory_") or (name == "qkv" and tables_of(module)):
                module.register_forward_pre_hook(in_fp32)
                module.register_forward_hook(self.in_the_dtype_of_the_stream)
        self._keep_in_fp32_modules_strict = kept_in_fp32(self)
        self.post_init()  # type: ignore[operator]

    def in_the_dtype_of_the_stream(self, memory: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output.to(self.embedding.weight.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], *arguments: Any, **options: Any) -> Any:
        """What casts a model (`half`, `to` and others share no public method) leaves the maps of memories in fp32."""
        tensors = self.state_dict(keep_vars=True)
        kept = {id(tensors[name]) for name in kept_in_fp32(self)}
        kept |= {id(tensors[name].grad) for name in kept_in_fp32(self)}

        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if id(tensor) not in kept or moved.dtype == torch.float32:
                return moved
            return (moved if moved.dtype == tensor.dtype else tensor.to(moved.device)).float()

        return super()._apply(keep_dtype, *arguments, **options)

    def train(self, mode: bool = True) -> Any:
        """As in torch; but batch-normalised queries keep their statistics, which padding would change."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, QueryBatchNorm):
                module.training = False
        return self

    def stand_ins(self, embedded_BTD: Any) -> Tensor:
        """Tokens for embeddings that are given without any: none begins a document."""
        begins: list[Any] = [ids.ids_V == 0 for ids in self.token_ids.values()]
        token = int(begins[0].long().argmin()) if begins else 0
        return torch.full(embedded_BTD.shape[:2], token, device=embedded_BTD.device)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """The final norm's output.

        Args:
            attention_mask: (B, S), false for padding; or (B, 1, T, S), which tokens each token sees: true, or 0.
            position_ids: (B, T); None: counted from the first that is not padding. Without a mask of what each token
                sees, a document begins wherever they do not go on by one; it sees nothing before it.
            cache: the keys and values of earlier positions, a `Cache`; transformers before 5.24 calls it
                `past_key_values`.

        Raises:
            ValueError: not exactly one of `input_ids` and `inputs_embeds`; more positions than the context has; a cache
                with several documents in a row.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if input_ids is None and self.reads_tokens:
            raise ValueError("this model looks rows up by the tokens: give input_ids, not inputs_embeds")
        given: Any = input_ids if inputs_embeds is None else inputs_embeds
        new, cache = given.shape[1], past_key_values if cache is None else cache
        if position_ids is not None and (position_ids.ndim != 2 or position_ids.shape[1] != new):
            raise ValueError(f"position_ids has shape {tuple(position_ids.shape)} (expected {tuple(given.shape[:2])})")
        past = 0 if cache is None else int(cache.get_seq_length())
        if self.training and torch.is_grad_enabled() and any(each.gradient_checkpointing for each in self.blocks):
            use_cache = False  # it would get the keys and values twice
            if cache is not None:
                raise ValueError("a cache is given, but activations are recomputed (gradient checkpointing)")
        cached = cache is not None or bool(use_cache)
        layout, in_a_row, positions = reading_of(attention_mask, position_ids, past, past + new, cached, given.device)
        if positions > self.context:
            raise ValueError(f"{positions} positions do not fit the context of {self.context}")
        config: Any = self.config
        if cache is None and not in_a_row and (config.use_cache if use_cache is None else use_cache):
            cache = DynamicCache()
        states = []
        for x_BTD in self.states(
            self.stand_ins(inputs_embeds) if input_ids is None else input_ids,
            None if cache is None else SharedCache(cache, len(self.blocks), self.context),
            layout,
            seen_BS=None if layout is None else seen_by_the_next(layout.mask_BTT),
            embedded_BTD=inputs_embeds,
        ):
            if config.output_hidden_states if output_hidden_states is None else output_hidden_states:
                states.append(x_BTD)
        return BaseModelOutputWithPast(
            last_hidden_state=x_BTD, hidden_states=tuple(states) if states else None, **{CACHE: cache}
        )


class Reading(NamedTuple):
    """What the tokens of a call see.

    Attributes:
        layout: None: each token sees all before it, the first at position 0.
        in_a_row: whether several documents follow each other.
        positions: that there are, so far.
    """

    layout: AttentionLayout | None
    in_a_row: bool
    positions: int


def reading_of(
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    past: int,
    stop: int,
    cached: bool,
    device: torch.device,
) -> Reading:
    """What the arguments of a forward ask for.

    Args:
        attention_mask, position_ids: as given to it.
        past, stop: the range of the new tokens among all.
        cached: whether keys and values of the tokens before are there, or are to be kept.
        device: of these tokens.

    Raises:
        ValueError: several documents follow each other, and `cached`.
    """
    order_1T = torch.arange(past, stop, device=device)[None]
    if attention_mask is not None and attention_mask.ndim == 2 and bool(attention_mask.all()):
        attention_mask = None
    if attention_mask is None and (position_ids is None or bool((position_ids == order_1T).all())):
        return Reading(None, False, stop)
    document_BT = mask_BT = None
    if attention_mask is not None and attention_mask.ndim == 2:
        mask_BT = attention_mask[:, past:stop]
    if attention_mask is None or mask_BT is not None:  # a mask of four axes says itself what is seen
        document_BT = documents(position_ids, mask_BT)
    if document_BT is not None and cached:
        raise ValueError("documents in a row (by their position_ids) are read without a cache")
    layout = layout_of(seen_by(attention_mask, document_BT, order_1T), position_ids, mask_BT)
    positions = stop if document_BT is None else int(positions_of(layout).max()) + 1
    return Reading(layout, document_BT is not None, positions)


def in_fp32(memory: nn.Module, inputs: Any) -> Any:
    """Memories compute in fp32, whatever the dtype of the stream."""
    x_BTD, *others = inputs
    return x_BTD.float(), *others


def on_the_device_of_the_weights(table: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """A table that several layers read may be on another device than some of them."""
    return output.to(inputs[1].device)


class PkmlmForCausalLM(PkmlmPreTrainedModel, GenerationMixin):
    """Tokens to logits."""

    _tied_weights_keys = {"lm_head.weight": "model.embedding.weight"}  # noqa: RUF012

    def __init__(self, config: PkmlmConfig):
        super().__init__(config)
        self.model = PkmlmModel(config)
        self.lm_head = Linear(config.dim, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits (B, T, V) of the next tokens, at the last `logits_to_keep` positions (0: at all).

        Args:
            labels: (B, T), the input ids, which are shifted here; -100 is not scored. `loss` is then the mean of -log p
                in nats.
        """
        found = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits_BTV = self.lm_head(found.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits_BTV, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits_BTV,
            hidden_states=found.hidden_states,
            **{CACHE: found.get(CACHE)},
        )
        return output if return_dict is not False and self.config.return_dict else output.to_tuple()
