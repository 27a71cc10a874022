"""GPT-NeoX (Black et al. 2022), the architecture of Pythia: layer norms, rotary positions, an FFN beside attention."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pkmlm.model.convert.asked import Asked, rope_of, rotary
from pkmlm.model.convert.weights import Part, by_head, same

if TYPE_CHECKING:
    from pkmlm.recipe.schema import Model

TYPE, CLASS, PREFIX = "gpt_neox", "GPTNeoXForCausalLM", "gpt_neox."
IGNORED = r"\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)$"
HEAD = "embed_out.weight"
ACTIVATIONS = {"gelu": "gelu", "relu": "relu", "gelu_new": "gelu-tanh", "gelu_pytorch_tanh": "gelu-tanh"}
THEIRS = {"gelu": "gelu", "relu": "relu", "gelu-tanh": "gelu_pytorch_tanh"}


def keys(asked: Asked) -> dict[str, Any]:
    """The keys of `model` in a recipe that a configuration stands for."""
    if not asked.flag("attention_bias", True):
        asked.refuse("attention_bias", "true")
    turned = rotary(asked, "rotary_emb_base", "rotary_pct", 0.25)
    width = asked.size("hidden_size") // asked.size("num_attention_heads")
    turned["rotary_fraction"] = int(turned["rotary_fraction"] * width) / width  # transformers cuts it off
    return {
        "vocab_size": asked.size("vocab_size"),
        "dim": asked.size("hidden_size"),
        "layers": asked.size("num_hidden_layers"),
        "heads": asked.size("num_attention_heads"),
        "context": asked.size("max_position_embeddings"),
        "norm": "layer",
        "norm_eps": asked.number("layer_norm_eps", 1e-5),
        "ffn": asked.one_of("hidden_act", "gelu", ACTIVATIONS),
        "ffn_dim": asked.size("intermediate_size"),
        "positions": "rotary",
        **turned,
        "qk_norm": False,
        "bias": "all",
        "residual": "parallel" if asked.flag("use_parallel_residual", True) else "sequential",
        "tie_embeddings": asked.flag("tie_word_embeddings", False),
    }


def config(model: "Model") -> dict[str, Any] | None:
    """The configuration that stands for a model; None: it is not of this architecture."""
    fits = (model.norm, model.positions, model.bias, model.qk_norm) == ("layer", "rotary", "all", False)
    fits = fits and model.ffn in THEIRS and model.value_heads == model.heads
    if not fits or model.head_width * model.heads != model.dim:
        return None
    share = model.rotary_width / model.head_width
    if int(share * model.head_width) < model.rotary_width:  # as transformers would cut it off
        share = math.nextafter(share, 1.0)
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "max_position_embeddings": model.context,
        "layer_norm_eps": model.epsilon("layer"),
        "hidden_act": THEIRS[model.ffn],
        "intermediate_size": model.inner,
        "attention_dropout": model.dropout,
        "hidden_dropout": model.dropout,
        "rotary_pct": share,
        "rotary_emb_base": model.rotary_base,
        "rope_parameters": {**rope_of(model), "partial_rotary_factor": share},
        "use_parallel_residual": model.residual == "parallel",
        "attention_bias": True,
        "tie_word_embeddings": model.tie_embeddings,
    }


def parts(model: "Model") -> Iterator[Part]:
    """The tensors of our model, layer by layer, made of theirs."""
    dim, inner, heads = model.dim, model.inner, model.heads
    yield same("embedding.weight", "embed_in.weight", model.vocab_size or 0, dim)
    for layer in range(model.layers):
        ours, theirs = f"blocks.{layer}", f"layers.{layer}"
        for kind in ("weight", "bias"):
            second = (dim,) if kind == "weight" else ()
            yield same(f"{ours}.attention_norm.{kind}", f"{theirs}.input_layernorm.{kind}", dim)
            yield same(f"{ours}.norm.{kind}", f"{theirs}.post_attention_layernorm.{kind}", dim)
            maps = f"{theirs}.attention.query_key_value.{kind}"
            yield by_head(f"{ours}.attention.qkv.{kind}", maps, heads, 3 * dim, *second)
            yield same(f"{ours}.attention.out.{kind}", f"{theirs}.attention.dense.{kind}", dim, *second)
            yield same(f"{ours}.parts.ffn.up.{kind}", f"{theirs}.mlp.dense_h_to_4h.{kind}", inner, *second)
            wide = (inner,) if kind == "weight" else ()
            yield same(f"{ours}.parts.ffn.down.{kind}", f"{theirs}.mlp.dense_4h_to_h.{kind}", dim, *wide)
    yield same("norm.weight", "final_layer_norm.weight", dim)
    yield same("norm.bias", "final_layer_norm.bias", dim)
