"""Where the slots of a memory are read in a text: the strongest positions, the text around them, what they share.

N: tokens; H: heads, or tables; k: slots a head reads; r: H * k; R: reads of a batch; K: slots of the memory; U: slots
that a batch reads; c: contexts kept of each slot.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pkmlm.evaluate.documents import Documents
from pkmlm.evaluate.load import LoadedRun
from pkmlm.memory.base import UsageTap

JUDGED, LEAST = 10, 3  # contexts in which a pattern is looked for, and the fewest that must share it
BEFORE, AFTER = 14, 6  # tokens shown around the one that reads


class TopPositions(NamedTuple):
    """The positions that give each slot of a memory the most weight, strongest first; equal ones in the text's order.

    Attributes:
        weights_Kc: float32, the weight of the slot's value in the memory's answer there (summed over heads);
            -inf: none.
        positions_Kc: int64, scored positions of the text, counted from 0; -1: none.
        slot: the only slot whose positions these are (K is 1); None: those of all.
    """

    weights_Kc: NDArray[np.float32]
    positions_Kc: NDArray[np.int64]
    slot: int | None = None

    def of(self, slot: int) -> list[tuple[float, int]]:
        """The weights and positions of a slot, without those that are none."""
        row = slot if self.slot is None else 0
        pairs = zip(self.weights_Kc[row].tolist(), self.positions_Kc[row].tolist(), strict=True)
        return [(weight, position) for weight, position in pairs if position >= 0]


class TopContexts:
    """Keeps the strongest positions of every slot of a memory, whose reads `add` receives (see `ReadListener`).

    Takes 12 bytes for each slot and context kept, however long the text.

    Args:
        tap: of the memory.
        device: where the positions are kept.
        contexts: how many to keep of each slot.
        slot: the only slot to keep them of; None: all.
    """

    def __init__(self, tap: UsageTap, device: torch.device, contexts: int = JUDGED, slot: int | None = None):
        self.tap, self.contexts, self.slot, self.tokens = tap, contexts, slot, 0
        slots = tap.slots if slot is None else 1
        self.weights_Kc = torch.full((slots, contexts), -math.inf, device=device)
        self.positions_Kc = torch.full((slots, contexts), -1, dtype=torch.int64, device=device)

    def positions(self) -> TopPositions:
        """The positions found so far."""
        return TopPositions(self.weights_Kc.cpu().numpy(), self.positions_Kc.cpu().numpy(), self.slot)

    def add(self, slots_NHk: Tensor, weights_NHk: Tensor) -> None:
        slots_NHk, weights_NHk = (x.to(self.weights_Kc.device) for x in (slots_NHk, weights_NHk))
        token_R, slot_R, weight_R = summed_reads(slots_NHk, weights_NHk)
        position_R = token_R + self.tokens
        self.tokens += len(slots_NHk)
        if self.slot is not None:
            own_R = slot_R == self.slot
            position_R, slot_R, weight_R = position_R[own_R], torch.zeros_like(slot_R[own_R]), weight_R[own_R]
        better_R = weight_R > self.weights_Kc[slot_R, -1]  # of equal weights the earlier position stays
        position_R, slot_R, weight_R = position_R[better_R], slot_R[better_R], weight_R[better_R]
        order_R = weight_R.sort(descending=True, stable=True).indices
        order_R = order_R[slot_R[order_R].sort(stable=True).indices]  # by slot, then weight, then position
        position_R, slot_R, weight_R = position_R[order_R], slot_R[order_R], weight_R[order_R]
        slots_U, group_R, count_U = slot_R.unique_consecutive(return_inverse=True, return_counts=True)
        rank_R = torch.arange(len(slot_R), device=slot_R.device) - (count_U.cumsum(0) - count_U)[group_R]
        kept_R = rank_R < self.contexts
        at = group_R[kept_R], rank_R[kept_R]
        weights_Uc = self.weights_Kc.new_full((len(slots_U), self.contexts), -math.inf)
        positions_Uc = self.positions_Kc.new_full((len(slots_U), self.contexts), -1)
        weights_Uc[at], positions_Uc[at] = weight_R[kept_R], position_R[kept_R]
        both_Uc = torch.cat([self.weights_Kc[slots_U], weights_Uc], dim=1)
        best = both_Uc.sort(dim=1, descending=True, stable=True).indices[:, : self.contexts]
        self.weights_Kc[slots_U] = both_Uc.gather(1, best)
        self.positions_Kc[slots_U] = torch.cat([self.positions_Kc[slots_U], positions_Uc], dim=1).gather(1, best)


def summed_reads(slots_NHk: Tensor, weights_NHk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The reads of each token, with those of one slot by several heads summed.

    Returns:
        Token, slot and weight (float32) of each read, (R,), in the order of tokens, then slots.
    """
    slots_Nr, order_Nr = slots_NHk.flatten(1).sort(dim=1, stable=True)
    weights_Nr = weights_NHk.flatten(1).float().gather(1, order_Nr)
    first_Nr = torch.ones_like(slots_Nr, dtype=torch.bool)
    first_Nr[:, 1:] = slots_Nr[:, 1:] != slots_Nr[:, :-1]
    first_R = first_Nr.flatten()
    sums_R = weights_Nr.new_zeros(int(first_R.sum())).index_add_(0, first_R.cumsum(0) - 1, weights_Nr.flatten())
    return first_Nr.nonzero()[:, 0], slots_Nr.flatten()[first_R], sums_R


class Context(NamedTuple):
    """A position of a text that reads a slot.

    Attributes:
        position: counted in scored positions of the text, from 0.
        document: its number, from 0.
        place: in the window that the model read, from 0.
        weight: of the slot's value in the memory's answer, summed over heads.
        before: the text that leads up to the token read.
        token: the token read.
        after: the text that follows.
        previous: the token before `token`; "" at the beginning of a document.
        next: the token after `token`.
    """

    position: int
    document: int
    place: int
    weight: float
    before: str
    token: str
    after: str
    previous: str
    next: str


def contexts_at(positions: NDArray[np.int64], documents: Documents, run: LoadedRun) -> dict[int, Context]:
    """The text around scored positions, in one pass over documents.

    Position p reads token p - 1 of its document (at a document's beginning: the run's prefix) and predicts
    token p.

    Args:
        positions: any shape; negative ones are passed over.
        documents: those that were scored.
        run: whose tokenizer made their ids, and whose model's context makes the windows.

    Returns:
        The context of each position, with weight 0.
    """
    wanted = np.unique(positions)
    tokenizer, length = run.tokenizer, run.model.context
    found, start = {}, 0
    for number, (ids, prompt) in enumerate(documents.with_prompts()):
        scored = max(0, len(ids) - prompt)
        inside = wanted[np.searchsorted(wanted, start) : np.searchsorted(wanted, start + scored)]
        for position in inside.tolist():
            at = prompt + position - start
            stop = min(len(ids), (at // length + 1) * length)  # of the window that scores it: see `windows`
            before = [int(i) for i in ids[max(0, at - 1 - BEFORE) : max(0, at - 1)]]
            found[position] = Context(
                position=position,
                document=number,
                place=at - max(0, stop - length),
                weight=0.0,
                before=tokenizer.decode(before),
                token=tokenizer.piece(int(ids[at - 1]) if at > 0 else run.prefix),
                after=tokenizer.decode(ids[at : at + AFTER].tolist()),
                previous=tokenizer.piece(before[-1] if before else run.prefix) if at > 0 else "",
                next=tokenizer.piece(int(ids[at])),
            )
        start += scored
    return found


class Pattern(NamedTuple):
    """What at least half (and at least LEAST) of a slot's JUDGED strongest contexts have in common.

    Attributes:
        kind: "token" (the one read), "next", "previous" or "place" (in the model's window).
        what: the token or the place.
        shared: contexts that have it.
        contexts: of how many.
    """

    kind: str
    what: str
    shared: int
    contexts: int


def find_pattern(contexts: Sequence[Context]) -> Pattern | None:
    """What most of the JUDGED strongest contexts share (if several kinds tie, the first of token, next, previous,
    place); None if too few of them share anything.
    """
    contexts = contexts[:JUDGED]
    best = None
    for kind in ("token", "next", "previous", "place"):
        counts = Counter(getattr(context, kind) for context in contexts)
        what, shared = counts.most_common(1)[0] if counts else ("", 0)
        if shared >= max(LEAST, len(contexts) / 2) and (best is None or shared > best.shared):
            best = Pattern(kind, str(what), shared, len(contexts))
    return best
