"""Memories with keys: product keys (Lample et al. 2019, sec. 3) and the baseline of flat keys (its table 4), with what
Memory+ adds to them (Berges et al. 2024).

B: sequences; T: positions; N: tokens (B * T); D: model width; V: width of a value; H: heads; q: width of a query; k:
slots a head reads; r: reads of a token (H * k); n: sub-keys of a half; f: width of a key (of a sub-key: q / 2); K:
slots; S: some of them.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import relu, rms_norm, silu

from pkmlm.kernels import ops
from pkmlm.kernels.matmul import Linear, at_least_fp32, linear, without_autocast
from pkmlm.memory.base import SparseMemory, UsageTap, uncompiled
from pkmlm.memory.init import Constant, InitSpec, Uniform
from pkmlm.memory.key_spec import Gate, KeyNorm, KeySpec, QueryMap, QueryNorm, Scores
from pkmlm.memory.query import RMS_EPSILON, Query
from pkmlm.memory.spec import Start
from pkmlm.memory.table import Pool, Values

WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": ops.softmax,
    "relu": relu,
    "none": lambda scores_NHk: scores_NHk,
}


class KeyMemory(SparseMemory):
    """m(x) = sum over heads and their k best slots of w * v, where w is the softmax of their scores, unless `scores`
    says otherwise (Lample et al. 2019, eq. 1 to 3).

    All heads share the values, which start at N(0, 1/V) (not in the paper; the authors' released choice). Without the
    softmax, the k weights do not sum to 1 but are about 1 each; values then start at N(0, 1/(k^2 V)) (our choice). With
    `start` "zero" they start at 0, and so does the layer's output; keys and queries learn once values have. What is
    added to the stream is m; or W2 m, if values and model differ in width; or, with a gate, W2 (m * silu(W1 x)) (Berges
    et al. 2024). W1 and W2 start at N(0, 1/D), their biases at 0.
    """

    stream = "parts.memory"
    spec_class: ClassVar[type[KeySpec]]
    spec: KeySpec
    saved_per_read: ClassVar[int]  # units of 4 bytes that the backward pass keeps of a read

    def __init__(
        self,
        dim: int,
        *,
        num_keys: int = 512,
        heads: int = 4,
        topk: int = 32,
        key_dim: int = 512,
        query: QueryMap = "linear",
        query_norm: QueryNorm = "batch",
        key_norm: KeyNorm = "none",
        scores: Scores = "softmax",
        value_dim: int | None = None,
        gate: Gate = "none",
        start: Start = "drawn",
        pool: Pool | None = None,
        layer: int = 1,
        name: str = "memory",
        momentum: float = 0.1,
        **others: Any,
    ):
        """A memory that maps (..., dim) to (..., dim), drawn from torch's generator (`torch.manual_seed`).

        Args:
            dim: width of the input and of the output (D).
            num_keys: n, the square root of the number of slots; there are n sub-keys in each half, or n^2 flat keys.
            heads: queries of a token (H); each head has its own keys, and all share the values.
            topk: slots that a head reads for a token (k), at most as many as it has keys (product keys: sub-keys of
                a half).
            key_dim: width of a query (q), and of a flat key; even for product keys, whose sub-keys have half of it.
            query: from input to queries: "linear", one map; "mlp", two with a ReLU between, whose hidden layer of width
                `dim` all heads share.
            query_norm: "batch" normalises each of the H * q entries over the tokens of a forward (in evaluation: by
                running statistics), "layer" and "rms" each query by itself, "none" nothing.
            key_norm: "rms" normalises each key, and the part of a query that is compared with it; "none" nothing.
            scores: what turns the k scores of a head into weights: "softmax", "relu", or "none" (they are the weights).
            value_dim: width of a value (V); None: `dim`.
            gate: "silu" multiplies the sum of the values, entry by entry, by silu(W1 x); "none" does not.
            start: "zero" lets the values, and so the output, start at 0; "drawn" does not.
            pool: tables to read, made by `new_tables` and owned by another module; None: the memory has its own.
            layer, name: the block that it is in, counted from 1, and what it is called there, for reports.
            momentum: weight of one forward in the running statistics of "batch", 0 to 1.
            others: further keys of the kind.

        Raises:
            ValueError: an argument is out of its range or not one of the choices, or sizes do not match.
            TypeError: an argument is unknown.
        """
        super().__init__()
        if dim < 1:
            raise ValueError(f"dim: found {dim} (expected 1 or more)")
        if gate not in get_args(Gate):
            raise ValueError(f"gate: found {gate!r} (expected {' or '.join(get_args(Gate))})")
        if not 0 <= momentum <= 1:
            raise ValueError(f"momentum: found {momentum} (expected 0 to 1)")
        if unknown := ", ".join(others.keys() - self.spec_class().arguments.keys()):
            raise TypeError(f"unknown arguments: {unknown}")
        memory = self.spec = self.spec_class(
            num_keys=num_keys,
            heads=heads,
            topk=topk,
            key_dim=key_dim,
            query=query,
            query_norm=query_norm,
            key_norm=key_norm,
            scores=scores,
            value_dim=value_dim,
            gate=gate,
            start=start,
            **others,
        )
        memory.check(dim)
        width = value_dim or dim
        self.dim = dim
        self.topk, self.scores = topk, scores
        self.reads = heads * topk
        self.scores_per_query = memory.scores_per_query
        self.query = Query(dim, memory, momentum)
        layers = () if pool is None else pool.layers
        self.tap = UsageTap(layer, name, memory.kind, memory.addresses, heads, pool=layers)
        if pool is None:
            for name, table in self.new_tables(dim, memory).items():
                self.add_module(name, table)
        else:  # plain attributes: as modules of this layer, they would be stored and trained once more
            with torch.device("meta"):
                expected = shapes_of(self.new_tables(dim, memory))
            if (found := shapes_of(dict(pool.named_children()))) != expected:  # kernels check no bounds
                raise ValueError(f"pool: found tables {found} (expected {expected})")
            self.__dict__.update(pool.named_children())
        self.make_keys(memory)
        self.key_norm = RMSKeyNorm(memory.key_width) if key_norm == "rms" else None
        std = dim**-0.5  # of the output, too, whatever the values' width
        self.gate = Linear(dim, width, initial_std=std) if gate == "silu" else None
        self.output = Linear(width, dim, initial_std=std) if self.gate is not None or width != dim else None
        self.reset_parameters()

    @classmethod
    def new_tables(cls, dim: int, memory: KeySpec) -> dict[str, Values]:
        """The tables of a memory, or of several, by the names of their attributes, without initial weights."""
        width = memory.value_dim or dim
        share = 1 if memory.scores == "softmax" else 1 / memory.topk
        return {"values": Values(memory.slots, width, std=share * width**-0.5, start=memory.start)}

    @abstractmethod
    def make_keys(self, memory: KeySpec) -> None:
        """Make the parameters of the keys: the only ones that this module holds itself, not in a submodule."""

    def key_parameters(self) -> list[nn.Parameter]:
        return [*self.parameters(recurse=False)]

    def init_spec(self) -> dict[str, InitSpec]:
        return {name: Uniform(keys_f.shape[-1] ** -0.5) for name, keys_f in self.named_parameters(recurse=False)}

    @abstractmethod
    def select(self, q_NHq: Tensor) -> tuple[Tensor, Tensor]:
        """The k best slots of each query, highest first: scores (N, H, k), differentiable; slots (N, H, k), int64."""

    def normed(self, q_NHq: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys (..., f) as they are compared."""
        return (q_NHq, keys) if self.key_norm is None else self.key_norm(q_NHq, keys)

    @uncompiled
    def forward(self, x_BTD: Tensor) -> Tensor:
        """(..., D) to (..., D), in the dtype of the rows read, or of the map W2; search and softmax are in fp32."""
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        q_NHq = self.query(x_ND)
        with without_autocast(x_BTD.device):
            scores_NHk, slots_NHk = self.select(at_least_fp32(q_NHq))
            slots_NHk, weights_NHk = self.tap(slots_NHk, WEIGHTS[self.scores](scores_NHk))
        m_NV = self.read(x_ND, slots_NHk.flatten(1), weights_NHk.flatten(1))
        if self.gate is not None:
            m_NV = m_NV * silu(self.gate(x_ND))
        return (m_NV if self.output is None else self.output(m_NV)).view_as(x_BTD)

    def read(self, x_ND: Tensor, slots_Nr: Tensor, weights_Nr: Tensor) -> Tensor:
        """The weighted sums of the values (N, V)."""
        return self.values(slots_Nr, weights_Nr)

    def answer(self, slots_S: Tensor) -> Tensor:
        """The rows, mapped by W2 if there is one."""
        rows_SV = super().answer(slots_S)
        return rows_SV if self.output is None else linear(rows_SV, self.output.weight)

    def flops_per_token(self) -> int:
        """Scores of all keys, and the weighted sum of the values (Lample et al. 2019, sec. 3.2)."""
        keys = sum(keys.numel() for keys in self.key_parameters())
        return keys + self.reads * sum(table.width for table in self.read_tables())

    def saved_per_token(self) -> int:
        """Queries before and after their norms; for each read its weight and its slot (of flat keys twice); with a gate
        both its sides, and the input of W2."""
        queries = 2 if self.key_norm is None else 3
        maps = 3 * (self.gate is not None) + (self.output is not None)
        entries = queries * self.query.heads * self.query.key_dim + maps * self.values.width
        return entries + self.reads * self.saved_per_read


def shapes_of(tables: Mapping[str, nn.Module]) -> dict[str, tuple[int, ...]]:
    """The shapes of tables by their names."""
    return {name: tuple(table.get_parameter("weight_KD").shape) for name, table in tables.items()}


class RMSKeyNorm(nn.Module):
    """Root-mean-square normalisation of every key and of the part of a query that is compared with it, with a learnt
    gain for each.

    The gains start at f^-0.4, so that scores start at a standard deviation of f^-0.3: with gains of 1 it would be
    sqrt(f), and the softmax one-hot. (Berges et al. 2024 give no start; this is that of UltraMemV2's released code,
    arXiv 2508.18756.)

    Args:
        width: entries of a key (f).
    """

    def __init__(self, width: int):
        super().__init__()
        self.query_gain_f = nn.Parameter(torch.empty(width))
        self.key_gain_f = nn.Parameter(torch.empty(width))

    def init_spec(self) -> dict[str, InitSpec]:
        start = Constant(len(self.key_gain_f) ** -0.4)
        return {"query_gain_f": start, "key_gain_f": start}

    def forward(self, q_NHq: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised queries (N, H, q), f entries at a time, and keys (..., f), both in fp32 or wider."""
        width = self.key_gain_f.shape
        q_NHjf = rms_norm(q_NHq.unflatten(-1, (-1, *width)), width, self.query_gain_f, RMS_EPSILON)
        return q_NHjf.flatten(2), rms_norm(keys, width, self.key_gain_f, RMS_EPSILON)
