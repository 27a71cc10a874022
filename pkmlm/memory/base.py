"""What all memories have in common: a table of which a token reads few rows, a tap on the reads, and their cost.

N: tokens; H: heads (for hash layers: tables); k: reads of a head (for hash layers: 1).
"""

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.module_tracker import ModuleTracker

from pkmlm.memory.address import Addresses, entry_of, memory_label
from pkmlm.memory.init import initialise
from pkmlm.memory.spec import Spec
from pkmlm.memory.table import Modules, Values

Layer = TypeVar("Layer", bound="SparseMemory")
Inputs = ParamSpec("Inputs")
Output = TypeVar("Output")
Listener = Callable[..., None]  # gets tensors with a row for each token, detached
TRACKER = ModuleTracker()  # of no modules: it is only asked whether this thread is in a backward pass


def is_recomputing() -> bool:
    """Whether this forward runs within a backward pass, as torch's checkpointing repeats one whose activations it has
    not kept. What a forward counts or keeps, it has then counted or kept before.
    """
    return bool(TRACKER.is_bw)


class Tap(nn.Module):
    """Tells listeners what a forward finds for its tokens, once: not again when activations are recomputed. A copy of
    it has no listeners.
    """

    def __init__(self) -> None:
        super().__init__()
        self.listeners: list[Listener] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "listeners": []}

    @contextmanager
    def listen(self, listener: Listener) -> Iterator[None]:
        """Tell a listener while the `with` block runs."""
        self.listeners.append(listener)
        try:
            yield
        finally:
            self.listeners.remove(listener)

    def tell(self, *found_N: Tensor) -> None:
        """Tell all listeners, in the order in which they came."""
        if not self.listeners or is_recomputing():
            return
        for listener in tuple(self.listeners):
            listener(*(x_N.detach() for x_N in found_N))


class UsageTap(Tap):
    """The identity on a memory's reads, of which it tells its listeners: slots and weights, both (N, H, k).

    Attributes:
        layer: the block, counted from 1.
        name: of the memory, in the recipe.
        kind: of the memory.
        addresses: the names of its slots; there are as many as rows of its table, or of all its tables together.
        heads: memory heads, or tables.
        part: which of the memory's layers in the block it is; empty: the only one.
        shared: whether all heads read the same slots. Otherwise each has its own table: head h has the rows from
            h * slots / heads up to (h + 1) * slots / heads.
        residual: whether what the memory makes of its rows is added to the residual stream.
        pool: the layers that read the same table, including this one; empty: only this memory reads the table.
    """

    def __init__(
        self,
        layer: int,
        name: str,
        kind: str,
        addresses: Addresses,
        heads: int,
        *,
        part: str = "",
        shared: bool = True,
        residual: bool = True,
        pool: tuple[int, ...] = (),
    ):
        super().__init__()
        self.layer, self.name, self.part, self.kind = layer, name, part, kind
        self.addresses, self.slots, self.heads = addresses, addresses.slots, heads
        self.shared, self.residual, self.pool = shared, residual, pool

    @property
    def entry(self) -> dict[str, Any]:
        """What the memory's entry in a report begins with."""
        return entry_of(self.name, self.layer, self.kind, self.part)

    @property
    def label(self) -> str:
        """The memory's name in reports: "layer 3 facts", "layer 2 tables qkv"."""
        return memory_label(self.entry)

    def forward(self, slots_NHk: Tensor, weights_NHk: Tensor) -> tuple[Tensor, Tensor]:
        """Slots read (int64, below `slots`) and their weights (floating), unchanged: (N, H, k) each. The k slots of a
        head (or table) are distinct.

        The weights come from the scores alone: they contain nothing else of the token, such as an expert's activation.
        """
        self.tell(slots_NHk, weights_NHk)
        return slots_NHk, weights_NHk


class SparseMemory(nn.Module, ABC):
    """A layer that reads a few rows of a large table for each token.

    The model, its cost, the usage counters, reports and the optimizer look only at what a memory defines here. Its
    reads go through `tap`; its constructor ends with `reset_parameters`, so that a layer made by hand is ready to use.

    Attributes:
        spec: the keys that it was made from.
        dim: width of its input.
        tap: sees the slots and weights of all reads.
        values: the table.
        reads: rows that one token reads: those of all heads, or of all tables together.
        outputs: sums that are taken of them, each of equally many rows.
        weighted: whether reads have weights of their own; otherwise each weighs 1.
        scores_per_query: scores that a search for slots computes for one query of one head; 0: it does not search.
        stream: what stands for the memory in the names of the random streams of its initial weights, within a block.
        orders: for each table (`tap.heads`), how many tokens choose its rows; empty: the stream does.
    """

    spec: Spec
    dim: int
    tap: UsageTap
    values: Values
    reads: int
    outputs: int = 1
    weighted: bool = True
    scores_per_query: int = 0
    stream: str = ""
    orders: tuple[int, ...] = ()

    def reset_parameters(self) -> None:
        """Draw all weights from torch's generator (`torch.manual_seed`).

        On the meta device nothing is drawn: `build_model` makes its layers there, and then fills the whole model from
        the recipe's seed (`initialise`).
        """
        if not self.values.weight_KD.is_meta:
            initialise(self, int(torch.randint(2**63 - 1, (), device="cpu")))

    def read_tables(self) -> list[Values]:
        """The tables that it reads, in order, including those of a pool, which the model owns."""
        return [self.values]

    def key_parameters(self) -> list[nn.Parameter]:
        """The keys that queries are compared with, if it has some."""
        return []

    def rows_of(self, ids_BTG: Tensor) -> Tensor:
        """The rows that tokens read (B, T, H * k), k of each table, from the ids of the tokens that they see, where
        `orders` is not empty.

        Args:
            ids_BTG: as in `pkmlm.memory.tokens.Past`.
        """
        raise NotImplementedError

    @property
    def gated(self) -> bool:
        """Whether a gate, computed from the input, multiplies each entry of the values' sum."""
        return getattr(self, "gate", None) is not None

    @property
    def left_out(self) -> tuple[str, ...]:
        """What the layer's output also depends on, but `answer` leaves out."""
        return ("gate",) if self.gated else ()

    @property
    def device(self) -> torch.device:
        """Where its weights lie."""
        return next(itertools.chain(self.parameters(), self.buffers())).device

    def answer(self, slots_S: Tensor) -> Tensor:
        """What rows of `values`, given by number, add to the layer's output when read with weight 1 and without a gate,
        apart from a bias: (S, D).
        """
        return self.values.rows(slots_S)

    def extra_repr(self) -> str:
        """What it is called in reports, and its sizes."""
        heads = f"heads={self.tap.heads}" if self.tap.shared else f"tables={self.tap.heads}"
        reads = f"slots={self.tap.slots}, {heads}, topk={self.reads // self.tap.heads}"
        return f"{self.tap.label}, {reads}, parameters={sum(weight.numel() for weight in self.parameters())}"

    def misfit(self, *inputs: Any) -> str:
        """Why `forward` cannot take these inputs, of which the first is the stream; empty: no reason is known."""
        if not inputs or not isinstance(x := inputs[0], Tensor):
            return ""
        if not x.is_floating_point() or x.shape[-1:] != (self.dim,):
            return f"the input is {x.dtype} {tuple(x.shape)} (expected floating, (..., {self.dim}))"
        tables = {table.weight_KD for table in self.read_tables()}
        for name, weight in self.named_parameters():
            if weight.device != x.device:
                return f"the input is on {x.device} (expected {weight.device}, as {name})"
            if weight in tables or (torch.is_autocast_enabled(x.device.type) and weight.dtype == torch.float32):
                continue
            if weight.dtype not in (torch.float32, torch.float64):
                return f"{name} is in {weight.dtype} (expected torch.float32: call the layer's float())"
            if weight.dtype != x.dtype:
                return f"the input is in {x.dtype} (expected {weight.dtype}, as {name}, or autocast)"
        return ""

    @abstractmethod
    def flops_per_token(self) -> int:
        """Multiply-adds of a forward besides those of linear maps: with keys, codes and rows of the table."""

    @abstractmethod
    def saved_per_token(self) -> int:
        """Numbers that autograd keeps for the backward, besides the input and output: an estimate."""


def memories(model: Modules) -> list[SparseMemory]:
    """Every memory of a model, in the order of their taps."""
    return [module for module in model.modules() if isinstance(module, SparseMemory)]


def usage_taps(model: Modules) -> list[UsageTap]:
    """Every tap of a model, by layer and in the order in which the block reads."""
    return [module for module in model.modules() if isinstance(module, UsageTap)]


def outside_compiler(function: Callable[Inputs, Output]) -> Callable[Inputs, Output]:
    """Decorate a function so that torch.compile leaves it as it is.

    `torch.compiler.disable` imports the compiler, which takes seconds, so it is called only while tracing.
    """

    @functools.wraps(function)
    def untraced(*inputs: Inputs.args, **options: Inputs.kwargs) -> Output:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*inputs, **options)
        return function(*inputs, **options)

    return untraced


def uncompiled(
    forward: Callable[Concatenate[Layer, Inputs], Tensor],
) -> Callable[Concatenate[Layer, Inputs], Tensor]:
    """Decorate a layer's forward so that torch.compile leaves it as it is, and that an input which it cannot take is a
    ValueError which names the layer. Tracing it would fail in numba's dispatcher, and miss listeners that come later.
    """

    @functools.wraps(forward)
    def named(layer: Layer, *inputs: Inputs.args, **options: Inputs.kwargs) -> Tensor:
        try:
            return forward(layer, *inputs, **options)
        except (RuntimeError, TypeError, ValueError) as error:
            if reason := layer.misfit(*inputs):
                raise ValueError(f"{layer.tap.label}: {reason}") from error
            raise

    return outside_compiler(named)
