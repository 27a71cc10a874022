"""PEER: product keys that find experts of one hidden neuron each (He 2024, arXiv 2407.04153).

N: tokens; D: model width; V: width of a value; r: reads of a token.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.functional import gelu, relu

from pkmlm.memory.key_spec import KeySpec
from pkmlm.memory.peer.spec import Expert, PEERSpec
from pkmlm.memory.product_key.layer import ProductKeyMemory
from pkmlm.memory.table import Values

EXPERTS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": gelu, "relu": relu}


class PEER(ProductKeyMemory):
    """y = sum over heads and their k best experts i of w_i * act(<u_i, x>) * v_i, where w is the softmax of the scores.

    The rows u and v are two tables, which all heads read; both start at N(0, 1/width) (the paper does not say). Usage
    counts w, the weight that the router gives an expert, whatever the expert then answers.

    Attributes:
        inputs: u, as wide as the model.
        values: v.
    """

    spec_class = PEERSpec
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
        super().__init__(dim, expert=expert, **arguments)
        self.activation = EXPERTS[expert]

    @classmethod
    def new_tables(cls, dim: int, memory: KeySpec) -> dict[str, Values]:
        inputs = Values(memory.slots, dim, std=dim**-0.5)
        return {"inputs": inputs, **super().new_tables(dim, memory)}

    @property
    def left_out(self) -> tuple[str, ...]:
        return (*super().left_out, "activation")

    def read_tables(self) -> list[Values]:
        return [self.inputs, *super().read_tables()]

    def read(self, x_ND: Tensor, slots_Nr: Tensor, weights_Nr: Tensor) -> Tensor:
        """The weighted sums of the experts' answers (N, V)."""
        hidden_Nr = self.activation(self.inputs.products(x_ND, slots_Nr))
        return super().read(x_ND, slots_Nr, weights_Nr * hidden_Nr)
