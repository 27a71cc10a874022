"""The background of slot-wise fine-tuning: in how many batches of a text a model reads each slot.

Needs torch only to count.

K: rows of a table.
"""

import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pkmlm.console import token_progress, warn_each
from pkmlm.errors import UserError, printable
from pkmlm.evaluate.documents import TextChoice, chosen_documents
from pkmlm.runs.directory import RunDirectory
from pkmlm.runs.results import read_arrays, write_arrays

if TYPE_CHECKING:  # these modules import torch
    from pkmlm.distributed import World
    from pkmlm.evaluate.likelihood import Window

ORIGIN = ("run", "step", "split", "checkpoint", "batches", "batch_tokens")


@dataclass(frozen=True)
class Background:
    """How often a model reads each row of its tables over batches of a text.

    Attributes:
        run, step: of the model.
        split: the split of the run's tokens that was read, or the name of a text.
        checkpoint: the digest of its checkpoint.
        batches: how many were counted.
        batch_tokens: scored tokens of a batch, at least; the text's last batch may have fewer.
        read_by: by the table's path in the model, how many batches read each row: int64 (K).
        reads: likewise, the reads of each row.
        memories: likewise, what the entry of a report says of the memory that reads the table.
    """

    run: str
    step: int
    split: str
    checkpoint: str
    batches: int
    batch_tokens: int
    read_by: dict[str, NDArray[np.int64]]
    reads: dict[str, NDArray[np.int64]]
    memories: dict[str, dict[str, Any]]

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays of the file: the fields of ORIGIN, and for each table PATH.read_by and PATH.reads; and "memories",
        as JSON.
        """
        arrays = {name: np.array(getattr(self, name)) for name in ORIGIN}
        arrays["memories"] = np.array(json.dumps(self.memories))
        for name in ("read_by", "reads"):
            arrays |= {f"{path}.{name}": counts for path, counts in getattr(self, name).items()}
        return arrays

    @property
    def digest(self) -> str:
        """The sha256 of all that it holds."""
        digest = hashlib.sha256()
        for name, array in sorted(self.arrays.items()):
            digest.update(json.dumps([name, array.dtype.str, array.shape]).encode() + array.tobytes())
        return digest.hexdigest()

    def write(self, path: Path) -> None:
        """Write an .npz file."""
        write_arrays(path, self.arrays)

    @classmethod
    def read(cls, path: Path) -> "Background":
        """What `write` wrote.

        Raises:
            UserError: the file is missing or damaged (exit code 1), or of another kind (2).
        """
        hint = "pkmlm usage-report RUN --split train --background FILE writes one"
        arrays = read_arrays(path)
        try:
            origin: dict[str, Any] = {name: arrays[name].item() for name in ORIGIN}
            paths = [name.removesuffix(".reads") for name in arrays if name.endswith(".reads")]
            read_by, reads = (
                {path: arrays[f"{path}.{name}"].astype(np.int64, casting="safe") for path in paths}
                for name in ("read_by", "reads")
            )
            return cls(**origin, read_by=read_by, reads=reads, memories=json.loads(arrays["memories"].item()))
        except (KeyError, TypeError, ValueError):
            raise UserError(f"{path} is not a background of slots", hint) from None

    def as_json(self) -> dict[str, Any]:
        """Where it comes from, and for each table: whose it is, its slots, how many of them any batch reads, how many
        every batch reads, and the mean number of batches that read a slot.
        """
        tables = [
            {
                "table": path,
                **self.memories[path],
                "slots": len(read_by_K),
                "read": int((read_by_K > 0).sum()),
                "every_batch": int((read_by_K == self.batches).sum()),
                "mean_batches": float(read_by_K.mean()),
            }
            for path, read_by_K in self.read_by.items()
        ]
        return {name: getattr(self, name) for name in ORIGIN} | {"tables": tables}


def count_background(
    run: RunDirectory,
    step: str,
    choice: TextChoice,
    batches: int,
    batch_tokens: int | None,
    quiet: bool,
    world: "World | None" = None,
) -> Background:
    """Count a background in one pass over a text.

    Args:
        step: "latest", "best" or a number.
        choice: of the text; by default the train split.
        batches: how many to count, evenly spread over the text; all, if it has fewer.
        batch_tokens: tokens of a batch; None: as many as a training step of the run takes.
        quiet: show no progress.
        world: the processes that share the pass; each gets the counts of all.

    Raises:
        UserError: there is no such checkpoint or text, or the model has no table of values.
    """
    from pkmlm.distributed import World
    from pkmlm.evaluate.load import load_on_all_ranks
    from pkmlm.evaluate.perplexity import BATCH, score_windows, windows
    from pkmlm.measure.counters import RowCounters
    from pkmlm.memory.base import memories
    from pkmlm.memory.table import tables_of

    world = world or World()
    loaded = load_on_all_ranks(run.path, step, world)
    if choice.text is None and choice.split is None:
        choice = choice._replace(split="train")
    quiet = quiet or world.rank > 0
    documents, model = chosen_documents(choice, loaded, quiet), loaded.model
    if not tables_of(model):
        message = f"the model of {run.path} has no memory with a table of values"
        hint = "give a run with a memory: slot-wise fine-tuning trains its tables"
        raise UserError(message, hint)
    size = batch_tokens or loaded.recipe.train.batch_tokens
    most, counted, done = min(batches, -(-documents.tokens // size)), 0, 0
    prefix, context = loaded.prefix, model.context
    stream = (
        window for ids, prompt in documents.with_prompts() for window in windows(ids, prefix, context, context, prompt)
    )
    owners = {table: memory for memory in memories(model) for table in memory.read_tables()}
    entries = {
        path.removesuffix(".weight_KD"): owners[table].tap.entry | ({"layer": None} if owners[table].tap.pool else {})
        for path, table in tables_of(model).items()
    }
    with (
        RowCounters(model) as counters,
        token_progress(f"reading {printable(loaded.name)}", documents.tokens, quiet) as advance,
    ):
        read_by, reads = counters.take(), counters.take()
        for batch in in_batches(stream, size):
            first, done = done, done + sum(len(window.targets) for window in batch)
            advance(done)
            if first * most < counted * documents.tokens:  # before the next of `most` equal parts
                continue
            if counted % world.size == world.rank:
                for start in range(0, len(batch), BATCH):
                    score_windows(model, batch[start : start + BATCH], counters.only)
                for path, reads_K in counters.take().items():
                    reads[path] += reads_K
                    read_by[path] += reads_K > 0
            counted += 1
    if world.rank == 0:
        warn_each(documents.warnings)
    return Background(
        run=loaded.name,
        step=loaded.step,
        split=documents.name,
        checkpoint=loaded.checkpoint,
        batches=counted,
        batch_tokens=size,
        read_by={path: world.all_sum(read_by_K.cpu()).numpy() for path, read_by_K in read_by.items()},
        reads={path: world.all_sum(reads_K.cpu()).numpy() for path, reads_K in reads.items()},
        memories=entries,
    )


def in_batches(stream: "Iterator[Window]", tokens: int) -> "Iterator[list[Window]]":
    """Windows in their order, in the smallest batches that score at least `tokens` tokens."""
    while batch := list(itertools.islice(stream, 1)):
        left = tokens - len(batch[0].targets)
        while left > 0 and (window := next(stream, None)) is not None:
            batch.append(window)
            left -= len(window.targets)
        yield batch
