"""MemoryFormer's hash tables (Ding et al. 2024, sec. 2.2 to 2.4).

B: sequences; T: positions; N: tokens (B * T); D: width in; K: tables; b: bits of a code; W: width out.
"""

import math
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn.functional import gelu

from pkmlm.kernels import ops
from pkmlm.kernels.matmul import at_least_fp32, without_autocast
from pkmlm.memory.address import Addresses
from pkmlm.memory.base import SparseMemory, UsageTap, uncompiled
from pkmlm.memory.hash.spec import HashScore, HashSpec
from pkmlm.memory.table import Values

LIKE_LINEAR_STD = 0.02


def score_rms(bits: int, temperature: float, scaled: bool) -> float:
    """Root mean square of a bucket's score p(z) over z ~ N(0, 1)^bits; with `scaled`, of sum|z| * p(z)."""
    z = np.linspace(0, 12, 24001)
    density = 2 * np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    density[0] /= 2
    sigmoid2 = (1 + np.exp(-2 * z / temperature)) ** -2
    m0, m1, m2 = ((z**power * sigmoid2 * density).sum() for power in (0, 1, 2))
    if not scaled:
        return math.sqrt(m0**bits)
    return math.sqrt(bits * m2 * m0 ** (bits - 1) + bits * (bits - 1) * m1**2 * m0 ** (bits - 2))


class HashLayer(SparseMemory):
    """One Memory Layer: y = sum over tables k of p(z_k) * T_k[h(z_k)] (eq. 8 to 13), in place of a linear map.

    The input is cut into K = D / b chunks; the signs of a chunk are the code of its bucket. The tables start at a size
    that makes the output as large as that of a linear map with weights N(0, 0.02^2), GPT-2's (the paper does not say):
    with p about 0.13 at 8 bits, entries of 0.02 would start the layer nearly dead. The larger start of the other maps
    (`linear_std`) cost a model of width 128 0.33 nats.

    The authors' released code adds a bias, drawn from N(0, 0.001^2), to the output, which eq. 13 does not have. Its
    blocks begin with an RMSNorm; ours begin with a LayerNorm, which the paper's argument for balanced signs requires.

    It maps (B, T, dim) to (B, T, width), is drawn from torch's generator when it is constructed (by `build_model` from
    the recipe's seed), and holds its tables one below the other in `values.weight_KD` (K * 2^b, W).

    Args:
        dim: width of the input (D), a multiple of `bits`.
        width: of the output (W), and of a row of the tables.
        bits: of a code (b), 1 to 16; there are dim / bits tables of 2^bits rows.
        temperature: t of the score p(z), above 0: the smaller, the closer p is to 1.
        score: "paper", p(z); or "scaled", sum|z| * p(z), as in the paper's released code.
        share: the initial size of the output over that of the linear map (residual branches start smaller).
        layer, name: the block that it is in, counted from 1, and what the memory is called there, for reports.
        part: which hash layer of the block: "qkv", "ffn1", "ffn2", or any other text.
        residual: whether its output is added to the residual stream.

    Raises:
        ValueError: an argument is out of its range, or `dim` is not a multiple of `bits`.
    """

    def __init__(
        self,
        dim: int,
        width: int,
        *,
        bits: int = 8,
        temperature: float = 1.0,
        score: HashScore = "paper",
        share: float = 1.0,
        layer: int = 1,
        name: str = "hash",
        part: str = "",
        residual: bool = False,
    ):
        super().__init__()
        self.spec = spec = HashSpec(bits=bits, temperature=temperature, score=score)
        if dim < 1 or dim % bits:
            raise ValueError(f"dim: found {dim} (expected a multiple of bits, {bits})")
        if width < 1:
            raise ValueError(f"width: found {width} (expected 1 or more)")
        self.dim, self.tables, self.bits = dim, dim // bits, bits
        self.reads = self.tables
        self.temperature, self.scaled = spec.temperature, spec.score == "scaled"
        size = share * LIKE_LINEAR_STD * math.sqrt(dim)
        std = size / (math.sqrt(self.tables) * score_rms(bits, spec.temperature, self.scaled))
        addresses = Addresses(self.tables << bits, 1 << bits, tables=True)
        self.tap = UsageTap(layer, name, spec.kind, addresses, self.tables, part=part, shared=False, residual=residual)
        self.values = Values(addresses.slots, width, std=std)
        self.reset_parameters()

    @uncompiled
    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) to (B, T, W), in the dtype of the rows read. Signs and scores are always taken in fp32."""
        with without_autocast(x_BTD.device):
            z_BTKb = at_least_fp32(x_BTD).unflatten(-1, (self.tables, self.bits))
            z_NKb = z_BTKb.reshape(-1, self.tables, self.bits)
            rows_NK, scores_NK = ops.bucket_reads(z_NKb, self.temperature, scaled=self.scaled)
            rows_NK1, scores_NK1 = self.tap(rows_NK[..., None], scores_NK[..., None])
        return self.values(rows_NK1.squeeze(-1), scores_NK1.squeeze(-1)).view(*x_BTD.shape[:-1], self.values.width)

    def flops_per_token(self) -> int:
        """(b + W) * K: scores, and the weighted sum of rows (sec. 2.3)."""
        return (self.bits + self.values.width) * self.tables

    def saved_per_token(self) -> int:
        """The input, and for each table its row (an index of 8 bytes) and score."""
        return (self.bits + 3) * self.tables


class MemoryBlock(nn.Module):
    """Two Memory Layers in place of an FFN, a LayerNorm between (eq. 15, sec. 2.4).

    The paper has no activation there; `hash.activation: gelu` puts one before the norm.

    The second layer's chunks are `extra_bits` wider (table 5), which widens the output of the first.

    Args:
        dim: model width, a multiple of `spec.bits`.
        spec: the memory's keys.
        share, layer, name: as for `HashLayer`; `share` is that of the second layer.
    """

    stream = "parts.ffn"

    def __init__(self, dim: int, spec: HashSpec, *, share: float, layer: int, name: str):
        super().__init__()
        where: dict[str, Any] = {**spec.arguments, "layer": layer, "name": name}
        wide_bits = spec.bits + spec.extra_bits
        wide = wide_bits * (dim // spec.bits)
        self.first = HashLayer(dim, wide, **where | {"part": "ffn1"})
        self.norm = nn.LayerNorm(wide)
        self.second = HashLayer(wide, dim, **where | {"bits": wide_bits, "part": "ffn2"}, share=share, residual=True)
        self.gelu = spec.activation == "gelu"

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) to (B, T, D), in the dtype of the rows read."""
        h_BTW = self.first(x_BTD)
        return self.second(self.norm(gelu(h_BTW) if self.gelu else h_BTW))
