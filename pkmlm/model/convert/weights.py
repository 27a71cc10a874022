"""How a tensor of our model is made of those of another, and how it is taken apart again.

D: model width; h: heads; e: width of a head.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the names of architectures are asked for without torch
    from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """One tensor of ours, made of one or several of theirs.

    Attributes:
        name: of ours.
        sources: the names of theirs, with their shapes.
        join: makes ours of theirs, in this order.
        split: the other way.
    """

    name: str
    sources: Mapping[str, Shape]
    join: "Callable[[list[Tensor]], Tensor]"
    split: "Callable[[Tensor], Sequence[Tensor]]"


def same(name: str, source: str, *shape: int) -> Part:
    """The same tensor under another name."""
    return rows(name, {source: shape})


def rows(name: str, sources: Mapping[str, Shape]) -> Part:
    """Tensors one below the other."""
    lengths = [shape[0] for shape in sources.values()]
    return Part(name, sources, one_below_the_other, lambda ours: ours.split(lengths))


def one_below_the_other(theirs: "list[Tensor]") -> "Tensor":
    """Tensors, joined along their first dimension."""
    import torch

    return torch.cat(theirs)


def transposed(name: str, source: str, *shape: int) -> Part:
    """A matrix that is stored with its inputs first."""
    return Part(name, {source: shape}, lambda theirs: theirs[0].T, lambda ours: [ours.T])


def by_head(name: str, source: str, heads: int, *shape: int) -> Part:
    """Queries, keys and values (3, h, e, ...) that are stored head by head (h, 3, e, ...)."""

    def turned(first: int, second: int) -> "Callable[[Tensor], Tensor]":
        return lambda x: x.unflatten(0, (first, second, -1)).transpose(0, 1).flatten(0, 2)

    join, split = turned(heads, 3), turned(3, heads)
    return Part(name, {source: shape}, lambda theirs: join(theirs[0]), lambda ours: [split(ours)])
