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
from pkmlm.errors import UserError
from pkmlm.files import remove_file
from pkmlm.model.memory.base import SparseMemory, memories
from pkmlm.model.memory.values import side_by_side
from pkmlm.recipe.schema import Recipe
from pkmlm.runs.results import drift_file, drift_state_file, read_arrays, signed_arrays, write_arrays
from pkmlm.seeds import derived_seed

SAMPLE = 2048  # values of a memory whose movement is measured
WINDOW = 100  # steps over which the progress line counts slots
NOTED = ("read_K", "last_K", "sample_S")  # arrays of a memory in both kinds of files


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
    the last record. For a checkpoint between two records, kept-step-N.npz holds the state as long as the checkpoint
    exists; a resume without an intact file starts recording over.

    Args:
        folder: RUN/usage.
        recipe: of the run.
        model: whose memories are watched.
        step: of the model's weights.
        world: the ranks that train the model. All of them call each method; rank 0 writes.
        allowed: called before each write; raises a UserError if the folder has become another run's.

    Attributes:
        warnings: about files that a resume could not use.
    """

    def __init__(
        self,
        folder: Path,
        recipe: Recipe,
        model: nn.Module,
        step: int,
        world: World | None = None,
        allowed: Callable[[], None] = lambda: None,
    ):
        self.world, self.allowed = world or World(), allowed
        self.folder, self.every, self.last = folder, recipe.eval.every, recipe.train.steps
        seed = derived_seed(recipe.train.seed, "drift")
        self.memories = [_MemoryDrift(memory, seed, self.world) for memory in memories(model)]
        self.began = self.since = step
        self.warnings: list[str] = []
        self._resume(step)
        self.began, self.since = self.world.broadcast([self.began, self.since])

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
        first = self.since == self.began
        for memory in self.memories:
            memory.merge_ranks()
        found = [memory.record(self.since, step, first) for memory in self.memories]
        log_event("drift", step, since=self.since, began=self.began, memories=[numbers for numbers, _ in found])
        self.since = step
        self._write(drift_file(self.folder, step), step, [moved for _, moved in found])
        for memory in self.memories:
            memory.begin()

    def keep(self, step: int) -> None:
        """Write what a resume from a checkpoint between two records needs."""
        if not self.memories or step == self.since:
            return
        for memory in self.memories:
            memory.merge_ranks()
        before = [{"before_SD": memory.before_SD} for memory in self.memories]
        self._write(drift_state_file(self.folder, step), step, before)

    def forget(self, steps: list[int]) -> None:
        """Delete what was kept for all checkpoints but those of `steps`."""
        kept = {drift_state_file(self.folder, step) for step in steps}
        for file in self.folder.glob(drift_state_file(self.folder, "*").name):
            if file not in kept:
                remove_file(file)

    def _write(self, path: Path, step: int, more: list[dict[str, Tensor]]) -> None:
        """Write what each memory has noted, and its arrays in `more`."""
        arrays = {
            f"{number}-{name}": tensor.cpu().numpy()
            for number, (memory, own) in enumerate(zip(self.memories, more, strict=True))
            for name, tensor in ({name: getattr(memory, name) for name in NOTED} | own).items()
        }
        with self.world.collective_errors():
            if self.world.rank == 0:
                self.allowed()
                write_arrays(path, signed_arrays({"steps": np.array([self.began, self.since, step]), **arrays}))

    def _resume(self, step: int) -> None:
        """Restore the state that an earlier process left at this step, if its file is intact."""
        files = (drift_state_file(self.folder, step), drift_file(self.folder, step))
        file = next((file for file in files if file.exists()), None)
        if file is None:
            return
        try:
            arrays = read_arrays(file)
            noted = [memory.noted(number, arrays) for number, memory in enumerate(self.memories)]
            began, since, at = (int(number) for number in arrays["steps"])
            if not 0 <= began <= since <= at == step:
                raise ValueError("another step's")
        except (UserError, KeyError, ValueError, TypeError, OverflowError):
            self.warnings.append(f"{file} is damaged, or of another memory: drift recording starts over here")
            return
        self.began, self.since = began, since
        for memory, (read_K, last_K, before_SD) in zip(self.memories, noted, strict=True):
            device = memory.read_K.device
            if before_SD is not None:  # a checkpoint between two records
                memory.read_K = torch.from_numpy(read_K).to(device)
                memory.before_SD = torch.from_numpy(before_SD).to(device)
            memory.last_K = torch.from_numpy(last_K).to(device)


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

    def record(self, since: int, step: int, first: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The numbers of the event, and how far each sampled value has moved (2-norm, (S,)), with its norm before.

        `read` counts the slots read in this window, since the last record; `died` those read in the window before but
        not in this one; `woke` the reverse. Both are 0 in the first record. `never` counts the slots never read.
        `moved` is the median movement of the sampled slots that were read, relative to their norm before.
        """
        before_K = self.last_K == since
        woke = 0 if first else int((self.read_K & ~before_K).sum())
        died = 0 if first else int((before_K & ~self.read_K).sum())
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
        return numbers, {"moved_S": moved_S, "norm_S": norm_S}

    def begin(self) -> None:
        """Start the next window."""
        self.read_K.zero_()
        self.before_SD = self._values()

    def noted(self, number: int, arrays: dict[str, np.ndarray]) -> tuple[Any, Any, Any]:
        """The read_K, last_K and before_SD (or None) that an earlier process wrote for this memory.

        Raises:
            ValueError, KeyError: the arrays are those of another memory.
        """
        read_K, last_K, sample_S = (arrays[f"{number}-{name}"] for name in NOTED)
        before_SD = arrays.get(f"{number}-before_SD")
        kept = [(read_K, self.read_K), (last_K, self.last_K), (before_SD, self.before_SD)]
        alike = all(
            found is None or (found.shape, found.dtype) == (own.shape, own.cpu().numpy().dtype) for found, own in kept
        )
        if not alike or not np.array_equal(sample_S, self.sample_S.cpu().numpy()):
            raise ValueError("another memory's")
        return read_K, last_K, before_SD
