"""What measuring and generating need of a model: `Transformer` has it, and so has a model of `transformers` with a
memory attached.

B: sequences; T: positions; D: model width; V: vocabulary.
"""

from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor, nn
from typing_extensions import Self

from pkmlm.memory.table import Modules
from pkmlm.model.attention import AttentionLayout, KVCache


class LanguageModel(Modules, Protocol):
    """Tokens to logits, by way of hidden states.

    Attributes:
        context: most tokens that it reads at once.
        embedding: of the tokens.
        blocks: from the first to the last.
        norm: the last, whose output the head reads.
        token_ids: what memories need to know about the tokens, by the ids that they ask for: "canonical", "plain".
    """

    context: int

    @property
    def embedding(self) -> nn.Embedding: ...

    @property
    def blocks(self) -> nn.ModuleList: ...

    @property
    def norm(self) -> nn.Module: ...

    @property
    def token_ids(self) -> nn.ModuleDict: ...

    def hidden(self, tokens_BT: Tensor, cache: KVCache | None = None, layout: AttentionLayout | None = None) -> Tensor:
        """The final norm's output (B, T, D), from tokens (int64) and a cache of those before; a model may refuse a
        layout.
        """

    def head(self, h_BTD: Tensor) -> Tensor:
        """Logits (..., V) of hidden states (..., D)."""

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def eval(self) -> Self: ...

    def requires_grad_(self, requires_grad: bool = True) -> Self: ...

    def __call__(self, tokens_BT: Tensor, cache: KVCache | None = None) -> Any:
        """Logits (B, T, V): at each position, of the token after it."""
