"""The tables whose rows memories read, and the pool of tables that several memories share.

Ranks may divide the columns of a table among them. All ranks then gather the slots and weights of all reads, and each
sends the columns that it has summed back to the rank whose tokens they belong to; gradients go the opposite way.

N: tokens (of this rank); r: reads of a token; K: rows; D: width of the table; d: columns of one rank (D / M); M: ranks
that divide the columns; A: all their tokens (M * N); S: some rows; C: bytes of a quantized row.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pkmlm.distributed import World
from pkmlm.kernels import ops
from pkmlm.kernels.reference import Quantized, dequantize
from pkmlm.kernels.row_gradient import RowGradient
from pkmlm.memory.init import InitSpec, Normal
from pkmlm.memory.spec import Start

HALF_ON = ("cuda",)  # the CPU's kernels read fp32


class Values(nn.Module):
    """A table of rows, read as weighted sums (Lample et al. 2019, eq. 3; Ding et al. 2024, eq. 13) or as products.

    Args:
        rows, width: shape of the table.
        std: standard deviation of its initial entries, which are normal.
        start: "zero" lets them start at 0 all the same; "drawn" does not.

    Attributes:
        weight_KD: the table (fp32), or this rank's columns of it; None: it is held in few bits.
        codes_KC, scale_K: the table in few bits (see `kernels.reference.Quantized`); None: it is not.
        width: of a row, all columns.
        gradient: where backward passes collect the reads that make the table's gradient, after `keep_reads` was called;
            None: the gradient is a dense tensor in `weight_KD.grad`.
        copy_KD: the table in half precision, for forwards under autocast on a GPU; None until the first. It is reused
            if the table is known not to have changed: see `fresh_copy`.
        ranks: those that divide the table's columns among them, in their order.
    """

    def __init__(self, rows: int, width: int, *, std: float, start: Start = "drawn"):
        super().__init__()
        self.weight_KD = nn.Parameter(torch.empty(rows, width))
        self.codes_KC: Tensor | None
        self.scale_K: Tensor | None
        self.register_buffer("codes_KC", None)
        self.register_buffer("scale_K", None)
        self.width, self.std, self.start = width, std, start
        self.gradient: RowGradient | None = None
        self.copy_KD: Tensor | None = None
        self._copied = -1
        self.ranks = World()

    def divide(self, ranks: World) -> None:
        """Hold only this rank's columns, before the table has storage; the width is a multiple of the ranks."""
        rows, width = self.weight_KD.shape
        self.weight_KD = nn.Parameter(self.weight_KD.new_empty(rows, width // ranks.size))
        self.ranks = ranks

    def hold_bits(self, bits: int) -> None:
        """Hold the table in 8 or 4 bits, without a gradient, before it has storage."""
        rows = len(self.weight_KD)
        self.register_parameter("weight_KD", None)
        columns, dtype = (self.width, torch.int8) if bits == 8 else ((self.width + 1) // 2, torch.uint8)
        self.codes_KC, self.scale_K = torch.empty(rows, columns, dtype=dtype), torch.empty(rows)

    @property
    def height(self) -> int:
        """How many rows it has."""
        return len(self.weight_KD if self.codes_KC is None else self.codes_KC)

    def quantized(self) -> Quantized | None:
        """The table in few bits; None: it is in fp32, or for now replaced by one in fp32."""
        if self.weight_KD is not None or self.codes_KC is None or self.scale_K is None:
            return None
        return Quantized(self.codes_KC, self.scale_K, self.width)

    def rows(self, rows_S: Tensor) -> Tensor:
        """Some rows (S, D) by their numbers, in fp32, without a gradient; of this rank's columns."""
        table = self.quantized()
        return self.weight_KD.detach()[rows_S].float() if table is None else dequantize(table.take(rows_S))

    def keep_reads(self, *, every_row: bool = False) -> None:
        """Make backward passes collect the gradient in `gradient`, for the optimizer that calls this.

        Args:
            every_row: whether the gradient has a segment for each row, read or not (see `RowGradient`).

        Raises:
            ValueError: another optimizer has already done so.
        """
        self.refuse_second_optimizer()
        self.gradient = RowGradient(len(self.weight_KD), every_row=every_row)

    def refuse_second_optimizer(self) -> None:
        """Raise a ValueError if an optimizer already takes this table's reads."""
        if self.gradient is not None:
            raise ValueError("the table has an optimizer already (to make another, set its `gradient` to None first)")

    def init_spec(self) -> dict[str, InitSpec]:
        if self.weight_KD is None:
            return {}
        std = 0.0 if self.start == "zero" else self.std
        return {"weight_KD": Normal(std, self.width, self.ranks.rank * self.weight_KD.shape[1])}

    def forward(self, slots_Nr: Tensor, weights_Nr: Tensor) -> Tensor:
        """The weighted sums of rows (N, D), in the dtype of the rows that are read.

        If ranks divide the columns, all of them must call this. In training each has its own tokens, equally many, and
        sums its columns for the tokens of all. In evaluation all have the same tokens.

        Args:
            slots_Nr: int64, rows of the table.
            weights_Nr: floating.
        """
        if self.ranks.size == 1:
            return self._columns(slots_Nr, weights_Nr)
        if self.training:
            weights_Ar = _Collective.apply(weights_Nr, self.ranks.all_gather, self.ranks.reduce_scatter)
            slots_Ar = self.ranks.all_gather(slots_Nr.int()).long()  # slots are below 2^31
            sums_Ad = self._columns(slots_Ar, weights_Ar)
            parts_Ad = _Collective.apply(sums_Ad, self.ranks.all_to_all, self.ranks.all_to_all)
        else:
            parts_Ad = self.ranks.all_gather(self._columns(slots_Nr, weights_Nr))
        return side_by_side(parts_Ad, self.ranks.size)

    def products(self, x_ND: Tensor, slots_Nr: Tensor) -> Tensor:
        """<x[t], row slots[t, j]> of each read (N, r), in the dtype of the table, or fp32 if that is wider.

        If ranks divide the columns, all of them must call this, as with `forward`: each multiplies its columns for the
        tokens of all, and the products are summed.

        Args:
            x_ND: floating, as wide as the table.
            slots_Nr: int64, rows of the table.
        """
        if self.ranks.size == 1:
            return self._products(x_ND, slots_Nr)
        parts_Ad = one_below_the_other(x_ND, self.ranks.size)
        if self.training:
            x_Ad = _Collective.apply(parts_Ad, self.ranks.all_to_all, self.ranks.all_to_all)
            slots_Ar = self.ranks.all_gather(slots_Nr.int()).long()
            products_Ar = self._products(x_Ad, slots_Ar)
            return _Collective.apply(products_Ar, self.ranks.reduce_scatter, self.ranks.all_gather)
        own_Nd = parts_Ad.chunk(self.ranks.size)[self.ranks.rank]
        return self.ranks.all_sum(self._products(own_Nd, slots_Nr))

    def _products(self, x_Nd: Tensor, slots_Nr: Tensor) -> Tensor:
        if (table := self.quantized()) is not None:
            return ops.quantized_row_products(table, x_Nd, slots_Nr)
        return ops.row_products(self.weight_KD, x_Nd, slots_Nr, self.gradient, self._half())

    def _columns(self, slots_Nr: Tensor, weights_Nr: Tensor) -> Tensor:
        if (table := self.quantized()) is not None:
            return ops.quantized_row_sum(table, slots_Nr, weights_Nr)
        return ops.weighted_row_sum(self.weight_KD, slots_Nr, weights_Nr, self.gradient, self._half())

    def _half(self) -> Tensor | None:
        """Under autocast on a GPU, an up-to-date copy; otherwise None."""
        device = self.weight_KD.device.type
        if device not in HALF_ON or not torch.is_autocast_enabled(device):
            return None
        dtype = torch.get_autocast_dtype(device)
        copy_KD = self.fresh_copy()
        if copy_KD is None or copy_KD.dtype != dtype:
            with torch.inference_mode(False):  # a copy made in that mode could not be used in training
                copy_KD = self.copy_KD = self.weight_KD.detach().to(dtype)
            self._copied = self.weight_KD._version
        return copy_KD

    def fresh_copy(self) -> Tensor | None:
        """The copy, if the table is known not to have changed since; otherwise None.

        Torch's fused optimizers change a parameter without incrementing its version. Row Adam increments it, and
        nothing trains a table that needs no gradient. (Changes through `.data` are never counted.) Torch has no public
        name for reading a tensor's `_version`.
        """
        counted = self.gradient is not None or not self.weight_KD.requires_grad
        return self.copy_KD if counted and self._copied == self.weight_KD._version else None

    def rows_updated(self, copy_KD: Tensor | None) -> None:
        """Tell torch, which cannot see it, that a kernel has written rows, and the same rows of `copy_KD` if given."""
        torch.autograd.graph.increment_version(self.weight_KD)
        if copy_KD is not None:
            torch.autograd.graph.increment_version(copy_KD)
            self._copied = self.weight_KD._version

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        self.copy_KD = None  # of another table
        super().register_parameter(name, param)

    def _apply(self, *arguments: Any, **options: Any) -> "Values":
        self.copy_KD = None  # it would stay on the old device; `to`, `cuda` and `half` share no public method
        return super()._apply(*arguments, **options)

    def __getstate__(self) -> dict[str, Any]:
        """Copies of the module have neither the table in half precision nor an optimizer that takes their gradient."""
        return {**self.__dict__, "copy_KD": None, "gradient": None}


class Pool(nn.Module):
    """The tables that the memories of several layers share (Berges et al. 2024). The model owns them, and they are
    stored, counted, divided and trained with it; the memories only read them.

    Args:
        tables: by the names that they would have in a memory that owns them, such as "values".
        layers: whose memories read them, counted from 1.
    """

    def __init__(self, tables: dict[str, Values], layers: tuple[int, ...]):
        super().__init__()
        self.layers = layers
        for name, table in tables.items():
            self.add_module(name, table)


class Modules(Protocol):
    """A network, as far as its modules are concerned."""

    def modules(self) -> Iterator[nn.Module]: ...

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


def tables_of(model: Modules) -> dict[str, Values]:
    """The tables of a model by the paths of their weights."""
    return {f"{path}.weight_KD": module for path, module in model.named_modules() if isinstance(module, Values)}


def table_ranks(model: nn.Module) -> dict[str, World]:
    """The ranks that divide the columns of each table of a model, by the path of its weight."""
    return {name: table.ranks for name, table in tables_of(model).items()}


class _Collective(torch.autograd.Function):
    """A collective, such as `World.all_gather`, whose transpose carries the gradient back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, collective: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.back = back
        return collective(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


def side_by_side(parts_Ad: Tensor, ranks: int) -> Tensor:
    """(M * N, d), the ranks' columns one below the other, as (N, D)."""
    return parts_Ad.view(ranks, -1, parts_Ad.shape[-1]).transpose(0, 1).flatten(1)


def one_below_the_other(x_ND: Tensor, ranks: int) -> Tensor:
    """(N, D) as (M * N, d), the ranks' columns one below the other: the inverse of `side_by_side`."""
    return x_ND.view(len(x_ND), ranks, -1).transpose(0, 1).flatten(0, 1)
