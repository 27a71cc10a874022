"""The linear map of a model."""

from torch import Tensor, nn

from pkmlm.kernels import products


class Linear(nn.Linear):
    """torch's `Linear`, whose products are those of `pkmlm.kernels.products`."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) to (..., O)."""
        return products.linear(x, self.weight, self.bias)
