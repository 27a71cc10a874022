"""Where the reads of a memory can be observed.

N: tokens; H: heads (for hash layers: tables); k: reads per head (for hash layers: 1).
"""

from torch import Tensor, nn


class UsageTap(nn.Module):
    """The identity on a memory's reads: register a forward hook on it to observe them.

    Attributes:
        layer: the block, counted from 1.
        name: "memory", or for hash layers "qkv", "ffn1", "ffn2".
        kind: of the memory: "product-key", "flat-key" or "hash".
        slots: rows of the memory's table; of all tables together for hash layers.
        heads: memory heads, or tables.
        shared: whether all heads read the same slots. Otherwise each has a table of its own: head h the rows from
            h * slots / heads up to (h + 1) * slots / heads.
        residual: whether the rows that are read, times their weights, are added to the residual stream as they are.
    """

    def __init__(
        self, layer: int, name: str, kind: str, slots: int, heads: int, *, shared: bool = True, residual: bool = True
    ):
        super().__init__()
        self.layer, self.name, self.kind, self.slots, self.heads = layer, name, kind, slots, heads
        self.shared, self.residual = shared, residual

    def forward(self, slots_NHk: Tensor, weights_NHk: Tensor) -> tuple[Tensor, Tensor]:
        """Slots read (int64, below `slots`) and their weights after the softmax (floating), unchanged."""
        return slots_NHk, weights_NHk


def usage_taps(model: nn.Module) -> list[UsageTap]:
    """Every tap of a model, by layer and in the order in which the block reads."""
    return [module for module in model.modules() if isinstance(module, UsageTap)]
