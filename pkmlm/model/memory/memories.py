"""The memories of a model."""

from torch import nn

from pkmlm.model.memory.hash_table import HashLayer
from pkmlm.model.memory.key_memory import KeyMemory


def memories(model: nn.Module) -> list[KeyMemory | HashLayer]:
    """Every memory of a model, in the order of their taps."""
    return [module for module in model.modules() if isinstance(module, KeyMemory | HashLayer)]
