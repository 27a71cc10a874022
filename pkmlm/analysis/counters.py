"""Counting what a model reads from its memories, while it runs.

N: tokens; H: memory heads (hash layers: tables); k: slots a head reads; K: slots that one head can read.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pkmlm.analysis.usage import MemoryUsage
from pkmlm.distributed import World
from pkmlm.errors import UserError
from pkmlm.evaluate.documents import Documents
from pkmlm.evaluate.load import LoadedRun
from pkmlm.evaluate.perplexity import score
from pkmlm.model.memory.usage_tap import UsageTap, usage_taps

# Of slots, held at a time when two heads are compared: as many as a core's cache holds; a GPU wants few large calls.
COMPARISONS = {"cpu": 1 << 18, "cuda": 1 << 26}
Watch = TypeVar("Watch", bound="WatchedReads")


class WatchedReads:
    """Shows reads of memories to functions while the `with` block runs.

    Args:
        readers: whom a tap's reads are shown to, slots (N, H, k) and weights (N, H, k), detached.
    """

    def __init__(self, readers: list[tuple[UsageTap, Callable[[Tensor, Tensor], None]]]):
        self._readers = readers
        self._hooks: list[Any] = []
        self._mask_N: Tensor | None = None

    def __enter__(self: Watch) -> Watch:
        self._hooks = [tap.register_forward_hook(self._hook(read)) for tap, read in self._readers]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def only(self, mask_N: Tensor) -> None:
        """Show only these positions of the next forwards (bool, on the model's device); until this is called, all."""
        self._mask_N = mask_N

    def _hook(self, read: Callable[[Tensor, Tensor], None]) -> Callable[[nn.Module, Any, tuple[Tensor, Tensor]], None]:
        def show(tap: nn.Module, inputs: Any, reads: tuple[Tensor, Tensor]) -> None:
            slots_NHk, weights_NHk = (x.detach() for x in reads)
            if self._mask_N is not None:
                slots_NHk, weights_NHk = slots_NHk[self._mask_N], weights_NHk[self._mask_N]
            read(slots_NHk, weights_NHk)

        return show


class UsageCounters(WatchedReads):
    """Counts every read of a model's memories while the `with` block runs.

    Kept are integer counts and float64 masses of each head and slot, and sums over each head's reads, on the model's
    device: memory does not grow with the tokens counted. A read counts whatever its weight, zero too.

    Args:
        memory: which one is watched, as in `usage_taps`; None: all.
    """

    def __init__(self, model: nn.Module, memory: int | None = None):
        device = next((parameter.device for parameter in model.parameters()), None)
        watched = usage_taps(model) if memory is None else [usage_taps(model)[memory]]
        self._memories = [_Counter(tap, device) for tap in watched]
        super().__init__([(memory.tap, memory.add) for memory in self._memories])

    def memories(self, world: World | None = None) -> list[MemoryUsage]:
        """What has been counted, in all processes of `world` together: one entry a watched memory, in order.

        Raises:
            UserError: a memory reads with weights that are not finite.
        """
        return [memory.result(world or World()) for memory in self._memories]


class _Counter:
    """The counts of one memory.

    The heads of a hash layer own their slots, so that (head, slot) is the slot itself; elsewhere head h's
    counts of slot s stand at h * K + s.
    """

    def __init__(self, tap: UsageTap, device: torch.device | None):
        self.tap = tap
        self.shared = tap.kind != "hash"
        size = tap.slots * tap.heads if self.shared else tap.slots
        self.tokens = 0
        self.counts = torch.zeros(size, dtype=torch.int64, device=device)
        self.masses = torch.zeros(size, dtype=torch.float64, device=device)
        self.squares = torch.zeros(tap.heads, dtype=torch.float64, device=device)
        self.common_HH = torch.zeros(tap.heads, tap.heads, dtype=torch.int64, device=device)

    @torch.no_grad()
    def add(self, slots_NHk: Tensor, weights_NHk: Tensor) -> None:
        self.tokens += len(slots_NHk)
        if self.shared:
            self._add_common(slots_NHk)
            first_H = torch.arange(self.tap.heads, device=slots_NHk.device) * self.tap.slots
            slots_NHk = slots_NHk + first_H[:, None]
        index = slots_NHk.flatten()
        self.counts.index_add_(0, index, torch.ones_like(index))
        weights_NHk = weights_NHk.double()
        self.masses.index_add_(0, index, weights_NHk.flatten())
        self.squares += weights_NHk.square().sum((0, 2))

    def _add_common(self, slots_NHk: Tensor) -> None:
        """Count the slots that two heads share; a head's own slots differ from each other."""
        heads, topk = slots_NHk.shape[1:]
        for part_nHk in slots_NHk.split(max(1, COMPARISONS[slots_NHk.device.type] // topk**2)):
            for g in range(heads):
                self.common_HH[g, g] += part_nHk[:, g].numel()
                for h in range(g + 1, heads):
                    common = (part_nHk[:, g, :, None] == part_nHk[:, h, None, :]).count_nonzero()
                    self.common_HH[g, h] += common
                    self.common_HH[h, g] += common

    def result(self, world: World) -> MemoryUsage:
        tap = self.tap
        where = f"the {tap.name} of layer {tap.layer}"
        tokens = int(world.all_sum(torch.tensor(self.tokens)))
        own = (self.counts, self.masses, self.squares, self.common_HH)
        counts, masses, squares, common_HH = (world.all_sum(x.cpu().clone()) for x in own)
        if not bool(masses.isfinite().all()):
            raise UserError(f"{where} reads with weights that are not finite", "use an earlier checkpoint: --step N")
        return MemoryUsage(
            tap.layer,
            tap.name,
            tap.kind,
            tokens,
            counts.view(tap.heads, -1).numpy(),
            masses.view(tap.heads, -1).numpy(),
            squares.numpy(),
            common_HH.numpy() if self.shared else None,
        )


def measure_usage(
    run: LoadedRun,
    documents: Documents,
    advance: Callable[[int], bool] | None = None,
    world: World | None = None,
) -> list[MemoryUsage]:
    """What a run's memories read at the scored positions of documents, each position once.

    Args:
        advance, world: see `score`.

    Returns:
        One entry a memory, in the model's order; of all processes of `world` together.

    Raises:
        UserError: see `score` and `UsageCounters.memories`.
    """
    with UsageCounters(run.model) as counters:
        score(run.model, documents, run.tokenizer.eos, watch=counters.only, advance=advance, world=world)
    return counters.memories(world)
