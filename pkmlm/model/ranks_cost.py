"""What training a recipe on several ranks costs each of them: memory, and bytes sent a step, by arithmetic (no torch).

W: ranks; M: those that divide each table of rows by columns (`parallel.memory`); G = W / M: ranks that hold the same
columns; t: tokens of a rank in a step; r: reads of a token from a table of K rows of width D.
"""

import math
from dataclasses import dataclass, replace

from pkmlm.model.block_cost import Part
from pkmlm.model.cost import Cost, cost_of
from pkmlm.model.training_memory import bytes_of_weight, row_gradient_bytes
from pkmlm.recipe.check import MAX_PARAMETERS, MAX_SLOTS
from pkmlm.recipe.schema import Recipe


@dataclass(frozen=True)
class RankCost:
    """One rank's share.

    Attributes:
        memory: M, `table_ranks` below.
        training: bytes by what they hold, as `Cost.training`.
        sent: bytes that it sends in a step, by what they say; see `bytes_sent`.
    """

    memory: int
    training: dict[str, int]
    sent: dict[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.training.values())


def divisions(cost: Cost, ranks: int) -> list[int]:
    """Every M that is possible on so many ranks: it divides them, and the width of each table."""
    parts = table_parts(cost)
    common = math.gcd(ranks, *(part.width for part in parts)) if parts else 1
    return [each for each in range(1, common + 1) if common % each == 0]


def table_parts(cost: Cost) -> list[Part]:
    """The modules with a table of rows, one for each table."""
    return [part for block in cost.blocks for part in block.parts if part.memory]


def rank_cost(recipe: Recipe, cost: Cost, ranks: int, table_ranks: int) -> RankCost:
    """The cost, in bytes, of one of `ranks` ranks of which `table_ranks` divide each table.

    Args:
        cost: `cost_of` the recipe.
    """
    held = bytes_held(recipe, cost, ranks, table_ranks)
    return RankCost(table_ranks, held, bytes_sent(recipe, cost, ranks, table_ranks))


def shardable(recipe: Recipe, cost: Cost) -> tuple[int, int]:
    """The dense parameters that `parallel.shard` divides among all ranks: those of blocks, and the others. Keys of
    memories stay whole.
    """
    memory = recipe.model.memory
    layers = sum(part.name == "memory" for part in table_parts(cost))
    blocks = sum(block.dense for block in cost.blocks)
    return blocks - layers * memory.heads * memory.key_dim * memory.key_rows, cost.dense - blocks


def bytes_held(recipe: Recipe, cost: Cost, ranks: int, table_ranks: int) -> dict[str, int]:
    """`Cost.training` for a rank that holds one of `table_ranks` parts of the tables' columns.

    Each rank keeps the reads of the global batch, and of the gradient of their outputs its own columns; in a forward it
    also holds the slots and weights that it reads for the others. With `parallel.shard` it holds its part of the dense
    parameters, and whole ones of two blocks and of what is outside of blocks.
    """
    away = cost.memory - cost.memory // table_ranks
    parts, tokens = table_parts(cost), recipe.train.micro_batch * recipe.model.context
    reads = sum(part.reads for part in parts)
    held = dict(cost.training)
    held["weights"] -= bytes_of_weight(recipe) * away
    held["moments"] -= 8 * away
    for part in parts:
        whole, columns = (row_gradient_bytes(part, recipe.train.batch_tokens, tokens, m) for m in (1, table_ranks))
        held["gradients"] += columns - whole
    held["activations"] += tokens * (table_ranks - 1) * reads * 12
    if recipe.parallel.shard and ranks > 1:
        inside, outside = shardable(recipe, cost)
        others = inside + outside - (inside + outside) // ranks
        held["weights"] += 4 * (outside + 2 * max(block.dense for block in cost.blocks))
        held["weights"] -= bytes_of_weight(recipe) * others
        held["gradients"] -= 4 * others
        held["moments"] -= 8 * others
    return held


def bytes_sent(recipe: Recipe, cost: Cost, ranks: int, table_ranks: int) -> dict[str, int]:
    """Bytes that each rank sends in a step, as the usual ring and pairwise algorithms send them.

    dense: 2 (W - 1) / W of the dense gradients, in fp32: an all-reduce. With `parallel.shard`, in each forward and
    backward, (W - 1) / W of the parameters of blocks twice, of the others once, and of all gradients once.
    reads: slots and weights to the M - 1 others that hold columns, outputs back, and both gradients the other way:
    t (12 r (M - 1) + 2 D (M - 1) / M numbers). With `train.recompute`, the former two a second time, but
    for the last outputs of a block.
    gradients: of tables, among the G ranks of the same columns: (G - 1) M t (8 r + D / M numbers) where the reads
    themselves travel, or 2 (G - 1) / G of the rows' sums in fp32 (and a flag each), whichever is less.
    statistics: of batch-normalised queries.
    Numbers are those of the outputs: 2 bytes in bf16 and fp16 (on a GPU), else 4. Left out: some 100 bytes a step for
    loss, norms and stop requests, and what validation and checkpoints take.
    """
    tokens, groups = recipe.train.batch_tokens // ranks, ranks // table_ranks
    number = 2 if recipe.train.precision in ("bf16", "fp16") else 4
    # Recomputation ends where the last activation is had that a backward needs: before a block's last output.
    again = {id(part) for block in cost.blocks for part in block.parts[:-1]} if recipe.train.recompute else set()
    reads = gradients = 0
    for part in table_parts(cost):
        passes = 2 if id(part) in again else 1
        outputs = (1 + passes) * part.width * number // table_ranks
        reads += tokens * (table_ranks - 1) * ((20 if recipe.train.recompute else 12) * part.reads + outputs)
        rows, columns = part.memory // part.width, part.width // table_ranks
        gradients += min(exchange_bytes(table_ranks * tokens, part.reads, rows, columns, number, ranks=groups))
    inside, outside = shardable(recipe, cost) if recipe.parallel.shard else (0, 0)
    fetched = recipe.micro_batches(ranks) * (3 * inside + 2 * outside)
    return {
        "dense": 4 * (ranks - 1) * (2 * (cost.dense - inside - outside) + fetched) // ranks,
        "reads": reads,
        "gradients": gradients,
        "statistics": statistics_bytes(recipe, cost, ranks),
    }


def exchange_bytes(tokens: int, reads: int, rows: int, width: int, number: int = 4, *, ranks: int) -> tuple[int, int]:
    """Bytes that each of `ranks` ranks sends for the gradient of one table: if reads travel, and if sums of rows do.

    Args:
        tokens: of one rank in a step (of its group of ranks, where these divide the columns).
        reads: of a token.
        rows, width: of the table; the columns of one rank.
        number: bytes of a number of the output's gradient.
    """
    by_reads = (ranks - 1) * tokens * (8 * reads + number * width)
    by_rows = 2 * (ranks - 1) * rows * (4 * width + 1) // ranks
    return by_reads, by_rows


def statistics_bytes(recipe: Recipe, cost: Cost, ranks: int) -> int:
    """For each forward of a memory with batch-normalised queries: two moments to all others, two sums back."""
    memory = recipe.model.memory
    if memory.query_norm != "batch":
        return 0
    layers = sum(part.name == "memory" for part in table_parts(cost))
    features = 2 * 4 * memory.heads * memory.key_dim
    passes = 2 if recipe.train.recompute else 1
    each = passes * (ranks - 1) * features + 2 * (ranks - 1) * features // ranks
    return layers * recipe.micro_batches(ranks) * each


def most_keys(recipe: Recipe, vocab_size: int, ranks: int, table_ranks: int, device_bytes: int) -> int | None:
    """The largest `model.memory.num_keys` with which a rank's training fits into so many bytes; 0: none does.

    None: the recipe has no memory of keys and values.
    """
    if recipe.model.memory.kind == "none":
        return None

    def fits(num_keys: int) -> bool:
        sized = replace(recipe.model.memory, num_keys=num_keys, topk=min(recipe.model.memory.topk, num_keys))
        larger = replace(recipe, model=replace(recipe.model, memory=sized))
        return rank_cost(larger, cost_of(larger, vocab_size), ranks, table_ranks).bytes <= device_bytes

    low, high = 0, math.isqrt(min(MAX_SLOTS, MAX_PARAMETERS // recipe.model.dim))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
