"""The layers that are timed beside one another, each with the optimizers that update it.

N: tokens; r: reads of a token; K: slots; D: width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from pkmlm.bench.plain_memory import PlainMemory, plain_ffn
from pkmlm.bench.shape import Shape
from pkmlm.model.init import initialise
from pkmlm.model.memory.key_memory import ProductKeyMemory
from pkmlm.recipe.schema import Recipe
from pkmlm.seeds import generator
from pkmlm.train.optim import parameter_groups

RATE = 1e-3


@dataclass(frozen=True)
class Contender:
    """A layer and what updates it.

    Attributes:
        count: the steps of its value table, as the optimizer that holds the table counts them; None: it has none.
        values: the weighted sum of values, of slots and weights (N, r); None: it has none.
    """

    layer: nn.Module
    optimizers: list[torch.optim.Optimizer]
    count: Tensor | int | None = None
    values: Callable[[Tensor, Tensor], Tensor] | None = None

    def update(self) -> None:
        """One optimizer step over all of the layer's gradients."""
        for optimizer in self.optimizers:
            optimizer.step()

    def clear(self) -> None:
        """Forget the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def product_key_layer(shape: Shape, device: torch.device) -> ProductKeyMemory:
    """This package's layer, with the weights that every memory starts from."""
    layer = ProductKeyMemory(shape.dim, shape.memory, 1, momentum=0.1).to(device)
    initialise(layer, 1)
    return layer


def row_adam(shape: Shape, source: ProductKeyMemory) -> Contender:
    """This package's layer, whose values are updated straight from their reads."""
    optimizers = [group.optimizer for group in parameter_groups(source, Recipe())]
    return Contender(source, optimizers, torch.zeros((), dtype=torch.int64), source.values)


def plain_adam(shape: Shape, source: ProductKeyMemory, *, fused: bool = False) -> Contender:
    """Plain torch, a dense gradient, Adam as it comes or fused."""
    layer = plain_layer(shape, source)
    count = torch.zeros((), device=layer.values.weight.device if fused else "cpu")
    return Contender(layer, [torch.optim.Adam(layer.parameters(), lr=RATE, fused=fused)], count, layer.sum_values)


def plain_sparse(shape: Shape, source: ProductKeyMemory) -> Contender:
    """Plain torch, a sparse gradient of the values and SparseAdam; fused Adam for the rest."""
    layer = plain_layer(shape, source, sparse=True)
    values = layer.values.weight
    rest = [parameter for parameter in layer.parameters() if parameter is not values]
    optimizers = [torch.optim.SparseAdam([values], lr=RATE), torch.optim.Adam(rest, lr=RATE, fused=True)]
    return Contender(layer, optimizers, 0, layer.sum_values)


def ffn(shape: Shape, source: ProductKeyMemory) -> Contender:
    """The FFN of the same width, fused Adam."""
    layer = plain_ffn(shape.dim).to(source.values.weight_KD.device)
    return Contender(layer, [torch.optim.Adam(layer.parameters(), lr=RATE, fused=True)])


def plain_layer(shape: Shape, source: ProductKeyMemory, *, sparse: bool = False) -> PlainMemory:
    """The memory in plain torch, with the weights and the values of `source`."""
    layer = PlainMemory(shape.dim, shape.memory, sparse=sparse)
    layer.take_weights(source)
    return layer.to(source.values.weight_KD.device)


# By their names in `pkmlm.bench.LAYERS`: each has the weights of a layer, and its values themselves.
CONTENDERS: dict[str, Callable[[Shape, ProductKeyMemory], Contender]] = {
    "pkmlm": row_adam,
    "plain-adam": plain_adam,
    "plain-fused": partial(plain_adam, fused=True),
    "plain-sparse": plain_sparse,
    "ffn": ffn,
}


def beside_one_another(names: Sequence[str], shape: Shape, source: ProductKeyMemory) -> dict[str, Contender]:
    """Contenders by name, of which all that have a value table train that of `source` with one pair of moments."""
    values_KD = source.values.weight_KD
    contenders = {name: CONTENDERS[name](shape, source) for name in names}
    moments = {name: torch.zeros_like(values_KD) for name in ("exp_avg", "exp_avg_sq")}
    for one in contenders.values():
        for optimizer in one.optimizers:
            if any(parameter is values_KD for group in optimizer.param_groups for parameter in group["params"]):
                optimizer.state[values_KD].update(step=one.count, **moments)
    return contenders


def inputs(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens (1, N, D) that want a gradient, and the gradient of the output; both N(0, 1), the same for every layer."""
    random = generator(1, "bench memory")
    x_1ND, grad_1ND = (torch.randn(1, shape.tokens, shape.dim, generator=random).to(device) for _ in range(2))
    return x_1ND.requires_grad_(), grad_1ND


def actions(one: Contender, x_1ND: Tensor, grad_1ND: Tensor, reads: tuple[Tensor, Tensor]) -> dict[str, partial[None]]:
    """Each of `pkmlm.bench.LAYER_PHASES` that a layer has, in training mode, and the forgetting of its gradients.

    Args:
        reads: slots and weights (N, r) of the sum of values alone.
    """
    alone = {} if one.values is None else {"values": partial(sum_values, one.values, *reads)}
    return alone | {
        "forward": partial(forward, one, x_1ND),
        "backward": partial(backward, one, x_1ND, grad_1ND, update=False),
        "step": partial(backward, one, x_1ND, grad_1ND, update=True),
    }


@torch.no_grad()
def sum_values(values: Callable[[Tensor, Tensor], Tensor], slots_Nr: Tensor, weights_Nr: Tensor) -> None:
    """The weighted sum of values, without gradients."""
    values(slots_Nr, weights_Nr)


@torch.no_grad()
def forward(one: Contender, x_1ND: Tensor) -> None:
    """A forward, without gradients."""
    one.layer(x_1ND)


def backward(one: Contender, x_1ND: Tensor, grad_1ND: Tensor, *, update: bool) -> None:
    """A forward and backward, with or without the optimizers' update."""
    one.layer(x_1ND).backward(grad_1ND)
    if update:
        one.update()
    one.clear()
    x_1ND.grad = None
