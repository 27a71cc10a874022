"""Token tables: the row of the token itself. The cheapest memory, and so the control of all others."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pkmlm.memory.spec import (
    EveryRowOptim,
    Lookback,
    Place,
    Site,
    Spec,
    SpecError,
    TableShape,
    key,
)

if TYPE_CHECKING:
    from torch import nn

Into = Literal["stream", "values"]


@dataclass(frozen=True)
class TokenSpec(Spec):
    default_lr_scale: ClassVar[float] = 5.0
    title: ClassVar[str] = "Rows of token tables"
    unit: ClassVar[str] = "row"

    kind: Literal["token"] = key("token", "the row of the token itself")
    into: Into = key(
        "stream",
        "stream: the row is added before attention; values: to attention's values, behind a gate for each head",
    )
    optim: EveryRowOptim = key(EveryRowOptim, "how its table learns")

    @property
    def lookback(self) -> Lookback:
        return Lookback("plain", 1, 0)

    def places(self, beside: bool) -> tuple[Place, ...]:
        if beside:
            raise SpecError("layers", "found a layer with +", "none: a token's row stands before or in attention")
        return ("before",) if self.into == "stream" else ("values",)

    def tables(self, dim: int, vocab_size: int) -> list[TableShape]:
        return [TableShape("layers", vocab_size, dim)]

    def build(self, site: Site, places: tuple[Place, ...]) -> "dict[Place, nn.Module]":
        from pkmlm.memory.token.layer import TokenMemory

        where: dict[str, Any] = {"layer": site.layer, "name": site.name, "heads": site.heads}
        return {place: TokenMemory(site.dim, vocab_size=site.vocab_size, **self.arguments, **where) for place in places}

    def describe(self) -> str:
        return f"a row for each token, added to {'the stream' if self.into == 'stream' else 'the values of attention'}"
