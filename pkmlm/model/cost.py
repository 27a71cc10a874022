"""What a recipe costs: parameters, operations and bytes read, by arithmetic (no torch, no model).

Operations are multiply-adds, each counted once, of a forward over one sequence of s = model.context tokens.
Counted are the products with weights, keys, values and table rows, and attention's own (`attention_flops`). Left out,
all small beside these: norms, activations, softmax, the top-k and the sums of candidate scores, biases, residual sums,
the embedding look-up.
"""

from dataclasses import dataclass
from typing import Any

from pkmlm.model.block_cost import Block, block_cost
from pkmlm.model.training_memory import training_bytes
from pkmlm.recipe.check import memory_layers
from pkmlm.recipe.schema import Recipe


@dataclass(frozen=True)
class Cost:
    """The cost of a model; see the module for what is counted.

    Attributes:
        dense: parameters that are not values of memories or hash tables; the embeddings are among them.
        memory: parameters of values and tables.
        read_per_token: parameters that the forward of one token reads: its rows of values and tables, and
            all dense ones but the rows of the input embedding and of learned positions that belong to
            others. (A tied embedding is read whole, as the head.)
        flops_per_token: blocks and head, averaged over a full sequence.
        entry_bytes: bytes an entry of values and tables, for table_bytes and gather_bytes_per_token.
        training: bytes by what they hold, with weights and Adam's moments in fp32; an estimate, see
            `training_bytes`.
    """

    dense: int
    memory: int
    read_per_token: int
    blocks: tuple[Block, ...]
    flops_per_token: int
    entry_bytes: int
    training: dict[str, int]

    @property
    def gather_bytes_per_token(self) -> int:
        return sum(block.read for block in self.blocks) * self.entry_bytes

    def as_json(self) -> dict[str, Any]:
        """The shape of `pkmlm cost --json`."""
        return {
            "parameters": {"dense": self.dense, "memory": self.memory, "read_per_token": self.read_per_token},
            "block": [
                {
                    "layer": block.layer,
                    "flops": block.flops_without_attention + block.attention_flops,
                    "flops_without_attention": block.flops_without_attention,
                    "table_bytes": block.memory * self.entry_bytes,
                    "paper": None
                    if block.paper_flops is None
                    else {
                        "flops": block.paper_flops + block.attention_flops,
                        "flops_without_attention": block.paper_flops,
                    },
                }
                for block in self.blocks
            ],
            "flops_per_token": self.flops_per_token,
            "gather_bytes_per_token": self.gather_bytes_per_token,
            "entry_bytes": self.entry_bytes,
            "training_bytes": {**self.training, "total": sum(self.training.values())},
        }


def cost_of(recipe: Recipe, vocab_size: int, entry_bytes: int = 2) -> Cost:
    """The cost of a recipe's model: operations in multiply-adds, sizes in bytes.

    Args:
        recipe: a checked recipe.
        vocab_size: rows of the embedding (`model.vocab_size` may be null).
        entry_bytes: bytes an entry of values and tables: 2 as the papers count (fp16), 4 for fp32.
    """
    model = recipe.model
    memories = memory_layers(model)
    blocks = tuple(block_cost(model, layer, memories) for layer in range(1, model.layers + 1))
    embedding, head = vocab_size * model.dim, 0 if model.tie_embeddings else vocab_size * model.dim
    positions = model.context * model.dim if model.positions == "learned" else 0
    dense = embedding + positions + sum(block.dense for block in blocks) + 2 * model.dim + head
    unread = (positions - model.dim if positions else 0) + (0 if model.tie_embeddings else embedding - model.dim)
    flops = sum(block.flops_without_attention + block.attention_flops for block in blocks)
    return Cost(
        dense=dense,
        memory=sum(block.memory for block in blocks),
        read_per_token=dense - unread + sum(block.read for block in blocks),
        blocks=blocks,
        flops_per_token=flops // model.context + vocab_size * model.dim,
        entry_bytes=entry_bytes,
        training=training_bytes(recipe, dense, blocks, vocab_size),
    )
