"""What one block of a model costs, part by part; see `model.cost` for what is counted."""

from dataclasses import dataclass, replace

from pkmlm.model.attention_cost import attention_flops, attention_parameters, attention_saved
from pkmlm.recipe.schema import Model


@dataclass(frozen=True)
class Part:
    """One module of a block.

    Attributes:
        name: "attention", "ffn", "memory", "qkv", "ffn1", "ffn2".
        dense: parameters of maps, norms, queries and keys.
        flops: of its maps, over one sequence, attention's own products left out.
        memory: parameters of the values of a memory, or of hash tables.
        reads: rows of these that one token reads; width: of a row.
        saved: numbers kept for the backward, for one token (an estimate).
    """

    name: str
    dense: int
    flops: int
    memory: int = 0
    reads: int = 0
    width: int = 0
    saved: int = 0

    @property
    def read(self) -> int:
        """Parameters of the memory that one token reads."""
        return self.reads * self.width


@dataclass(frozen=True)
class Block:
    """One layer as built, and what MemoryFormer's formula gives for it (None where it does not apply)."""

    layer: int
    parts: tuple[Part, ...]
    attention_flops: int
    paper_flops: int | None

    @property
    def flops_without_attention(self) -> int:
        return sum(part.flops for part in self.parts)

    @property
    def memory(self) -> int:
        return sum(part.memory for part in self.parts)

    @property
    def dense(self) -> int:
        return sum(part.dense for part in self.parts)

    @property
    def read(self) -> int:
        return sum(part.read for part in self.parts)


def block_cost(model: Model, layer: int, memories: dict[int, bool]) -> Block:
    """Attention, then an FFN (or Memory Block), a memory, or both; `memories` is `memory_layers(model)`."""
    s, d = model.context, model.dim
    hashed = model.projections == "hash"
    parts = [attention(model)]
    if memories.get(layer, True):
        parts += memory_block(model) if hashed else [ffn(model)]
    if layer in memories:
        parts.append(key_memory(model))
    # One norm before all that follows attention.
    parts[1] = replace(parts[1], dense=parts[1].dense + 2 * d, saved=parts[1].saved + 2 * d)
    paper = None
    if layer not in memories and model.attention == "softmax" and (hashed or model.ffn_dim in (None, 4 * d)):
        paper = 6 * s * d * d // model.hash.bits if hashed else 12 * s * d * d
    return Block(layer, tuple(parts), attention_flops(model), paper)


def attention(model: Model) -> Part:
    """Norm, one map to q, k and v, and the output map; or one Memory Layer to q, k and v that share a hash."""
    d, hashing = model.dim, model.hash
    rotated = 3 * d if model.positions == "rotary" else 0  # copies of queries and keys, and their parts
    dense, saved = 2 * d + attention_parameters(model), 6 * d + rotated + attention_saved(model)
    if model.projections == "hash":
        qkv = hash_layer_cost(hashing.bits, d // hashing.bits, 3 * d, model.context, "qkv")
        return replace(qkv, dense=dense, saved=qkv.saved + saved)
    maps = 4 * d * d
    return Part("attention", dense + maps + (4 * d if model.bias else 0), model.context * maps, saved=saved)


def ffn(model: Model) -> Part:
    """The dense FFN: two maps and their biases."""
    d, inner = model.dim, model.ffn_dim or 4 * model.dim
    bias = inner + d if model.bias else 0
    return Part("ffn", 2 * d * inner + bias, model.context * 2 * d * inner, saved=2 * inner)


def memory_block(model: Model) -> list[Part]:
    """Two Memory Layers with a norm between (MF section 2.4, eq. 15)."""
    bits, tables = model.hash.bits, model.dim // model.hash.bits
    wide_bits = bits + model.hash.extra_bits
    wide = wide_bits * tables
    first = hash_layer_cost(bits, tables, wide, model.context, "ffn1")
    second = hash_layer_cost(wide_bits, tables, model.dim, model.context, "ffn2")
    return [first, replace(second, dense=2 * wide, saved=second.saved + 2 * wide)]


def key_memory(model: Model) -> Part:
    """Queries, sub-keys (or flat keys) and values.

    FLOPs a token (PKM section 3.2): the query map; H * n * d_q for the scores of both halves' sub-keys
    (flat keys: H * n^2 * d_q); H * k * d for the weighted sum of the values.
    """
    memory, d = model.memory, model.dim
    queries = memory.heads * memory.key_dim
    query_map = d * queries + (d * d if memory.query == "mlp" else 0)
    bias = queries + (d if memory.query == "mlp" else 0)
    norm = {"batch": 2 * queries, "layer": 2 * memory.key_dim, "rms": memory.key_dim, "none": 0}[memory.query_norm]
    keys = queries * memory.key_rows  # product keys: heads * 2 * n * (d_q / 2)
    reads = memory.heads * memory.topk
    return Part(
        "memory",
        query_map + bias + norm + keys,
        model.context * (query_map + keys + reads * d),
        memory=memory.slots * d,
        reads=reads,
        width=d,
        # Queries before and after their norm; for each read a weight, its slot and, of product keys, both sub-keys.
        saved=2 * queries + reads * (7 if memory.kind == "product-key" else 5),
    )


def hash_layer_cost(bits: int, tables: int, width: int, tokens: int, name: str = "hash") -> Part:
    """The cost of one Memory Layer (MF section 2.3): tokens * (bits + width) * tables operations.

    Args:
        bits: of a bucket code (tau): a table has 2^bits rows.
        tables: how many (K); the layer's input is bits * tables wide.
        width: of the output (h), and so of a row.
        tokens: of the sequence (s).
    """
    return Part(
        name,
        dense=0,
        flops=tokens * (bits + width) * tables,
        memory=tables * 2**bits * width,
        reads=tables,
        width=width,
        saved=(bits + 3) * tables,  # the input, and for each table its row and score
    )
