"""Llama (Touvron et al. 2023), and what Qwen2 and Qwen3 have in common with it: RMS norms, SwiGLU, rotary positions."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pkmlm.model.convert.asked import Asked, rope_of, rotary
from pkmlm.model.convert.weights import Part, rows, same

if TYPE_CHECKING:
    from pkmlm.recipe.schema import Model

TYPE, CLASS, PREFIX, HEAD = "llama", "LlamaForCausalLM", "model.", "lm_head.weight"
IGNORED = r"\.rotary_emb\.inv_freq$"


def shared_keys(asked: Asked) -> dict[str, Any]:
    """The keys of a model with this block; biases and norms of queries and keys are those of Llama."""
    asked.one_of("hidden_act", "silu", {"silu": "swiglu", "swish": "swiglu"})
    heads = asked.size("num_attention_heads")
    return {
        "vocab_size": asked.size("vocab_size"),
        "dim": asked.size("hidden_size"),
        "layers": asked.size("num_hidden_layers"),
        "heads": heads,
        "kv_heads": asked.size("num_key_value_heads", heads),
        "head_dim": asked.value("head_dim"),
        "context": asked.size("max_position_embeddings"),
        "norm": "rms",
        "norm_eps": asked.number("rms_norm_eps", 1e-6),
        "ffn": "swiglu",
        "ffn_dim": asked.size("intermediate_size"),
        "positions": "rotary",
        **rotary(asked),
        "tie_embeddings": asked.flag("tie_word_embeddings", False),
    }


def keys(asked: Asked) -> dict[str, Any]:
    """The keys of `model` in a recipe that a configuration stands for."""
    asked.without("sliding_window")
    found = shared_keys(asked)
    attention, ffn = asked.flag("attention_bias", False), asked.flag("mlp_bias", False)
    if attention != ffn:
        asked.refuse("attention_bias", f"{str(ffn).lower()}, as mlp_bias")
    return found | {"bias": "all" if ffn else "none", "qk_norm": False}


def shared_config(model: "Model") -> dict[str, Any]:
    """The configuration of a model with this block."""
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.value_heads,
        "head_dim": model.head_width,
        "max_position_embeddings": model.context,
        "rms_norm_eps": model.epsilon("rms"),
        "hidden_act": "silu",
        "intermediate_size": model.inner,
        "attention_dropout": model.dropout,  # it knows no other
        "rope_theta": model.rotary_base,
        "rope_parameters": rope_of(model),
        "tie_word_embeddings": model.tie_embeddings,
    }


def has_the_block(model: "Model") -> bool:
    """Whether a model has the norms, FFN and positions of this block."""
    return (model.norm, model.ffn, model.positions, model.residual) == (
        "rms",
        "swiglu",
        "rotary",
        "sequential",
    ) and model.rotary_fraction == 1


def config(model: "Model") -> dict[str, Any] | None:
    """The configuration that stands for a model; None: it is not of this architecture."""
    if not has_the_block(model) or model.qk_norm or model.bias == "qkv" or model.dim % model.heads:
        return None
    biased = model.bias == "all"
    return shared_config(model) | {"attention_bias": biased, "mlp_bias": biased}


def parts(model: "Model") -> Iterator[Part]:
    """The tensors of our model, layer by layer, made of theirs."""
    dim, wide, inner = model.dim, model.heads * model.head_width, model.inner
    read = model.value_heads * model.head_width
    yield same("embedding.weight", "embed_tokens.weight", model.vocab_size or 0, dim)
    for layer in range(model.layers):
        ours, theirs = f"blocks.{layer}", f"layers.{layer}"
        yield same(f"{ours}.attention_norm.weight", f"{theirs}.input_layernorm.weight", dim)
        yield same(f"{ours}.norm.weight", f"{theirs}.post_attention_layernorm.weight", dim)
        maps = {"q_proj": wide, "k_proj": read, "v_proj": read}
        attention, ffn = f"{theirs}.self_attn", f"{theirs}.mlp"
        yield rows(
            f"{ours}.attention.qkv.weight", {f"{attention}.{name}.weight": (out, dim) for name, out in maps.items()}
        )
        yield same(f"{ours}.attention.out.weight", f"{attention}.o_proj.weight", dim, wide)
        yield rows(
            f"{ours}.parts.ffn.up.weight", {f"{ffn}.{name}.weight": (inner, dim) for name in ("gate_proj", "up_proj")}
        )
        yield same(f"{ours}.parts.ffn.down.weight", f"{ffn}.down_proj.weight", dim, inner)
        if model.bias != "none":
            yield rows(f"{ours}.attention.qkv.bias", {f"{attention}.{name}.bias": (out,) for name, out in maps.items()})
        if model.bias == "all":
            yield same(f"{ours}.attention.out.bias", f"{attention}.o_proj.bias", dim)
            yield rows(
                f"{ours}.parts.ffn.up.bias", {f"{ffn}.{name}.bias": (inner,) for name in ("gate_proj", "up_proj")}
            )
            yield same(f"{ours}.parts.ffn.down.bias", f"{ffn}.down_proj.bias", dim)
        if model.qk_norm:
            yield same(f"{ours}.attention.query_norm.weight", f"{attention}.q_norm.weight", model.head_width)
            yield same(f"{ours}.attention.key_norm.weight", f"{attention}.k_norm.weight", model.head_width)
    yield same("norm.weight", "norm.weight", dim)
