"""The size of a memory layer that is timed."""

from dataclasses import dataclass

from pkmlm.recipe.schema import Memory

WIDTH = 4  # bytes of an fp32 number


@dataclass(frozen=True)
class Shape:
    """A memory and the tokens that read it; all numbers are fp32."""

    num_keys: int
    dim: int
    heads: int
    topk: int
    key_dim: int
    tokens: int

    @property
    def slots(self) -> int:
        return self.memory.slots

    @property
    def table_bytes(self) -> int:
        """Of the values."""
        return self.slots * self.dim * WIDTH

    @property
    def memory(self) -> Memory:
        return Memory(
            kind="product-key",
            layers=("1",),
            num_keys=self.num_keys,
            heads=self.heads,
            topk=self.topk,
            key_dim=self.key_dim,
        )

    def least_bytes(self, touched: int) -> dict[str, int]:
        """What each phase must move at least, were nothing read twice from memory.

        values: a row for each read, and the output. forward: the input, too. backward: the rows once more, for the
        gradients of the weights. step: besides, every touched row and its two moments, read and written.
        """
        rows, tokens = self.tokens * self.heads * self.topk * self.dim * WIDTH, self.tokens * self.dim * WIDTH
        forward, backward = rows + 2 * tokens, 2 * rows + 2 * tokens
        step = backward + 6 * touched * self.dim * WIDTH
        return {"values": rows + tokens, "forward": forward, "backward": backward, "step": step}
