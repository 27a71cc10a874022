"""Counting what a model reads from its memories while it runs; `MemoryUsage` computes usage and KL from the counts.

N: tokens; H: memory heads, or tables; K: rows of a table; k: slots a head reads; R: tokens and heads whose weights are
not all 0.
"""

import threading
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor
from typing_extensions import Self

from pkmlm.distributed import World
from pkmlm.errors import UserError
from pkmlm.measure.usage import MemoryUsage, with_pools
from pkmlm.memory.base import Listener, Tap, UsageTap, memories, usage_taps
from pkmlm.memory.table import Modules, tables_of

# Pairs of slots that are compared at once: as many as a core's cache holds; a GPU wants few large calls.
COMPARISONS = {"cpu": 1 << 18, "cuda": 1 << 26}
Listeners = Iterable[tuple[Tap, Listener]]  # each with the tap that it listens to


class ReadListener:
    """Passes what taps tell to listeners, while the `with` block runs, at the positions that `only` selects.

    Several threads may call the model: each says which positions of its own calls count, and listeners get one forward
    at a time.
    """

    def __init__(self, listeners: Listeners):
        self._by_tap: dict[Tap, list[Listener]] = {}
        for tap, listener in listeners:
            self._by_tap.setdefault(tap, []).append(listener)
        self._taps, self._lock = ExitStack(), threading.Lock()
        self._own, self._masked = threading.local(), False

    def __enter__(self) -> Self:
        for tap, listeners in self._by_tap.items():
            self._taps.enter_context(tap.listen(partial(self._pass_on, listeners)))
        return self

    def __exit__(self, *error: object) -> None:
        self._taps.close()

    def only(self, mask_N: Tensor) -> None:
        """Restrict this thread's next forward passes to some positions (bool, on the model's device); by default all
        count. From then on, a forward in a thread that has not said which positions count is an error.
        """
        self._own.mask_N, self._masked = mask_N, True

    @torch.no_grad()
    def _pass_on(self, listeners: list[Listener], *found_N: Tensor) -> None:
        mask_N: Tensor | None = getattr(self._own, "mask_N", None)
        if mask_N is not None:
            mask_N = mask_N.to(found_N[0].device)  # a pretrained model may be spread over several devices
            found_N = tuple(x_N[mask_N] for x_N in found_N)
        elif self._masked:
            message = "a thread called the model without saying which positions count"
            raise UserError(message, "call `only` in each thread that calls the model")
        with self._lock:
            for listener in listeners:
                listener(*found_N)


class UsageCounters(ReadListener):
    """Counts every read of a model's memories while the `with` block runs, in whichever thread the model is called.

    Keeps integer counts and float64 masses of each head and slot, and sums over each head's reads, on the model's
    device, so that memory does not grow with the tokens counted. A read counts whatever its weight, even 0; its mass is
    the absolute value of its weight, which may be negative where scores are weights.

        with pkmlm.UsageCounters(model) as counters:
            model(tokens)
        for memory in counters.memories():
            print(memory.label, memory.as_json()["mass"]["kl"])

    Args:
        model: any module with memories in it.
        taps: those whose reads are counted; None: all of the model's.
        overlap: also count the slots that two heads both read for a token, which can take as long as the model.
        others: that hear of the same positions.
    """

    def __init__(
        self, model: Modules, taps: list[UsageTap] | None = None, *, overlap: bool = True, others: Listeners = ()
    ):
        device = next((parameter.device for parameter in model.parameters()), None)
        self._counters = [_Counter(tap, device, overlap) for tap in (usage_taps(model) if taps is None else taps)]
        super().__init__([*((counter.tap, counter.add) for counter in self._counters), *others])

    def memories(self, world: World | None = None) -> list[MemoryUsage]:
        """What has been counted: one entry per tap, in order, then one for each table that several share.

        Args:
            world: the processes whose counts are added; all of them must call this.

        Raises:
            UserError: a memory reads with weights that are not finite.
        """
        return with_pools([counter.result(world or World()) for counter in self._counters])


class _Counter:
    """The counts of one memory: head h's reads of slot s are at h * K + s, with K slots that one head can read."""

    def __init__(self, tap: UsageTap, device: torch.device | None, overlap: bool):
        self.tap, self.overlap = tap, overlap
        size = tap.slots * tap.heads if tap.shared else tap.slots
        self.tokens = 0
        self.counts = torch.zeros(size, dtype=torch.int64, device=device)
        self.masses = torch.zeros(size, dtype=torch.float64, device=device)
        self.squares_H = torch.zeros(tap.heads, dtype=torch.float64, device=device)
        self.common_HH = torch.zeros(tap.heads, tap.heads, dtype=torch.int64, device=device)
        self.spread_3 = torch.zeros(3, dtype=torch.float64, device=device)
        self.weighing_H = torch.zeros(tap.heads, dtype=torch.int64, device=device)

    def add(self, slots_NHk: Tensor, weights_NHk: Tensor) -> None:
        slots_NHk, weights_NHk = (x.to(self.counts.device) for x in (slots_NHk, weights_NHk))
        self.tokens += len(slots_NHk)
        if self.tap.shared:  # otherwise a slot's number already is its index
            if self.overlap:
                self._add_common(slots_NHk)
            first_H = torch.arange(self.tap.heads, device=slots_NHk.device) * self.tap.slots
            slots_NHk = slots_NHk + first_H[:, None]
        index = slots_NHk.flatten()
        self.counts.index_add_(0, index, torch.ones_like(index))
        weights_NHk = weights_NHk.double().abs()
        self.masses.index_add_(0, index, weights_NHk.flatten())
        self.squares_H += weights_NHk.square().sum((0, 2))
        self.weighing_H += weights_NHk.count_nonzero((0, 2))
        mass_NH = weights_NHk.sum(-1)
        share_Rk = (weights_NHk / mass_NH[..., None])[mass_NH > 0]
        effective_R = torch.special.entr(share_Rk).sum(-1).exp()
        number = effective_R.new_tensor(len(effective_R))
        self.spread_3 += torch.stack([effective_R.sum(), share_Rk.amax(-1).sum(), number])

    def _add_common(self, slots_NHk: Tensor) -> None:
        """Count the slots that two heads have in common for a token; the slots of one head are distinct."""
        heads, topk = slots_NHk.shape[1:]
        for chunk_nHk in slots_NHk.split(max(1, COMPARISONS[slots_NHk.device.type] // topk**2)):
            for g in range(heads):
                self.common_HH[g, g] += chunk_nHk[:, g].numel()
                for h in range(g + 1, heads):
                    common = (chunk_nHk[:, g, :, None] == chunk_nHk[:, h, None, :]).count_nonzero()
                    self.common_HH[g, h] += common
                    self.common_HH[h, g] += common

    def result(self, world: World) -> MemoryUsage:
        tap = self.tap
        tokens = int(world.all_sum(torch.tensor(self.tokens)))
        own = (self.counts, self.masses, self.squares_H, self.common_HH, self.spread_3, self.weighing_H)
        counts, masses, squares_H, common_HH, spread_3, weighing_H = (world.all_sum(x.cpu().clone()) for x in own)
        if not bool(masses.isfinite().all()):
            raise UserError(
                f"{tap.label} reads with weights that are not finite", "use an earlier checkpoint: --step N"
            )
        return MemoryUsage(
            memory=tap.name,
            layer=tap.layer,
            kind=tap.kind,
            addresses=tap.addresses,
            tokens=tokens,
            counts_HK=counts.view(tap.heads, -1).numpy(),
            masses_HK=masses.view(tap.heads, -1).numpy(),
            squares_H=squares_H.numpy(),
            common_HH=common_HH.numpy() if tap.shared else None,
            spread_3=spread_3.numpy(),
            pool=tap.pool,
            weighing_H=weighing_H.numpy(),
            part=tap.part,
        )


class RowCounters(ReadListener):
    """Counts how often each row of a model's tables is read while the `with` block runs.

    Args:
        model: any module with memories in it; one table counts the reads of all memories that share it.
    """

    def __init__(self, model: Modules):
        paths = {table: path.removesuffix(".weight_KD") for path, table in tables_of(model).items()}
        self._reads = {
            path: torch.zeros(len(table.weight_KD), dtype=torch.int64, device=table.weight_KD.device)
            for table, path in paths.items()
        }
        super().__init__(
            (memory.tap, partial(self._add, self._reads[paths[table]]))
            for memory in memories(model)
            for table in memory.read_tables()
        )

    def _add(self, reads_K: Tensor, slots_NHk: Tensor, weights_NHk: Tensor) -> None:
        reads_K += torch.bincount(slots_NHk.flatten(), minlength=len(reads_K))

    def take(self) -> dict[str, Tensor]:
        """The reads of each row since the last call, by path of the table: int64 (K), on the model's device."""
        taken = {path: reads_K.clone() for path, reads_K in self._reads.items()}
        for reads_K in self._reads.values():
            reads_K.zero_()
        return taken
