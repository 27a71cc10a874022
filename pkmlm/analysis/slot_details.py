"""Everything that is known of single slots: who reads them over a text, where, and what their values say.

N: tokens; H: heads (hash layers: tables); k: slots a head reads; R: reads of a token; K: slots; S: some slots.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pkmlm.analysis.counters import UsageCounters, WatchedReads
from pkmlm.analysis.lens import Lens
from pkmlm.analysis.slot_contexts import CONTEXTS, SlotReaders, Strongest, summed_reads
from pkmlm.analysis.slots import Context, Holding, Slot, most_read
from pkmlm.analysis.usage import MemoryUsage
from pkmlm.data.tokenizer import Tokenizer
from pkmlm.errors import UserError
from pkmlm.evaluate.documents import Documents
from pkmlm.evaluate.load import LoadedRun
from pkmlm.evaluate.perplexity import score
from pkmlm.model.memory.base import memories
from pkmlm.model.transformer import Transformer

BEFORE, AFTER = 14, 6  # tokens shown around the one that reads
MOST_HELD = 2000  # slots of a run that a page shows with words and contexts


def index_slots(
    run: LoadedRun,
    documents: Documents,
    advance: Callable[[int], bool] | None = None,
    contexts: int = CONTEXTS,
    memory: int | None = None,
) -> tuple[list[MemoryUsage], list[Strongest]]:
    """One pass over documents: how often the slots of memories were read, and by which positions most.

    Args:
        advance: see `score`.
        contexts: kept of each slot.
        memory: the only one that is watched, as in `memories`; None: all.

    Returns:
        One entry each a watched memory, in the model's order.

    Raises:
        UserError: see `measure_usage`.
    """
    with UsageCounters(run.model, memory) as counters, SlotReaders(run.model, contexts, memory) as readers:

        def watch(mask_N: Tensor) -> None:
            counters.only(mask_N)
            readers.only(mask_N)

        score(run.model, documents, run.tokenizer.eos, watch=watch, advance=advance)
    return counters.memories(), readers.strongest()


def contexts_at(
    positions: NDArray[np.int64], documents: Documents, tokenizer: Tokenizer, length: int
) -> dict[int, Context]:
    """The text around scored positions (negative ones are passed over), in one pass over documents; weights are 0.

    Position p reads token p - 1 of its document (at a document's beginning: the end-of-document token) and predicts
    token p.

    Args:
        length: the model's context, for the place in the window.
    """
    wanted = np.unique(positions)
    found, start = {}, 0
    for number, ids in enumerate(documents.ids):
        inside = wanted[np.searchsorted(wanted, start) : np.searchsorted(wanted, start + len(ids))]
        for position in inside.tolist():
            found[position] = _context(position, position - start, number, ids, tokenizer, length)
        start += len(ids)
    return found


def _context(position: int, at: int, document: int, ids: np.ndarray, tokenizer: Tokenizer, length: int) -> Context:
    stop = min(len(ids), (at // length + 1) * length)  # of the window that scores it: see `windows`
    before = [int(i) for i in ids[max(0, at - 1 - BEFORE) : max(0, at - 1)]]
    token = int(ids[at - 1]) if at > 0 else tokenizer.eos
    return Context(
        position=position,
        document=document,
        place=at - max(0, stop - length),
        weight=0.0,
        before=tokenizer.decode(before),
        token=tokenizer.piece(token),
        after=tokenizer.decode(ids[at : at + AFTER].tolist()),
        previous=tokenizer.piece(before[-1] if before else tokenizer.eos) if at > 0 else "",
        next=tokenizer.piece(int(ids[at])),
    )


class Wanted(NamedTuple):
    """Slots of one memory of which everything is asked; `memory` counts as in `memories`."""

    memory: int
    usage: MemoryUsage
    strongest: Strongest
    slots: list[int]


def describe(run: LoadedRun, wanted: list[Wanted], documents: Documents) -> list[list[Slot]]:
    """Everything that is known of some slots of some memories.

    Args:
        documents: those of the index, to be read again for the text of contexts.
    """
    kept = [np.zeros(0, np.int64), *(ask.strongest.positions_Kc[ask.slots].ravel() for ask in wanted)]
    texts = contexts_at(np.concatenate(kept), documents, run.tokenizer, run.model.context)
    described = []
    for ask in wanted:
        lens = Lens(run, ask.memory)
        words = lens.words(ask.slots) if lens.reaches_output else [(None, None)] * len(ask.slots)
        slots = []
        for slot, (raises, lowers) in zip(ask.slots, words, strict=True):
            read = zip(*(array[slot].tolist() for array in ask.strongest), strict=True)
            contexts = [texts[position]._replace(weight=weight) for weight, position in read if position >= 0]
            slots.append(Slot.of(ask.usage, slot, raises, lowers, contexts))
        described.append(slots)
    return described


def hold(run: LoadedRun, usages: list[MemoryUsage], strongest: list[Strongest], documents: Documents) -> list[Holding]:
    """What a page shows of every memory's slots; of the MOST_HELD most read ones (shared by the memories) everything.

    Args:
        documents: those of the index, to be read again for the text of contexts.
    """
    each = max(1, MOST_HELD // max(1, len(usages)))
    wanted = [Wanted(i, *pair, most_read(pair[0], each)) for i, pair in enumerate(zip(usages, strongest, strict=True))]
    held = []
    for ask, slots in zip(wanted, describe(run, wanted, documents), strict=True):
        lens, first_S, tokens = Lens(run, ask.memory), None, []
        if lens.reaches_output:
            read = np.flatnonzero(ask.usage.counts_S)
            first_S = np.full(ask.usage.slots, -1)
            named, first_S[read] = np.unique(lens.first(read), return_inverse=True)
            tokens = [run.tokenizer.piece(int(token)) for token in named]
        held.append(Holding(slots, first_S, tokens))
    return held


class Reading(NamedTuple):
    """A token of a text and the slots that it reads most: (slot, weight), strongest first."""

    token: str
    slots: list[tuple[int, float]]


@torch.no_grad()
def read_text(run: LoadedRun, index: int, ids: list[int], most: int) -> list[Reading]:
    """Which slots of a memory each token of a text reads, the end-of-document token before it first.

    Args:
        index: of the memory, as in `memories`.
        ids: of the text; more than the model's context are read in pieces of it, each without the one before.
        most: slots of a token.
    """
    found: list[Reading] = []

    def read(slots_NHk: Tensor, weights_NHk: Tensor) -> None:
        for slots_Hk, weights_Hk, token in zip(slots_NHk, weights_NHk, piece, strict=True):
            _, slot_R, weight_R = summed_reads(slots_Hk[None], weights_Hk[None])
            order_R = weight_R.sort(descending=True, stable=True).indices[:most]
            pairs = zip(slot_R[order_R].tolist(), weight_R[order_R].tolist(), strict=True)
            found.append(Reading(run.tokenizer.piece(token), list(pairs)))

    stream = [run.tokenizer.eos, *ids]
    with WatchedReads([(memories(run.model)[index].tap, read)]):
        for start in range(0, len(stream), run.model.context):
            piece = stream[start : start + run.model.context]
            run.model.hidden(torch.tensor([piece], device=run.device))
    return found


def find_memory(model: Transformer, layer: str | None) -> int:
    """The index of the memory that "3", "3:ffn1" or None (the last one) names; a layer alone: its last one.

    Raises:
        UserError: there is none.
    """
    taps = [module.tap for module in memories(model)]
    names = [f"{tap.layer}:{tap.name}" for tap in taps]
    if not taps:
        raise UserError("the model has no memory to look into", "give a run of a model with a memory or hash tables")
    found = [i for i, tap in enumerate(taps) if layer in (None, str(tap.layer), names[i])]
    if not found:
        raise UserError(f"--layer {layer}: no memory there (expected {', '.join(names)})")
    return found[-1]
