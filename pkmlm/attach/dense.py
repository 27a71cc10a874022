"""The control of a memory: a dense layer with as many operations at the same places.

B: sequences; T: positions; D: model width.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.nn.functional import silu

from pkmlm.kernels.matmul import Linear
from pkmlm.memory.spec import Place, Site, Spec, Start, TableShape, key, size


class SwiGLU(nn.Module):
    """W3 (silu(W1 x) * W2 x) (Shazeer 2020, arXiv 2002.05202, eq. 6).

    Args:
        dim: width of the input and of the output (D).
        inner: width of the hidden layer.
        start: "zero" lets W3, and so the output, start at 0; "drawn" does not.
    """

    def __init__(self, dim: int, inner: int, start: Start = "drawn"):
        super().__init__()
        self.gate, self.up = (Linear(dim, inner, initial_std=dim**-0.5) for _ in range(2))
        self.down = Linear(inner, dim, initial_std=0.0 if start == "zero" else inner**-0.5)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        return self.down(silu(self.gate(x_BTD)) * self.up(x_BTD))


@dataclass(frozen=True)
class DenseSpec(Spec):
    """A SwiGLU where a memory could be."""

    kind: Literal["dense"] = key("dense", "a dense layer")
    inner: int = size(1, "width of the hidden layer")

    def places(self, beside: bool) -> tuple[Place, ...]:
        return ("beside",) if beside else ("ffn",)

    def tables(self, dim: int, vocab_size: int) -> list[TableShape]:
        return []

    def describe(self) -> str:
        return f"a SwiGLU of width {self.inner:,}"

    def build(self, site: Site, places: tuple[Place, ...]) -> dict[Place, nn.Module]:
        return {place: SwiGLU(site.dim, self.inner, self.start) for place in places}
