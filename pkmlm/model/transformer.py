"""The network: a decoder-only, pre-norm transformer whose FFNs may be memories.

B: sequences; T: positions; D: model width; V: vocabulary; C: positions of the context; w: rotated pairs of a head.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, silu

from pkmlm.errors import memory_errors
from pkmlm.kernels.matmul import Linear, linear
from pkmlm.memory.base import SparseMemory
from pkmlm.memory.gate import Gate
from pkmlm.memory.init import Constant, InitSpec, initialise, linear_std
from pkmlm.memory.query import QueryBatchNorm
from pkmlm.memory.spec import Lookback, Place, Site
from pkmlm.memory.table import Pool, Values, tables_of
from pkmlm.memory.tokens import Past, TokenIds
from pkmlm.model.attention import (
    Attention,
    AttentionLayout,
    Documents,
    KVCache,
    positions_of,
    rotation,
    within_documents,
)
from pkmlm.model.loss import summed_loss

if TYPE_CHECKING:
    from pkmlm.distributed import ProcessGroups
    from pkmlm.recipe.schema import Model, Recipe

BATCH_NORM_MOMENTUM = 0.1  # of one optimizer step
SMEARED = 16
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu-tanh": partial(gelu, approximate="tanh"),
    "relu": relu,
    "swiglu": silu,
}
Pasts = dict[str, Past]  # by the ids that a memory asks for: "canonical", "plain"


class FFN(nn.Module):
    """W3 act(W1 x), or with swiglu W3 (silu(W1 x) * W2 x) (Shazeer 2020, eq. 6); W1 and W2 are one map.

    Args:
        model: the recipe's section: its `dim`, `ffn`, `ffn_dim` and `bias`.
        out_std: standard deviation of the last map's initial weights.
    """

    def __init__(self, model: "Model", out_std: float):
        super().__init__()
        self.gated, bias = model.ffn == "swiglu", model.bias == "all"
        self.up = Linear(model.dim, (1 + self.gated) * model.inner, bias, linear_std(model.dim, model.inner))
        self.down = Linear(model.inner, model.dim, bias, out_std)
        self.activation = ACTIVATIONS[model.ffn]

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) to (B, T, D), in the dtype of the maps."""
        if not self.gated:
            return self.down(self.activation(self.up(x_BTD)))
        gate_BTI, up_BTI = self.up(x_BTD).chunk(2, -1)
        return self.down(self.activation(gate_BTI) * up_BTI)


class Smear(nn.Module):
    """x[t] + s sigmoid(<w, x[t]>) x[t - 1] of a document's embeddings: a bigram for the price of few numbers (Jordan et
    al., modded-nanogpt; Karpathy, nanochat). w is as wide as the first `SMEARED` entries; it and s start at 0.

    Args:
        dim: width of the stream (D).
    """

    def __init__(self, dim: int):
        super().__init__()
        self.gate = Linear(min(dim, SMEARED), 1, bias=False, initial_std=0.0)
        self.scale_1 = nn.Parameter(torch.empty(1))

    def init_spec(self) -> dict[str, InitSpec]:
        return {"scale_1": Constant(0.0)}

    def forward(self, x_BTD: Tensor, past: Past) -> Tensor:
        """The embeddings (B, T, D)."""
        (before_BTD,) = past.earlier("smear", x_BTD, past.places_BTj[..., 1:2])
        return x_BTD + self.scale_1 * torch.sigmoid(self.gate(x_BTD[..., :SMEARED])) * before_BTD


def stream_norm(model: "Model") -> nn.Module:
    """A norm of the residual stream."""
    kind = nn.LayerNorm if model.norm == "layer" else nn.RMSNorm
    return kind(model.dim, model.epsilon(model.norm))


class Block(nn.Module):
    """Attention, then `parts`: an FFN or a memory in its place, and memories beside it.

    sequential: z = x + attention(norm(x)), y = z + parts(norm(z)); parallel: y = x + attention(norm(x)) +
    parts(norm(x)). Before all of this, each memory of `before` adds to x; those of `values` add to attention's values.
    The residual stream itself is never normalised (MemoryFormer's eq. 15 as its released code reads it).

    Args:
        model: the recipe's section: its `dim`, `residual` and `dropout`.
        attention: maps the normalised stream (B, T, D) to what is added to it.
        parts: each maps (B, T, D) to (B, T, D); by name: "ffn", and the memories.
        before: memories that are added to the stream before attention, by name; they look rows up by the tokens.
        values: memories that are added to attention's values, likewise.
        gates: what multiplies the output of a memory, by its name.
    """

    def __init__(
        self,
        model: "Model",
        attention: Attention,
        parts: dict[str, nn.Module],
        before: dict[str, SparseMemory] | None = None,
        values: dict[str, SparseMemory] | None = None,
        gates: dict[str, Gate] | None = None,
    ):
        super().__init__()
        self.gates: Mapping[str, Gate] = nn.ModuleDict(gates)  # type: ignore[assignment]
        self.before, self.values = nn.ModuleDict(before), nn.ModuleDict(values)
        reading = {**(before or {}), **(values or {})}
        self.ids = {name: memory.spec.lookback.ids for name, memory in reading.items() if memory.spec.lookback}
        self.parallel = model.residual == "parallel"
        self.attention_norm = stream_norm(model)
        self.attention = attention
        self.norm = stream_norm(model)
        self.parts = nn.ModuleDict(parts)
        self.dropout = nn.Dropout(model.dropout)

    def forward(
        self,
        x_BTD: Tensor,
        cos_sin: tuple[Tensor, Tensor] | None,
        cache: KVCache | None,
        layout: AttentionLayout | Documents | None = None,
        pasts: Pasts | None = None,
    ) -> Tensor:
        """The residual stream after the block (B, T, D), from that before it.

        Args:
            pasts: the tokens that each token sees before it, which memories before attention need.

        The others are those of `Attention.forward`.

        Raises:
            ValueError: the block has a memory that needs `pasts`, and it is None.
        """
        seen, more_BTD = pasts or {}, None
        if self.ids:
            if missing := set(self.ids.values()).difference(seen):
                raise ValueError(f"a memory of this block needs `pasts` of {' and '.join(missing)} ids")
            for name, memory in self.before.items():
                own_BTD = self._gated(name, memory(x_BTD, seen[self.ids[name]]), x_BTD)
                x_BTD = x_BTD + self.dropout(own_BTD)
        h_BTD = self.attention_norm(x_BTD)
        for name, memory in self.values.items() if self.ids else ():
            own_BTD = self._gated(name, memory(h_BTD, seen[self.ids[name]]), h_BTD)
            more_BTD = own_BTD if more_BTD is None else more_BTD + own_BTD
        mixed_BTD = self.attention(h_BTD, cos_sin, cache, layout, more_BTD)
        z_BTD = x_BTD + self.dropout(mixed_BTD)
        h_BTD = self.norm(x_BTD if self.parallel else z_BTD)
        for name, part in self.parts.items():
            z_BTD = z_BTD + self.dropout(self._gated(name, part(h_BTD), h_BTD))
        return z_BTD

    def _gated(self, name: str, y_BTD: Tensor, x_BTD: Tensor) -> Tensor:
        return self.gates[name](y_BTD, x_BTD) if name in self.gates else y_BTD


class Network(nn.Module):
    """Tokens to hidden states: what a `Transformer` has in common with the network of an export.

    Attributes:
        token_ids: what memories need to know about the tokens, by the ids that they ask for: "canonical", "plain".
    """

    def assemble(self, model: "Model", vocab_size: int, blocks: list[Block], pools: dict[str, Pool]) -> None:
        """Make its parts, without initial weights; the arguments are those of `Transformer`."""
        self.context = model.context
        self.rotary_width = model.rotary_width if model.positions == "rotary" else 0
        self.rotary_base, self.rotary_scaling = model.rotary_base, model.rotary_scaling
        self.embedding = uninitialized_embedding(vocab_size, model.dim)
        self.positions = uninitialized_embedding(model.context, model.dim) if model.positions == "learned" else None
        self.smear = Smear(model.dim) if model.smear else None
        self.dropout = nn.Dropout(model.dropout)
        self.blocks = nn.ModuleList(blocks)
        self.pools = nn.ModuleDict({memory_key(name): pool for name, pool in pools.items()})
        self.token_ids = nn.ModuleDict(token_ids(model, vocab_size))
        self.norm = stream_norm(model)
        self.document_mask = model.document_mask

    def states(
        self,
        tokens_BT: Tensor,
        cache: KVCache | None = None,
        layout: AttentionLayout | None = None,
        *,
        seen_BS: Tensor | None = None,
        embedded_BTD: Tensor | None = None,
    ) -> Iterator[Tensor]:
        """The residual stream before each block, and then the final norm's output: (B, T, D) each.

        Args:
            tokens_BT: int64, below V.
            cache: keys and values of the tokens before; the new ones are added to it.
            layout: positions (within the context) and mask of tokens that are not a plain sequence.
            seen_BS: with a layout after a cache: which tokens so far the next one sees, for memories that look rows up
                by the tokens.
            embedded_BTD: what stands for the tokens' embeddings; None: these.

        Raises:
            ValueError: more positions than the context has.
        """
        x_BTD = self.embedding(tokens_BT) if embedded_BTD is None else embedded_BTD
        start, length = (cache.length if cache else 0), x_BTD.shape[1]
        if layout is None and start + length > self.context:
            raise ValueError(f"{start + length} positions do not fit the context of {self.context}")
        order = layout if seen_BS is None else None
        pasts = {name: find(tokens_BT, cache, order, seen_BS) for name, find in self.token_ids.items()}
        read_as: AttentionLayout | Documents | None = layout
        if self.document_mask:
            read_as = within_documents(pasts["plain"].begins_BS, length, layout, cached=cache is not None)
        if isinstance(read_as, AttentionLayout) and x_BTD.device.type != "cpu":
            read_as = read_as.as_added(x_BTD.dtype)
        at_T = torch.arange(start, start + length, device=x_BTD.device) if read_as is None else positions_of(read_as)
        if self.smear is not None:
            x_BTD = self.smear(x_BTD, pasts["plain"])
        if self.positions is not None:
            at = slice(start, start + length) if read_as is None else at_T
            x_BTD = x_BTD + self.positions.weight[at]
        x_BTD = self.dropout(x_BTD)
        cos_sin = None
        if self.rotary_width:
            if read_as is not None:  # the same for all heads; documents are read in a row
                at_T = at_T.view(1, 1, -1) if isinstance(read_as, Documents) else at_T[:, None]
            cos_sin = rotation(at_T, self.rotary_width, self.rotary_base, self.rotary_scaling)
        for block in self.blocks:
            yield x_BTD
            x_BTD = block(x_BTD, cos_sin, cache, read_as, pasts)
        if cache is not None:
            cache.length += length
        yield self.norm(x_BTD)

    def hidden(self, tokens_BT: Tensor, cache: KVCache | None = None, layout: AttentionLayout | None = None) -> Tensor:
        """The final norm's output (B, T, D). The arguments are those of `states`; a layout excludes a cache."""
        for x_BTD in self.states(tokens_BT, cache, layout):
            last_BTD = x_BTD
        return last_BTD


class Transformer(Network):
    """Tokens to logits. Build it with `build_model`, which also draws its weights.

    Args:
        model: the recipe's section.
        vocab_size: rows of the embedding (V).
        blocks: the blocks, from the first to the last.
        pools: the tables that the layers of a memory share, by its name.
    """

    def __init__(self, model: "Model", vocab_size: int, blocks: list[Block], pools: dict[str, Pool] | None = None):
        super().__init__()
        self.assemble(model, vocab_size, blocks, pools or {})
        self.untied_head = None if model.tie_embeddings else Linear(model.dim, vocab_size, bias=False)

    def head(self, h_BTD: Tensor) -> Tensor:
        """Logits (..., V) of hidden states (..., D)."""
        return linear(h_BTD, (self.untied_head or self.embedding).weight)

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor, scale: float = 1.0) -> Tensor:
        """`summed_loss` of the logits at all positions: 0-d, nats.

        Args:
            tokens_BT: int64, below V.
            targets_BT: int64, the token that follows each position; negative: not scored.
            scale: factor of the loss, see `summed_loss`.
        """
        weight_VD = (self.untied_head or self.embedding).weight
        return summed_loss(self.hidden(tokens_BT).flatten(0, 1), weight_VD, targets_BT.flatten(), scale)

    def forward(self, tokens_BT: Tensor, cache: KVCache | None = None) -> Tensor:
        """Logits (B, T, V): at each position, of the token after it. The arguments are those of `hidden`."""
        return self.head(self.hidden(tokens_BT, cache))


def matrices_of(model: nn.Module) -> list[str]:
    """The paths of the weights of attention's and the FFN's linear maps."""
    return [
        f"{path}.{name}.weight"
        for path, part in model.named_modules()
        if isinstance(part, Attention | FFN)
        for name, inner in part.named_children()
        if isinstance(inner, nn.Linear)
    ]


def trained_names(model: nn.Module, only: str) -> set[str]:
    """The paths of the parameters that move under `train.only`: all; those of "memories" with their gates; their
    "values", which are their tables; or only their "gates", see `Gate`.
    """
    if only == "values":
        return {*tables_of(model)}
    whole = [path for path, module in model.named_modules() if trains(path, module, only)]
    return {
        name for name, _ in model.named_parameters() if any(name.startswith(f"{path}.".lstrip(".")) for path in whole)
    }


def trains(path: str, module: nn.Module, only: str) -> bool:
    """Whether all parameters of a module move under `train.only`."""
    if only == "gates":
        return isinstance(module, Gate)
    of_memory = isinstance(module, SparseMemory) or path.rpartition(".")[2].startswith(memory_key(""))
    return of_memory if only == "memories" else not path


def uninitialized_embedding(rows: int, dim: int) -> nn.Embedding:
    """An embedding without initial weights: drawing them on the meta device would load torch's compiler (0.5 s)."""
    return nn.Embedding.from_pretrained(torch.empty(rows, dim), freeze=False)


def memory_key(name: str) -> str:
    """What modules call a memory of that name: torch refuses names that modules have themselves, such as "half"."""
    return f"memory_{name}"


def kept_in_fp32(model: nn.Module) -> list[str]:
    """The names of tensors that stay in fp32 in a model of half precision: all that memories have besides tables
    (rounded queries and keys would find other slots), the scales of tables in few bits, and the gains of attention's
    own queries and keys.
    """
    floats = [name for name, tensor in model.state_dict().items() if tensor.is_floating_point()]
    kept = re.compile(r"\bmemory_.*(?<!\.weight_KD)$|\.scale_K$|\.attention\.(query|key)_norm\.")
    return [name for name in floats if kept.search(name)]


def token_ids(model: "Model", vocab_size: int) -> dict[str, TokenIds]:
    """What the memories of a model need to know about the tokens, by the ids that they ask for."""
    asked: dict[str, list[Lookback]] = {}
    for lookback in model.lookbacks:
        asked.setdefault(lookback.ids, []).append(lookback)
    return {ids: TokenIds(vocab_size, lookbacks, f"{ids} ids") for ids, lookbacks in asked.items()}


def build_pools(model: "Model") -> dict[str, Pool]:
    """The tables that the layers of each memory share, without initial weights, by its name."""
    found = {
        name: memory.new_pool(model.dim, tuple(memory.layer_places(model.layers)))
        for name, memory in model.memories.items()
    }
    return {name: pool for name, pool in found.items() if pool is not None}


def build_block(model: "Model", vocab_size: int, layer: int, micro_batches: int, pools: Mapping[str, Pool]) -> Block:
    """A block of a recipe's model, without initial weights.

    Args:
        model: the recipe's section.
        vocab_size: rows of the embedding.
        layer: counted from 1.
        micro_batches: forwards of an optimizer step, over which batch-normalised queries take their momentum.
        pools: of `build_pools`.
    """
    share = (2 * model.layers) ** -0.5 if model.init == "small" else 0.0
    momentum = 1 - (1 - BATCH_NORM_MOMENTUM) ** (1 / micro_batches)
    at: dict[Place, dict[str, Any]] = {place: {} for place in get_args(Place)}
    for name, places in model.memory_places().get(layer, {}).items():
        site = Site(model.dim, layer, name, vocab_size, share, momentum, pools.get(name), model.heads)
        for place, module in model.memories[name].build(site, places).items():
            at[place][memory_key(name)] = module
    width, read = model.heads * model.head_width, 2 * model.value_heads * model.head_width
    std = linear_std(model.dim, model.dim)
    qkv: nn.Module = Linear(model.dim, width + read, model.bias != "none", std)
    out: nn.Module | None = Linear(width, model.dim, model.bias == "all", share * std)
    for module in at["qkv"].values():
        qkv, out = module, None
    parts = {**(at["ffn"] or {"ffn": FFN(model, share * linear_std(model.inner, model.dim))}), **at["beside"]}
    gates = {
        memory_key(name): Gate(model.dim)
        for name in model.memory_places().get(layer, {})
        if model.memories[name].gate == "token"
    }
    return Block(model, Attention(model, qkv, out, layer - 1), parts, at["before"], at["values"], gates)


def build_parts(model: "Model", vocab_size: int, micro_batches: int = 1) -> tuple[list[Block], dict[str, Pool]]:
    """The blocks of a recipe's model, and the tables that they share; the arguments are those of `build_block`."""
    pools = build_pools(model)
    layers = range(1, model.layers + 1)
    return [build_block(model, vocab_size, layer, micro_batches, pools) for layer in layers], pools


def streams(model: Transformer) -> dict[str, str]:
    """The random streams of memories' initial weights, by the paths of their modules. They depend on a memory's stream
    and on how many of the same come before it in its block, not on its name.
    """
    found = {f"pools.{name}": f"pool{number or ''}" for number, name in enumerate(model.pools)}
    for path, module in model.blocks.named_modules(prefix="blocks"):
        if stream := getattr(module, "stream", ""):
            whole = f"{'.'.join(path.split('.')[:2])}.{stream}"
            number = sum(other.rstrip("0123456789") == whole for other in found.values())
            found[path] = f"{whole}{number or ''}"
    return found


def build_model(
    recipe: "Recipe",
    vocab_size: int,
    device: str | torch.device = "cpu",
    ranks: "ProcessGroups | None" = None,
    *,
    init_weights: bool = True,
    table_bits: int | None = None,
) -> Transformer:
    """The model of a recipe, initialised from its seed; on the meta device, only its shape.

    Memories that look rows up by the tokens know no tokenizer yet: to train them, fill the `ids_V` of `token_ids`.

    A model built on "meta" holds the same numbers once it has storage (`to_empty`) and is initialised (`initialise`,
    with its `streams`).

    Args:
        recipe: a checked recipe.
        vocab_size: rows of the embedding (`model.vocab_size` may be null).
        device: where the weights lie; "meta": nowhere.
        ranks: process groups that train the model; each rank holds its columns of the tables, and all else in full.
        init_weights: False leaves the weights uninitialized, for a checkpoint to be loaded into them.
        table_bits: 8 or 4 bits in which the tables are held, without initial weights; None: in fp32.

    Raises:
        UserError: the model does not fit into the device's memory.
    """
    with torch.device("meta"):
        micro_batches = recipe.micro_batches(ranks.world.size if ranks else 1)
        model = Transformer(recipe.model, vocab_size, *build_parts(recipe.model, vocab_size, micro_batches))
        if ranks is not None:  # divide the tables, and let batch norms see the tokens of all ranks
            for module in model.modules():
                if isinstance(module, Values):
                    module.divide(ranks.memory)
                elif isinstance(module, QueryBatchNorm):
                    module.ranks = ranks.world
        if table_bits is not None:
            for table in tables_of(model).values():
                table.hold_bits(table_bits)
    if torch.device(device).type != "meta":
        size = sum(parameter.numel() for parameter in model.parameters())
        message = f"the model does not fit into memory: {size:,} parameters, {4 * size / 1e9:,.1f} GB in fp32"
        with memory_errors(message, "`pkmlm cost` shows what a recipe needs"):
            model.to_empty(device=device)
        if init_weights:
            initialise(model, recipe.train.seed, streams(model))
    return model
