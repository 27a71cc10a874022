"""N-gram tables: rows found by a hash of the last tokens (Cheng et al. 2026, "Engram"), and their lite form."""

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pkmlm.memory.spec import (
    MAX_SLOTS,
    EveryRowOptim,
    Lookback,
    Place,
    Site,
    Spec,
    SpecError,
    TableShape,
    key,
    size,
)

if TYPE_CHECKING:
    from torch import nn

Fusion = Literal["gate", "add"]
ROW = 24
TAPS = 4  # positions that the convolution sees, the largest order apart


@dataclass(frozen=True)
class NGramSpec(Spec):
    default_lr_scale: ClassVar[float] = 5.0
    title: ClassVar[str] = "Rows of n-gram tables"
    unit: ClassVar[str] = "row"
    shapeless: ClassVar[tuple[str, ...]] = ("orders", "canonical")

    kind: Literal["ngram"] = key("ngram", "rows found by a hash of the last tokens (Engram), added before attention")
    orders: tuple[int, ...] = key(
        (2, 3), "n-gram lengths: how many tokens, including the current one, choose a row", ge=1, le=8
    )
    heads: int = size(8, "tables per order, each with its own hash")
    rows: int = size(65537, "rows of a table, a prime; 1: the control without a memory")
    row_dim: int | None = size(None, "width of a row; null: 24, and with fusion add that of the model")
    fusion: Fusion = key(
        "gate",
        "gate: rows give a value, and the stream decides how much of it is added (Engram); add: rows are added",
    )
    conv: bool = key(
        True, "gate: a causal convolution after the gate, over 4 positions that are the largest order apart"
    )
    canonical: bool = key(True, "tokens that differ only in case, accents or surrounding spaces choose the same rows")
    optim: EveryRowOptim = key(EveryRowOptim, "how its tables learn")

    @property
    def table_count(self) -> int:
        return len(self.orders) * self.heads

    def width(self, dim: int) -> int:
        """The width of a row in a stream of width `dim`."""
        return self.row_dim or (dim if self.fusion == "add" else ROW)

    @property
    def convolves(self) -> bool:
        return self.fusion == "gate" and self.conv

    @property
    def lookback(self) -> Lookback:
        order = max(self.orders)
        return Lookback(
            "canonical" if self.canonical else "plain", order, (TAPS - 1) * order if self.convolves else order - 1
        )

    def places(self, beside: bool) -> tuple[Place, ...]:
        if beside:
            raise SpecError("layers", "found a layer with +", "none: an n-gram memory stands before attention")
        return ("before",)

    def check(self, dim: int) -> None:
        if not self.orders or len(set(self.orders)) < len(self.orders):
            raise SpecError("orders", f"found {list(self.orders)}", "one order or more, each once")
        if self.rows > 1 and (prime := next_prime(self.rows)) > self.rows:
            raise SpecError("rows", f"found {self.rows}", f"a prime, such as {prime}, or 1")
        if self.table_count * self.rows > MAX_SLOTS:
            found = f"{self.table_count} tables of {self.rows} rows"
            raise SpecError("rows", found, "at most 2^31 rows in a layer", "heads")
        if self.fusion == "add" and self.width(dim) != dim:
            raise SpecError("row_dim", f"found {self.row_dim}, but fusion add adds rows", f"null, or {dim}", "fusion")

    def tables(self, dim: int, vocab_size: int) -> list[TableShape]:
        return [TableShape("rows", self.table_count * self.rows, self.width(dim))]

    def sizes(self, dim: int, vocab_size: int, layers: int) -> dict[str, int]:
        maps = layers * 2 * self.table_count * self.width(dim) * dim
        return {**super().sizes(dim, vocab_size, layers), "row_dim": maps}

    def build(self, site: Site, places: tuple[Place, ...]) -> "dict[Place, nn.Module]":
        from pkmlm.memory.ngram.layer import NGramMemory

        return {"before": NGramMemory(site.dim, **self.arguments, layer=site.layer, name=site.name)}

    def describe(self) -> str:
        orders = " and ".join(map(str, self.orders))
        return f"{self.table_count} tables of {self.rows:,} rows for the last {orders} tokens"


def next_prime(number: int) -> int:
    """The smallest prime that is not less than `number`, which is above 1."""
    return next(n for n in itertools.count(number) if all(n % each for each in range(2, math.isqrt(n) + 1)))
