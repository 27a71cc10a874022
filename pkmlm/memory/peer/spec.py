"""PEER: product keys that find experts of one hidden neuron each (He 2024)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pkmlm.memory.product_key.spec import ProductKeySpec
from pkmlm.memory.spec import TableShape, key

if TYPE_CHECKING:
    from pkmlm.memory.key_memory import KeyMemory

Expert = Literal["gelu", "relu"]


@dataclass(frozen=True)
class PEERSpec(ProductKeySpec):
    title: ClassVar[str] = "Experts"
    unit: ClassVar[str] = "expert"
    shapeless: ClassVar[tuple[str, ...]] = ("topk", "scores", "expert")

    kind: Literal["peer"] = key("peer", "experts of one neuron, found by product keys (He 2024)")  # type: ignore[assignment]
    expert: Expert = key("gelu", "activation of an expert's neuron")

    def tables(self, dim: int, vocab_size: int) -> list[TableShape]:
        return [TableShape("num_keys", self.slots, dim), *super().tables(dim, vocab_size)]

    @property
    def layer(self) -> "type[KeyMemory]":
        from pkmlm.memory.peer.layer import PEER

        return PEER
