"""What follows from the keys of a recipe's `model`, whether they come from a recipe or from an export's configuration.
Nothing here imports torch or pydantic.
"""

from collections.abc import Mapping

from pkmlm.memory.spec import Lookback, Place, Spec

EPSILON = {"rms": 1e-6, "layer": 1e-5}  # of norms, by default


class Shape:
    """Keys of `model`, under their own names; its classes hold the values."""

    dim: int
    layers: int
    heads: int
    kv_heads: int | None
    head_dim: int | None
    rotary_fraction: float
    norm_eps: float | None
    ffn: str
    ffn_dim: int | None
    smear: bool
    document_mask: bool
    memories: Mapping[str, Spec]

    @property
    def head_width(self) -> int:
        """Entries of a head."""
        return self.head_dim or self.dim // self.heads

    @property
    def value_heads(self) -> int:
        """Heads of keys, and of values."""
        return self.kv_heads or self.heads

    @property
    def inner(self) -> int:
        """The inner width of the FFN."""
        if self.ffn_dim is not None:
            return self.ffn_dim
        return -(-8 * self.dim // (3 * 64)) * 64 if self.ffn == "swiglu" else 4 * self.dim

    @property
    def rotary_width(self) -> int:
        """How many of a head's entries rotate; even in a checked recipe."""
        return round(self.rotary_fraction * self.head_width)

    def epsilon(self, norm: str) -> float:
        """What a norm of a kind ("rms", "layer") adds to a mean square or variance."""
        return self.norm_eps or EPSILON[norm]

    @property
    def kinds(self) -> list[str]:
        """The kinds of its memories, each once."""
        return [*dict.fromkeys(memory.kind for memory in self.memories.values())]

    @property
    def lookbacks(self) -> list[Lookback]:
        """What its parts need to know of the tokens before each."""
        asked = [memory.lookback for memory in self.memories.values()]
        own = [Lookback("plain", 1, int(self.smear))] if self.smear or self.document_mask else []
        return [each for each in asked if each] + own

    def memory_places(self) -> dict[int, dict[str, tuple[Place, ...]]]:
        """The memories in each layer that has one, and their places there: layer, from 1 -> name -> places."""
        found: dict[int, dict[str, tuple[Place, ...]]] = {}
        for name, memory in self.memories.items():
            for layer, places in memory.layer_places(self.layers).items():
                found.setdefault(layer, {})[name] = places
        return dict(sorted(found.items()))
