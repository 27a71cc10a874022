"""Pretrained models of `transformers` as ours, and back: keys of a configuration and names of weights, one file an
architecture. Nothing here builds a model.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from pkmlm.model.convert import gpt2, gpt_neox, llama, qwen2, qwen3
from pkmlm.model.convert.asked import Asked
from pkmlm.model.convert.weights import Part, same

if TYPE_CHECKING:
    from pkmlm.recipe.schema import Model


class Architecture(Protocol):
    """A kind of model that transformers has.

    Attributes:
        TYPE, CLASS: its model_type, and its class with a head.
        PREFIX: of the names of all tensors but the head's.
        HEAD: the name of the head's weights.
        IGNORED: a pattern of the names of tensors that follow from the configuration.
    """

    TYPE: str
    CLASS: str
    PREFIX: str
    HEAD: str
    IGNORED: str

    def keys(self, asked: Asked) -> dict[str, Any]:
        """The keys of `model` in a recipe that a configuration stands for.

        Raises:
            UserError: it asks for what our model has not.
        """

    def config(self, model: "Model") -> dict[str, Any] | None:
        """The configuration that stands for a model without memories; None: it is not of this architecture."""

    def parts(self, model: "Model") -> Iterator[Part]:
        """The tensors of our model but an untied head, layer by layer, made of theirs, which are named without prefix.
        `model.vocab_size` is set.
        """


MODULES: tuple[Any, ...] = (llama, qwen3, qwen2, gpt_neox, gpt2)
ARCHITECTURES: dict[str, Architecture] = {module.TYPE: module for module in MODULES}


def parts_of(architecture: Architecture, model: "Model") -> Iterator[Part]:
    """All tensors of our model, made of theirs, whose names are whole."""
    for part in architecture.parts(model):
        sources = {f"{architecture.PREFIX}{name}": shape for name, shape in part.sources.items()}
        yield Part(part.name, sources, part.join, part.split)
    if not model.tie_embeddings:
        yield same("untied_head.weight", architecture.HEAD, model.vocab_size or 0, model.dim)


def architecture_of(model: "Model") -> Architecture | None:
    """The architecture of transformers that a model is of; None: transformers has none that computes the same."""
    if model.memories or model.smear or model.attention != "softmax":
        return None
    return next((each for each in ARCHITECTURES.values() if each.config(model) is not None), None)
