"""Saving checkpoints in the background: training waits for a copy of the tensors, and goes on while a thread writes it.

A checkpoint is written into a temporary folder, synced and renamed; the pointers move and earlier checkpoints go only
after that. With several ranks, the thread of each writes that rank's files, and rank 0's gives the folder its name when
all are there: the threads talk over a group of their own.
"""

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pkmlm.device import free_bytes, is_finite
from pkmlm.distributed import ProcessGroups, for_background, ranks_of_machine
from pkmlm.errors import UserError
from pkmlm.files import MANIFEST, entry_of, write_json, write_text, writing_folder
from pkmlm.recipe.schema import Recipe, dump_recipe
from pkmlm.runs.checkpoint import DRIFT, OPTIMIZER, WEIGHTS, Tables, moments_of, part_name, write_tensors
from pkmlm.runs.directory import RunDirectory
from pkmlm.runs.record import CHECKPOINT_VERSION, RECIPE, STATE, Progress

SPARE = 1 << 28  # bytes that a copy leaves free
PATIENCE = 10.0  # seconds of waiting before it is said


class Saver:
    """Writes the checkpoints of a run, one at a time. All ranks construct it and call each method together. As a
    context manager it waits at the end for a write that is under way, but not if the user does not (Ctrl-C).

    Args:
        run: where checkpoints go.
        recipe: of the run; each checkpoint holds it.
        ranks: the ranks that train together.
        say: called with a line for people.
        saved: called with the step of a checkpoint when this thread learns that it stands.
        step_bytes: main memory that a rank's training step takes and gives back; a copy leaves it free, too.
    """

    def __init__(
        self,
        run: RunDirectory,
        recipe: Recipe,
        ranks: ProcessGroups,
        say: Callable[[str], None],
        saved: Callable[[int], None] = lambda step: None,
        step_bytes: int = 0,
    ):
        self.run, self.recipe, self.ranks, self.say, self.saved = run, recipe, ranks, say, saved
        self.step_bytes = step_bytes
        self.background = for_background(ranks.world)
        self.thread: threading.Thread | None = None
        self.step = 0  # of the checkpoint under way, or of the last one; 0: there was none
        self.failure: BaseException | None = None

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.thread is not None and kind is not KeyboardInterrupt:
            self.thread.join()

    def save(
        self,
        progress: Progress,
        weights: dict[str, Tensor],
        optimizer: dict[str, Tensor],
        tables: Tables,
        drift: dict[str, Tensor],
        committed: Callable[[float], None],
    ) -> None:
        """Copy what a checkpoint of `progress.step` holds, and begin to write it. Where memory does not hold a copy,
        write it before returning.

        Args:
            weights, optimizer, tables: see `runs.checkpoint`.
            drift: of `measure.drift`, the same on all ranks.
            committed: called by rank 0, in the thread, when the checkpoint stands, with the seconds that training
                waited: for the checkpoint before, and for this one's copy.

        Raises:
            UserError: the save before failed; see `wait`.
        """
        began = time.monotonic()
        self.wait()
        with self.ranks.world.collective_errors():
            if self.ranks.world.rank == 0:
                self.run.refuse_replaced()
        tensors = self._own_tensors(weights, optimizer, tables, drift)
        copy = self._holds_copy(tensors)
        if copy:
            tensors = {file: {name: copied(one) for name, one in own.items()} for file, own in tensors.items()}
        else:
            self.say("too little memory for a copy of the checkpoint: training waits while it is written")
        state, recipe = asdict(progress), dump_recipe(self.recipe)
        copied_in = time.monotonic() - began

        def write() -> None:
            try:
                self._write(progress.step, tensors, state, recipe)
                with self.background.collective_errors():
                    if self.background.rank == 0:
                        committed(copied_in if copy else time.monotonic() - began)
            except BaseException as error:
                self.failure = error

        self.step = progress.step
        self.thread = threading.Thread(target=write, name="checkpoint", daemon=True)  # ends with the process
        self.thread.start()
        if not copy:
            self.wait()

    def check(self) -> None:
        """Raise the error of a write that has failed since. All ranks find it after the same step."""
        if self.thread is not None and not self.ranks.world.all_max(int(self.thread.is_alive())):
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint under way stands.

        Raises:
            UserError: a weight is not finite (exit code 3), or a write failed (1); earlier checkpoints are untouched.
            SystemExit: that happened on another rank.
        """
        if self.thread is None:
            return
        self.thread.join(PATIENCE)
        if self.thread.is_alive():
            self.say("waiting until the checkpoint is written")
        self.thread.join()
        self.thread = None
        if self.failure is not None:
            self.ranks.world.comm_state.failed = self.background.comm_state.failed
            failure, self.failure = self.failure, None
            raise failure
        self.saved(self.step)

    def _own_tensors(
        self, weights: dict[str, Tensor], optimizer: dict[str, Tensor], tables: Tables, drift: dict[str, Tensor]
    ) -> dict[str, dict[str, Tensor]]:
        """The tensors that this rank writes, by file."""
        ranks, lead = self.ranks, self.ranks.world.rank == 0
        own: dict[str, dict[str, Tensor]] = {}
        for name, tensors, own_tables in ((WEIGHTS, weights, tables), (OPTIMIZER, optimizer, moments_of(tables))):
            divided = own_tables if ranks.memory.size > 1 else {}
            if lead:
                own[name] = {key: tensor for key, tensor in tensors.items() if key not in divided}
            if divided and ranks.data.rank == 0:  # the first ranks that hold different columns
                part = part_name(name, ranks.memory.rank, ranks.memory.size)
                own[part] = {key: tensors[key] for key in divided if key in tensors}
        if lead and drift:
            own[DRIFT] = drift
        return own

    def _holds_copy(self, tensors: dict[str, dict[str, Tensor]]) -> bool:
        """Whether the memory of every rank's machine holds a copy of these tensors beside training: of all its ranks'
        together.
        """
        world, beside = self.ranks.world, ranks_of_machine()
        needed = self.step_bytes + sum(tensor.nbytes for own in tensors.values() for tensor in own.values())
        first = world.rank - world.rank % beside
        needed = sum(world.gather_objects(needed)[first : first + beside])
        return not world.all_max(int(needed + SPARE > free_bytes(torch.device("cpu"))))

    def _write(self, step: int, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any], recipe: str) -> None:
        """Write a rank's tensors, by file and name, and, on rank 0, the small files."""
        world, path = self.background, self.run.checkpoint(step)
        lead = world.rank == 0
        with world.collective_errors():
            weights = [own for file, own in tensors.items() if file.startswith(Path(WEIGHTS).stem)]
            bad = [name for own in weights for name, tensor in own.items() if not is_finite(tensor)]
            if bad:
                what = f"training diverged: {bad[0]} is not finite at step {step}, which is not saved"
                raise UserError(what, exit_code=3)
        with ExitStack() as stack:
            with world.collective_errors():
                folder = stack.enter_context(writing_folder(path)) if lead else path
            folder = path.with_name(world.broadcast(folder.name))
            with world.collective_errors():
                entries = {name: write_tensors(folder / name, own) for name, own in tensors.items()}
                if lead:
                    write_json(folder / STATE, state)
                    write_text(folder / RECIPE, recipe)
                    entries |= {name: entry_of(folder / name) for name in (STATE, RECIPE)}
            files = {name: entry for share in world.gather_objects(entries) for name, entry in share.items()}
            with world.collective_errors():
                if lead:
                    manifest = {"version": CHECKPOINT_VERSION, "step": step, "files": files}
                    write_json(folder / MANIFEST, manifest)
                    stack.close()


def copied(tensor: Tensor) -> Tensor:
    """A copy in main memory, which is not pinned: of pinned memory torch takes powers of two, and keeps them, so that
    the next save would find less.
    """
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
