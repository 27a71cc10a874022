"""Memories in a network that torch.compile compiles."""

import functools
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

Layer = TypeVar("Layer")
Forward = Callable[[Layer, Tensor], Tensor]


def uncompiled(forward: Forward[Layer]) -> Forward[Layer]:
    """A layer's forward that torch.compile leaves as it is.

    Its tracing would fail in numba's dispatcher, and would not see who begins to watch reads later. `disable` is called
    in a trace only, as it imports the compiler, which takes seconds.
    """

    @functools.wraps(forward)
    def untraced(layer: Layer, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(forward)(layer, x)
        return forward(layer, x)

    return untraced
