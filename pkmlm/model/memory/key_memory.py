"""Memories with keys: product keys (Lample et al. 2019, sec. 3) and the baseline of flat keys (its table 4).

B: sequences; T: positions; N: tokens (B * T); D: model width; H: heads; q: width of a query; k: slots a head reads; n:
sub-keys of a half; f: width of a sub-key (q / 2); K: slots.
"""

from abc import abstractmethod
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from pkmlm.device import at_least_fp32
from pkmlm.kernels import ops
from pkmlm.model.init import InitSpec, Uniform
from pkmlm.model.memory.base import SparseMemory, UsageTap, uncompiled
from pkmlm.model.memory.query import Query
from pkmlm.model.memory.values import Values
from pkmlm.recipe.schema import Memory, QueryMap, QueryNorm


class KeyMemory(SparseMemory):
    """m(x) = sum over heads and their k best slots of w * v, w the softmax of scores (Lample et al. 2019, eq. 1 to 3).

    All heads share the values, which start at N(0, 1/D) (not in the paper; the authors' released choice).
    """

    kind: ClassVar[Literal["product-key", "flat-key"]]
    saved_per_read: ClassVar[int]  # numbers of 4 bytes: a weight, and indices of 8 bytes

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
        layer: int = 1,
        momentum: float = 0.1,
    ):
        """A memory that maps (B, T, dim) to (B, T, dim), drawn from torch's generator (`torch.manual_seed`).

        Args:
            dim: width of the input, of the output and of a value (D).
            num_keys: n, the root of the number of slots: product keys have n sub-keys in either half, flat keys n^2.
            heads: queries of a token (H); each head has its own keys, and all share the values.
            topk: slots that a head reads for a token (k), at most as many as it has keys (product keys: sub-keys of
                a half).
            key_dim: width of a query (q). A sub-key has half of it, so that it is even; a flat key has all of it.
            query: from input to queries: "linear", one map; "mlp", two with a ReLU between, the hidden layer of width
                `dim` being the same for all heads.
            query_norm: "batch" normalises each of the H * q entries over the tokens of a forward (in evaluation: by
                running statistics), "layer" and "rms" each query by itself, "none" nothing.
            layer: the block that it stands in, counted from 1, for the usage report.
            momentum: weight of one forward in the running statistics of "batch", 0 to 1.

        Raises:
            ValueError: an argument is out of its range or none of the choices, or sizes do not fit one another.
        """
        super().__init__()
        memory = Memory(  # checks types, ranges and choices
            kind=self.kind,
            num_keys=num_keys,
            heads=heads,
            topk=topk,
            key_dim=key_dim,
            query=query,
            query_norm=query_norm,
        )
        if topk > memory.key_rows:
            raise ValueError(f"topk: found {topk} (expected at most {memory.key_rows}, the keys to choose from)")
        self.topk = topk
        self.reads = heads * topk
        self.query = Query(dim, memory, momentum)
        self.tap = UsageTap(layer, "memory", self.kind, memory.slots, heads)
        self.values = Values(memory.slots, dim, std=dim**-0.5, group="values")
        self.make_keys(memory)
        self.reset_parameters()

    @abstractmethod
    def make_keys(self, memory: Memory) -> None:
        """Make the parameters of the keys, with their shapes."""

    @abstractmethod
    def select(self, q_NHq: Tensor) -> tuple[Tensor, Tensor]:
        """The k best slots of each query, highest first: scores (N, H, k), differentiable; slots (N, H, k), int64."""

    @uncompiled
    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) to (B, T, D), in the dtype of the rows read; search and softmax are in fp32."""
        q_NHq = self.query(x_BTD.flatten(0, 1))
        with torch.autocast(x_BTD.device.type, enabled=False):
            scores_NHk, slots_NHk = self.select(at_least_fp32(q_NHq))
            slots_NHk, weights_NHk = self.tap(slots_NHk, scores_NHk.softmax(-1))
        out: Tensor = self.values(slots_NHk.flatten(1), weights_NHk.flatten(1))
        return out.view_as(x_BTD)

    def flops_per_token(self) -> int:
        """Scores of all keys, and the weighted sum of the values (Lample et al. 2019, sec. 3.2)."""
        keys = sum(parameter.numel() for parameter in self.parameters(recurse=False))
        return keys + self.reads * self.values.width

    def saved_per_token(self) -> int:
        """Queries before and after their norm; for each read its weight, its slot and, if any, both sub-keys."""
        return 2 * self.query.heads * self.query.key_dim + self.reads * self.saved_per_read


class ProductKeyMemory(KeyMemory):
    """A memory of n^2 slots searched with 2n sub-keys a head (eq. 4).

    Each head has its own two sets of sub-keys; they start at U(+-1/sqrt(f)) (not in the paper; the authors' code). The
    parameters are `subkeys_H2nf`, those of the `query` network, and the values, `values.weight_KD` (n^2, D), of which
    a step of training changes few rows: see `pkmlm.train.row_adam.RowAdam`.
    """

    kind = "product-key"
    saved_per_read = 7

    def make_keys(self, memory: Memory) -> None:
        if memory.key_dim % 2:
            raise ValueError(f"key_dim: found {memory.key_dim} (expected an even number, to be halved)")
        self.subkeys_H2nf = nn.Parameter(torch.empty(memory.heads, 2, memory.num_keys, memory.key_dim // 2))

    def init_spec(self) -> dict[str, InitSpec]:
        return {"subkeys_H2nf": Uniform(self.subkeys_H2nf.shape[-1] ** -0.5)}

    def select(self, q_NHq: Tensor) -> tuple[Tensor, Tensor]:
        """The exact top-k over all n^2 product keys, as `ops.product_key_select`."""
        return ops.product_key_select(q_NHq, self.subkeys_H2nf, self.topk)

    def scores_per_query(self) -> int:
        return 2 * self.subkeys_H2nf.shape[2]


class FlatKeyMemory(KeyMemory):
    """A memory of num_keys^2 slots, each of which has a whole key for each head (table 4).

    A search takes O(slots), not O(sqrt(slots)). The parameters are `keys_HKq`, those of the `query` network, and the
    values, `values.weight_KD` (n^2, D).
    """

    kind = "flat-key"
    saved_per_read = 5

    def make_keys(self, memory: Memory) -> None:
        self.keys_HKq = nn.Parameter(torch.empty(memory.heads, memory.slots, memory.key_dim))

    def init_spec(self) -> dict[str, InitSpec]:
        return {"keys_HKq": Uniform(self.keys_HKq.shape[-1] ** -0.5)}

    def select(self, q_NHq: Tensor) -> tuple[Tensor, Tensor]:
        """The exact top-k over all keys, as `ops.flat_key_select`."""
        return ops.flat_key_select(q_NHq, self.keys_HKq, self.topk)

    def scores_per_query(self) -> int:
        return self.keys_HKq.shape[1]
