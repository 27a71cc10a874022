"""Token tables: the row of the token itself, added to the stream (per-layer embeddings) or to attention's values (value
embeddings: Jordan et al. 2024, modded-nanogpt; Karpathy 2025, nanochat).

B: sequences; T: positions; N: tokens (B * T); D: model width; G: largest order; h: heads of attention; V: vocabulary.
"""

import math

import torch
from torch import Tensor

from pkmlm.kernels.matmul import Linear, at_least_fp32, without_autocast
from pkmlm.memory.address import Addresses
from pkmlm.memory.base import SparseMemory, UsageTap, uncompiled
from pkmlm.memory.scale import Scale
from pkmlm.memory.spec import Start
from pkmlm.memory.table import Values
from pkmlm.memory.token.spec import Into, TokenSpec
from pkmlm.memory.tokens import Past

VALUES_STD = math.sqrt(2 / 5)  # that of attention's values at the start: `linear_std` times the root of the width


class TokenMemory(SparseMemory):
    """What a table holds for each token, whatever stands before it.

    stream: y = s * row; rows start at zero, and s, which is learnt, at 0.1, as those of an n-gram memory that adds.

    values: head i of attention gets y_i = 2 sigmoid(<w_i, x>) row_i beside its own values, where row_i is its part of
    the row and x the normalised stream; w starts at zero, so that the gate starts at 1. Rows start as large as the
    values are, or, with `start` "zero", at 0.

    Args:
        dim: width of the stream (D), and of a row.
        vocab_size: rows of the table (V).
        into: "stream" or "values".
        heads: of attention (h), which divide `dim`; for "values".
        start: "zero" lets the rows start at 0, as those that are added to the stream always do; "drawn" does not.
        layer, name: the block that it is in, counted from 1, and what it is called there, for reports.

    Raises:
        ValueError: an argument is out of its range or not one of the choices.
    """

    stream = "token"
    weighted = False
    reads = 1
    orders = (1,)

    def __init__(
        self,
        dim: int,
        *,
        vocab_size: int,
        into: Into = "stream",
        heads: int = 1,
        start: Start = "drawn",
        layer: int = 1,
        name: str = "tokens",
    ):
        super().__init__()
        self.spec = TokenSpec(into=into, start=start)
        for key, value in (("dim", dim), ("vocab_size", vocab_size), ("heads", heads)):
            if value < 1:
                raise ValueError(f"{key}: found {value} (expected 1 or more)")
        if dim % heads:
            raise ValueError(f"heads: found {heads} (expected a divisor of dim, {dim})")
        self.dim, self.heads = dim, heads
        added = into == "stream"
        self.tap = UsageTap(layer, name, self.spec.kind, Addresses(vocab_size), 1, shared=False, residual=added)
        self.values = Values(vocab_size, dim, std=0.0 if added else VALUES_STD, start=start)
        self.scale = Scale() if added else None
        self.gate = None if added else Linear(dim, heads, bias=False, initial_std=0.0)
        self.reset_parameters()

    def rows_of(self, ids_BTG: Tensor) -> Tensor:
        """The row of each token: its id. On a CPU, ids outside of the table are refused; a GPU would have to wait.

        Raises:
            ValueError: an id is not one of the vocabulary's.
        """
        rows_BT1 = ids_BTG[..., :1]
        if rows_BT1.device.type == "cpu" and rows_BT1.numel():
            low, high = map(int, rows_BT1.aminmax())
            if low < 0 or high >= self.values.height:
                found = low if low < 0 else high
                raise ValueError(f"{self.tap.label}: found token {found} (expected 0 to {self.values.height - 1})")
        return rows_BT1

    def answer(self, slots_S: Tensor) -> Tensor:
        """The rows, times the factor."""
        rows_SD = super().answer(slots_S)
        return rows_SD if self.scale is None else self.scale(rows_SD)

    @uncompiled
    def forward(self, x_BTD: Tensor, past: Past) -> Tensor:
        """What is added to the stream, or to attention's values (B, T, D)."""
        rows_N11 = self.rows_of(past.ids_BTG).flatten(0, 1)[..., None]
        ones_N11 = torch.ones(rows_N11.shape, device=rows_N11.device)
        rows_N11, ones_N11 = self.tap(rows_N11, ones_N11)
        y_BTD = self.values(rows_N11[..., 0], ones_N11[..., 0]).reshape(x_BTD.shape)
        if self.scale is not None:
            return self.scale(y_BTD)
        assert self.gate is not None
        gate_BTh = self.gate(x_BTD)
        with without_autocast(x_BTD.device):
            gate_BTh1 = 2 * torch.sigmoid(at_least_fp32(gate_BTh))[..., None]
            return (gate_BTh1 * y_BTD.unflatten(-1, (self.heads, -1))).flatten(-2)

    def flops_per_token(self) -> int:
        """The row, and its product with the factor or the gates."""
        return 2 * self.dim

    def saved_per_token(self) -> int:
        """The row's number (8 bytes) and weight, the row, and the gates before and after their sigmoid."""
        return 3 + self.dim + 2 * self.heads * (self.gate is not None)
