"""N-gram memories: tables whose rows are found by a hash of the last tokens (Cheng et al. 2026, "Engram", arXiv
2601.07372); and the lite form that adds only the rows to the stream (nanochat, modded-nanogpt).

B: sequences; T: new positions; S: all positions so far; N: tokens (B * T); D: model width; G: largest order; H: tables
(orders * heads); P: rows of a table; e: width of a row; V: vocabulary; i: taps of the convolution.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from pkmlm.kernels.matmul import Linear, at_least_fp32
from pkmlm.memory.address import Addresses
from pkmlm.memory.base import SparseMemory, UsageTap, uncompiled
from pkmlm.memory.init import Constant, InitSpec, Multipliers
from pkmlm.memory.ngram.spec import TAPS, Fusion, NGramSpec
from pkmlm.memory.query import RMS_EPSILON
from pkmlm.memory.scale import Scale
from pkmlm.memory.spec import Start
from pkmlm.memory.table import Values
from pkmlm.memory.tokens import Past

GATE_FLOOR = 1e-6  # below it the root of a gate's score is constant, so that its slope stays finite


class NGramMemory(SparseMemory):
    """Adds to the stream what its tables hold for the last 1 to G tokens.

    The row of a table is (c[t] m[0] XOR c[t-1] m[1] ... ) mod P (sec. 2.2), where c are canonical ids and m the table's
    own odd multipliers, as many as its order; where there is no token, c is 0. Products stay below 2^63: ids are below
    2^31, multipliers below 2^32. (Engram shares multipliers between the tables of an order, and gives each another
    prime. Equal tables let head h own the rows from h * P on, as in other memories.)

    gate: a linear map makes a key k and a value v of the rows of all tables, concatenated. y = u + SiLU(conv(RMS(u))),
    u = sigmoid(sign(a) sqrt(|a|)) v, a = <RMS(x), RMS(k)> / sqrt(D) (sec. 2.3; the root is only in the authors' code).
    The convolution is causal, has 4 taps per channel, G tokens apart, starts at zero, and, unlike the authors', sees
    nothing of other documents. With `start` "zero" the rows, and so y, start at 0.

    add: y = s * sum of the rows, which are as wide as the model and start at zero; s starts at 0.1.

    Args:
        dim: width of the stream (D).
        orders: the numbers of tokens that are hashed.
        heads: tables of each order.
        rows: of a table (P), a prime; or 1, which leaves a gate and a convolution without a memory.
        row_dim: width of a row (e); None: 24, with "add" `dim`.
        fusion: "gate" or "add", see above.
        conv: whether "gate" has the convolution.
        canonical: whether the ids that it is called with are canonical.
        start: "zero" lets the rows start at 0, as those that are added always do; "drawn" does not.
        layer, name: the block that it is in, counted from 1, and what it is called there, for reports.

    Raises:
        ValueError: an argument is out of its range or not one of the choices, or `row_dim` does not fit `dim`.
    """

    multipliers_HG: Tensor
    stream = "ngram"
    weighted = False

    def __init__(
        self,
        dim: int,
        *,
        orders: Sequence[int] = (2, 3),
        heads: int = 8,
        rows: int = 65537,
        row_dim: int | None = None,
        fusion: Fusion = "gate",
        conv: bool = True,
        canonical: bool = True,
        start: Start = "drawn",
        layer: int = 1,
        name: str = "ngrams",
    ):
        super().__init__()
        if dim < 1:
            raise ValueError(f"dim: found {dim} (expected 1 or more)")
        self.spec: NGramSpec
        spec = self.spec = NGramSpec(
            orders=tuple(orders),
            heads=heads,
            rows=rows,
            row_dim=row_dim,
            fusion=fusion,
            conv=conv,
            canonical=canonical,
            start=start,
        )
        spec.check(dim)
        self.dim, self.rows = dim, rows
        self.tables = self.reads = spec.table_count
        self.outputs = self.tables if fusion == "gate" else 1
        self.orders = tuple(order for order in orders for _ in range(heads))
        self.register_buffer("multipliers_HG", torch.empty(self.tables, max(orders), dtype=torch.int64))
        addresses = Addresses(self.tables * rows, rows, tables=True)
        self.tap = UsageTap(layer, name, spec.kind, addresses, self.tables, shared=False)
        width_of_row = spec.width(dim)
        width = self.tables * width_of_row
        std = width**-0.5 if fusion == "gate" else 0.0
        self.values = Values(addresses.slots, width_of_row, std=std, start=start)
        self.scale = Scale() if fusion == "add" else None
        self.gate = NGramGate(width, dim) if fusion == "gate" else None
        self.conv = CausalConv(dim, max(orders), f"{name} {layer}") if spec.convolves else None
        self.reset_parameters()

    def init_spec(self) -> dict[str, InitSpec]:
        return {"multipliers_HG": Multipliers(self.orders)}

    @property
    def left_out(self) -> tuple[str, ...]:
        return super().left_out if self.conv is None else (*super().left_out, "convolution")

    def answer(self, slots_S: Tensor) -> Tensor:
        """What each row adds to the value, without the convolution; with "add", the row times the factor."""
        rows_Se = super().answer(slots_S)
        if self.scale is not None:
            return self.scale(rows_Se)
        assert self.gate is not None
        value_DHe = self.gate.maps.weight.chunk(2)[1].unflatten(1, (self.tables, -1))
        return torch.einsum("se,sde->sd", rows_Se, value_DHe.transpose(0, 1)[slots_S // self.rows].to(rows_Se.dtype))

    def rows_of(self, ids_BTG: Tensor) -> Tensor:
        """The rows of `values` that tokens read (B, T, H), from the canonical ids of the tokens that they see."""
        hash_BTH = ids_BTG[..., :1] * self.multipliers_HG[:, 0]
        for back in range(1, self.multipliers_HG.shape[1]):
            hash_BTH = hash_BTH ^ (ids_BTG[..., back : back + 1] * self.multipliers_HG[:, back])
        return hash_BTH % self.rows + torch.arange(self.tables, device=ids_BTG.device) * self.rows

    @uncompiled
    def forward(self, x_BTD: Tensor, past: Past) -> Tensor:
        """What is added to the stream (B, T, D); norms, gate and convolution are in fp32."""
        rows_NH = self.rows_of(past.ids_BTG).flatten(0, 1)
        ones_NH = torch.ones(rows_NH.shape, device=rows_NH.device)
        rows_NH1, ones_NH1 = self.tap(rows_NH[..., None], ones_NH[..., None])
        if self.scale is not None:
            return self.scale(self.values(rows_NH1[..., 0], ones_NH1[..., 0])).reshape(x_BTD.shape)
        assert self.gate is not None
        rows_BTW = self.values(rows_NH1.flatten(0, 1), ones_NH1.flatten(0, 1)).reshape(
            *x_BTD.shape[:-1], self.tables * self.values.width
        )
        u_BTD = self.gate(x_BTD, rows_BTW)
        return u_BTD if self.conv is None else self.conv(u_BTD, past)

    def flops_per_token(self) -> int:
        """The weighted sums of rows; of a gate, its score and its product; of the convolution, its taps."""
        dim = 0 if self.gate is None else self.gate.maps.out_features // 2
        return self.tables * self.values.width + (2 + TAPS * (self.conv is not None)) * dim

    def saved_per_token(self) -> int:
        """The rows' numbers (8 bytes) and weights; of a gate, its rows, keys, values and both sides of their products;
        of the convolution, what its taps see and its sum."""
        dim = 0 if self.gate is None else self.gate.maps.out_features // 2
        width = self.tables * self.values.width if self.gate is not None else self.values.width
        return 3 * self.tables + width + 6 * dim + (TAPS + 3) * dim * (self.conv is not None)


class NGramGate(nn.Module):
    """u = sigmoid(sign(a) sqrt(|a|)) v, where a is a score, like a cosine, of the stream and the key of the rows.

    Args:
        width: of all rows of a token (W).
        dim: of the stream (D).
    """

    def __init__(self, width: int, dim: int):
        super().__init__()
        self.maps = Linear(width, 2 * dim)
        self.stream_norm, self.key_norm = (nn.RMSNorm(dim, RMS_EPSILON) for _ in range(2))

    def forward(self, x_BTD: Tensor, rows_BTW: Tensor) -> Tensor:
        """(B, T, D), in fp32 or wider."""
        maps = self.maps(rows_BTW)
        with torch.autocast(x_BTD.device.type, enabled=False):
            k_BTD, v_BTD = at_least_fp32(maps).chunk(2, -1)
            score_BT1 = (self.stream_norm(at_least_fp32(x_BTD)) * self.key_norm(k_BTD)).sum(-1, keepdim=True)
            return gate_of(score_BT1 * x_BTD.shape[-1] ** -0.5) * v_BTD


def gate_of(score: Tensor) -> Tensor:
    """sigmoid(sign(a) sqrt(|a|)), the root being constant where |a| is below 1e-6; in the shape and dtype of a."""
    return torch.sigmoid(torch.copysign(score.abs().clamp(min=GATE_FLOOR).sqrt(), score.detach()))


class CausalConv(nn.Module):
    """y = u + SiLU(sum over taps i of w[i] * RMS(u) at the token i * dilation before), of the document's own tokens.

    Args:
        dim: channels (D), each with 4 taps of its own.
        dilation: tokens between taps.
        name: under which a cache keeps RMS(u).
    """

    def __init__(self, dim: int, dilation: int, name: str):
        super().__init__()
        self.dilation, self.name = dilation, name
        self.norm = nn.RMSNorm(dim, RMS_EPSILON)
        self.weight_iD = nn.Parameter(torch.empty(TAPS, dim))

    def init_spec(self) -> dict[str, InitSpec]:
        return {"weight_iD": Constant(0.0)}

    def forward(self, u_BTD: Tensor, past: Past) -> Tensor:
        """(B, T, D), in the dtype of u."""
        places_BTi = past.places_BTj[..., self.dilation :: self.dilation][..., : TAPS - 1]
        with torch.autocast(u_BTD.device.type, enabled=False):
            n_BTD = self.norm(u_BTD)
            seen = past.earlier(self.name, n_BTD, places_BTi)
            total_BTD = n_BTD * self.weight_iD[0]
            for seen_BTD, weight_D in zip(seen, self.weight_iD[1:], strict=True):
                total_BTD = total_BTD + seen_BTD * weight_D
            return u_BTD + silu(total_BTD)
