"""What follows from the keys of a recipe's `model`, whether they come from a recipe or from an export's configuration.
Nothing here imports torch or pydantic.
"""

from collections.abc import Mapping

from pkmlm.memory.spec import Place, Spec


class Shape:
    """Keys of `model`, under their own names; its classes hold the values."""

    dim: int
    layers: int
    heads: int
    rotary_fraction: float
    memories: Mapping[str, Spec]

    @property
    def rotary_width(self) -> int:
        """How many of a head's dim / heads entries rotate; even in a checked recipe."""
        return round(self.rotary_fraction * (self.dim // self.heads))

    @property
    def kinds(self) -> list[str]:
        """The kinds of its memories, each once."""
        return [*dict.fromkeys(memory.kind for memory in self.memories.values())]

    def memory_places(self) -> dict[int, dict[str, tuple[Place, ...]]]:
        """The memories in each layer that has one, and their places there: layer, from 1 -> name -> places."""
        found: dict[int, dict[str, tuple[Place, ...]]] = {}
        for name, memory in self.memories.items():
            for layer, places in memory.layer_places(self.layers).items():
                found.setdefault(layer, {})[name] = places
        return dict(sorted(found.items()))
