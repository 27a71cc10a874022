"""Which documents two splits of a corpus share: those that a model has seen in training measure nothing."""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pkmlm.data.index import Index, damaged, token_bytes
from pkmlm.data.tokenizer import Tokenizer
from pkmlm.errors import read_errors

LEAST = 16  # tokens: shorter documents ("Yes.", a heading) repeat by nature
RUN = 1 << 17  # tokens that are read at a time
GROUP = 1 << 16  # documents whose places are read at a time


class Overlap(NamedTuple):
    """`shared` of the `documents` of the split `later` are in the split `earlier` too."""

    earlier: str
    later: str
    shared: int
    documents: int


def overlaps(folder: Path, index: Index, tokenizer: Tokenizer) -> list[Overlap]:
    """How many documents of valid and test are in train, and of test in valid; only those of LEAST tokens or more.

    Whole documents are compared, by hashes of 128 bits (BLAKE2b) of their tokens, which are equal if and only if the
    texts are: the tokenizer loses nothing. One newline at either end is left out, as the last document of a file often
    has one more than the same document elsewhere. Documents that differ in anything else are not the same.

    Memory holds the hashes of valid and test, not of train: of train, documents that are as long as one of these are
    read again, once, and hashed. (A part of a corpus is not looked at: it has its share alone. What joins all has all.)
    """
    ids = tokenizer.encode("\n")
    newline = ids[0] if len(ids) == 1 else -1
    held: dict[str, Counter[bytes]] = {}
    lengths: set[int] = set()
    for split in ("valid", "test"):
        if split in index.splits:
            held[split] = Counter()
            for length, digest in hashes(folder, split, index, newline):
                held[split][digest] += 1
                lengths.add(length)
    sought = set().union(*held.values())
    seen: dict[str, Collection[bytes]] = {
        "train": {digest for _, digest in hashes(folder, "train", index, newline, lengths) if digest in sought},
        **held,
    }
    return [
        Overlap(
            earlier, later, sum(n for digest, n in held[later].items() if digest in seen[earlier]), held[later].total()
        )
        for earlier, later in (("train", "valid"), ("train", "test"), ("valid", "test"))
        if earlier in seen and later in held
    ]


def hashes(
    folder: Path, split: str, index: Index, newline: int, lengths: Collection[int] | None = None
) -> Iterator[tuple[int, bytes]]:
    """The length in tokens and the hash of every document that is long enough, without a newline at its ends.

    Args:
        lengths: pass over documents of others; None: of none.
    """
    tokens = Tokens(folder, split, index)
    about = index.splits[split]
    path = folder / f"{split}.documents"
    if lengths is not None:
        sizes_sought = np.array(sorted({length + more for length in lengths for more in (1, 2, 3)}), np.int64)
    for first in range(0, about.documents, GROUP):
        with read_errors(path):
            places = np.fromfile(path, "<i8", min(GROUP, about.documents - first) + 1, offset=8 * first)
        sizes = np.diff(places)
        chosen = np.isin(sizes, sizes_sought) if lengths is not None else sizes > LEAST
        for start, stop in zip(places[:-1][chosen].tolist(), places[1:][chosen].tolist(), strict=True):
            length, digest = tokens.hashed(start, stop - 1, newline)
            if length >= LEAST:
                yield length, digest


class Tokens:
    """The tokens of a split, read from its shards from front to back: mapped, all of them would stay in memory."""

    def __init__(self, folder: Path, split: str, index: Index):
        shards = index.splits[split].shards
        self.paths = [folder / shard.name for shard in shards]
        self.starts = np.cumsum([0, *(shard.tokens for shard in shards[:-1])])
        self.dtype = np.dtype(f"<u{token_bytes(index.dtype)}")
        self.begin, self.run = 0, memoryview(b"")

    def hashed(self, start: int, stop: int, newline: int) -> tuple[int, bytes]:
        """How many the tokens from `start` up to `stop` are, less a first and a last that are `newline`; their hash.
        They are more than two."""
        hash = hashlib.blake2b(digest_size=16)
        piece = self.read(start, stop)
        if piece[0] == newline:
            start, piece = start + 1, piece[1:]
        at = start + len(piece)
        while at < stop:
            hash.update(piece)
            piece = self.read(at, stop)
            at += len(piece)
        if piece[-1] == newline:
            stop, piece = stop - 1, piece[:-1]
        hash.update(piece)
        return stop - start, hash.digest()

    def read(self, start: int, stop: int) -> memoryview:
        """Tokens from `start` on, at least one and at most up to `stop`."""
        if not self.begin <= start < self.begin + len(self.run):
            shard = int(np.searchsorted(self.starts, start, side="right")) - 1
            path, offset = self.paths[shard], (start - int(self.starts[shard])) * self.dtype.itemsize
            with read_errors(path):
                self.begin, self.run = start, np.fromfile(path, self.dtype, RUN, offset=offset).data
            if not len(self.run):
                raise damaged(path, f"it ends before byte {offset:,}")
        return self.run[start - self.begin : stop - self.begin]
