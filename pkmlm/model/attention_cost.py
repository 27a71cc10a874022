"""What attention costs between its maps: operations, parameters, numbers kept for the backward (no torch).

s: tokens of a sequence; d: model width; h: heads; e: width of a head.
"""

from typing import NamedTuple

from pkmlm.model.efficient_attention import CHUNK
from pkmlm.recipe.schema import Model


class Blocks(NamedTuple):
    """How Linformer reads a sequence: blocks, the positions of one, and the rows that stand for all but the last."""

    number: int
    size: int
    rows: int


def blocks(model: Model) -> Blocks:
    """The blocks of a model's context."""
    options = model.attention_options
    number = -(-model.context // options.block)
    return Blocks(number, options.block, (number - 1) * options.rank)


def features(model: Model) -> int:
    """M, the features of a head: the Performer's as the recipe says, cosFormer's a cosine and a sine of each entry."""
    return model.attention_options.features if model.attention == "performer" else 2 * (model.dim // model.heads)


def attention_flops(model: Model) -> int:
    """Multiply-adds over one sequence, as `model` builds it; not halved for causality, as MemoryFormer counts.

    softmax: scores and weighted sums, 2 s^2 d.
    linformer: both over the own block of c and the K rows of all blocks but the last, 2 s (K + c) d; and these rows.
    cosformer, performer: the weights within chunks of C = 64, h s C (M + e + 1), and the running sum, written and read
    once a chunk, 2 h (s - C) M (e + 1); the one beside e is the sum of the weights. Performer's features: 2 s M d.

    MemoryFormer's table 2 prints totals of one block (s = 2,048, d = 1,024, h = 16) and no settings. Without attention
    the block has 12 s d^2 = 25.77 G, which leaves 0.28 to 0.38 G for Linformer (26.1), 4.18 to 4.28 G for cosFormer
    (30.0) and 0.88 to 0.98 G for Performer (26.7). Counted as their papers define them, not causally: Linformer
    4 s k d, so that k would be 34 to 45 (at the paper's k = 256 the block would have 27.9 G); Performer 4 s M d,
    M = 105 to 116 (256: 27.9 G); cosFormer 4 s e d = 0.54 G (26.3 G), while one head as wide as the model, without the
    split into cosine and sine, would need 2 s d^2 = 4.29 G, 30.06 in all. The causal forms also pay for what is near.
    """
    s, d = model.context, model.dim
    if model.attention == "softmax":
        return 2 * s * s * d
    if model.attention == "linformer":
        number, size, rows = blocks(model)
        return 2 * number * size * (rows + size) * d + 2 * size * rows * d
    chunk, width, wide = min(CHUNK, s), d // model.heads + 1, features(model)
    tokens = -(-s // chunk) * chunk
    maps = 2 * s * wide * d if model.attention == "performer" else 0
    return maps + model.heads * (tokens * chunk * (wide + width) + 2 * (tokens - chunk) * wide * width)


def attention_parameters(model: Model) -> int:
    """Linformer's two projections; the Performer's directions are drawn, not trained."""
    return 2 * model.attention_options.rank * model.attention_options.block if model.attention == "linformer" else 0


def attention_saved(model: Model) -> int:
    """Numbers kept for the backward, for one token, beyond those of a softmax that keeps no scores (an estimate).

    linformer: the keys and values that a block sees. cosformer, performer: for each head features, weights within the
    chunk, and of all but the last chunk the sums and what they were made of.
    """
    if model.attention == "softmax":
        return 0
    if model.attention == "linformer":
        _, size, rows = blocks(model)
        return model.dim + 2 * model.dim * (rows + size) // size
    chunk, width, wide = min(CHUNK, model.context), model.dim // model.heads, features(model)
    count = -(-model.context // chunk)
    near = 6 * wide + width + 3 * chunk if model.attention == "performer" else 2 * wide + width + 2 * chunk
    far = (2 * wide + width + wide * width // chunk) * (count - 1) // count
    return model.heads * (near + far)
