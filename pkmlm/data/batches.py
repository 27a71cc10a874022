"""Batches as a pure function of (seed, step, rank, world size): nothing to save, nothing dropped, nothing repeated.

B: sequences; T: positions (the context).
"""

import math
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pkmlm.data.corpus import Corpus
from pkmlm.recipe.schema import Recipe
from pkmlm.seeds import derived_seed

IGNORED = -100  # marks a target that is not scored, as in torch; the loss ignores every negative target
ROUNDS = 6
LENGTHS = 8  # sequences that are cut have a multiple of this: what compiles or plans for a shape meets few of them


class Batch(NamedTuple):
    tokens_BT: Tensor
    targets_BT: Tensor


class Batches:
    """The training sequences of a corpus, in a fresh pseudo-random order each epoch.

    An epoch is one stream of tokens, every document followed by the end-of-document token, cut into pieces of `context`
    targets; the input of a piece is the token before it and all of the piece but its last token. The stream's first
    input is the end-of-document token, so every document starts after one; as an input it is the tokenizer's `begin`.
    The stream's last piece may be short: its input continues at the start of the stream, and those targets are not
    scored. Each token is thus scored once an epoch. In the first epoch the documents stand as in the corpus; in each
    later one they are shuffled anew. Prompts are read, but not scored.

    Args:
        corpus: the training split.
        context: tokens per sequence.
        sequences: sequences per global batch.
        seed: determines the order.
    """

    def __init__(self, corpus: Corpus, context: int, sequences: int, seed: int):
        self.corpus, self.context, self.batch, self.seed = corpus, context, sequences, seed
        self.pieces = -(-corpus.tokens // context)
        self._streams: dict[int, Shuffled] = {}

    @classmethod
    def of(cls, corpus: Corpus, recipe: Recipe) -> "Batches":
        """The batches that a recipe asks for."""
        kind = cls if recipe.data.pack else UnpackedBatches
        return kind(corpus, recipe.model.context, recipe.sequences, recipe.train.seed)

    def read(self, step: int) -> int:
        """The tokens that the sequences of the global batch of `step` hold, scored or not."""
        return self.batch * self.context

    @property
    def mean_read(self) -> float:
        """The mean of `read` over an epoch."""
        return self.batch * self.context

    def scored(self, step: int) -> int:
        """The number of scored targets in the global batch of `step` (from 1)."""
        return sum(self._scored(epoch, number) for epoch, number in self._numbers(step, 0, self.batch))

    def _scored(self, epoch: int, number: int) -> int:
        """The scored targets of one piece."""
        start, stop = number * self.context, min((number + 1) * self.context, self.corpus.tokens)
        return int(self._stream(epoch).learnt(start, stop).sum()) if self.corpus.has_answers else stop - start

    def micro_batch(self, step: int, index: int, size: int, rank: int = 0, world: int = 1) -> Batch:
        """Micro-batch `index` (from 0) of global batch `step` (from 1) for one rank; int64 on the CPU.

        Over all ranks, a micro-batch is size * world consecutive sequences of the global batch: the same for every pair
        of (size, world) with the same product.
        """
        first = (index * world + rank) * size
        pieces = [self._piece(epoch, number) for epoch, number in self._numbers(step, first, size)]
        tokens_BT, targets_BT = (torch.from_numpy(np.stack(part)) for part in zip(*pieces, strict=True))
        return Batch(tokens_BT, targets_BT)

    def _stream(self, epoch: int) -> "Corpus | Shuffled":
        """The documents of an epoch, in its order; of two epochs at most, which a batch may span."""
        if epoch == 0 or self.corpus.documents == 1:
            return self.corpus
        if epoch not in self._streams:
            last = {old: stream for old, stream in self._streams.items() if old == epoch - 1}
            self._streams = {**last, epoch: Shuffled(self.corpus, derived_seed(self.seed, "documents", epoch))}
        return self._streams[epoch]

    def _piece(self, epoch: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Input and target ids of one piece, (T,) each."""
        documents = self._stream(epoch)
        start, stop = number * self.context, (number + 1) * self.context
        stream = documents.read(max(0, start - 1), min(stop, self.corpus.tokens))
        if start == 0:
            stream = np.concatenate([[self.corpus.eos], stream])
        targets = np.full(self.context, IGNORED)
        targets[: len(stream) - 1] = stream[1:]
        if self.corpus.has_answers:
            learnt = documents.learnt(start, min(stop, self.corpus.tokens))
            targets[: len(learnt)][~learnt] = IGNORED
        while len(stream) < self.context:
            stream = np.concatenate([stream, documents.read(0, min(self.corpus.tokens, self.context - len(stream)))])
        return self.corpus.as_input(stream[: self.context]), targets

    def _numbers(self, step: int, first: int, size: int) -> list[tuple[int, int]]:
        """The epochs and pieces of `size` sequences of a global batch, in order, from sequence `first` on."""
        start = (step - 1) * self.batch + first
        drawn = np.arange(start, start + size)
        epochs, positions = drawn // self.pieces, drawn % self.pieces
        return [
            (epoch, number)
            for epoch in np.unique(epochs).tolist()
            for number in permute(
                positions[epochs == epoch], self.pieces, derived_seed(self.seed, "order", epoch)
            ).tolist()
        ]


class UnpackedBatches(Batches):
    """The same with a document in each sequence, in place of a piece of the stream: what is left of the sequence is not
    scored. Of a document that is longer than the context, the last tokens are read. The sequences of a micro-batch are
    as long as the longest document in it, rounded up: what nobody reads costs nothing.
    """

    def __init__(self, corpus: Corpus, context: int, sequences: int, seed: int):
        super().__init__(corpus, context, sequences, seed)
        self.pieces = corpus.documents

    @cached_property
    def lengths(self) -> np.ndarray:
        """How many tokens of each document are read: (documents,)."""
        return np.minimum(np.diff(self.corpus.boundaries(0, self.corpus.documents)), self.context)

    def read(self, step: int) -> int:
        return int(self.lengths[[number for _, number in self._numbers(step, 0, self.batch)]].sum())

    @property
    def mean_read(self) -> float:
        return self.batch * float(self.lengths.mean())

    def micro_batch(self, step: int, index: int, size: int, rank: int = 0, world: int = 1) -> Batch:
        tokens_BT, targets_BT = super().micro_batch(step, index, size, rank, world)
        together = self._numbers(step, index * world * size, world * size)  # all ranks' sequences are equally long
        length = cut_length(int(self.lengths[[number for _, number in together]].max()), self.context)
        return Batch(tokens_BT[:, :length], targets_BT[:, :length])

    def _scored(self, epoch: int, number: int) -> int:
        return min(self.context, int(self.corpus.answer_lengths(number, number + 1)[0]))

    def _piece(self, epoch: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        start, stop = self.corpus.boundaries(number, number + 1).tolist()
        document = self.corpus.read(max(start, stop - self.context - 1), stop)
        if stop - start <= self.context:
            document = np.concatenate([[self.corpus.begin], document])
        length, learnt = len(document) - 1, self._scored(epoch, number)
        tokens, targets = np.full(self.context, self.corpus.begin), np.full(self.context, IGNORED)
        tokens[:length] = document[:-1]
        targets[length - learnt : length] = document[-learnt:]
        return tokens, targets


def cut_length(longest: float, context: int) -> int:
    """The positions of sequences whose longest document has so many tokens."""
    return min(context, math.ceil(longest / LENGTHS) * LENGTHS)


def mean_read(recipe: Recipe) -> float:
    """The tokens that a step of a recipe reads, on average; those of a full batch if it names no data.

    Raises:
        UserError: without `data.pack`, the tokens, whose documents say how long they are, are missing or damaged.
    """
    if recipe.data.pack or not recipe.data.folders:
        return recipe.train.batch_tokens
    return Batches.of(Corpus(recipe.data.folders, "train"), recipe).mean_read


class Shuffled:
    """The documents of a corpus in a pseudo-random order, as one stream.

    It holds 16 bytes a document.

    Args:
        corpus: of which it is made.
        seed: determines the order.
    """

    def __init__(self, corpus: Corpus, seed: int):
        self.corpus = corpus
        bounds = corpus.boundaries(0, corpus.documents)
        order = permute(np.arange(corpus.documents), corpus.documents, seed)
        self._from = bounds[order]  # where each document begins in the corpus
        lengths = bounds[order + 1] - self._from
        self._to = np.concatenate([[0], np.cumsum(lengths)])  # where it begins here, and where the last one ends

    def read(self, start: int, stop: int) -> np.ndarray:
        """The ids from `start` up to `stop`: int64, (stop - start,)."""
        parts = [self.corpus.read(*part) for part in self._parts(start, stop)]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def learnt(self, start: int, stop: int) -> np.ndarray:
        """Which of them are learnt: bool, (stop - start,)."""
        return np.concatenate([np.empty(0, bool), *(self.corpus.learnt(*part) for part in self._parts(start, stop))])

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Where in the corpus the ids from `start` up to `stop` are."""
        document = int(np.searchsorted(self._to, start, "right")) - 1
        while start < stop:
            end = min(stop, int(self._to[document + 1]))
            first = int(self._from[document]) + start - int(self._to[document])
            yield first, first + end - start
            start, document = end, document + 1


def permute(positions: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Where a pseudo-random permutation of range(size) sends `positions`; computed, not stored.

    A Feistel network over the smallest even number of bits that holds `size` values, repeated until the result is below
    `size` (at most four times as many values as needed, so a few rounds on average).
    """
    half = max(1, (max(1, size - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    keys = np.random.default_rng(seed).integers(0, 2**63, ROUNDS, dtype=np.uint64)
    result = positions.astype(np.uint64)
    outside = np.ones(len(result), dtype=bool)
    while outside.any():
        left, right = result[outside] >> np.uint64(half), result[outside] & mask
        for round_key in keys:
            left, right = right, left ^ (_mixed(right + round_key) & mask)
        result[outside] = (left << np.uint64(half)) | right
        outside = result >= size
    return result.astype(np.int64)


def _mixed(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser: every input bit affects every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
