"""A pkmlm model for `transformers`. Part of an exported model: it stands alone, and does nothing but compute.

B: sequences; T: new positions; S: all positions so far; D: model width; V: vocabulary; h: heads; e: width of a head.
"""

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, scaled_dot_product_attention
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .configuration_pkmlm import PkmlmConfig
from .memory_pkmlm import HashLayer, KeyMemory, KeyNorm, MemoryBlock, Pool, QueryBatchNorm
from .ngram_pkmlm import NGramIds, NGramMemory

ROTARY_BASE = 10_000.0
# What this release of transformers calls the cache: `cache` since 5.24.
CACHE = "cache" if "cache" in {field.name for field in fields(CausalLMOutputWithPast)} else "past_key_values"


def rotation(positions_BT: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines (B, 1, T, width / 2) of rotary positions, in fp32."""
    frequency = ROTARY_BASE ** (-torch.arange(0, width, 2, device=positions_BT.device, dtype=torch.float32) / width)
    angle_B1Tw = positions_BT[:, None, :, None] * frequency
    return angle_B1Tw.cos(), angle_B1Tw.sin()


def rotate(x_BhTe: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the first entries of each head by position (halves paired); keep the rest."""
    cos, sin = (part.to(x_BhTe.dtype) for part in cos_sin)
    width = cos.shape[-1]
    a, b, rest = x_BhTe[..., :width], x_BhTe[..., width : 2 * width], x_BhTe[..., 2 * width :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def visible(new: int, past: int, total: int, mask: Tensor | None, device: torch.device) -> Tensor | None:
    """Which of `total` keys each of `new` queries sees, (B or 1, 1, T, S); None if plain causality suffices.

    Args:
        past: positions before the queries. A cache of fixed size has more keys than positions.
        mask: (B, S), false for padding; or whatever `scaled_dot_product_attention` takes, (B, 1, T, S), used as it is.
    """
    if mask is not None and mask.ndim == 4:
        return mask[..., :total]
    if mask is None and past + new == total and (past == 0 or new == 1):
        return None
    key_S, query_T1 = torch.arange(total, device=device), torch.arange(past, past + new, device=device)[:, None]
    seen_BTS = (key_S <= query_T1)[None]
    if mask is not None:
        seen_BTS = seen_BTS.repeat(len(mask), 1, 1)
        seen_BTS[..., : mask.shape[1]] &= mask[:, None, :total].bool()
        seen_BTS |= key_S == query_T1  # padding sees itself: a row that sees nothing would be NaN
    return seen_BTS[:, None]


class Attention(nn.Module):
    """Multi-head causal attention. With hashed projections, a hash layer gives q, k and v; there is no output map."""

    def __init__(self, config: PkmlmConfig, index: int):
        super().__init__()
        self.heads, self.dropout, self.index = config.heads, config.dropout, index
        if config.projections == "hash":
            self.qkv: nn.Module = HashLayer(config, config.dim, 3 * config.dim, config.hash["bits"])
            self.out = None
        else:
            self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=config.bias)
            self.out = nn.Linear(config.dim, config.dim, bias=config.bias)

    def forward(self, x_BTD: Tensor, cos_sin: Any, cache: Any, past: int, mask: Tensor | None) -> Tensor:
        batch, new, dim = x_BTD.shape
        q_BhTe, k_BhTe, v_BhTe = self.qkv(x_BTD).view(batch, new, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if cos_sin is not None:
            q_BhTe, k_BhTe = rotate(q_BhTe, cos_sin), rotate(k_BhTe, cos_sin)
        if cache is not None:
            # In early releases of transformers 5, a cache of fixed size needs the places.
            place = {"cache_position": torch.arange(past, past + new, device=x_BTD.device)}
            k_BhTe, v_BhTe = cache.update(k_BhTe, v_BhTe, self.index, place)
        seen = visible(new, past, k_BhTe.shape[2], mask, x_BTD.device)
        mixed_BhTe = scaled_dot_product_attention(
            q_BhTe,
            k_BhTe,
            v_BhTe,
            attn_mask=seen,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=seen is None and new > 1,
        )
        y_BTD = mixed_BhTe.transpose(1, 2).reshape(batch, new, dim)
        return y_BTD if self.out is None else self.out(y_BTD)


class FFN(nn.Module):
    """Two linear maps with an activation between."""

    def __init__(self, config: PkmlmConfig):
        super().__init__()
        inner = config.ffn_dim or 4 * config.dim
        self.up = nn.Linear(config.dim, inner, bias=config.bias)
        self.down = nn.Linear(inner, config.dim, bias=config.bias)
        self.activation = gelu if config.activation == "gelu" else relu

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x_BTD)))


class Block(nn.Module):
    """Attention, then an FFN (or its hash tables), a memory, or both side by side; perhaps an n-gram memory first."""

    def __init__(self, config: PkmlmConfig, index: int, pool: Pool | None):
        super().__init__()
        self.parallel = config.residual == "parallel"
        self.attention_norm = nn.LayerNorm(config.dim)
        self.attention = Attention(config, index)
        self.norm = nn.LayerNorm(config.dim)
        self.parts = nn.ModuleDict()
        here = [text for text in config.memory["layers"] if text.rstrip("+") == str(index + 1)]
        if not here or here[0].endswith("+"):
            self.parts["ffn"] = MemoryBlock(config) if config.projections == "hash" else FFN(config)
        if here:
            self.parts["memory"] = KeyMemory(config, pool)
        layers = config.ngram["layers"]
        self.ngram = NGramMemory(config, 1 + layers.index(index + 1)) if index + 1 in layers else None
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor, ngrams: Any, *how: Any) -> Tensor:
        if self.ngram is not None:
            x_BTD = x_BTD + self.dropout(self.ngram(x_BTD, ngrams))
        z_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD), *how))
        h_BTD = self.norm(x_BTD if self.parallel else z_BTD)
        for part in self.parts.values():
            z_BTD = z_BTD + self.dropout(part(h_BTD))
        return z_BTD


class PkmlmPreTrainedModel(PreTrainedModel):
    """What the two models share: how `transformers` may treat them, and the initial weights of a new one."""

    config_class = PkmlmConfig
    base_model_prefix = "model"
    _input_embed_layer = "embedding"
    _supports_sdpa = True
    _no_split_modules = ["Block"]  # noqa: RUF012 (as the library has it)
    _skip_keys_device_placement = [CACHE]  # noqa: RUF012

    def __init__(self, config: PkmlmConfig):
        super().__init__(config)
        kept = ["scale_K"] if config.table_bits else []
        if config.memory["kind"] != "none":  # rounded queries and keys would find other slots
            kept += ["query", "key_norm", "keys_HKq" if config.memory["kind"] == "flat-key" else "subkeys_H2nf"]
        self._keep_in_fp32_modules_strict = kept

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """As in the library; the canonical ids of n-gram memories are resized, too."""
        embedding = super().resize_token_embeddings(*args, **kwargs)
        if self.base_model.ngram_ids is not None:
            self.config.canonical_sha256 = self.base_model.ngram_ids.resize(embedding.num_embeddings)
        return embedding

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise a new model; to train one from scratch, use pkmlm itself."""
        for name, parameter in module.named_parameters(recurse=False):
            if name == "bias":
                nn.init.zeros_(parameter)
            elif isinstance(module, nn.LayerNorm | nn.RMSNorm | QueryBatchNorm):
                nn.init.ones_(parameter)
            elif isinstance(module, KeyNorm):
                nn.init.constant_(parameter, len(parameter) ** -0.4)
            elif isinstance(module, KeyMemory):
                nn.init.uniform_(parameter, -(parameter.shape[-1] ** -0.5), parameter.shape[-1] ** -0.5)
            else:
                nn.init.normal_(parameter, std=0.02)
        if isinstance(module, NGramMemory):
            module.multipliers_HG.random_(2**31).mul_(2).add_(1)
            heads = self.config.ngram["heads"]
            for place, order in enumerate(self.config.ngram["orders"]):
                module.multipliers_HG[place * heads : (place + 1) * heads, order:] = 0
        if isinstance(module, NGramIds):
            module.canonical_V.copy_(torch.arange(len(module.canonical_V)))
        if isinstance(module, QueryBatchNorm):
            nn.init.zeros_(module.running_mean)
            nn.init.ones_(module.running_var)


class PkmlmModel(PkmlmPreTrainedModel):
    """Tokens to hidden states."""

    def __init__(self, config: PkmlmConfig):
        super().__init__(config)
        if config.attention != "softmax":
            raise ValueError(f"attention {config.attention!r} is not known here (expected 'softmax')")
        self.rotary_width = round(config.rotary_fraction * (config.dim // config.heads))
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.positions = nn.Embedding(config.context, config.dim) if config.positions == "learned" else None
        self.dropout = nn.Dropout(config.dropout)
        shared = config.memory["share_values"] and len(config.memory["layers"]) > 1
        self.pool = Pool(config) if shared else None
        self.blocks = nn.ModuleList([Block(config, index, self.pool) for index in range(config.layers)])
        self.ngram_ids = NGramIds(config) if config.ngram["layers"] else None
        self.norm = nn.LayerNorm(config.dim)
        self.post_init()

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
        """The final norm's output; by default, positions are counted from the first that is not padding.

        Args:
            cache: the keys and values of earlier positions, a `Cache`; transformers before 5.24 calls it
                `past_key_values`.

        Raises:
            ValueError: not exactly one of `input_ids` and `inputs_embeds`; more positions than the context has.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        x_BTD = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        cache = past_key_values if cache is None else cache
        if cache is None and (self.config.use_cache if use_cache is None else use_cache):
            cache = DynamicCache()
        new = x_BTD.shape[1]
        past = 0 if cache is None else int(cache.get_seq_length())
        if past + new > self.config.context:
            raise ValueError(f"{past + new} positions do not fit the context of {self.config.context}")
        if attention_mask is not None and attention_mask.ndim == 2 and bool(attention_mask.all()):
            attention_mask = None
        if position_ids is None:
            position_ids = torch.arange(past, past + new, device=x_BTD.device)[None]
            if attention_mask is not None and attention_mask.ndim == 2:
                position_ids = (attention_mask.long().cumsum(1) - 1).clamp(min=0)[:, past : past + new]
        if self.positions is not None:
            x_BTD = x_BTD + self.positions(position_ids)
        x_BTD = self.dropout(x_BTD)
        rotary = self.config.positions == "rotary"
        cos_sin = rotation(position_ids, self.rotary_width) if rotary else None
        ngrams = None if self.ngram_ids is None else self.ngram_ids(input_ids, attention_mask, cache)
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        states = []
        for block in self.blocks:
            if wanted:
                states.append(x_BTD)
            x_BTD = block(x_BTD, ngrams, cos_sin, cache, past, attention_mask)
        x_BTD = self.norm(x_BTD)
        return BaseModelOutputWithPast(
            last_hidden_state=x_BTD,
            hidden_states=(*states, x_BTD) if wanted else None,
            **{CACHE: cache},
        )


class PkmlmForCausalLM(PkmlmPreTrainedModel, GenerationMixin):
    """Tokens to logits."""

    _tied_weights_keys = {"lm_head.weight": "model.embedding.weight"}  # noqa: RUF012

    def __init__(self, config: PkmlmConfig):
        super().__init__(config)
        self.model = PkmlmModel(config)
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
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
