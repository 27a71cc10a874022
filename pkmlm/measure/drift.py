"""Drift: which slots of the memories are read in training, and how far their values move between records.

K: slots; S: slots sampled; D: width of a value.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pkmlm.data.batches import permute
from pkmlm.distributed import World
from pkmlm.memory.base import SparseMemory, memories
from pkmlm.memory.values import side_by_side
from pkmlm.recipe.schema import Recipe
from pkmlm.runs.results import drift_file, write_arrays
from pkmlm.seeds import derived_seed

SAMPLE = 2048  # values of a memory whose movement is measured
WINDOW = 100  # steps over which the progress line counts slots


class ReadSlots:
    """Notes which slots of a memory are read in training.

    Args:
        memory: its tap is listened to from now on.
        ranks: those that train the memory together.

    Attributes:
        read_K: bool, whether this rank has read each slot; after `merge_ranks`, whether any rank has.
    """

    def __init__(self, memory: SparseMemory, ranks: World):
        self.tap, self.ranks = memory.tap, ranks
        self.read_K = torch.zeros(self.tap.slots, dtype=torch.bool, device=memory.values.weight_KD.device)
        self.tap.register_forward_hook(self._note)

    def _note(self, tap: nn.Module, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        if tap.training:
            self.read_K.index_fill_(0, output[0].flatten(), True)

    def merge_ranks(self) -> None:
        """Add what the other ranks have read; all ranks call this together."""
        self.read_K = self.ranks.all_any(self.read_K)


class RecentReads(ReadSlots):
    """The share of a memory's slots that were read in the last complete window of steps, for the progress line."""

    def __init__(self, memory: SparseMemory, ranks: World):
        super().__init__(memory, ranks)
        self.steps = 0
        self.share: float | None = None

    def after_step(self) -> str:
        """Count a step, all ranks together; returns the share as text, empty until the first window is complete."""
        self.steps += 1
        if self.steps % WINDOW == 0:
            self.merge_ranks()
            self.share = float(self.read_K.float().mean())
            self.read_K.zero_()
        return "" if self.share is None else f"layer {self.tap.layer} reads {self.share:.0%}"


class Drift:
    """Records a "drift" event and RUN/usage/drift-step-N.npz every `eval.every` steps, and at the end of training if
    that comes at least half as many steps after the last record.

    Reads of all slots are noted; the values of SAMPLE slots, drawn from the recipe's seed, are compared with those at
    the last record. A checkpoint holds the state (`tensors`).

    Args:
        folder: RUN/usage.
        recipe: of the run.
        model: whose memories are watched, with the weights from which training starts.
        world: the ranks that train the model. All of them call each method; rank 0 writes.
    """

    def __init__(self, folder: Path, recipe: Recipe, model: nn.Module, world: World | None = None):
        self.world = world or World()
        self.folder, self.every, self.last = folder, recipe.eval.every, recipe.train.steps
        seed = derived_seed(recipe.train.seed, "drift")
        self.memories = [_MemoryDrift(memory, seed, self.world) for memory in memories(model)]
        self.since = 0  # the step of the last record

    def tensors(self) -> dict[str, Tensor]:
        """What a resume needs: for each memory, the slots read since the last record, when each was last found read,
        and the sampled values at that record. Empty where there is no memory.
        """
        found = {} if not self.memories else {"since": torch.tensor(self.since)}
        for number, memory in enumerate(self.memories):
            memory.merge_ranks()
            found |= {f"{number}.{name}": tensor for name, tensor in memory.state().items()}
        return found

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Go on from what `tensors` returned."""
        if self.memories:
            self.since = int(tensors["since"])
        for number, memory in enumerate(self.memories):
            for name, tensor in memory.state().items():
                tensor.copy_(tensors[f"{number}.{name}"])

    def record(self, step: int, log_event: Callable[..., None]) -> None:
        """Record a step, if a record is due.

        Args:
            step: the one just taken.
            log_event: `RunLog.event`, which takes the event's name, the step, and its numbers by name.
        """
        # A window of less than half of `eval.every` is too short to call a slot dead.
        ends = step == self.last and (step - self.since) * 2 >= self.every
        if not self.memories or step == self.since or not (ends or (self.every > 0 and step % self.every == 0)):
            return
        for memory in self.memories:
            memory.merge_ranks()
        found = [memory.record(self.since, step) for memory in self.memories]
        log_event("drift", step, since=self.since, memories=[numbers for numbers, _ in found])
        self.since = step
        arrays = {
            f"{number}-{name}": tensor.cpu().numpy()
            for number, (_, tensors) in enumerate(found)
            for name, tensor in tensors.items()
        }
        with self.world.collective_errors():
            if self.world.rank == 0:
                write_arrays(drift_file(self.folder, step), arrays)
        for memory in self.memories:
            memory.begin()


class _MemoryDrift(ReadSlots):
    """What is noted of one memory: the slots read since the last record, and the step of the last record that found
    each slot read.
    """

    def __init__(self, memory: SparseMemory, seed: int, ranks: World):
        super().__init__(memory, ranks)
        self.values, slots, device = memory.values, self.tap.slots, self.read_K.device
        self.last_K = torch.zeros(slots, dtype=torch.int64, device=device)
        sample = np.sort(permute(np.arange(min(SAMPLE, slots)), slots, seed))
        self.sample_S = torch.from_numpy(sample).to(device)
        self.before_SD = self._values()

    def _values(self) -> Tensor:
        own_Sd = self.values.weight_KD.detach()[self.sample_S].float()
        return side_by_side(self.values.ranks.all_gather(own_Sd), self.values.ranks.size)

    def state(self) -> dict[str, Tensor]:
        """What a resume needs, by name."""
        return {"read_K": self.read_K, "last_K": self.last_K, "before_SD": self.before_SD}

    def record(self, since: int, step: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The numbers of the event, and the arrays that they were computed from: which slots were read, when each was
        last found read, the slots sampled, how far their values have moved (2-norm), and their norms before.

        `read` counts the slots read in this window, since the last record; `died` those read in the window before but
        not in this one; `woke` the reverse. Both are 0 in the first record. `never` counts the slots never read.
        `moved` is the median movement of the sampled slots that were read, relative to their norm before.
        """
        before_K = self.last_K == since
        woke = int((self.read_K & ~before_K).sum()) if since else 0
        died = int((before_K & ~self.read_K).sum()) if since else 0
        self.last_K[self.read_K] = step
        moved_S = (self._values() - self.before_SD).norm(dim=1)
        norm_S = self.before_SD.norm(dim=1)
        share_S = moved_S / norm_S.clamp(min=1e-12)
        read_S = self.read_K[self.sample_S]
        median = float(share_S[read_S].median()) if bool(read_S.any()) else math.nan
        numbers = {
            "layer": self.tap.layer,
            "name": self.tap.name,
            "slots": self.tap.slots,
            "read": int(self.read_K.sum()),
            "died": died,
            "woke": woke,
            "never": int((self.last_K == 0).sum()),
            "moved": median if math.isfinite(median) else None,
        }
        noted = {"read_K": self.read_K, "last_K": self.last_K, "sample_S": self.sample_S}
        return numbers, {**noted, "moved_S": moved_S, "norm_S": norm_S}

    def begin(self) -> None:
        """Start the next window."""
        self.read_K.zero_()
        self.before_SD = self._values()
