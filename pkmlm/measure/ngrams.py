"""Collisions: which n-grams of a text fall into which row of a memory whose rows the last tokens choose.

N: tokens; G: largest order; U: distinct n-grams; P: rows of a table.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from pkmlm.data.tokenizer import Tokenizer
from pkmlm.distributed import World
from pkmlm.memory.base import SparseMemory, memories
from pkmlm.memory.tokens import TokenIds
from pkmlm.model.language_model import LanguageModel

LEAST_TO_COUNT = 1 << 20  # n-grams: fewer are not worth a sort


class NGrams:
    """The n-grams that a model sees, as ids of one sort, which `add` receives (see `ReadListener`). Their size grows
    with the number of distinct n-grams, not with the text.

    Args:
        ids: tell of them.

    Attributes:
        tap: of these.
        ids_V: the id of each token.
    """

    def __init__(self, ids: TokenIds):
        self.tap, self.ids_V = ids.tap, ids.ids_V.cpu()
        self._ids_UG, self._counts_U = torch.empty(0, ids.order, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
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


def ngrams_of(model: LanguageModel) -> dict[str, NGrams]:
    """What counts the n-grams that a model sees, for each sort of ids that its memories ask for."""
    return {name: NGrams(ids) for name, ids in model.token_ids.items() if isinstance(ids, TokenIds)}


def ngrams_for(memory: SparseMemory, ngrams: Mapping[str, NGrams]) -> NGrams:
    """Those of the ids by which a memory looks its rows up."""
    assert memory.spec.lookback is not None
    return ngrams[memory.spec.lookback.ids]


def ngrams_in_row(
    tokenizer: Tokenizer, memory: SparseMemory, ngrams: Mapping[str, NGrams], slot: int
) -> list[dict[str, Any]]:
    """The n-grams seen that fall into a row, most frequent first. Each id is shown as its first token; 0, the beginning
    of a document, as the end-of-document token.
    """
    seen = ngrams_for(memory, ngrams)
    table = slot // (memory.tap.slots // memory.tap.heads)
    order = memory.orders[table]
    ids_UG, counts_U = seen.distinct(order)
    here_U = (rows_read(memory, ids_UG)[:, table] == slot).any(-1)

    def piece(number: int) -> str:
        return tokenizer.piece(int((seen.ids_V == number).nonzero()[0, 0]))

    found = zip(ids_UG[here_U, :order].flip(1).tolist(), counts_U[here_U].tolist(), strict=True)  # oldest first
    return [
        {"tokens": [piece(each) for each in ids], "count": count}
        for ids, count in sorted(found, key=lambda pair: -pair[1])
    ]


def rows_read(memory: SparseMemory, ids_UG: Tensor) -> Tensor:
    """The rows that n-grams read: (U, tables, k), on the CPU, where k is how many a table gives for one."""
    return memory.rows_of(ids_UG.to(memory.device)).cpu().unflatten(-1, (memory.tap.heads, -1))


def collisions(memory: SparseMemory, ngrams: Mapping[str, NGrams]) -> list[dict[str, Any]]:
    """For each order: the distinct n-grams seen, the rows of a table, and the share of n-grams that are alone in a row
    of theirs (the mean over the k rows that an n-gram reads of each of the order's tables), or in any of them. Each
    share is measured, and expected for random rows: (1 - k / P)^(U - 1) for one row. Empty for a memory whose rows the
    stream chooses.
    """
    found = []
    rows = memory.tap.slots // memory.tap.heads
    for order in sorted(set(memory.orders)):
        ids_UG, _ = ngrams_for(memory, ngrams).distinct(order)
        rows_UHk = rows_read(memory, ids_UG)
        tables = [table for table, own in enumerate(memory.orders) if own == order]
        alone = []
        for table in tables:
            row_Uk = rows_UHk[:, table] - table * rows
            alone.append(torch.bincount(row_Uk.flatten(), minlength=rows)[row_Uk] == 1)
        alone_UR = torch.cat(alone, 1)  # of each row that an n-gram reads
        expected = (1 - rows_UHk.shape[2] / rows) ** (len(ids_UG) - 1)
        found.append(
            {
                "order": order,
                "distinct": len(ids_UG),
                "rows": rows,
                "tables": len(tables),
                "alone": float(alone_UR.double().mean()),
                "alone_expected": expected,
                "alone_in_any": float(alone_UR.any(1).double().mean()),
                "alone_in_any_expected": 1 - (1 - expected) ** alone_UR.shape[1],
            }
        )
    return found


def all_collisions(model: LanguageModel, ngrams: Mapping[str, NGrams]) -> list[dict[str, Any]]:
    """The `collisions` of all memories of a model."""
    return [memory.tap.entry | each for memory in memories(model) for each in collisions(memory, ngrams)]
