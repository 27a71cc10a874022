"""The shape of a pkmlm model for `transformers`. Part of an exported model: it stands alone."""

from typing import Any

from transformers import PretrainedConfig


class PkmlmConfig(PretrainedConfig):
    """The keys of a pkmlm recipe's `model`, under their own names and with their own defaults.

    Args:
        vocab_size: rows of the embedding.
        dim, layers, heads, context: width, blocks, attention heads and positions; `transformers`' names for them
            (hidden_size, num_hidden_layers, num_attention_heads, max_position_embeddings) work as well.
        positions: "learned" or "rotary"; `rotary_fraction` of each head rotates.
        attention: "softmax".
        projections: "dense", or "hash": q, k, v and the FFN are MemoryFormer's hash tables, as `hash` says.
        residual: "sequential" or "parallel".
        ffn_dim: inner width of the FFN; None: 4 * dim.
        activation: "gelu" or "relu".
        memory, hash, ngram: the recipe's mappings; missing keys have their defaults. memory["layers"] holds "5" for a
            memory in place of the FFN of the fifth block, "5+" for one beside it.
        table_bits: 8 or 4: the tables of memories (n-gram tables, too) and of hash layers are codes of this many bits,
            with one scale per row; None: they are ordinary weights.
        trained: where the weights come from: run, step, tokens and the rest of the recipe. The model does not use it.
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
        positions: str = "learned",
        rotary_fraction: float = 1.0,
        attention: str = "softmax",
        projections: str = "dense",
        residual: str = "sequential",
        ffn_dim: int | None = None,
        activation: str = "gelu",
        bias: bool = True,
        tie_embeddings: bool = True,
        dropout: float = 0.0,
        memory: dict[str, Any] | None = None,
        hash: dict[str, Any] | None = None,
        ngram: dict[str, Any] | None = None,
        table_bits: int | None = None,
        trained: dict[str, Any] | None = None,
        use_cache: bool = True,
        **kwargs: Any,
    ):
        self.vocab_size, self.dim, self.layers, self.heads, self.context = vocab_size, dim, layers, heads, context
        self.positions, self.rotary_fraction, self.attention = positions, rotary_fraction, attention
        self.projections, self.residual, self.dropout = projections, residual, dropout
        self.ffn_dim, self.activation, self.bias = ffn_dim, activation, bias
        self.memory = {
            "kind": "none",
            "layers": [],
            "num_keys": 512,
            "heads": 4,
            "topk": 32,
            "key_dim": 512,
            "query": "linear",
            "query_norm": "batch",
            "key_norm": "none",
            "scores": "softmax",
            "share_values": False,
            "value_dim": None,
            "gate": "none",
            "expert": "gelu",
            **(memory or {}),
        }
        self.hash = {
            "bits": 8,
            "extra_bits": 2,
            "temperature": 1.0,
            "score": "paper",
            "activation": "none",
            **(hash or {}),
        }
        self.ngram = {
            "layers": [],
            "orders": [2, 3],
            "heads": 8,
            "rows": 65537,
            "row_dim": 24,
            "fusion": "gate",
            "conv": True,
            "canonical": True,
            **(ngram or {}),
        }
        self.table_bits, self.trained = table_bits, trained or {}
        self.use_cache = use_cache
        super().__init__(**{"tie_word_embeddings": tie_embeddings, **kwargs})
