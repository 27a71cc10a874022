"""What training a recipe holds in memory, by arithmetic (no torch): an estimate."""

from pkmlm.kernels.ops import HEADS, SCORES
from pkmlm.model.block_cost import Block, Part
from pkmlm.recipe.schema import Recipe

# Logits at a time, by device: 8 MB in fp32 stay in a CPU's cache; a GPU wants few large calls (512 MB, not measured).
LOGITS = {"cpu": 1 << 21, "cuda": 1 << 27}
LEAST_TOKENS = 512  # fewer at a time, and adding up the head's gradient would show


def tokens_at_a_time(device: str, vocab_size: int) -> int:
    """Tokens whose logits the loss holds at a time, on a kind of device."""
    return max(LEAST_TOKENS, LOGITS[device] // vocab_size)


def training_bytes(recipe: Recipe, dense: int, blocks: tuple[Block, ...], vocab_size: int) -> dict[str, int]:
    """An estimate of the memory that training takes in one process, by what holds it.

    weights, gradients, moments: fp32, 4 + 4 + 8 bytes a parameter under Adam, and 2 for the copy that a GPU reads in
    bf16 and fp16; for values and hash tables `row_gradient_bytes` in place of a gradient.
    activations: what maps, norms, attention and memories keep of one micro-batch for the backward, without
    dropout (with `train.recompute`: each block's input, and one block whole); 2 bytes a number in bf16 and fp16,
    otherwise 4; SDPA is taken to keep no s^2 scores.
    logits: those that exist at a time, as they come and in fp32, and what the head's gradient takes before it is one.
    search: the scores of keys that exist at a time.
    Of both, what a CPU takes; a GPU holds up to 1.1 GB of logits and 0.13 GB of scores.
    Left out: the allocator's slack, the framework itself and the data.

    Args:
        recipe: a precision of "auto", which only a device resolves, is taken as fp32, here and below.
        dense: parameters that are not in tables.
        blocks: of `cost_of`.
        vocab_size: rows of the embedding.
    """
    model, train, memory = recipe.model, recipe.train, recipe.model.memory
    parameters = dense + sum(block.memory for block in blocks)
    tokens = train.micro_batch * model.context
    kept = sum(row_gradient_bytes(part, train.batch_tokens, tokens) for block in blocks for part in block.parts)
    rows = 2 * memory.num_keys if memory.kind == "product-key" else memory.slots
    search = 0 if memory.kind == "none" else 4 * min(SCORES["cpu"], tokens * HEADS["cpu"] * rows)
    at_a_time = min(tokens, tokens_at_a_time("cpu", vocab_size))
    width = 2 if train.precision in ("bf16", "fp16") else 4
    in_blocks = [sum(part.saved for part in block.parts) for block in blocks]
    saved = 3 * model.dim + (len(blocks) * model.dim + max(in_blocks) if train.recompute else sum(in_blocks))
    return {
        "weights": bytes_of_weight(recipe) * parameters,
        "gradients": 4 * dense + kept,
        "moments": 8 * parameters,
        "activations": tokens * saved * width,
        "logits": 8 * vocab_size * (at_a_time + model.dim),
        "search": search,
    }


def bytes_of_weight(recipe: Recipe) -> int:
    """Of one number in fp32, and of its copy in half precision, if training has one."""
    return 6 if recipe.train.precision in ("bf16", "fp16") else 4


def row_gradient_bytes(part: Part, tokens: int, tokens_of_pass: int, table_ranks: int = 1) -> int:
    """What the gradient of a table of rows takes until the update (`pkmlm.kernels.row_gradient`).

    For each read its slot and weight, twice while they are sorted, and for each token the gradient of the output: of
    all tokens of a step, or, where that is less, of one backward pass beside sums of rows, and as much again while
    reads turn into sums.

    Args:
        tokens: of a step.
        tokens_of_pass: of one backward pass.
        table_ranks: those that divide the table's columns; the tokens of all of them read it in a pass.
    """
    of_a_token = 40 * part.reads + 4 * part.width // table_ranks
    sums = 8 * part.memory // table_ranks
    return min(tokens * of_a_token, sums + table_ranks * tokens_of_pass * of_a_token)
