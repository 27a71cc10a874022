"""The shape of a pkmlm model for `transformers`."""

from typing import Any

from transformers import PretrainedConfig


class PkmlmConfig(PretrainedConfig):
    """The keys of a pkmlm recipe's `model`, under their own names.

    Args:
        vocab_size: rows of the embedding.
        dim, layers, heads, context: width, blocks, attention heads and positions; `transformers`' names for them
            (hidden_size, num_hidden_layers, num_attention_heads, max_position_embeddings) work as well.
        memories: by name, each with its kind and the keys of that kind.
        table_bits: 8 or 4: the tables of memories are codes of this many bits, with one scale per row; None: they are
            ordinary weights.
        trained: where the weights come from: run, step, tokens and the rest of the recipe. The model does not use it.
        keys: the other keys of `model`, and those of `transformers`.
    """

    model_type = "pkmlm"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012 (as the library has it)
    attribute_map = {  # noqa: RUF012
        "hidden_size": "dim",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "max_position_embeddings": "context",
        "tie_word_embeddings": "tie_embeddings",
    }

    def __init__(
        self,
        vocab_size: int = 0,
        dim: int = 512,
        layers: int = 6,
        heads: int = 8,
        context: int = 512,
        tie_embeddings: bool = True,
        memories: dict[str, dict[str, Any]] | None = None,
        table_bits: int | None = None,
        trained: dict[str, Any] | None = None,
        use_cache: bool = True,
        **keys: Any,
    ):
        self.vocab_size, self.dim, self.layers, self.heads, self.context = vocab_size, dim, layers, heads, context
        self.memories, self.table_bits = memories or {}, table_bits
        self.trained, self.use_cache = trained or {}, use_cache
        super().__init__(**{"tie_word_embeddings": tie_embeddings, **keys})
