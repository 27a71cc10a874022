"""GPT-2 (Radford et al. 2019): layer norms, learnt positions. Its matrices are stored with their inputs first."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pkmlm.model.convert.asked import Asked
from pkmlm.model.convert.gpt_neox import ACTIVATIONS
from pkmlm.model.convert.weights import Part, same, transposed

if TYPE_CHECKING:
    from pkmlm.recipe.schema import Model

TYPE, CLASS, PREFIX, HEAD = "gpt2", "GPT2LMHeadModel", "transformer.", "lm_head.weight"
IGNORED = r"\.attn\.(bias|masked_bias)$"
THEIRS = {"gelu": "gelu", "relu": "relu", "gelu-tanh": "gelu_new"}


def keys(asked: Asked) -> dict[str, Any]:
    """The keys of `model` in a recipe that a configuration stands for."""
    dim = asked.size("n_embd")
    if not asked.flag("scale_attn_weights", True):
        asked.refuse("scale_attn_weights", "true")
    asked.without("scale_attn_by_inverse_layer_idx", "add_cross_attention")
    return {
        "vocab_size": asked.size("vocab_size"),
        "dim": dim,
        "layers": asked.size("n_layer"),
        "heads": asked.size("n_head"),
        "context": asked.size("n_positions"),
        "norm": "layer",
        "norm_eps": asked.number("layer_norm_epsilon", 1e-5),
        "ffn": asked.one_of("activation_function", "gelu_new", ACTIVATIONS),
        "ffn_dim": asked.size("n_inner", 4 * dim),
        "positions": "learned",
        "qk_norm": False,
        "bias": "all",
        "tie_embeddings": asked.flag("tie_word_embeddings", True),
    }


def config(model: "Model") -> dict[str, Any] | None:
    """The configuration that stands for a model; None: it is not of this architecture."""
    fits = (model.norm, model.positions, model.bias, model.qk_norm) == ("layer", "learned", "all", False)
    fits = fits and model.ffn in THEIRS and model.value_heads == model.heads and model.residual == "sequential"
    if not fits or model.head_width * model.heads != model.dim:
        return None
    return {
        "vocab_size": model.vocab_size,
        "n_embd": model.dim,
        "n_layer": model.layers,
        "n_head": model.heads,
        "n_positions": model.context,
        "layer_norm_epsilon": model.epsilon("layer"),
        "activation_function": THEIRS[model.ffn],
        "n_inner": model.inner,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), model.dropout),
        "tie_word_embeddings": model.tie_embeddings,
    }


def parts(model: "Model") -> Iterator[Part]:
    """The tensors of our model, layer by layer, made of theirs."""
    dim, inner = model.dim, model.inner
    yield same("embedding.weight", "wte.weight", model.vocab_size or 0, dim)
    yield same("positions.weight", "wpe.weight", model.context, dim)
    for layer in range(model.layers):
        ours, theirs = f"blocks.{layer}", f"h.{layer}"
        for kind in ("weight", "bias"):
            yield same(f"{ours}.attention_norm.{kind}", f"{theirs}.ln_1.{kind}", dim)
            yield same(f"{ours}.norm.{kind}", f"{theirs}.ln_2.{kind}", dim)
        for name, source, wide, out in (
            ("attention.qkv", "attn.c_attn", dim, 3 * dim),
            ("attention.out", "attn.c_proj", dim, dim),
            ("parts.ffn.up", "mlp.c_fc", dim, inner),
            ("parts.ffn.down", "mlp.c_proj", inner, dim),
        ):
            yield transposed(f"{ours}.{name}.weight", f"{theirs}.{source}.weight", wide, out)
            yield same(f"{ours}.{name}.bias", f"{theirs}.{source}.bias", out)
    yield same("norm.weight", "ln_f.weight", dim)
    yield same("norm.bias", "ln_f.bias", dim)
