"""MemoryFormer's hash tables: a bucket for each chunk of the input, by its signs (Ding et al. 2024)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pkmlm.memory.spec import EveryRowOptim, Place, Site, Spec, SpecError, TableShape, key

if TYPE_CHECKING:
    from torch import nn

HashScore = Literal["paper", "scaled"]
Part = Literal["qkv", "ffn"]
MOST_BITS = 16


@dataclass(frozen=True)
class HashSpec(Spec):
    """Hash tables in place of the maps to queries, keys and values (attention then has no output map), and of the FFN.

    In all layers it is MemoryFormer; in some, a hybrid.
    """

    default_lr_scale: ClassVar[float] = 3.0  # MemoryFormer's recipes set 1
    title: ClassVar[str] = "Hash buckets"
    unit: ClassVar[str] = "bucket"
    shapeless: ClassVar[tuple[str, ...]] = ("temperature", "score", "activation")
    of_the_model: ClassVar[tuple[str, ...]] = ("parts", "extra_bits", "activation", "start")

    kind: Literal["hash"] = key("hash", "MemoryFormer's hash tables (Ding et al. 2024)")
    layers: tuple[str, ...] = key(("all",), "layers with these tables, counted from 1: 5, [3, 5], auto:2, or all")
    parts: tuple[Part, ...] = key(
        ("qkv", "ffn"), "what the tables take the place of: the maps to queries, keys and values; the FFN"
    )
    bits: int = key(8, "bits of a bucket code (tau): dim / bits tables of 2^bits rows", ge=1, le=MOST_BITS)
    extra_bits: int = key(2, "additional bits in the second layer of the Memory Block", ge=0, le=MOST_BITS - 1)
    temperature: float = key(1.0, "temperature t of the score p(z)", ge=1e-30)  # 2 / t must be finite in fp32
    score: HashScore = key("paper", "p(z) as in the paper, or sum|z| * p(z) as in its released code")
    activation: Literal["none", "gelu"] = key("none", "activation between the two layers of the Memory Block")
    optim: EveryRowOptim = key(EveryRowOptim, "how its tables learn")

    def places(self, beside: bool) -> tuple[Place, ...]:
        if beside:
            raise SpecError("layers", "found a layer with +", "none: hash tables take the place of maps")
        return self.parts

    def check(self, dim: int) -> None:
        if not self.parts or len(set(self.parts)) < len(self.parts):
            raise SpecError("parts", f"found {list(self.parts)}", "qkv, ffn, or both, each once")
        if dim % self.bits:
            found = f"{self.bits} bits do not divide the width {dim}"
            raise SpecError("bits", found, f"a divisor of {dim}, at most {MOST_BITS}")
        if "ffn" in self.parts and self.bits + self.extra_bits > MOST_BITS:
            found = f"{self.bits} + {self.extra_bits} bits make tables of 2^{self.bits + self.extra_bits} rows"
            raise SpecError("extra_bits", found, f"at most {MOST_BITS} bits in all", "bits")

    def tables(self, dim: int, vocab_size: int) -> list[TableShape]:
        tables, wide_bits = max(1, dim // self.bits), self.bits + self.extra_bits
        shapes = [TableShape("bits", tables << self.bits, 3 * dim)] if "qkv" in self.parts else []
        if "ffn" in self.parts:
            shapes.append(TableShape("bits", tables << self.bits, wide_bits * tables))
            shapes.append(TableShape("extra_bits", tables << wide_bits, dim))
        return shapes

    def build(self, site: Site, places: tuple[Place, ...]) -> "dict[Place, nn.Module]":
        from pkmlm.memory.hash.layer import HashLayer, MemoryBlock

        where: dict[str, Any] = {"layer": site.layer, "name": site.name}
        built: dict[Place, nn.Module] = {}
        if "qkv" in places:
            built["qkv"] = HashLayer(site.dim, 3 * site.dim, **self.arguments, **where, part="qkv")
        if "ffn" in places:
            built["ffn"] = MemoryBlock(site.dim, self, share=site.share, **where)
        return built

    def paper_flops(self, dim: int, context: int) -> int | None:
        """6 s d^2 / tau (sec. 2.3)."""
        return 6 * context * dim * dim // self.bits if self.parts == ("qkv", "ffn") else None

    def describe(self) -> str:
        return f"tables of 2^{self.bits} buckets in place of {' and '.join(self.parts)}"
