"""What a memory is worth: the perplexity of a text with another answer in place of the memory's own. No training.

The answer of a memory is what its layer returns at a position, after the gate if it has one: for most, it is added to
the residual stream; for hash tables, it is the output of the map whose place they take. A probe gives another answer at
every position that the model reads and changes nothing else. The answers:

- zero: 0.
- redrawn_values: the memory's own, with every row of its tables drawn again from their initial distribution.
- random_slots: the memory's own, from uniformly random slots (of its own table, where each head has one) with the
  weights of those that it chose.
- token_mean: the mean answer at the token's positions in the train split; for a token that does not occur there, the
  mean answer at all positions.
- bigram_mean: the mean answer at the positions of the train split with the same token and the same token before it; for
  a pair that occurs there fewer than PAIR_LEAST times, and at a window's first position, where the model sees no token
  before, as token_mean.
- same_token: the memory's own answer at another position of the same token, drawn at random from the text; for a token
  that occurs there only once, as token_mean.

The means are taken over pieces of the train split as long as the model's context, with one document after the other, as
in training: over all of them, or over evenly spaced ones if all hold more tokens than asked for. The scored text does
not contribute to them, unless it is the train split. Draws depend only on the memory's place in the model and the order
of the text; each probe draws once, and no interval shows how much other draws would differ.

Windows, and what is scored in them, are those of `pkmlm eval`. A probe is given in nats per token above the real
perplexity, with a bootstrap interval over documents: the 2.5th and the 97.5th percentile of the same number over DRAWS
resamples of the text's documents (of pieces of PIECE tokens, if there are fewer than LEAST_DOCUMENTS documents). Its
share is the part of the memory's gain over zero, in nats, that it keeps: 1 at the real perplexity, 0 at that of zero,
negative if it is worse; None if the interval of the gain reaches down to 0.

N: positions of the text; B: windows of a batch; T: positions of a window; W: width of an answer; R: means; U: documents
or pieces; P: pieces of the train split; H: heads, or tables; k: slots a head reads; V: vocabulary.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pkmlm.console import token_progress
from pkmlm.data.corpus import Corpus
from pkmlm.device import free_bytes
from pkmlm.errors import NotFinite, UserError, printable
from pkmlm.evaluate.documents import Documents, TextChoice, chosen_documents, open_split
from pkmlm.evaluate.load import LoadedRun
from pkmlm.evaluate.perplexity import BATCH, score_windows, windows
from pkmlm.memory.address import entry_of
from pkmlm.memory.base import SparseMemory, memories
from pkmlm.memory.init import initialise
from pkmlm.memory.table import Values
from pkmlm.model.language_model import LanguageModel
from pkmlm.runs.results import perplexity
from pkmlm.seeds import derived_seed, generator

PAIR_LEAST = 4  # positions that a pair of tokens needs for a mean of its own
LEAST_DOCUMENTS, PIECE = 10, 1000  # with fewer documents, intervals are over pieces of so many tokens
DRAWS, LEVEL = 1000, 0.95  # of an interval
MOST_KEPT = 1 << 28  # numbers of the answers that are kept for `same_token`: 1 GB in fp32
SEED = 0
PROBES = ("zero", "redrawn_values", "random_slots", "token_mean", "bigram_mean", "same_token")

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Entry = dict[str, Any]
Advance = Callable[[int], None]  # called with the number of tokens read since the last call
Answer = Callable[[SparseMemory, Tensor], Tensor | None]


@contextmanager
def answers_from(group: Sequence[SparseMemory], answer: Answer) -> Iterator[None]:
    """Let a function answer in place of some memories while the `with` block runs.

    Args:
        group: the memories.
        answer: called in every forward with the memory and its own answer (B, T, W); returns what takes its place, of
            the same shape, or None to leave it.
    """
    with ExitStack() as hooks:
        for memory in group:
            hooks.enter_context(memory.register_forward_hook(lambda memory, _, own: answer(memory, own)))
        yield


class Text:
    """A text, as positions counted over all its documents.

    A position reads the token before the one that it predicts: at a document's beginning, the end-of-document token.

    Args:
        documents: read once.
        prefix: the end-of-document token.

    Attributes:
        ids: token ids of each document that has any.
        tokens_N: the token that each position reads.
        first_N: whether each position is the first of its document.
        scored_N: whether the token after it is scored; in a document's prompt it is not.
    """

    def __init__(self, documents: Documents, prefix: int):
        self.prefix = prefix
        found = [(ids, prompt) for ids, prompt in documents.with_prompts() if len(ids)]
        self.ids = [ids for ids, _ in found]
        self.scored_N = np.concatenate([np.arange(len(ids)) >= prompt for ids, prompt in found] or [np.zeros(0, bool)])
        if not self.scored_N.any():
            raise UserError(f"{documents.name} holds no tokens")
        read = [part for ids in self.ids for part in ([prefix], ids[:-1])]
        self.tokens_N: Ints = np.concatenate(read).astype(np.int64)
        self.first_N = np.zeros(len(self.tokens_N), bool)
        self.first_N[self.starts] = True

    @property
    def starts(self) -> Ints:
        """Where each document begins."""
        return np.cumsum([0, *map(len, self.ids[:-1])])

    def units(self) -> tuple[str, Ints]:
        """What intervals are over, documents or pieces of them, and where each of these begins."""
        if len(self.ids) >= LEAST_DOCUMENTS:
            return "documents", self.starts
        pieces = [start + np.arange(0, len(ids), PIECE) for start, ids in zip(self.starts, self.ids, strict=True)]
        return f"pieces of {PIECE:,} tokens", np.concatenate(pieces)

    def pairs_N(self, vocabulary: int) -> Ints:
        """A number for the pair of each position's token and the one before it in its document; -1: there is none."""
        return np.where(self.first_N, -1, np.roll(self.tokens_N, 1) * vocabulary + self.tokens_N)


class Reader:
    """Scores a text with a model, and knows which of its positions the current forward reads.

    Args:
        model: in evaluation mode.
        text: what it reads.

    Attributes:
        at_BT: int64, the positions of the current forward; arbitrary ones for padding.
        scored_BT: whether it is their turn here: each position has one, and is otherwise only context.
    """

    def __init__(self, model: LanguageModel, text: Text):
        self.model, self.text = model, text
        self.device = next(model.parameters()).device
        self.at_BT = self.scored_BT = torch.empty(0)

    @torch.no_grad()
    def nll(self, advance: Advance) -> Floats:
        """-log p of the token after each position (N,), in nats; 0 where it is not scored.

        Raises:
            NotFinite: (exit code 1) a score is not finite.
        """
        parts: list[Tensor] = []
        context, end = self.model.context, 0
        stream = (window for ids in self.text.ids for window in windows(ids, self.text.prefix, context, context))
        while group := list(itertools.islice(stream, BATCH)):
            stops_B = end + np.cumsum([len(window.targets) for window in group])
            first_B = stops_B - [len(window.tokens) for window in group]
            at_BT = first_B[:, None] + np.arange(max(len(window.tokens) for window in group))
            self.at_BT = torch.from_numpy(at_BT.clip(max=len(self.text.tokens_N) - 1)).to(self.device)
            parts += score_windows(self.model, group, self._watch)
            advance(int(stops_B[-1]) - end)
            end = int(stops_B[-1])
        nll_N = torch.cat(parts).numpy()
        if not np.isfinite(nll_N).all():
            raise NotFinite("the model's scores are not finite", exit_code=1)
        return np.where(self.text.scored_N, nll_N, 0.0)

    def _watch(self, mask: Tensor) -> None:
        self.scored_BT = mask.view_as(self.at_BT)


class Means:
    """The mean answers of memories in the train split to the tokens and pairs of tokens that a text holds.

    Args:
        model: whose memories answer.
        group: the memories.
        corpus: the train split.
        text: its tokens and pairs are those that get a mean.
        most: tokens of the split to read, at most.
        advance: see `Advance`.

    Attributes:
        tokens: positions that were read.
        means: of each memory, (R, W); the last one is over all positions.
        token_N, pair_N: int64, which of the means each position of the text takes.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: LanguageModel,
        group: Sequence[SparseMemory],
        corpus: Corpus,
        text: Text,
        most: int,
        advance: Advance,
    ):
        ids_PT = evenly_spaced(corpus, model.context, most)
        self.tokens = ids_PT.size
        keys = MeanKeys.of(ids_PT, text, model.embedding.num_embeddings)
        device = next(model.parameters()).device
        self.token_N, self.pair_N = (torch.from_numpy(each).to(device) for each in (keys.token_N, keys.pair_N))
        self.means = mean_answers(model, group, ids_PT, keys, advance)


class MeanKeys(NamedTuple):
    """What a mean answer is of: a token of the text, or a pair that is frequent in what the means are over.

    Attributes:
        last: how many such means there are, tokens first; the next one is that over all positions.
        counting: (P, T) each, of the positions that the means are over: which means one counts for besides that last
            one, its token's and its pair's; -1: none.
        token_N, pair_N: which mean each position of the text takes for its token, and for its pair.
    """

    last: int
    counting: list[Ints]
    token_N: Ints
    pair_N: Ints

    @classmethod
    def of(cls, ids_PT: Ints, text: Text, vocabulary: int) -> "MeanKeys":
        """The keys of means over these tokens, for a text."""
        pairs_PT = np.full(ids_PT.shape, -1)
        pairs_PT[:, 1:] = ids_PT[:, :-1] * vocabulary + ids_PT[:, 1:]
        tokens, pairs_N = np.intersect1d(text.tokens_N, ids_PT), text.pairs_N(vocabulary)
        found, counts = np.unique(pairs_PT[pairs_PT >= 0], return_counts=True)
        pairs = np.intersect1d(found[counts >= PAIR_LEAST], pairs_N)
        last = len(tokens) + len(pairs)
        of_pairs = places(pairs, pairs_PT)
        counting = [places(tokens, ids_PT), np.where(of_pairs < 0, -1, of_pairs + len(tokens))]
        token_N, pair_N = places(tokens, text.tokens_N), places(pairs, pairs_N)
        token_N = np.where(token_N < 0, last, token_N)
        return cls(last, counting, token_N, np.where(pair_N < 0, token_N, pair_N + len(tokens)))


def mean_answers(
    model: LanguageModel, group: Sequence[SparseMemory], ids_PT: Ints, keys: MeanKeys, advance: Advance
) -> dict[SparseMemory, Tensor]:
    """The mean answers of each memory (keys.last + 1, W) over positions, in the dtype of its answers.

    Raises:
        UserError: (exit code 1) there is too little memory for them.
    """
    device = next(model.parameters()).device
    sums: dict[SparseMemory, Tensor] = {}
    kinds: dict[SparseMemory, torch.dtype] = {}
    free, needed = free_bytes(device), 0

    def add(memory: SparseMemory, own: Tensor) -> None:
        nonlocal needed
        own_NW = own.flatten(0, 1).double()
        if memory not in sums:
            needed += 8 * (keys.last + 1) * own_NW.shape[1]
            if needed > free:
                message = f"the mean answers need {needed / 1e9:.1f} GB or more, {free / 1e9:.1f} GB are free"
                raise UserError(message, "give a smaller --fit-tokens or a shorter text", exit_code=1)
            sums[memory], kinds[memory] = own_NW.new_zeros(keys.last + 1, own_NW.shape[1]), own.dtype
        sums[memory][keys.last] += own_NW.sum(0)
        for at_BT in batch:
            at_N = torch.from_numpy(at_BT).to(own.device).flatten()
            sums[memory].index_add_(0, at_N[at_N >= 0], own_NW[at_N >= 0])

    with answers_from(group, add):
        for start in range(0, len(ids_PT), BATCH):
            batch = [at_PT[start : start + BATCH] for at_PT in keys.counting]
            ids_BT = ids_PT[start : start + BATCH]
            model.hidden(torch.from_numpy(ids_BT).to(device))
            advance(ids_BT.size)
    counted = np.concatenate([at_PT[at_PT >= 0] for at_PT in keys.counting])
    counts = np.bincount(counted, minlength=keys.last + 1)
    counts[keys.last] = ids_PT.size
    counts_R1 = torch.from_numpy(counts).to(device)[:, None]
    return {memory: sums.pop(memory).div_(counts_R1).to(kinds[memory]) for memory in group}


def evenly_spaced(corpus: Corpus, length: int, most: int) -> Ints:
    """Evenly spaced pieces of what a model reads of a split in training: (P, length), the first of them at the
    beginning. There is at least one piece; several hold at most `most` tokens together.
    """
    length = min(length, corpus.tokens)
    pieces = corpus.tokens // length
    chosen = np.linspace(0, pieces - 1, min(pieces, max(1, most // length))).round().astype(int) * length
    ids_PT = np.full((len(chosen), length), corpus.eos)  # which also precedes the first document
    for row, start in enumerate(chosen.tolist()):
        ids = corpus.read(max(0, start - 1), start + length - 1)
        ids_PT[row, length - len(ids) :] = ids
    return corpus.as_input(ids_PT)


def places(keys: Ints, wanted: Ints) -> Ints:
    """The index of each wanted number among sorted keys, in the shape of `wanted`; -1: it is not among them."""
    if not len(keys):
        return np.full(wanted.shape, -1)
    at = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return np.where(keys[at] == wanted, at, -1)


def partners(tokens_N: Ints, most: int) -> Ints:
    """For each position, a random other one with the same token (N,); -1: there is none.

    Args:
        tokens_N: the token of each position.
        most: how many positions can be partners; these are drawn at random, too.
    """
    random = np.random.default_rng(SEED)
    kept = random.permutation(len(tokens_N))[:most]
    kept = kept[np.argsort(tokens_N[kept], kind="stable")]  # by token
    rank_N = np.full(len(tokens_N), -1)
    rank_N[kept] = np.arange(len(kept))
    first_N, stop_N = (np.searchsorted(tokens_N[kept], tokens_N, side=side) for side in ("left", "right"))
    others_N = stop_N - first_N - (rank_N >= 0)
    drawn_N = first_N + (random.random(len(tokens_N)) * others_N).astype(np.int64)
    drawn_N += (rank_N >= 0) & (drawn_N >= rank_N)  # past the position itself
    return np.where(others_N > 0, kept[drawn_N.clip(max=len(kept) - 1)], -1)


class Probes:
    """The probes of a model's memories on a text: each method in PROBES answers for a group in a `with` block.

    Args:
        reader: of the model and the text.
        found: all memories of the model.
        means: of these, for this text.
    """

    def __init__(self, reader: Reader, found: Sequence[SparseMemory], means: Means):
        self.reader, self.found, self.fitted = reader, found, means
        self.streams = streams_of(found)
        width = sum(each.shape[1] for each in means.means.values())
        partner_N = partners(reader.text.tokens_N, max(1, MOST_KEPT // width))
        kept = np.unique(partner_N[partner_N >= 0])
        device = reader.device
        self._kept_N = torch.from_numpy(places(kept, np.arange(len(partner_N)))).to(device)
        self._partner_N = torch.from_numpy(places(kept, partner_N)).to(device)
        self._answers = {memory: mean.new_zeros(len(kept), mean.shape[1]) for memory, mean in means.means.items()}

    def real(self, advance: Advance) -> Floats:
        """The scores of the model as it is; keeps the answers that `same_token` gives."""

        def keep(memory: SparseMemory, own: Tensor) -> None:
            row_BT = torch.where(self.reader.scored_BT, self._kept_N[self.reader.at_BT], -1)
            self._answers[memory][row_BT[row_BT >= 0]] = own[row_BT >= 0]

        with answers_from(self.found, keep):
            return self.reader.nll(advance)

    def zero(self, group: Sequence[SparseMemory]) -> AbstractContextManager[None]:
        return answers_from(group, lambda memory, own: torch.zeros_like(own))

    def token_mean(self, group: Sequence[SparseMemory]) -> AbstractContextManager[None]:
        return answers_from(group, lambda memory, own: self._token_mean(memory))

    def _token_mean(self, memory: SparseMemory) -> Tensor:
        return self.fitted.means[memory][self.fitted.token_N[self.reader.at_BT]]

    def bigram_mean(self, group: Sequence[SparseMemory]) -> AbstractContextManager[None]:
        def answer(memory: SparseMemory, own: Tensor) -> Tensor:
            at_BT = self.reader.at_BT
            row_BT = self.fitted.pair_N[at_BT]
            row_BT[:, 0] = self.fitted.token_N[at_BT[:, 0]]
            return self.fitted.means[memory][row_BT]

        return answers_from(group, answer)

    def same_token(self, group: Sequence[SparseMemory]) -> AbstractContextManager[None]:
        def answer(memory: SparseMemory, own: Tensor) -> Tensor:
            row_BT, answer_BTW = self._partner_N[self.reader.at_BT], self._token_mean(memory)
            answer_BTW[row_BT >= 0] = self._answers[memory][row_BT[row_BT >= 0]]
            return answer_BTW

        return answers_from(group, answer)

    @contextmanager
    def random_slots(self, group: Sequence[SparseMemory]) -> Iterator[None]:
        def drawing(memory: SparseMemory) -> Callable[..., tuple[Tensor, Tensor]]:
            tap, random = memory.tap, generator(SEED, "slots", *self.streams[memory])
            size = tap.slots if tap.shared else tap.slots // tap.heads
            first_H1 = torch.arange(tap.heads)[:, None] * (0 if tap.shared else size)

            def hook(_: nn.Module, reads: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
                slots_NHk, weights_NHk = reads
                drawn_NHk = first_H1 + torch.randint(size, slots_NHk.shape, generator=random)
                return drawn_NHk.to(slots_NHk.device), weights_NHk

            return hook

        with ExitStack() as hooks:
            for memory in group:
                hooks.enter_context(memory.tap.register_forward_pre_hook(drawing(memory)))
            yield

    @contextmanager
    def redrawn_values(self, group: Sequence[SparseMemory]) -> Iterator[None]:
        own: dict[Values, nn.Parameter] = {}  # None where the table is held in few bits
        drawn: dict[Values, nn.Parameter] = {}
        for memory in group:
            for name, table in tables_read(memory).items():
                if table not in own:  # a table that several memories read is drawn once
                    with next(itertools.chain(table.parameters(), table.buffers())).device:
                        fresh = Values(memory.tap.slots, table.width, std=table.std)
                    initialise(fresh, derived_seed(SEED, "values", *self.streams[memory], name))
                    own[table], drawn[table] = table.weight_KD, fresh.weight_KD

        def give(weights: dict[Values, nn.Parameter]) -> Callable[..., None]:
            def hook(memory: SparseMemory, *_: Any) -> None:
                for table in tables_read(memory).values():
                    table.weight_KD = weights[table]

            return hook

        with ExitStack() as hooks:
            for memory in group:  # only while it reads: others may read the same table
                hooks.enter_context(memory.register_forward_pre_hook(give(drawn)))
                hooks.enter_context(memory.register_forward_hook(give(own)))
            try:
                yield
            finally:
                for table, weight_KD in own.items():
                    table.weight_KD = weight_KD


def tables_read(memory: SparseMemory) -> dict[str, Values]:
    """The tables that a memory reads, its own or those that it shares with others, by the attributes that hold them."""
    held = {**vars(memory), **dict(memory.named_children())}
    return {name: table for name, table in held.items() if isinstance(table, Values)}


def streams_of(found: Sequence[SparseMemory]) -> dict[SparseMemory, tuple[int, str]]:
    """What the random draws of each memory depend on, besides the probe: its layer, its part or stream, and how many of
    the same come before it in the layer.
    """
    streams: dict[SparseMemory, tuple[int, str]] = {}
    before: Counter[tuple[int, str]] = Counter()
    for memory in found:
        place = layer, stream = memory.tap.layer, memory.tap.part or memory.stream.rpartition(".")[2]
        streams[memory] = layer, f"{stream}{before[place] or ''}"
        before[place] += 1
    return streams


class Group(NamedTuple):
    """Memories that are probed together.

    Attributes:
        entry: what their entry in the report begins with.
        memories: in the model's order.
    """

    entry: Entry
    memories: list[SparseMemory]


def groups_of(found: Sequence[SparseMemory]) -> list[Group]:
    """Each memory in each of its layers; or, if it has several parts in a layer, each part in all of its layers. Then,
    of several memories, each that is in several groups as a whole; and if there are several groups, "all" together.
    """
    groups: dict[tuple[str, int | None, str], list[SparseMemory]] = {}
    for memory in found:
        tap = memory.tap
        groups.setdefault((tap.name, None if tap.part else tap.layer, tap.part), []).append(memory)
    several = len(groups) > 1
    if len(names := dict.fromkeys(memory.tap.name for memory in found)) > 1:
        for name in names:
            if sum(key[0] == name for key in groups) > 1:
                groups[name, None, ""] = [memory for memory in found if memory.tap.name == name]
    if several:
        groups["all", None, ""] = list(found)

    def group(name: str, part: str, members: list[SparseMemory]) -> Group:
        layers = {memory.tap.layer for memory in members}
        kinds = " + ".join(dict.fromkeys(memory.tap.kind for memory in members))
        layer = layers.pop() if len(layers) == 1 and name != "all" else None
        return Group(entry_of(name, layer, kinds, part), members)

    return [group(name, part, members) for (name, _, part), members in groups.items()]


def intervals(sums_UC: Floats, tokens_U: Ints) -> list[Entry]:
    """For each column the mean over tokens ("nats") and its bootstrap interval ("low" and "high", None for a single
    unit).

    Args:
        sums_UC: of each document or piece.
        tokens_U: how many tokens it has; those without any, such as a piece of a long prompt, are no units.
    """
    sums_UC, tokens_U = sums_UC[tokens_U > 0], tokens_U[tokens_U > 0]
    units, random = len(tokens_U), np.random.default_rng(SEED)
    mean_C = sums_UC.sum(axis=0) / tokens_U.sum()
    if units < 2:
        return [{"nats": float(mean), "low": None, "high": None} for mean in mean_C]
    means_DC = np.empty((DRAWS, sums_UC.shape[1]))
    for draw in range(DRAWS):
        times_U = np.bincount(random.integers(units, size=units), minlength=units)
        means_DC[draw] = times_U @ sums_UC / (times_U @ tokens_U)
    low_C, high_C = np.quantile(means_DC, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    found = zip(mean_C.tolist(), low_C.tolist(), high_C.tolist(), strict=True)
    return [{"nats": mean, "low": low, "high": high} for mean, low, high in found]


def probe_run(
    run: LoadedRun, twins: Sequence[LoadedRun], choice: TextChoice, fit_tokens: int, quiet: bool
) -> tuple[dict[str, Any], list[str]]:
    """Probe a run's memories on a text.

    Args:
        run: with memories.
        twins: models with the same tokenizer, to be scored on the same text.
        choice: of the text.
        fit_tokens: how many tokens of the train split means are taken over, at most.
        quiet: show no progress.

    Returns:
        What `pkmlm probe --json` prints, and warnings. The keys:

        - run, step, split, tokens (scored), documents, fit_tokens (over which means were taken);
        - interval: {over, units, level, draws};
        - real: {nats, low, high, token_ppl}, nats per token of the model as it is;
        - dense, a list: {run, step, nats, low, high, token_ppl} of each twin, its nats above the real ones;
        - memories, a list: {memory, layer, kind, part, probes: {NAME: {nats, low, high, token_ppl, share}}} of each
          group (see `groups_of`), part only for parts of a memory; nats are those above the real ones; layer is null
          for several, share is null where the memory is worth nothing.

        low and high are null for a text of one unit, token_ppl (the perplexity) where it is more than a float holds.

    Raises:
        UserError: the model has no memory; the text or the train split cannot be read; a twin has another tokenizer or
            a memory; (exit code 1) scores are not finite, or memory does not hold the means.
    """
    found = memories(run.model)
    if not found:
        raise UserError(f"{run.path}: the model has no memory to probe", "give a run with a memory")
    for twin in twins:
        if twin.tokenizer.sha256 != run.tokenizer.sha256:
            message = f"--dense {twin.path}: its tokenizer is not that of {run.path}"
            raise UserError(message, "give a run with the same tokenizer: nats are compared per token")
        if memories(twin.model):
            raise UserError(f"--dense {twin.path}: it has a memory (expected a model without one)")
    corpus, warnings = train_split(run, choice)
    documents = chosen_documents(choice, run, quiet)
    for twin in twins:
        if run.data.get("train") != twin.data.get("train", run.data.get("train")) and run.data:
            warnings.append(f"{twin.name} was trained on other tokens than {run.name}")
        if twin.tokens != run.tokens and twin.tokens and run.tokens:  # 0: not known, for example of an attached memory
            warnings.append(f"{twin.name} has trained on {twin.tokens:,} tokens, {run.name} on {run.tokens:,}")
        if twin.model.context != run.model.context:
            contexts = f"{twin.name} reads {twin.model.context:,} tokens at once, {run.name} {run.model.context:,}"
            warnings.append(f"{contexts}: a longer context alone lowers perplexity")

    text, groups = Text(documents, run.prefix), groups_of(found)
    over, starts_U = text.units()
    tokens_U = np.add.reduceat(text.scored_N.astype(np.int64), starts_U)
    passes, done = 1 + len(twins) + len(PROBES) * len(groups), 0
    total = min(fit_tokens, corpus.tokens) + passes * len(text.tokens_N)
    with token_progress(f"probing {printable(run.name)}", total, quiet) as show:

        def advance(tokens: int) -> None:
            nonlocal done
            done += tokens
            show(done)

        means = Means(run.model, found, corpus, text, fit_tokens, advance)
        probes = Probes(Reader(run.model, text), found, means)
        real_N = probes.real(advance)
        sums = [np.add.reduceat(real_N, starts_U)]
        for twin in twins:
            sums.append(np.add.reduceat(Reader(twin.model, text).nll(advance) - real_N, starts_U))
        for group in groups:
            for name in PROBES:
                with getattr(probes, name)(group.memories):
                    sums.append(np.add.reduceat(probes.reader.nll(advance) - real_N, starts_U))
    real, *beside = intervals(np.stack(sums, axis=1), tokens_U)
    for entry in (real, *beside):
        nats = entry["nats"] + (0.0 if entry is real else real["nats"])
        entry["token_ppl"] = perplexity(nats)
    entries = iter(beside)
    record = {
        "run": run.name,
        "step": run.step,
        "split": documents.name,
        "tokens": int(text.scored_N.sum()),
        "documents": len(text.ids),
        "fit_tokens": means.tokens,
        "interval": {"over": over, "units": int(np.count_nonzero(tokens_U)), "level": LEVEL, "draws": DRAWS},
        "real": real,
        "dense": [{"run": twin.name, "step": twin.step, **next(entries)} for twin in twins],
        "memories": [
            {**group.entry, "probes": with_shares({name: next(entries) for name in PROBES})} for group in groups
        ],
    }
    return record, [*warnings, *documents.warnings]


def with_shares(probes: dict[str, Entry]) -> dict[str, Entry]:
    """Probes with the share of the memory's gain that each keeps; None unless the gain's interval is above 0."""
    zero = probes["zero"]
    least = zero["nats"] if zero["low"] is None else zero["low"]
    return {
        name: each | {"share": 1 - each["nats"] / zero["nats"] if least > 0 else None} for name, each in probes.items()
    }


def train_split(run: LoadedRun, choice: TextChoice) -> tuple[Corpus, list[str]]:
    """The tokens over which means are taken, and warnings.

    Raises:
        UserError: they cannot be read.
    """
    try:
        corpus = open_split(choice.token_folders(run.path, run.recipe), "train", run.tokenizer)
    except UserError as error:
        hint = "give the folder of the run's tokens with --data DIR"
        raise UserError(f"means are taken over the train split: {error.message}", hint, error.exit_code) from None
    if corpus.sha256 != run.data.get("train", corpus.sha256):
        return corpus, [f"means are taken over other tokens than those that {run.name} was trained on"]
    return corpus, []
