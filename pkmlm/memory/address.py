"""What reports call a memory, and how its slots are addressed, printed and read."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Addresses:
    """The addresses of a memory's slots: pairs of sub-keys (16:113), a table and its row (3:250), or plain numbers.

    Attributes:
        slots: how many there are.
        columns: sub-keys of a half, or rows of a table; None: a slot has only a number.
        tables: whether the first part is a table, counted from 1; otherwise both are sub-keys, counted from 0.
    """

    slots: int
    columns: int | None = None
    tables: bool = False

    @property
    def subkeys(self) -> int | None:
        """Sub-keys of each half; None where slots are not pairs of them."""
        return None if self.tables else self.columns

    def parts(self, slot: int) -> dict[str, Any]:
        """A slot's sub-keys, or its table and row; empty if it has only a number."""
        if self.columns is None:
            return {}
        first, second = divmod(slot, self.columns)
        return {"table": first + 1, "row": second} if self.tables else {"subkeys": [first, second]}

    def name(self, slot: int) -> str:
        """A slot as it is printed and read: 17:4 for sub-keys, 2:40 for table and row, or its number."""
        if self.columns is None:
            return str(slot)
        first, second = divmod(slot, self.columns)
        return f"{first + self.tables}:{second}"

    def number(self, name: str) -> int | None:
        """The slot that a name or a number stands for; None: there is no such slot."""
        found = None
        if match := re.fullmatch(r"([0-9]{1,18})(?::([0-9]{1,18}))?", name):
            if match[2] is None:
                found = int(match[1])
            elif self.columns is not None and int(match[2]) < self.columns:
                found = (int(match[1]) - self.tables) * self.columns + int(match[2])
        return found if found is not None and 0 <= found < self.slots else None


def entry_of(memory: str, layer: int | None, kind: str, part: str = "") -> dict[str, Any]:
    """What each entry of a report begins with.

    Args:
        memory: its name in the recipe.
        layer: counted from 1; None: several, together.
        kind: of the memory.
        part: which of the memory's parts in the layer, if it has several.
    """
    return {"memory": memory, "layer": layer, "kind": kind} | ({"part": part} if part else {})


def memory_label(entry: Mapping[str, Any]) -> str:
    """What reports call the memory of an entry: "layer 3 facts", "layer 2 tables qkv"; of several layers, "facts"."""
    layer = f"layer {entry['layer']}" if entry["layer"] else None
    return " ".join(filter(None, (layer, entry["memory"], entry.get("part"))))
