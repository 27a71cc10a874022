"""What single slots of a memory hold: how they are read, the tokens that their values raise, the contexts that read
them; and the reports of `pkmlm slots`.

H: heads, or tables; k: slots a head reads; R: reads of a token; S: some slots; K: slots of the memory; D: width of the
model; V: vocabulary.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pkmlm.console import token_progress
from pkmlm.errors import UserError, printable
from pkmlm.evaluate.documents import Documents, TextChoice, chosen_documents
from pkmlm.evaluate.load import LoadedRun
from pkmlm.measure.measure_usage import measure_usage
from pkmlm.measure.ngrams import NGrams, collisions, ngrams_in_row, ngrams_of
from pkmlm.measure.slot_contexts import (
    JUDGED,
    Context,
    Pattern,
    TopContexts,
    TopPositions,
    contexts_at,
    find_pattern,
    summed_reads,
)
from pkmlm.measure.usage import MemoryUsage
from pkmlm.memory.address import Addresses
from pkmlm.memory.base import SparseMemory, UsageTap, memories
from pkmlm.memory.table import Modules
from pkmlm.model.language_model import LanguageModel

WORDS = 8  # tokens shown that a value raises most, or lowers most
CHUNK = 256  # values put through the output head at a time
SHUFFLES, SEED = 100, 0  # of contexts among slots
MOST_HELD = 2000  # slots of a run that a page shows with words and contexts


def find_memory(model: Modules, which: str | None) -> SparseMemory:
    """The last memory of a model with this layer, name or part: "3", "3:facts", "2:tables:ffn2", "2:ffn2" or "facts";
    None: the model's last one.

    Raises:
        UserError: there is none.
    """
    found = memories(model)
    if not found:
        raise UserError("the model has no memory to look into", "give a run of a model with a memory")
    names = {memory: [str(memory.tap.layer), memory.tap.name, memory.tap.part] for memory in found}
    wanted = set() if which is None else set(which.split(":"))
    fitting = [memory for memory in found if wanted <= set(filter(None, names[memory]))]
    if not fitting:
        expected = ", ".join(":".join(filter(None, each)) for each in names.values())
        what = f"at layer {which}" if which and which[0].isdecimal() else f"named {which}"
        raise UserError(f"no memory {what} (expected {expected})")
    return fitting[-1]


def slot_number(name: str, addresses: Addresses) -> int:
    """The slot that a name or a number stands for.

    Raises:
        UserError: there is none.
    """
    found = addresses.number(name)
    if found is None:
        first, last = (addresses.name(slot) for slot in (0, addresses.slots - 1))
        names = "" if addresses.columns is None else f" or {first} to {last}"
        raise UserError(f"--slot {name}: no such slot (expected 0 to {addresses.slots - 1}{names})")
    return found


class Word(NamedTuple):
    """A token and what a slot's value adds to its logit, relative to the mean token."""

    token: str
    logit: float


class LogitLens:
    """What the values of a memory say through the model's output head.

    A value v adds w * v to the residual stream, which the final norm and the head then read. The lens gives the head's
    output for v alone: v is scaled to length sqrt(D) and normalised, without what the norm adds to any v (its bias),
    and logits are relative to the mean token. This leaves out the size of the rest of the stream, and what later blocks
    make of v: the earlier the layer, the rougher the approximation (the "logit lens"). If there is a map between the
    values and the stream, v goes through it; a gate, which depends on the token that reads, is left out as well.

    Args:
        model: whose head is used.
        memory: of that model.
        size: of the vocabulary: outputs of the head beyond it are not tokens.
        piece: gives the text of a token.

    Attributes:
        applies: whether the values are added to the residual stream; those of a hash layer's qkv and ffn1 are not.
    """

    def __init__(self, model: LanguageModel, memory: SparseMemory, size: int, piece: Callable[[int], str]):
        self.model, self.memory, self.size, self.piece = model, memory, size, piece
        self.applies = memory.tap.residual
        self.device = next(model.parameters()).device

    @torch.no_grad()
    def logits(self, slots_S: Tensor) -> Tensor:
        """What each slot's value adds to each token's logit, relative to the mean token, float32 (S, V)."""
        v_SD = self.memory.answer(slots_S.to(self.memory.device)).to(self.device)
        v_SD = v_SD / v_SD.square().mean(dim=1, keepdim=True).sqrt().clamp(min=1e-12)
        norm = self.model.norm
        v_SD = v_SD.to(next((weight.dtype for weight in norm.parameters()), v_SD.dtype))
        logits_SV = self.model.head(norm(v_SD) - norm(torch.zeros_like(v_SD)))[:, : self.size].float()
        return logits_SV - logits_SV.mean(dim=1, keepdim=True)

    def top_tokens(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """The token that each slot's value raises most."""
        chunks = torch.from_numpy(slots).to(self.device).split(CHUNK)
        return np.concatenate([self.logits(slots_S).argmax(dim=1).cpu().numpy() for slots_S in chunks])

    def words(self, slots: Iterable[int], most: int = WORDS) -> list[tuple[list[Word], list[Word]]]:
        """For each slot the tokens that its value raises most, and those that it lowers most, strongest first."""
        wanted = torch.tensor(list(slots), dtype=torch.int64, device=self.device)
        found: list[tuple[list[Word], list[Word]]] = []
        for slots_S in wanted.split(CHUNK):
            logits_SV, sides = self.logits(slots_S), []
            for sign in (1, -1):
                top = (sign * logits_SV).topk(min(most, logits_SV.shape[1]))
                rows = zip(top.indices.tolist(), (sign * top.values).tolist(), strict=True)
                sides.append([[Word(self.piece(t), x) for t, x in zip(*row, strict=True)] for row in rows])
            found += list(zip(*sides, strict=True))
        return found


class SlotIndex(NamedTuple):
    """What a pass over a text finds out about a memory's slots: how often each is read, and where with the most weight;
    and the n-grams that the model saw, by the sort of their ids.
    """

    memory: SparseMemory
    usage: MemoryUsage
    top: TopPositions
    ngrams: dict[str, NGrams]


def index_slots(
    run: LoadedRun,
    documents: Documents,
    advance: Callable[[int], bool] | None = None,
    contexts: int = JUDGED,
    memory: SparseMemory | None = None,
    slot: int | None = None,
) -> list[SlotIndex]:
    """One pass over documents that indexes the slots of a run's memories.

    Args:
        run: whose model reads.
        documents: the text, for one pass.
        advance: see `score`.
        contexts: how many to keep of each slot.
        memory: the only one to index; None: all.
        slot: the only slot to keep contexts of; None: all.

    Returns:
        One entry per memory, in the model's order.
    """
    indexed = memories(run.model) if memory is None else [memory]
    taps = [each.tap for each in indexed]
    ngrams = ngrams_of(run.model)
    tops = [TopContexts(tap, run.device, contexts, slot) for tap in taps]
    usage = measure_usage(run, documents, advance, None, ngrams, taps, [(top.tap, top.add) for top in tops])
    found = zip(indexed, usage, tops, strict=False)  # without pools
    return [SlotIndex(memory, counted, top.positions(), ngrams) for memory, counted, top in found]


class SlotDetails(NamedTuple):
    """What is known of one slot.

    Attributes:
        slot: its number in the memory.
        name: as it is printed, see `Addresses.name`.
        address: its parts, see `Addresses.parts`.
        reads: on the text, by all heads.
        mass: of these reads.
        share: of the memory's mass.
        heads: (head, reads, mass) of those that read it, most reads first; empty where each has its own table.
        raises: the tokens that its value raises most; None where the lens does not apply.
        lowers: those that it lowers most.
        pattern: what its contexts share.
        contexts: those that give it the most weight, strongest first.
    """

    slot: int
    name: str
    address: dict[str, Any]
    reads: int
    mass: float
    share: float
    heads: list[tuple[int, int, float]]
    raises: list[Word] | None
    lowers: list[Word] | None
    pattern: Pattern | None
    contexts: list[Context]

    @classmethod
    def of(
        cls,
        tap: UsageTap,
        usage: MemoryUsage,
        slot: int,
        raises: list[Word] | None,
        lowers: list[Word] | None,
        contexts: list[Context],
    ) -> "SlotDetails":
        """The details of a slot of the memory of a tap, from its usage, words and contexts."""
        heads: list[tuple[int, int, float]] = []
        if tap.shared:
            pairs = zip(usage.counts_HK[:, slot].tolist(), usage.masses_HK[:, slot].tolist(), strict=True)
            heads = [(head, reads, mass) for head, (reads, mass) in enumerate(pairs, start=1) if reads]
            heads.sort(key=lambda entry: -entry[1])
        mass = float(usage.masses_S[slot])
        return cls(
            slot=slot,
            name=tap.addresses.name(slot),
            address=tap.addresses.parts(slot),
            reads=int(usage.counts_S[slot]),
            mass=mass,
            share=mass / max(float(usage.masses_S.sum()), 1e-300),
            heads=heads,
            raises=raises,
            lowers=lowers,
            pattern=find_pattern(contexts),
            contexts=contexts,
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "slot": self.slot,
            "name": self.name,
            **self.address,
            "reads": self.reads,
            "mass": self.mass,
            "share": self.share,
            "heads": [{"head": head, "reads": reads, "mass": mass} for head, reads, mass in self.heads],
            "raises": None if self.raises is None else [word._asdict() for word in self.raises],
            "lowers": None if self.lowers is None else [word._asdict() for word in self.lowers],
            "pattern": None if self.pattern is None else self.pattern._asdict(),
            "contexts": [context._asdict() for context in self.contexts],
        }


def slot_details(
    run: LoadedRun, indexes: Sequence[SlotIndex], chosen: Sequence[Sequence[int]], documents: Documents
) -> list[list[SlotDetails]]:
    """Everything that is known of some slots of some memories.

    Args:
        run: that was indexed.
        indexes: of the memories.
        chosen: the slots of each.
        documents: those of the index, to be read again for the text of contexts.
    """
    tops = [[index.top.of(slot) for slot in slots] for index, slots in zip(indexes, chosen, strict=True)]
    positions = [position for of_memory in tops for top in of_memory for _, position in top]
    texts = contexts_at(np.array(positions, np.int64), documents, run)

    found = []
    for index, slots, of_memory in zip(indexes, chosen, tops, strict=True):
        lens = LogitLens(run.model, index.memory, run.tokenizer.size, run.tokenizer.piece)
        words = lens.words(slots) if lens.applies else [(None, None)] * len(slots)
        details = []
        for slot, (raises, lowers), top in zip(slots, words, of_memory, strict=True):
            contexts = [texts[position]._replace(weight=weight) for weight, position in top]
            details.append(SlotDetails.of(index.memory.tap, index.usage, slot, raises, lowers, contexts))
        found.append(details)
    return found


def most_read(usage: MemoryUsage, most: int) -> list[int]:
    """The slots with the most mass, in falling order, equal ones by number; those without mass are left out."""
    order = np.argsort(-usage.masses_S, kind="stable")[:most]
    return [int(slot) for slot in order if usage.masses_S[slot] > 0]


def count_patterns(slots: Sequence[SlotDetails]) -> dict[str, Any]:
    """How many of some slots have a pattern, and of which kind; and how many have one when their contexts are shuffled
    among them (mean of SHUFFLES).
    """
    found = Counter(slot.pattern.kind for slot in slots if slot.pattern is not None)
    pool = [context for slot in slots for context in slot.contexts]
    random, hits = np.random.default_rng(SEED), 0
    for _ in range(SHUFFLES if pool else 0):
        shuffled = iter(random.permutation(len(pool)).tolist())
        for slot in slots:
            hits += find_pattern([pool[next(shuffled)] for _ in slot.contexts]) is not None
    return {"slots": len(slots), "patterned": found.total(), "kinds": dict(found), "shuffled": hits / SHUFFLES}


class PageSlots(NamedTuple):
    """What a page shows of the slots of one memory.

    Attributes:
        slots: the most read ones, with words and contexts.
        first_K: int64, which of `tokens` each slot's value raises most; -1: it is not read; None: the lens does not
            apply.
        tokens: those that some value raises most.
    """

    slots: list[SlotDetails]
    first_K: NDArray[np.int64] | None
    tokens: list[str]


def page_slots(run: LoadedRun, indexes: Sequence[SlotIndex], documents: Documents) -> list[PageSlots]:
    """What a page shows of every memory's slots: details of the MOST_HELD most read ones (divided among the memories),
    and the top word of each slot that is read.

    Args:
        run: that was indexed.
        indexes: of its memories.
        documents: those of the index, to be read again for the text of contexts.
    """
    each = max(1, MOST_HELD // len(indexes))
    details = slot_details(run, indexes, [most_read(index.usage, each) for index in indexes], documents)
    found = []
    for index, slots in zip(indexes, details, strict=True):
        lens, first_K, tokens = LogitLens(run.model, index.memory, run.tokenizer.size, run.tokenizer.piece), None, []
        if lens.applies:
            read = np.flatnonzero(index.usage.counts_S)
            first_K = np.full(index.usage.slots, -1)
            named, first_K[read] = np.unique(lens.top_tokens(read), return_inverse=True)
            tokens = [run.tokenizer.piece(int(token)) for token in named]
        found.append(PageSlots(slots, first_K, tokens))
    return found


def report_slots(
    run: LoadedRun, memory: SparseMemory, choice: TextChoice, slot: str | None, top: int, quiet: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The slots with most mass on a text, and how many of them have a pattern; or one slot, and its strongest contexts.

    Args:
        run: whose model reads.
        memory: of that model.
        choice: of the text.
        slot: the one slot, see `slot_number`; None: those with most mass.
        top: how many slots, or for one slot how many contexts.
        quiet: show no progress.

    Returns:
        What `pkmlm slots --json` prints, and warnings about the text.

    Raises:
        UserError: there is no such slot, or the text cannot be read.
    """
    number, kept = None, JUDGED
    if slot is not None:
        number, kept = slot_number(slot, memory.tap.addresses), max(top, JUDGED)
    documents = chosen_documents(choice, run, quiet)
    with token_progress(f"reading {printable(run.name)}", documents.tokens, quiet) as advance:
        (index,) = index_slots(run, documents, advance, kept, memory, number)
    chosen = most_read(index.usage, top) if number is None else [number]
    (slots,) = slot_details(run, [index], [chosen], chosen_documents(choice, run))
    record = _head(run, memory) | {"split": documents.name, "tokens": index.usage.tokens}
    if memory.orders:
        record["collisions"] = collisions(memory, index.ngrams)
    if number is None:
        record["patterns"] = count_patterns(slots)
    else:
        if memory.orders:
            record["ngrams"] = ngrams_in_row(run.tokenizer, memory, index.ngrams, number)[:top]
        slots = [each._replace(contexts=each.contexts[:top]) for each in slots]
    return record | {"slots": [each.as_json() for each in slots]}, documents.warnings


@torch.no_grad()
def report_prompt(run: LoadedRun, memory: SparseMemory, prompt: str, top: int) -> dict[str, Any]:
    """What `pkmlm slots PROMPT --json` prints: the slots that each token reads most, the end-of-document token first.

    Args:
        run: whose model reads.
        memory: of that model.
        prompt: any text; it is read in windows of the model's context, which do not see the text before them.
        top: how many slots of each token.
    """
    tap = memory.tap
    reads: list[tuple[str, list[tuple[int, float]]]] = []

    def listen(slots_NHk: Tensor, weights_NHk: Tensor) -> None:
        for slots_Hk, weights_Hk, token in zip(slots_NHk, weights_NHk, window, strict=True):
            _, slot_R, weight_R = summed_reads(slots_Hk[None], weights_Hk[None])
            order_R = weight_R.sort(descending=True, stable=True).indices[:top]
            pairs = zip(slot_R[order_R].tolist(), weight_R[order_R].tolist(), strict=True)
            reads.append((run.tokenizer.piece(token), list(pairs)))

    stream = [run.prefix, *run.tokenizer.encode(prompt)]
    with tap.listen(listen):
        for start in range(0, len(stream), run.model.context):
            window = stream[start : start + run.model.context]
            run.model.hidden(torch.tensor([window], device=run.device))
    lens = LogitLens(run.model, memory, run.tokenizer.size, run.tokenizer.piece)
    distinct = sorted({slot for _, pairs in reads for slot, _ in pairs})
    words = lens.words(distinct) if lens.applies else []
    raised = {slot: [word._asdict() for word in raises] for slot, (raises, _) in zip(distinct, words, strict=False)}

    def described(slot: int, weight: float) -> dict[str, Any]:
        return {"slot": slot, "name": tap.addresses.name(slot), "weight": weight, "raises": raised.get(slot)}

    tokens = [{"token": token, "slots": [described(*pair) for pair in pairs]} for token, pairs in reads]
    return _head(run, memory) | {"tokens": tokens}


def _head(run: LoadedRun, memory: SparseMemory) -> dict[str, Any]:
    """What every report of slots begins with. "left_out": what the words of slots leave out, such as a gate, which may
    hide what they say; "weighted": whether reads have weights, so that some are stronger than others.
    """
    how = {"left_out": list(memory.left_out), "weighted": memory.weighted}
    return {"run": run.name, "step": run.step, **memory.tap.entry, **how}
