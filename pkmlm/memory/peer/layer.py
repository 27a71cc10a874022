"""PEER: product keys that find experts of one hidden neuron each (He 2024, arXiv 2407.04153).

N: tokens; D: model width; V: width of a value; r: reads of a token.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn.functional import gelu, relu

from pkmlm.memory.product_key.layer import ProductKeyMemory
from pkmlm.memory.table import Values
from pkmlm.recipe.schema import Expert, Memory, section

EXPERTS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": gelu, "relu": relu}


class PEER(ProductKeyMemory):
    """y = sum over heads and their k best experts i of w_i * act(<u_i, x>) * v_i, where w is the softmax of the scores.

    The rows u and v are two tables, which all heads read; both start at N(0, 1/width) (the paper does not say). Usage
    counts w, the weight that the router gives an expert, whatever the expert then answers.

    Attributes:
        inputs: u, as wide as the model.
        values: v.
    """

    kind = "peer"
    saved_per_read = ProductKeyMemory.saved_per_read + 3  # the product, what the activation makes of it, the weight
    inputs: Values

    def __init__(self, dim: int, *, expert: Expert = "gelu", **arguments: Any):
        """Experts for an input of width `dim`.

        Args:
            dim: width of the input and of the output (D).
            expert: the activation, "gelu" or "relu".
            arguments: the others of `ProductKeyMemory`; `num_keys` is the square root of the number of experts, and
                `value_dim` the width of v.

        Raises:
            ValueError: as `ProductKeyMemory`.
        """
        chosen = section(Memory, kind=self.kind, expert=expert).expert
        super().__init__(dim, **arguments)
        self.spec = replace(self.spec, expert=chosen)
        self.activation = EXPERTS[chosen]

    @classmethod
    def new_tables(cls, dim: int, memory: Memory) -> dict[str, Values]:
        inputs = Values(memory.slots, dim, std=dim**-0.5, group="values")
        return {"inputs": inputs, **super().new_tables(dim, memory)}

    def read_tables(self) -> list[Values]:
        return [self.inputs, *super().read_tables()]

    def read(self, x_ND: Tensor, slots_Nr: Tensor, weights_Nr: Tensor) -> Tensor:
        """The weighted sums of the experts' answers (N, V)."""
        hidden_Nr = self.activation(self.inputs.products(x_ND, slots_Nr))
        return super().read(x_ND, slots_Nr, weights_Nr * hidden_Nr)
