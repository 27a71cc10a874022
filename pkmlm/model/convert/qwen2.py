"""Qwen2: Llama's block with biases of queries, keys and values."""

from typing import TYPE_CHECKING, Any

from pkmlm.model.convert import llama
from pkmlm.model.convert.asked import Asked

if TYPE_CHECKING:
    from pkmlm.recipe.schema import Model

TYPE, CLASS = "qwen2", "Qwen2ForCausalLM"
PREFIX, HEAD, IGNORED, parts = llama.PREFIX, llama.HEAD, llama.IGNORED, llama.parts


def whole_attention(asked: Asked) -> None:
    """Refuse layers that see only a window."""
    asked.without("use_sliding_window")
    types = asked.value("layer_types", [])
    if not isinstance(types, list) or any(each != "full_attention" for each in types):
        asked.refuse("layer_types", "full_attention in all layers")


def keys(asked: Asked) -> dict[str, Any]:
    """The keys of `model` in a recipe that a configuration stands for."""
    whole_attention(asked)
    return llama.shared_keys(asked) | {"bias": "qkv", "qk_norm": False}


def config(model: "Model") -> dict[str, Any] | None:
    """The configuration that stands for a model; None: it is not of this architecture."""
    fits = llama.has_the_block(model) and model.bias == "qkv" and not model.qk_norm
    fits = fits and model.head_width * model.heads == model.dim
    return llama.shared_config(model) | {"use_sliding_window": False} if fits else None
