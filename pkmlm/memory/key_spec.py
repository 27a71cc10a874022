"""The keys of memories that compare a query with keys: product keys, flat keys, PEER."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pkmlm.memory.address import Addresses
from pkmlm.memory.spec import (
    MAX_INT,
    Place,
    Section,
    Site,
    Spec,
    SpecError,
    TableOptim,
    TableSchedule,
    TableShape,
    key,
    size,
)

if TYPE_CHECKING:
    from torch import nn

    from pkmlm.memory.key_memory import KeyMemory
    from pkmlm.memory.table import Pool

QueryMap = Literal["linear", "mlp"]
QueryNorm = Literal["batch", "layer", "rms", "none"]
KeyNorm = Literal["none", "rms"]
Scores = Literal["softmax", "relu", "none"]
Gate = Literal["none", "silu"]  # of a layer by itself


@dataclass(frozen=True)
class KeysOptim(Section):
    lr_scale: float = key(
        1.0, "peak learning rate of the keys, as a multiple of optim.lr; 0: they stay as initialised", ge=0, le=1000
    )


@dataclass(frozen=True)
class KeyedOptim(TableOptim):
    """How values and keys learn. Values have a schedule of their own (Lample et al. 2019, sec. 4.3: constant)."""

    betas: tuple[float, float] | None = key((0.9, 0.999), "Adam's decay rates; null: those of optim", ge=0, lt=1)
    schedule: TableSchedule | None = key(
        "constant", "learning-rate schedule; null: that of optim; relative: that of optim, times a factor (`times`)"
    )
    warmup_steps: int | None = key(0, "steps of linear warm-up; null: those of optim", ge=0, le=MAX_INT)
    keys: KeysOptim = key(KeysOptim, "the keys: sub-keys, or flat keys")


@dataclass(frozen=True)
class KeySpec(Spec):
    """What the kinds have in common: heads, each with a query and its own keys, read the values of their best slots."""

    default_lr: ClassVar[float | None] = 1e-3  # Lample et al. 2019, sec. 4.3
    of_the_model: ClassVar[tuple[str, ...]] = ("share_values",)
    shapeless: ClassVar[tuple[str, ...]] = ("topk", "scores")

    layers: tuple[str, ...] = key(
        (),
        "layers with this memory, counted from 1: 5 in place of the FFN, 5+ beside it; all, or auto:2, which spreads "
        "two evenly, or auto:2+",
    )
    num_keys: int = size(512, "n: there are n^2 slots")
    heads: int = size(4, "memory heads; all share the values, each has its own keys and queries")
    topk: int = size(32, "slots read per head and token")
    key_dim: int = size(512, "width of a query and of a flat key; a sub-key has half of it")
    query: QueryMap = key(
        "linear", "the query network: one linear map; or two with a ReLU between them, the first shared by all heads"
    )
    query_norm: QueryNorm = key("batch", "normalisation of the queries; batch is that of Lample et al. 2019, table 2")
    key_norm: KeyNorm = key(
        "none",
        "rms: normalise each key and the part of a query that meets it, with one learnt gain for keys and one for "
        "queries",
    )
    scores: Scores = key(
        "softmax", "how the scores of the best slots become weights; relu and none treat each slot by itself"
    )
    share_values: bool = key(False, "one table for the memory's layers")
    value_dim: int | None = size(None, "width of a value; null: dim; another width adds a map back to dim")
    gate: Literal["none", "silu", "token"] = key(  # type: ignore[assignment]
        "none",
        "silu: the output is W2 (m * silu(W1 x)), where m is the weighted sum of values (Memory+); token: each token "
        "decides how much of the output is added, by a sigmoid",
    )
    optim: KeyedOptim = key(KeyedOptim, "how its values and keys learn")

    @property
    def arguments(self) -> dict[str, Any]:
        return {**super().arguments, "gate": "silu" if self.gate == "silu" else "none"}

    @property
    def slots(self) -> int:
        return self.num_keys**2

    @property
    def key_rows(self) -> int:
        """Keys of a head, in rows of `key_dim`."""
        raise NotImplementedError

    @property
    def key_width(self) -> int:
        """Entries of a key."""
        raise NotImplementedError

    @property
    def scores_per_query(self) -> int:
        """Scores that a search computes for one query of one head."""
        raise NotImplementedError

    @property
    def addresses(self) -> Addresses:
        return Addresses(self.slots)

    @property
    def key_lr_scale(self) -> float:
        return self.optim.keys.lr_scale

    @property
    def shares(self) -> bool:
        return self.share_values

    @property
    def keeps_statistics(self) -> bool:
        return self.query_norm == "batch"

    def places(self, beside: bool) -> tuple[Place, ...]:
        return ("beside",) if beside else ("ffn",)

    def check(self, dim: int) -> None:
        if self.topk > self.key_rows:
            raise SpecError(
                "topk", f"found {self.topk}", f"at most {self.key_rows}, the keys to choose from", "num_keys"
            )

    def tables(self, dim: int, vocab_size: int) -> list[TableShape]:
        return [TableShape("num_keys", self.slots, self.value_dim or dim)]

    def sizes(self, dim: int, vocab_size: int, layers: int) -> dict[str, int]:
        keys = layers * self.heads * self.key_dim * max(self.key_rows, dim)
        return {**super().sizes(dim, vocab_size, layers), "key_dim": keys}

    def with_keys(self, num_keys: int) -> "KeySpec":
        return replace(self, num_keys=num_keys, topk=min(self.topk, num_keys))

    @property
    def layer(self) -> "type[KeyMemory]":
        """The class of its layers."""
        raise NotImplementedError

    def new_pool(self, dim: int, layers: tuple[int, ...]) -> "Pool | None":
        from pkmlm.memory.table import Pool

        return Pool(self.layer.new_tables(dim, self), layers) if self.share_values and len(layers) > 1 else None

    def build(self, site: Site, places: tuple[Place, ...]) -> "dict[Place, nn.Module]":
        where: dict[str, Any] = {"layer": site.layer, "name": site.name, "pool": site.pool, "momentum": site.momentum}
        return {place: self.layer(site.dim, **self.arguments, **where) for place in places}

    def describe(self) -> str:
        shared = ", one table for all layers" if self.share_values else ""
        return f"{self.slots:,} {self.unit}s, {self.heads} heads that read {self.topk} each{shared}"
