"""Collisions: which n-grams of a text fall into which row of an n-gram memory.

N: tokens; G: largest order; U: distinct n-grams; P: rows of a table.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from pkmlm.data.tokenizer import Tokenizer
from pkmlm.distributed import World
from pkmlm.memory.base import Tap
from pkmlm.memory.ngram.layer import NGramMemory
from pkmlm.model.language_model import LanguageModel

LEAST_TO_COUNT = 1 << 20  # n-grams: fewer are not worth a sort


class NGrams:
    """The n-grams that a model sees, as canonical ids, which `add` receives (see `ReadListener`). Their size grows with
    the number of distinct n-grams, not with the text.

    Attributes:
        tap: the one that tells of them; of a model without n-gram memories, one that tells nothing.
    """

    def __init__(self, model: LanguageModel):
        order = 0 if model.ngram_ids is None else model.ngram_ids.order
        self.tap = Tap() if model.ngram_ids is None else model.ngram_ids.tap
        self._ids_UG, self._counts_U = torch.empty(0, order, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
        self._seen: list[Tensor] = []  # not counted yet
        self._shorter: dict[int, tuple[Tensor, Tensor]] = {}

    def add(self, ids_NG: Tensor) -> None:
        self._seen.append(ids_NG.cpu())
        if sum(map(len, self._seen)) > max(LEAST_TO_COUNT, len(self._ids_UG)):
            self._count()

    def _count(self) -> None:
        ids_NG = torch.cat([self._ids_UG, *self._seen])
        counts_N = torch.cat([self._counts_U, torch.ones(len(ids_NG) - len(self._ids_UG), dtype=torch.int64)])
        self._ids_UG, self._counts_U = summed(ids_NG, counts_N)
        self._seen = []

    def gather(self, world: World) -> None:
        """Count what has been seen, on all ranks together: all call this, after the last forward pass."""
        if not self._ids_UG.shape[1]:
            return
        self._count()
        if world.size > 1:
            own = torch.cat([self._ids_UG, self._counts_U[:, None]], 1)
            every = world.all_gather(pad(own, (0, 0, 0, world.all_max(len(own)) - len(own))))
            every = every[every[:, -1] > 0]  # without the padding, whose counts are 0
            self._ids_UG, self._counts_U = summed(every[:, :-1], every[:, -1])

    def distinct(self, order: int) -> tuple[Tensor, Tensor]:
        """The distinct n-grams of an order (U, G), newest id first and zeros beyond the order, and how often each was
        seen (U,). To be called after `gather`.
        """
        if order not in self._shorter:
            ids_UG = self._ids_UG.clone()
            ids_UG[:, order:] = 0
            self._shorter[order] = summed(ids_UG, self._counts_U)
        return self._shorter[order]


def summed(ids_NG: Tensor, counts_N: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct rows of ids in order (U, G), and the sum of the counts of each (U,); both int64."""
    ids_UG, group_N = ids_NG.unique(dim=0, return_inverse=True)
    return ids_UG, counts_N.new_zeros(len(ids_UG)).index_add_(0, group_N, counts_N)


def ngrams_in_row(
    model: LanguageModel, tokenizer: Tokenizer, memory: NGramMemory, ngrams: NGrams, slot: int
) -> list[dict[str, Any]]:
    """The n-grams seen that fall into a row, most frequent first. Each canonical id is shown as its first token; 0, the
    beginning of a document, as the end-of-document token.
    """
    assert model.ngram_ids is not None
    canonical_V, table = model.ngram_ids.canonical_V.cpu(), slot // memory.rows
    order = memory.orders_H[table]
    ids_UG, counts_U = ngrams.distinct(order)
    here_U = memory.rows_of(ids_UG.to(memory.multipliers_HG.device))[:, table].cpu() == slot

    def piece(canonical: int) -> str:
        return tokenizer.piece(int((canonical_V == canonical).nonzero()[0, 0]))

    found = zip(ids_UG[here_U, :order].flip(1).tolist(), counts_U[here_U].tolist(), strict=True)  # oldest first
    seen = sorted(found, key=lambda pair: -pair[1])
    return [{"tokens": [piece(each) for each in ids], "count": count} for ids, count in seen]


def collisions(memory: NGramMemory, ngrams: NGrams) -> list[dict[str, Any]]:
    """For each order: the distinct n-grams seen, the rows of a table, and the share of n-grams that are alone in their
    row of a table (the mean over the order's tables), or of any of these tables. Each share is measured, and expected
    for random rows: (1 - 1 / P)^(U - 1) for one table.
    """
    found = []
    for order in sorted(set(memory.orders_H)):
        ids_UG, _ = ngrams.distinct(order)
        rows_UH = memory.rows_of(ids_UG.to(memory.multipliers_HG.device)).cpu()
        tables = [table for table, own in enumerate(memory.orders_H) if own == order]
        alone = []
        for table in tables:
            row_U = rows_UH[:, table] - table * memory.rows
            alone.append(torch.bincount(row_U, minlength=memory.rows)[row_U] == 1)
        alone_HU = torch.stack(alone)
        expected = (1 - 1 / memory.rows) ** (len(ids_UG) - 1)
        found.append(
            {
                "order": order,
                "distinct": len(ids_UG),
                "rows": memory.rows,
                "tables": len(tables),
                "alone": float(alone_HU.double().mean()),
                "alone_expected": expected,
                "alone_in_any": float(alone_HU.any(0).double().mean()),
                "alone_in_any_expected": 1 - (1 - expected) ** len(tables),
            }
        )
    return found


def all_collisions(model: LanguageModel, ngrams: NGrams) -> list[dict[str, Any]]:
    """The `collisions` of each n-gram memory of a model, with its layer."""
    found = [module for module in model.modules() if isinstance(module, NGramMemory)]
    return [{"layer": memory.tap.layer, **each} for memory in found for each in collisions(memory, ngrams)]
