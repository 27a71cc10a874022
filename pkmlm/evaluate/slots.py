"""Who reads a slot, and what its value says: the index of a memory's slots over a text, made in one pass.

N: tokens; H: heads (hash layers: tables); k: slots a head reads; r: H * k; R: reads of a batch; K: slots; U: slots that
a batch reads; c: contexts kept a slot; S: some slots; D: model width; V: vocabulary.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pkmlm.data.tokenizer import Tokenizer
from pkmlm.errors import UserError
from pkmlm.evaluate.load import LoadedRun
from pkmlm.evaluate.perplexity import Documents, score
from pkmlm.evaluate.usage import UsageCounters, WatchedReads
from pkmlm.model.memory.hash_table import HashLayer
from pkmlm.model.memory.key_memory import KeyMemory
from pkmlm.model.memory.usage_tap import UsageTap
from pkmlm.model.transformer import Transformer
from pkmlm.report.slots import JUDGED, Context, Holding, Slot, Word, most_read
from pkmlm.report.usage import MemoryUsage

CONTEXTS = JUDGED  # kept a slot
BEFORE, AFTER = 14, 6  # tokens shown around the one that reads
WORDS = 8  # tokens that a value raises, or lowers, most
MOST_HELD = 2000  # slots of a run that a page shows with words and contexts
LENS_ROWS = 256  # values put through the output head at a time


class Strongest(NamedTuple):
    """The positions that give each slot of a memory most weight, strongest first; ties by position.

    Attributes:
        weights_Kc: float32, the weight of the slot's value in the memory's answer there (summed over heads); -1: none.
        positions_Kc: int64, scored positions of the text, counted from 0.
    """

    weights_Kc: NDArray[np.float32]
    positions_Kc: NDArray[np.int64]


class SlotReaders(WatchedReads):
    """Keeps the strongest readers of every slot of every memory while the `with` block runs.

    Memory: 12 bytes for each slot and context kept, whatever the length of the text.
    """

    def __init__(self, model: nn.Module, contexts: int = CONTEXTS):
        self._memories = [_Readers(module.tap, module.values.weight_KD.device, contexts) for module in memories(model)]
        super().__init__([(memory.tap, memory.add) for memory in self._memories])

    def strongest(self) -> list[Strongest]:
        """What has been found, one entry a memory, in the model's order."""
        return [Strongest(m.weights_Kc.cpu().numpy(), m.positions_Kc.cpu().numpy()) for m in self._memories]


class _Readers:
    def __init__(self, tap: UsageTap, device: torch.device, contexts: int):
        self.tap, self.contexts, self.tokens = tap, contexts, 0
        self.weights_Kc = torch.full((tap.slots, contexts), -1.0, device=device)
        self.positions_Kc = torch.full((tap.slots, contexts), -1, dtype=torch.int64, device=device)

    @torch.no_grad()
    def add(self, slots_NHk: Tensor, weights_NHk: Tensor) -> None:
        token_R, slot_R, weight_R = summed_reads(slots_NHk, weights_NHk)
        position_R = token_R + self.tokens
        self.tokens += len(slots_NHk)
        better_R = weight_R > self.weights_Kc[slot_R, -1]  # an equal weight comes too late
        position_R, slot_R, weight_R = position_R[better_R], slot_R[better_R], weight_R[better_R]
        order_R = weight_R.sort(descending=True, stable=True).indices
        order_R = order_R[slot_R[order_R].sort(stable=True).indices]  # by slot, then weight, then position
        position_R, slot_R, weight_R = position_R[order_R], slot_R[order_R], weight_R[order_R]
        slots_U, group_R, count_U = slot_R.unique_consecutive(return_inverse=True, return_counts=True)
        rank_R = torch.arange(len(slot_R), device=slot_R.device) - (count_U.cumsum(0) - count_U)[group_R]
        kept_R = rank_R < self.contexts
        at = group_R[kept_R], rank_R[kept_R]
        weights_Uc = self.weights_Kc.new_full((len(slots_U), self.contexts), -1.0)
        positions_Uc = self.positions_Kc.new_full((len(slots_U), self.contexts), -1)
        weights_Uc[at], positions_Uc[at] = weight_R[kept_R], position_R[kept_R]
        both_Uc = torch.cat([self.weights_Kc[slots_U], weights_Uc], dim=1)
        best = both_Uc.sort(dim=1, descending=True, stable=True).indices[:, : self.contexts]
        self.weights_Kc[slots_U] = both_Uc.gather(1, best)
        self.positions_Kc[slots_U] = torch.cat([self.positions_Kc[slots_U], positions_Uc], dim=1).gather(1, best)


def summed_reads(slots_NHk: Tensor, weights_NHk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The reads of each token with those of one slot by several heads summed: token, slot, weight (float32), (R,) each,
    in the order of tokens, then slots.
    """
    slots_Nr, order_Nr = slots_NHk.flatten(1).sort(dim=1, stable=True)
    weights_Nr = weights_NHk.flatten(1).float().gather(1, order_Nr)
    first_Nr = torch.ones_like(slots_Nr, dtype=torch.bool)
    first_Nr[:, 1:] = slots_Nr[:, 1:] != slots_Nr[:, :-1]
    first_R = first_Nr.flatten()
    sums_R = weights_Nr.new_zeros(int(first_R.sum())).index_add_(0, first_R.cumsum(0) - 1, weights_Nr.flatten())
    return first_Nr.nonzero()[:, 0], slots_Nr.flatten()[first_R], sums_R


def memories(model: nn.Module) -> list[KeyMemory | HashLayer]:
    """The memories of a model, in the order of their taps."""
    return [module for module in model.modules() if isinstance(module, KeyMemory | HashLayer)]


def index_slots(
    run: LoadedRun,
    documents: Documents,
    advance: Callable[[int], bool] | None = None,
    contexts: int = CONTEXTS,
) -> tuple[list[MemoryUsage], list[Strongest]]:
    """One pass over documents: what every memory's slots were read, and by which positions most.

    Args:
        advance: see `score`.
        contexts: kept of each slot.
    """
    with UsageCounters(run.model) as counters, SlotReaders(run.model, contexts) as readers:

        def watch(mask_N: Tensor) -> None:
            counters.only(mask_N)
            readers.only(mask_N)

        score(run.model, documents, run.tokenizer.eos, watch=watch, advance=advance)
    return counters.memories(), readers.strongest()


class Lens:
    """What the values of one memory say through the output head.

    A value v adds w * v to the residual stream, which the final LayerNorm and the head then read. The lens gives the
    head's answer to v alone: normalised without the norm's bias (the same for every slot), and relative to the mean
    token. It leaves out the size of the rest of the stream, and what later blocks make of v: the earlier the layer, the
    rougher the approximation ("logit lens").

    Args:
        index: of the memory, as in `memories`.
    """

    def __init__(self, run: LoadedRun, index: int):
        self.model, self.tokenizer = run.model, run.tokenizer
        self.memory = memories(run.model)[index]
        self.table_KD = self.memory.values.weight_KD.detach()

    @property
    def reaches_output(self) -> bool:
        """Whether the values are added to the residual stream; those of a hash layer's qkv and ffn1 are not."""
        return self.memory.tap.name in ("memory", "ffn2")

    @torch.no_grad()
    def logits(self, slots_S: Tensor) -> Tensor:
        """What each slot's value adds to each token's logit, relative to the mean token, float32 (S, V)."""
        v_SD = self.table_KD[slots_S].float()
        v_SD = v_SD - v_SD.mean(dim=1, keepdim=True)
        v_SD = v_SD / v_SD.square().mean(dim=1, keepdim=True).sqrt().clamp(min=1e-12)
        logits_SV = self.model.head(v_SD * self.model.norm.weight)[:, : self.tokenizer.size]
        return logits_SV - logits_SV.mean(dim=1, keepdim=True)

    def first(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """The token that each slot's value raises most."""
        parts = torch.from_numpy(slots).to(self.table_KD.device).split(LENS_ROWS)
        found = [self.logits(slots_S).argmax(dim=1).cpu().numpy() for slots_S in parts]
        return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)

    def words(self, slots: Iterable[int], most: int = WORDS) -> list[tuple[list[Word], list[Word]]]:
        """For each slot the tokens that its value raises most and lowers most, strongest first."""
        wanted = torch.tensor(list(slots), device=self.table_KD.device)
        found = []
        for slots_S in wanted.split(LENS_ROWS):
            logits_SV = self.logits(slots_S)
            sides = [self._named(logits_SV, sign, min(most, logits_SV.shape[1])) for sign in (1, -1)]
            found += list(zip(*sides, strict=True))
        return found

    def _named(self, logits_SV: Tensor, sign: int, most: int) -> list[list[Word]]:
        top = (sign * logits_SV).topk(most)
        pairs = zip(top.indices.tolist(), (sign * top.values).tolist(), strict=True)
        return [[Word(self.tokenizer.piece(t), logit) for t, logit in zip(*row, strict=True)] for row in pairs]


def contexts_at(
    positions: NDArray[np.int64], documents: Documents, tokenizer: Tokenizer, length: int
) -> dict[int, Context]:
    """The text around scored positions (negative ones are passed over), in one pass over documents; weights are 0.

    Position p reads token p - 1 of its document (at a document's beginning: the end-of-document token) and predicts
    token p.

    Args:
        length: the model's context, for the place in the window.
    """
    wanted = np.unique(positions.astype(np.int64))
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
    kept = [ask.strongest.positions_Kc[ask.slots].ravel() for ask in wanted]
    texts = contexts_at(np.concatenate([[], *kept]), documents, run.tokenizer, run.model.context)
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
