"""Product keys: n^2 slots, found by two sets of n sub-keys (Lample et al. 2019, sec. 3)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pkmlm.memory.address import Addresses
from pkmlm.memory.key_spec import KeySpec
from pkmlm.memory.spec import SpecError, key

if TYPE_CHECKING:
    from pkmlm.memory.key_memory import KeyMemory


@dataclass(frozen=True)
class ProductKeySpec(KeySpec):
    title: ClassVar[str] = "Product keys"

    kind: Literal["product-key"] = key("product-key", "product keys (Lample et al. 2019)")

    @property
    def key_rows(self) -> int:
        """Two sub-keys, one of each half, fill a row."""
        return self.num_keys

    @property
    def key_width(self) -> int:
        return self.key_dim // 2

    @property
    def scores_per_query(self) -> int:
        return 2 * self.num_keys

    @property
    def addresses(self) -> Addresses:
        return Addresses(self.slots, self.num_keys)

    def check(self, dim: int) -> None:
        super().check(dim)
        if self.key_dim % 2:
            raise SpecError("key_dim", f"found {self.key_dim}", "an even width, of which a sub-key has half")

    @property
    def layer(self) -> "type[KeyMemory]":
        from pkmlm.memory.product_key.layer import ProductKeyMemory

        return ProductKeyMemory
