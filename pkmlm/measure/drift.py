"""Drift: which slots of the memories are read in training, and how far their values move between records.

K: slots; S: slots sampled; D: width of a value.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pkmlm.data.batches import permute
from pkmlm.distributed import World
from pkmlm.measure.counters import ReadListener
from pkmlm.memory.base import SparseMemory, memories
from pkmlm.memory.table import side_by_side
from pkmlm.recipe.schema import Recipe
from pkmlm.seeds import derived_seed

SAMPLE = 2048  # values of a memory whose movement is measured
WINDOW = 100  # steps over which the progress line counts slots
RECORD, LINE = 1, 2  # bits: a slot is read since the last record; in this window of the progress line


class Drift(ReadListener):
    """Records a "drift" event every `eval.every` steps, and at the end of training if that comes at least half as many
    steps after the last record.

    Reads of all slots are noted while the `with` block runs; the values of SAMPLE slots, drawn from the recipe's seed,
    are compared with those at the last record. A checkpoint holds the state (`tensors`).

    Args:
        recipe: of the run.
        model: whose memories are watched, with the weights from which training starts.
        world: the ranks that train the model. All of them call each method.
    """

    def __init__(self, recipe: Recipe, model: nn.Module, world: World | None = None):
        self.world = world or World()
        self.every, self.last = recipe.eval.every, recipe.train.steps
        seed = derived_seed(recipe.train.seed, "drift")
        watched = {memory: _MemoryDrift(memory, seed, self.world) for memory in memories(model)}
        super().__init__((each.tap, each.add) for each in watched.values())
        self.memories = list(watched.values())
        self.since = 0  # the step of the last record
        searching = [each for memory, each in watched.items() if memory.scores_per_query]
        self.on_line = searching[:2]  # what fits
        self.steps, self.shares = 0, ""

    def after_step(self) -> str:
        """Count a step, all ranks together; returns what the progress line says of the slots read in the last complete
        window.
        """
        self.steps += 1
        if self.steps % WINDOW == 0:
            self.shares = ""
            for memory in self.on_line:
                self.shares += f"{memory.tap.label} reads {float(memory.read(LINE).float().mean()):.0%}  "
                memory.forget(LINE)
        return self.shares

    def tensors(self) -> dict[str, Tensor]:
        """What a resume needs: for each memory, the slots read since the last record, when each was last found read,
        and the sampled values at that record. Empty where there is no memory.
        """
        found = {} if not self.memories else {"since": torch.tensor(self.since)}
        for number, memory in enumerate(self.memories):
            found[f"{number}.read_K"] = memory.read(RECORD)
            found |= {f"{number}.last_K": memory.last_K, f"{number}.before_SD": memory.before_SD}
        return found

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Go on from what `tensors` returned."""
        if self.memories:
            self.since = int(tensors["since"])
        for number, memory in enumerate(self.memories):
            memory.bits_K.copy_(tensors[f"{number}.read_K"] * RECORD)
            memory.last_K.copy_(tensors[f"{number}.last_K"])
            memory.before_SD.copy_(tensors[f"{number}.before_SD"])

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
        found = [memory.record(self.since, step) for memory in self.memories]
        log_event("drift", step, since=self.since, memories=found)
        self.since = step


class _MemoryDrift:
    """What is noted of one memory: the slots read in training, for those who forget them at different times; and the
    step of the last record that found each slot read.

    Attributes:
        bits_K: uint8: RECORD and LINE for each slot that this rank has read.
    """

    def __init__(self, memory: SparseMemory, seed: int, ranks: World):
        self.tap, self.values, self.ranks = memory.tap, memory.values, ranks
        slots, device = self.tap.slots, self.values.weight_KD.device
        self.bits_K = torch.zeros(slots, dtype=torch.uint8, device=device)
        self.last_K = torch.zeros(slots, dtype=torch.int64, device=device)
        sample = np.sort(permute(np.arange(min(SAMPLE, slots)), slots, seed))
        self.sample_S = torch.from_numpy(sample).to(device)
        self.before_SD = self._values()

    def _values(self) -> Tensor:
        own_Sd = self.values.weight_KD.detach()[self.sample_S].float()
        return side_by_side(self.values.ranks.all_gather(own_Sd), self.values.ranks.size)

    def add(self, slots_NHk: Tensor, weights_NHk: Tensor) -> None:
        self.bits_K.index_fill_(0, slots_NHk.flatten(), RECORD | LINE)

    def read(self, bit: int) -> Tensor:
        """Bool (K): whether any rank has read each slot since `forget`; all ranks call this together."""
        return self.ranks.all_any(self.bits_K & bit > 0)

    def forget(self, bit: int) -> None:
        self.bits_K &= ~bit

    def record(self, since: int, step: int) -> dict[str, Any]:
        """End a window: the numbers of the event.

        `read` counts the slots read in this window, since the last record; `died` those read in the window before but
        not in this one; `woke` the reverse. Both are 0 in the first record. `never` counts the slots never read.
        `moved` is the median movement of the sampled slots that were read, relative to their norm before, without
        those that were 0 and still are; None where most were 0.
        """
        read_K, before_K, values_SD = self.read(RECORD), self.last_K == since, self._values()
        woke = int((read_K & ~before_K).sum()) if since else 0
        died = int((before_K & ~read_K).sum()) if since else 0
        self.last_K[read_K] = step
        share_S = (values_SD - self.before_SD).norm(dim=1) / self.before_SD.norm(dim=1)
        read_S = read_K[self.sample_S]
        median = float(share_S[read_S].nanmedian()) if bool(read_S.any()) else math.nan
        numbers = {
            **self.tap.entry,
            "slots": self.tap.slots,
            "read": int(read_K.sum()),
            "died": died,
            "woke": woke,
            "never": int((self.last_K == 0).sum()),
            "moved": median if math.isfinite(median) else None,
        }
        self.forget(RECORD)
        self.before_SD = values_SD
        return numbers
