"""The network: a decoder-only, pre-norm transformer whose FFNs may be memories.

B: sequences; T: positions; D: model width; V: vocabulary; C: positions of the context; w: rotated pairs of a head.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu

from pkmlm.distributed import ProcessGroups
from pkmlm.errors import memory_errors
from pkmlm.kernels.matmul import Linear, linear
from pkmlm.memory.flat_key.layer import FlatKeyMemory
from pkmlm.memory.hash.layer import HashLayer, MemoryBlock
from pkmlm.memory.init import initialise, linear_std
from pkmlm.memory.key_memory import KeyMemory
from pkmlm.memory.ngram.layer import NGramIds, NGramMemory, Past
from pkmlm.memory.peer.layer import PEER
from pkmlm.memory.product_key.layer import ProductKeyMemory
from pkmlm.memory.query import QueryBatchNorm
from pkmlm.memory.table import Pool, Values, tables_of
from pkmlm.model.attention import Attention, AttentionLayout, KVCache, rotation
from pkmlm.model.loss import summed_loss
from pkmlm.recipe.constraints import memory_layers
from pkmlm.recipe.schema import Model, Recipe

BATCH_NORM_MOMENTUM = 0.1  # of one optimizer step
KEY_MEMORIES: dict[str, type[KeyMemory]] = {each.kind: each for each in (ProductKeyMemory, FlatKeyMemory, PEER)}


class FFN(nn.Module):
    """Two linear maps with an activation between.

    Args:
        model: the recipe's section: its `dim`, `ffn_dim` (null: four times `dim`), `bias` and `activation`.
        share: factor of the last map's initial weights, as in every residual branch; GPT-2's is one over the square
            root of the number of branches.
    """

    def __init__(self, model: Model, share: float):
        super().__init__()
        inner = model.ffn_dim or 4 * model.dim
        self.up = Linear(model.dim, inner, bias=model.bias)
        self.down = Linear(inner, model.dim, model.bias, share * linear_std(inner, model.dim))
        self.activation: Callable[[Tensor], Tensor] = gelu if model.activation == "gelu" else relu

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) to (B, T, D), in the dtype of the maps."""
        return self.down(self.activation(self.up(x_BTD)))


class Block(nn.Module):
    """Attention, then `parts`: an FFN, a Memory Block, a memory, or an FFN with a memory beside it.

    sequential: z = x + attention(norm(x)), y = z + parts(norm(z)); parallel: y = x + attention(norm(x)) +
    parts(norm(x)). Before all of this, an n-gram memory adds to x.
    The residual stream itself is never normalised (MemoryFormer's eq. 15 as its released code reads it).

    Args:
        model: the recipe's section: its `dim`, `residual` and `dropout`.
        attention: maps the normalised stream (B, T, D) to what is added to it.
        parts: each maps (B, T, D) to (B, T, D); by name, "ffn" and "memory".
        ngram: the n-gram memory; None: there is none.
    """

    def __init__(
        self, model: Model, attention: Attention, parts: dict[str, nn.Module], ngram: NGramMemory | None = None
    ):
        super().__init__()
        self.ngram = ngram
        self.parallel = model.residual == "parallel"
        self.attention_norm = nn.LayerNorm(model.dim)
        self.attention = attention
        self.norm = nn.LayerNorm(model.dim)
        self.parts = nn.ModuleDict(parts)
        self.dropout = nn.Dropout(model.dropout)

    def forward(
        self,
        x_BTD: Tensor,
        cos_sin: tuple[Tensor, Tensor] | None,
        cache: KVCache | None,
        layout: AttentionLayout | None = None,
        past: Past | None = None,
    ) -> Tensor:
        """The residual stream after the block (B, T, D), from that before it.

        Args:
            past: the tokens that each token sees before it, which an n-gram memory needs.

        The others are those of `Attention.forward`.

        Raises:
            ValueError: the block has an n-gram memory, and `past` is None.
        """
        if self.ngram is not None:
            if past is None:
                raise ValueError("an n-gram memory needs `past`, the tokens before each token")
            x_BTD = x_BTD + self.dropout(self.ngram(x_BTD, past))
        z_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD), cos_sin, cache, layout))
        h_BTD = self.norm(x_BTD if self.parallel else z_BTD)
        for part in self.parts.values():
            z_BTD = z_BTD + self.dropout(part(h_BTD))
        return z_BTD


class Transformer(nn.Module):
    """Tokens to logits. Build it with `build_model`, which also draws its weights.

    Args:
        model: the recipe's section.
        vocab_size: rows of the embedding (V).
        blocks: the blocks, from the first to the last.
        pool: the tables that their memories share; None: each has its own.

    Attributes:
        ngram_ids: finds what n-gram memories need to know about the tokens; None: there are no n-gram memories.
    """

    def __init__(self, model: Model, vocab_size: int, blocks: list[Block], pool: Pool | None = None):
        super().__init__()
        self.context = model.context
        self.rotary_width = model.rotary_width if model.positions == "rotary" else 0
        self.embedding = uninitialized_embedding(vocab_size, model.dim)
        self.positions = uninitialized_embedding(model.context, model.dim) if model.positions == "learned" else None
        self.dropout = nn.Dropout(model.dropout)
        self.blocks = nn.ModuleList(blocks)
        self.pool = pool
        self.ngram_ids = NGramIds(vocab_size, model.ngram) if model.ngram.layers else None
        self.norm = nn.LayerNorm(model.dim)
        self.untied_head = None if model.tie_embeddings else Linear(model.dim, vocab_size, bias=False)

    def hidden(self, tokens_BT: Tensor, cache: KVCache | None = None, layout: AttentionLayout | None = None) -> Tensor:
        """The final norm's output (B, T, D).

        Args:
            tokens_BT: int64, below V.
            cache: keys and values of the tokens before; the new ones are added to it.
            layout: positions (within the context) and mask of tokens that are not a plain sequence; excludes a cache.

        Raises:
            ValueError: more positions than the context has.
        """
        start, length = (cache.length if cache else 0), tokens_BT.shape[1]
        if layout is None and start + length > self.context:
            raise ValueError(f"{start + length} positions do not fit the context of {self.context}")
        x_BTD = self.embedding(tokens_BT)
        if self.positions is not None:
            at = slice(start, start + length) if layout is None else layout.positions_BT
            x_BTD = x_BTD + self.positions.weight[at]
        x_BTD = self.dropout(x_BTD)
        cos_sin = None
        if self.rotary_width:
            in_order_T = torch.arange(start, start + length, device=tokens_BT.device)
            cos_sin = rotation(in_order_T if layout is None else layout.positions_BT[:, None], self.rotary_width)
        past = None if self.ngram_ids is None else self.ngram_ids(tokens_BT, cache, layout)
        for block in self.blocks:
            x_BTD = block(x_BTD, cos_sin, cache, layout, past)
        if cache is not None:
            cache.length += length
        return self.norm(x_BTD)

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


def uninitialized_embedding(rows: int, dim: int) -> nn.Embedding:
    """An embedding without initial weights: drawing them on the meta device would load torch's compiler (0.5 s)."""
    return nn.Embedding.from_pretrained(torch.empty(rows, dim), freeze=False)


def build_pool(model: Model) -> Pool | None:
    """The tables that the memories of a model share, without initial weights; None where each has its own."""
    layers = tuple(memory_layers(model))
    if not model.memory.share_values or len(layers) < 2:
        return None
    return Pool(KEY_MEMORIES[model.memory.kind].new_tables(model.dim, model.memory), layers)


def build_block(recipe: Recipe, layer: int, micro_batches: int, pool: Pool | None) -> Block:
    """A block of a recipe's model, without initial weights.

    Args:
        recipe: its `model` section is read.
        layer: counted from 1.
        micro_batches: forwards of an optimizer step, over which batch-normalised queries take their momentum.
        pool: of `build_pool`.
    """
    model = recipe.model
    share = (2 * model.layers) ** -0.5
    hashed = model.projections == "hash"
    memories = memory_layers(model)
    parts: dict[str, nn.Module] = {}
    if layer not in memories or memories[layer]:  # no memory here, or one beside the FFN
        parts["ffn"] = MemoryBlock(model.dim, model.hash, layer, share) if hashed else FFN(model, share)
    if layer in memories:
        momentum = 1 - (1 - BATCH_NORM_MOMENTUM) ** (1 / micro_batches)
        kind = KEY_MEMORIES[model.memory.kind]
        parts["memory"] = kind(model.dim, **model.memory.arguments, pool=pool, layer=layer, momentum=momentum)
    qkv: nn.Module = Linear(model.dim, 3 * model.dim, bias=model.bias)
    out: nn.Module | None = Linear(model.dim, model.dim, model.bias, share * linear_std(model.dim, model.dim))
    if hashed:
        spec = model.hash
        qkv = HashLayer(model.dim, 3 * model.dim, bits=spec.bits, **spec.arguments, layer=layer, name="qkv")
        out = None
    ngram = NGramMemory(model.dim, **model.ngram.arguments, layer=layer) if layer in model.ngram.layers else None
    return Block(model, Attention(model, qkv, out, layer - 1), parts, ngram)


def build_model(
    recipe: Recipe,
    vocab_size: int,
    device: str | torch.device = "cpu",
    ranks: ProcessGroups | None = None,
    *,
    init_weights: bool = True,
    table_bits: int | None = None,
) -> Transformer:
    """The model of a recipe, initialised from its seed; on the meta device, only its shape.

    N-gram memories know no tokenizer yet: to train them, fill `ngram_ids.canonical_V`.

    A model built on "meta" holds the same numbers once it has storage (`to_empty`) and is initialised (`initialise`).

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
        pool = build_pool(recipe.model)
        blocks = [build_block(recipe, layer, micro_batches, pool) for layer in range(1, recipe.model.layers + 1)]
        model = Transformer(recipe.model, vocab_size, blocks, pool)
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
            initialise(model, recipe.train.seed)
    return model
