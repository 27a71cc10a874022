"""Qwen3: Llama's block with RMS norms of each head's queries and keys."""

from typing import TYPE_CHECKING, Any

from pkmlm.model.convert import llama
from pkmlm.model.convert.asked import Asked
from pkmlm.model.convert.qwen2 import whole_attention

if TYPE_CHECKING:
    from pkmlm.recipe.schema import Model

TYPE, CLASS = "qwen3", "Qwen3ForCausalLM"
PREFIX, HEAD, IGNORED, parts = llama.PREFIX, llama.HEAD, llama.IGNORED, llama.parts
WIDTH = 128  # width of a head, where a configuration does not say


def keys(asked: Asked) -> dict[str, Any]:
    """The keys of `model` in a recipe that a configuration stands for."""
    whole_attention(asked)
    if asked.flag("attention_bias", False):
        asked.refuse("attention_bias", "false")
    return {**llama.shared_keys(asked), "head_dim": asked.size("head_dim", WIDTH), "bias": "none", "qk_norm": True}


def config(model: "Model") -> dict[str, Any] | None:
    """The configuration that stands for a model; None: it is not of this architecture."""
    fits = llama.has_the_block(model) and model.bias == "none" and model.qk_norm
    return llama.shared_config(model) | {"attention_bias": False, "use_sliding_window": False} if fits else None
