"""What a recipe costs: parameters, operations, bytes read, and memory to train.

Blocks are built on the meta device, without storage, and their modules are counted. Operations are multiply-adds, each
counted once, of a forward over one sequence of s = model.context tokens: the products with weights, keys, values and
table rows, and attention's own (`attention_flops`). Left out, all small beside these: norms, activations, softmax, the
top-k and the sums of candidate scores, biases, residual sums, the embedding look-up.

s: tokens of a sequence; d: model width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from pkmlm.kernels.matmul import SCORES
from pkmlm.memory.base import SparseMemory, memories
from pkmlm.memory.table import Pool, tables_of
from pkmlm.model.attention import Attention
from pkmlm.model.efficient_attention import CHUNK
from pkmlm.model.loss import tokens_of_chunk
from pkmlm.model.transformer import FFN, Transformer, build_block, build_pools, matrices_of, trained_names
from pkmlm.recipe.schema import Model, Recipe

ENTRY_BYTES = 2  # of an entry of values and tables, as the papers count (fp16)


@dataclass(frozen=True)
class TableCost:
    """A table of rows, as one layer reads it.

    Attributes:
        memory: the name of the memory.
        rows, width: its shape.
        reads: rows that one token reads in a layer.
        layers: how many read it: more than one for the table of a pool.
        outputs: sums of rows that one token reads in a layer: one per read for n-gram tables with a gate, otherwise 1.
    """

    memory: str
    rows: int
    width: int
    reads: int
    layers: int
    outputs: int = 1

    @property
    def parameters(self) -> int:
        return self.rows * self.width


@dataclass(frozen=True)
class BlockCost:
    """One layer as built.

    Attributes:
        layer: counted from 1.
        parts: what it is made of, in order: "attention", "ffn", and the memories by name.
        dense: parameters that are not in tables.
        matrices: those of attention's and the FFN's maps, which Muon may train.
        tables: in the order in which the block reads them.
        flops_without_attention: of its maps, keys and tables, over one sequence.
        attention_flops: of attention's own products, over one sequence.
        paper_flops: what MemoryFormer's block formula gives without attention; None where it does not apply.
        saved: numbers kept for the backward pass, for one token (an estimate).
        scores: scores that a memory's search makes for one query of one head.
        moving: of the dense parameters, those that move under each `train.only`.
    """

    layer: int
    parts: tuple[str, ...]
    dense: int
    matrices: int
    tables: tuple[TableCost, ...]
    flops_without_attention: int
    attention_flops: int
    paper_flops: int | None
    saved: int
    scores: int
    moving: Mapping[str, int]

    @property
    def memory(self) -> int:
        """Parameters of the tables that it reads; other blocks count the table of a pool, too."""
        return sum(table.parameters for table in self.tables)

    @property
    def read(self) -> int:
        """Parameters of its tables that one token reads."""
        return sum(table.reads * table.width for table in self.tables)


@dataclass(frozen=True)
class Cost:
    """The cost of a model.

    Attributes:
        dense: parameters that are not in memory values or hash tables, including the embeddings.
        memory: parameters of values and tables.
        read_per_token: parameters that the forward of one token reads: its rows of values and tables, and all dense
            ones except other tokens' rows of the input embedding and of learned positions. (All of a tied embedding is
            read, as the head.)
        flops_per_token: blocks and head, averaged over a full sequence.
        training: bytes by what they hold; see `training_bytes`.
    """

    dense: int
    memory: int
    read_per_token: int
    blocks: tuple[BlockCost, ...]
    flops_per_token: int
    training: dict[str, int]

    @property
    def gather_bytes_per_token(self) -> int:
        return sum(block.read for block in self.blocks) * ENTRY_BYTES

    @property
    def tables(self) -> list[TableCost]:
        """The tables of all blocks; those of a pool occur once."""
        return tables_of_blocks(self.blocks)

    def as_json(self) -> dict[str, Any]:
        """The cost as `pkmlm cost --json` prints it."""
        blocks = []
        for block in self.blocks:
            own, paper = block.flops_without_attention, block.paper_flops
            blocks.append(
                {
                    "layer": block.layer,
                    "flops": own + block.attention_flops,
                    "flops_without_attention": own,
                    "table_bytes": block.memory * ENTRY_BYTES,
                    "paper": None
                    if paper is None
                    else {"flops": paper + block.attention_flops, "flops_without_attention": paper},
                }
            )
        return {
            "parameters": {"dense": self.dense, "memory": self.memory, "read_per_token": self.read_per_token},
            "block": blocks,
            "flops_per_token": self.flops_per_token,
            "gather_bytes_per_token": self.gather_bytes_per_token,
            "training_bytes": {**self.training, "total": sum(self.training.values())},
        }


def cost_of(recipe: Recipe, vocab_size: int) -> Cost:
    """The cost of a recipe's model.

    Args:
        recipe: a checked recipe.
        vocab_size: rows of the embedding (`model.vocab_size` may be null).
    """
    model = recipe.model
    with torch.device("meta"):
        pools = build_pools(model)
    in_layers = model.memory_places()
    built: dict[tuple[Any, ...], BlockCost] = {}  # by the memories in it: blocks with the same ones are equal
    blocks = []
    for layer in range(1, model.layers + 1):
        placed = tuple(in_layers.get(layer, {}).items())
        if placed not in built:
            built[placed] = count_block(recipe, vocab_size, layer, pools)
        blocks.append(replace(built[placed], layer=layer))
    with torch.device("meta"):
        outside = Transformer(model, vocab_size, [])
    dense = sum(parameter.numel() for parameter in outside.parameters()) + sum(block.dense for block in blocks)
    unread = (model.context - 1) * model.dim if outside.positions is not None else 0
    if outside.untied_head is not None:
        unread += (vocab_size - 1) * model.dim
    flops = sum(block.flops_without_attention + block.attention_flops for block in blocks)
    return Cost(
        dense=dense,
        memory=sum(table.parameters for table in tables_of_blocks(blocks)),
        read_per_token=dense - unread + sum(block.read for block in blocks),
        blocks=tuple(blocks),
        flops_per_token=flops // model.context + vocab_size * model.dim,
        training=training_bytes(recipe, dense, blocks, vocab_size),
    )


def tables_of_blocks(blocks: Sequence[BlockCost]) -> list[TableCost]:
    """The tables of all blocks: first each block's own, then those that the layers of a memory share."""
    own = [table for block in blocks for table in block.tables if table.layers == 1]
    pools: dict[str, list[TableCost]] = {}
    for block in blocks:
        shared = [table for table in block.tables if table.layers > 1]
        for name in dict.fromkeys(table.memory for table in shared):
            pools.setdefault(name, [table for table in shared if table.memory == name])
    return own + [table for pool in pools.values() for table in pool]


def count_block(recipe: Recipe, vocab_size: int, layer: int, pools: Mapping[str, Pool]) -> BlockCost:
    """Build a block on the meta device, and count what its modules hold and do.

    Multiply-adds of a token are one for each weight of the linear maps, and those that the memories report.
    """
    model, s = recipe.model, recipe.model.context
    with torch.device("meta"):
        block = build_block(model, vocab_size, layer, micro_batches=1, pools=pools)
    found = memories(block)
    maps = sum(module.weight.numel() for module in block.modules() if isinstance(module, nn.Linear))
    tables = [
        TableCost(
            memory.tap.name,
            memory.tap.slots,
            table.width,
            memory.reads,
            max(1, len(memory.tap.pool)),
            memory.outputs,
        )
        for memory in found
        for table in memory.read_tables()
    ]
    parts: list[str] = []
    for name, part in (
        *block.before.items(),
        *block.values.items(),
        ("attention", block.attention),
        *block.parts.items(),
    ):
        parts += [" ".join(filter(None, (memory.tap.name, memory.tap.part))) for memory in memories(part)] or [name]
    return BlockCost(
        layer=layer,
        parts=tuple(parts),
        dense=sum(parameter.numel() for parameter in block.parameters())
        - sum(table.parameters for table in tables if table.layers == 1),
        matrices=sum(block.get_parameter(name).numel() for name in matrices_of(block)),
        tables=tuple(tables),
        flops_without_attention=s * (maps + sum(memory.flops_per_token() for memory in found)),
        attention_flops=attention_flops(model),
        paper_flops=paper_flops(model, layer),
        saved=saved_per_token(block, model),
        scores=max((memory.scores_per_query for memory in found), default=0),
        moving={only: moving_in(block, only) for only in ("memories", "values", "gates")},
    )


def moving_in(block: nn.Module, only: str) -> int:
    """Dense parameters of a block that move under `train.only`."""
    names = trained_names(block, only) - tables_of(block).keys()
    return sum(block.get_parameter(name).numel() for name in names)


def paper_flops(model: Model, layer: int) -> int | None:
    """Multiply-adds of a block without attention's own, by MemoryFormer's formulas (Ding et al. 2024, sec. 2.3): 12 s
    d^2 for a dense one, or by that of its one memory. None: there is no formula for it.
    """
    names = model.memory_places().get(layer, {})
    if model.attention != "softmax" or len(names) > 1:
        return None
    for name in names:
        return model.memories[name].paper_flops(model.dim, model.context)
    plain = model.ffn != "swiglu" and model.inner == 4 * model.dim and model.value_heads * model.head_width == model.dim
    return 12 * model.context * model.dim**2 if plain else None


def saved_per_token(module: nn.Module, model: Model) -> int:
    """Numbers that autograd keeps for one token for the backward pass of a module: inputs and outputs of norms, both
    sides of an FFN's activation, and what attention and memories keep. Dropout is left out."""
    if isinstance(module, SparseMemory):
        return module.saved_per_token()
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return 2 * module.normalized_shape[0]
    if isinstance(module, FFN):
        return 2 * module.up.out_features
    own = attention_saved(model) if isinstance(module, Attention) else 0
    return own + sum(saved_per_token(child, model) for child in module.children())


def attention_flops(model: Model) -> int:
    """Multiply-adds of attention over one sequence, without its maps; not halved for causality, as MemoryFormer
    counts. d is the width of all heads.

    softmax: scores and weighted sums, 2 s^2 d.
    linformer: both over a token's block of c and the K rows of all blocks but the last, 2 s (K + c) d; and these rows.
    cosformer, performer: the weights within chunks of C = 64, h s C (M + e + 1), and the running sum, written and read
    once a chunk, 2 h (s - C) M (e + 1); the 1 added to e is the sum of the weights. Performer's features: 2 s M d.
    (h heads, each e wide with M features.)
    """
    s, d, options = model.context, model.heads * model.head_width, model.attention_options
    if model.attention == "softmax":
        return 2 * s * s * d
    if model.attention == "linformer":
        blocks, size = -(-s // options.block), options.block
        rows = (blocks - 1) * options.rank
        return 2 * blocks * size * (rows + size) * d + 2 * size * rows * d
    chunk, features, width = min(CHUNK, s), attention_features(model), model.head_width + 1
    tokens = -(-s // chunk) * chunk
    maps = 2 * s * features * d if model.attention == "performer" else 0
    return maps + model.heads * (tokens * chunk * (features + width) + 2 * (tokens - chunk) * features * width)


def attention_saved(model: Model) -> int:
    """Numbers that attention keeps for the backward pass, for one token (an estimate).

    Queries, keys, values and the output; with rotary positions, also copies of queries and keys, and their parts.
    softmax: no scores. linformer: the keys and values that a block sees. cosformer, performer: for each head, features,
    weights within the chunk and, in all but the last chunk, the sums and what they are made of.
    """
    d, options = model.heads * model.head_width, model.attention_options
    read = model.value_heads * model.head_width
    saved = 2 * d + 2 * read + ((3 * (d + read) // 2) if model.positions == "rotary" else 0)
    if model.qk_norm:
        saved += d + read
    if model.attention == "softmax":
        return saved
    if model.attention == "linformer":
        rows = (-(-model.context // options.block) - 1) * options.rank
        return saved + d + 2 * d * (rows + options.block) // options.block
    chunk, features, width = min(CHUNK, model.context), attention_features(model), model.head_width
    count = -(-model.context // chunk)
    near = 6 * features + width + 3 * chunk if model.attention == "performer" else 2 * features + width + 2 * chunk
    far = (2 * features + width + features * width // chunk) * (count - 1) // count
    return saved + model.heads * (near + far)


def attention_features(model: Model) -> int:
    """Features of a head: Performer's number is set by the recipe; cosFormer has a cosine and a sine of each entry."""
    return model.attention_options.features if model.attention == "performer" else 2 * model.head_width


def training_bytes(recipe: Recipe, dense: int, blocks: list[BlockCost], vocab_size: int) -> dict[str, int]:
    """An estimate of the memory that training takes in one process, by what it holds.

    weights, gradients, moments: fp32, 4 + 4 + 8 bytes per parameter under Adam (under Muon 4 + 4 + 4), and 2 for the
    copy that a GPU reads in bf16 and fp16; for values and hash tables, `row_gradient_bytes` instead of a gradient. What
    `train.only` freezes has only weights.
    activations: what maps, norms, attention and memories keep of one micro-batch for the backward pass, without dropout
    (with `train.recompute`: each block's input, and everything for one block); 2 bytes per number in bf16 and fp16,
    otherwise 4; SDPA is assumed to keep no s^2 scores.
    logits: those of a chunk, as computed and in fp32, and the head's gradient while it adds up: its sum and a term.
    search: the scores of keys of a chunk.
    Logits and search are those on a CPU; a GPU holds up to 1.1 GB of logits and 0.13 GB of scores.
    Left out: the allocator's slack, the framework itself and the data; and on a GPU the mask of documents, a number for
    each two positions of a sequence.

    Args:
        recipe: a precision of "auto", which only a device resolves, counts as fp32, here and below.
        dense: parameters that are not in tables.
        blocks: of `cost_of`.
        vocab_size: rows of the embedding.
    """
    model, train = recipe.model, recipe.train
    tables = tables_of_blocks(blocks)
    parameters = dense + sum(table.parameters for table in tables)
    tokens = train.micro_batch * model.context
    moving = dense if train.only == "all" else moving_of(recipe, blocks)
    by_muon = sum(block.matrices for block in blocks) if train.only == "all" and recipe.optim.matrices == "muon" else 0
    # Below the first memory, nothing is kept for memories alone.
    below = min(model.memory_places()) - 1 if train.only != "all" else 0
    learning = learning_tables(recipe, tables)
    saved = [block.saved for block in blocks[below:]]
    in_blocks = len(saved) * model.dim + max(saved) if train.recompute else sum(saved)
    scores = max(block.scores for block in blocks)
    return {
        "weights": (6 if in_half_precision(recipe) else 4) * parameters,
        "gradients": 4 * moving + sum(row_gradient_bytes(table, train.batch_tokens, tokens) for table in learning),
        "moments": 8 * moving - 4 * by_muon + sum(moment_bytes(recipe, table) for table in learning),
        "activations": tokens * (3 * model.dim + in_blocks) * (2 if in_half_precision(recipe) else 4),
        "logits": 8 * vocab_size * (min(tokens, tokens_of_chunk("cpu", vocab_size)) + model.dim),
        "search": 4 * min(SCORES["cpu"], tokens * scores),
    }


def learning_tables(recipe: Recipe, tables: Sequence[TableCost]) -> Sequence[TableCost]:
    """The tables that learn: all, unless only gates do."""
    return [] if recipe.train.only == "gates" else tables


def moving_of(recipe: Recipe, blocks: Sequence[BlockCost]) -> int:
    """Dense parameters that move under a `train.only` that is not "all"."""
    return sum(block.moving[recipe.train.only] for block in blocks)


def moment_bytes(recipe: Recipe, table: TableCost) -> int:
    """Bytes of what an optimizer keeps for a table."""
    kept = 0 if recipe.model.memories[table.memory].table_optim.optimizer == "row-sgd" else 8
    return kept * table.parameters


def in_half_precision(recipe: Recipe) -> bool:
    """Whether forwards compute in bf16 or fp16."""
    return recipe.train.precision in ("bf16", "fp16")


def row_gradient_bytes(table: TableCost, tokens: int, micro_batch_tokens: int, table_ranks: int = 1) -> int:
    """Bytes of the gradient of a table of rows until the update (`pkmlm.kernels.row_gradient`).

    For each read its slot and weight, twice while they are sorted, and for each token the gradient of the output: of
    all tokens of a step, in each layer that reads the table; or, where that is less, of one layer's backward pass, plus
    sums of rows, and as much again while reads turn into sums.

    Args:
        tokens: of a step.
        micro_batch_tokens: of one backward pass.
        table_ranks: ranks that divide the table's columns; the tokens of all of them read it in a pass.
    """
    token_bytes = 40 * table.reads + 4 * table.outputs * table.width // table_ranks
    sums = 8 * table.parameters // table_ranks
    return min(table.layers * tokens * token_bytes, sums + table_ranks * micro_batch_tokens * token_bytes)


def bytes_held(recipe: Recipe, cost: Cost) -> dict[str, int]:
    """`Cost.training` for a rank of those that divide the tables' columns (`parallel.memory`).

    Each rank keeps the reads of the global batch, and its own columns of the gradient of their outputs; in a forward it
    also holds the slots and weights that it reads for the others.
    """
    table_ranks = recipe.parallel.memory
    elsewhere = cost.memory - cost.memory // table_ranks
    tokens = recipe.train.micro_batch * recipe.model.context
    weight = 6 if in_half_precision(recipe) else 4  # bytes, with the copy in half precision
    held = dict(cost.training)
    held["weights"] -= weight * elsewhere
    for table in learning_tables(recipe, cost.tables):
        held["moments"] -= moment_bytes(recipe, table) - moment_bytes(recipe, table) // table_ranks
        held["gradients"] -= row_gradient_bytes(table, recipe.train.batch_tokens, tokens)
        held["gradients"] += row_gradient_bytes(table, recipe.train.batch_tokens, tokens, table_ranks)
    held["activations"] += tokens * (table_ranks - 1) * sum(table.layers * table.reads for table in cost.tables) * 12
    return held
