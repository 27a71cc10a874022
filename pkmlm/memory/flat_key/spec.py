"""Flat keys: n^2 slots, each with a key of its own (the baseline of Lample et al. 2019, table 4)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pkmlm.memory.key_spec import KeySpec
from pkmlm.memory.spec import key

if TYPE_CHECKING:
    from pkmlm.memory.key_memory import KeyMemory


@dataclass(frozen=True)
class FlatKeySpec(KeySpec):
    title: ClassVar[str] = "Flat keys"

    kind: Literal["flat-key"] = key("flat-key", "a key for each slot, the baseline of Lample et al. 2019")

    @property
    def key_rows(self) -> int:
        return self.slots

    @property
    def key_width(self) -> int:
        return self.key_dim

    @property
    def scores_per_query(self) -> int:
        return self.slots

    @property
    def layer(self) -> "type[KeyMemory]":
        from pkmlm.memory.flat_key.layer import FlatKeyMemory

        return FlatKeyMemory
