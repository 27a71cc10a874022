"""Slot-wise fine-tuning: each step moves only those rows of the values that its own text reads more than other text
does (Lin et al. 2025, arXiv 2510.15103).

K: rows of a table; U: rows that a step reads; B: batches of the background.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pkmlm.distributed import World
from pkmlm.errors import UserError
from pkmlm.measure.background import Background
from pkmlm.measure.counters import RowCounters
from pkmlm.memory.table import Values, tables_of
from pkmlm.model.transformer import build_model
from pkmlm.recipe.schema import Recipe, SlotScore
from pkmlm.train.job import Job


@dataclass(frozen=True)
class TableBackground:
    """What a background says of one table, on its device.

    Attributes:
        batches: number of batches counted (B).
        read_by_K: int64, number of batches that read each row.
        reads_K: int64, reads of each row.
    """

    batches: int
    read_by_K: Tensor
    reads_K: Tensor


class SlotChoice:
    """Chooses, in each step, the rows of a model's tables of values that may move: the best ones of each table.

    Args:
        recipe: its `finetune` says what makes a row good (see `best_rows`), and how many are chosen.
        model: the model whose reads are counted; its tables must have their optimizers.
        background: of these tables; "count" needs none.

    Attributes:
        counters: count the reads of a step at the positions that are scored, as in a background.

    Raises:
        UserError: as `check_background`.
    """

    def __init__(self, recipe: Recipe, model: nn.Module, background: Background | None):
        self.slots, self.top = recipe.finetune.slots, recipe.finetune.top
        self.tables, self.counters = _tables(recipe, model, background), RowCounters(model)
        self.background: dict[str, TableBackground] = {}
        if background is not None:
            on = next(model.parameters()).device
            for path in self.tables:
                counts = (torch.from_numpy(each[path]).to(on) for each in (background.read_by, background.reads))
                self.background[path] = TableBackground(background.batches, *counts)

    def choose(self, world: World) -> None:
        """Choose by the step's reads, and drop the gradient of all other rows; all ranks call this."""
        reads = self.counters.take()
        for path, table in self.tables.items():
            assert table.gradient is not None
            counts_K = world.all_sum(reads[path])
            rows = best_rows(self.slots, counts_K, self.top, self.background.get(path))
            table.gradient.keep(torch.zeros_like(counts_K, dtype=torch.bool).index_fill_(0, rows, True))


def best_rows(slots: SlotScore, counts_K: Tensor, top: int, background: TableBackground | None = None) -> Tensor:
    """The rows with the highest scores among those that are read, best first, at most `top`; of ties, the first rows.

    With p a row's share of the reads, the score is p for count; p log((B + 1) / (batches of B that read it + 1)) for
    tfidf (Lin et al. 2025, sec. 3); and p log(p / q) for kl, where q is its share of the background's reads, with one
    read added to each row (as we understand arXiv 2605.03229; the smoothing is ours).

    Args:
        counts_K: int64, reads of each row in the step.
        background: for tfidf and kl.
    """
    rows_U = counts_K.nonzero()[:, 0]
    share_U = counts_K[rows_U].double() / counts_K.sum()
    if slots == "tfidf":
        assert background is not None
        score_U = share_U * torch.log((background.batches + 1) / (background.read_by_K[rows_U] + 1).double())
    elif slots == "kl":
        assert background is not None
        usual_U = (background.reads_K[rows_U] + 1).double() / (background.reads_K.sum() + len(counts_K))
        score_U = share_U * torch.log(share_U / usual_U)
    else:
        score_U = share_U
    return rows_U[score_U.sort(descending=True, stable=True).indices[:top]]


def check_background(job: Job) -> None:
    """Refuse a background, if there is one, that is not of the values of the recipe's model.

    Raises:
        UserError: it lacks a table, or has another number of slots.
    """
    if job.background is not None:
        _tables(job.recipe, build_model(job.recipe, job.vocab_size, "meta"), job.background)


def _tables(recipe: Recipe, model: nn.Module, background: Background | None) -> dict[str, Values]:
    """The model's tables of values by path, all of which the background has."""
    tables = {path.removesuffix(".weight_KD"): table for path, table in tables_of(model).items()}
    for path, table in tables.items():
        rows = len(table.weight_KD)
        slots = rows if background is None else len(background.reads.get(path, ()))
        if slots != rows:
            file = f"finetune.background: {recipe.finetune.background}"
            raise UserError(
                f"{file} has {slots:,} slots of {path} (expected {rows:,})",
                "count it with the run that training starts from: pkmlm usage-report RUN --background FILE",
            )
    return tables
