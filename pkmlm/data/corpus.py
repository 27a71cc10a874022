"""Read a tokenized corpus: mapped into memory, checked block by block as it is read.

Also which documents its splits share: those that a model has seen in training measure nothing.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pkmlm.data.index import DIGEST, FILE, HASHED, TOKEN_BYTES, TOKENIZER, Index, damaged, read_index
from pkmlm.data.tokenizer import Tokenizer
from pkmlm.errors import UserError, read_errors
from pkmlm.runs.files import sha256_of, size_of

LEAST = 16  # tokens: shorter documents ("Yes.", a heading) repeat by nature
RUN = 1 << 17  # tokens that a search for shared documents reads at a time
GROUP = 1 << 16  # documents whose places it reads at a time


class Corpus:
    """One split of a tokenized corpus: a stream of `tokens` ids in which `eos` follows each of `documents`.

    Attributes:
        tokens, documents: how many; `tokens` counts each `eos`.
        words, bytes: of the text, as lm-eval counts words and in UTF-8.
        eos, vocab_size, tokenizer_sha256: of the tokenizer.
        splits: the names of all splits of the corpus.
        sha256: of this split's tokens and where its documents begin: its identity, whatever its sources were called.
        hashes: the `sha256` of the splits "train" and "valid" (if there is one), and under "tokenizer" the tokenizer's:
            all that training depends on.
    """

    def __init__(self, folder: str | Path, split: str):
        """Open a split: sizes and the list of hashes are checked, tokens are not yet read.

        Args:
            folder: what `pkmlm tokenize -o` wrote.
            split: "train", "valid" or "test".

        Raises:
            UserError: there is no such corpus or split, or a file is missing, of another size, or damaged.
        """
        folder = Path(folder)
        index = read_index(folder)
        if split not in index.splits:
            raise UserError(
                f"{folder} has no split {split!r} (found {', '.join(index.splits)})",
                f"give --split {list(index.splits)[-1]} or --text FILE"
                + (f", or tokenize again with --{split} FILE" if split in ("valid", "test") else ""),
            )
        about = index.splits[split]
        self.folder = folder
        self.split = split
        self.splits = tuple(index.splits)
        self.sha256 = about.hashes_sha256
        self.tokens = about.tokens
        self.documents = about.documents
        self.words = about.words
        self.bytes = about.bytes
        self.eos = index.eos
        self.vocab_size = index.vocab_size
        self.tokenizer_sha256 = index.tokenizer_sha256
        self.hashes = {"tokenizer": index.tokenizer_sha256} | {
            name: each.hashes_sha256 for name, each in index.splits.items() if name != "test"
        }
        self._files, self._documents = open_files(folder, split, index)
        self._starts = np.cumsum([0, *(file.size for file in self._files[:-1])])

    def read(self, start: int, stop: int) -> np.ndarray:
        """The ids from `start` up to `stop`: int64, (stop - start,), the caller's to change.

        Raises:
            IndexError: they are not all in the corpus.
            UserError: a block that is read for the first time is damaged.
        """
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"tokens {start}..{stop} of {self.tokens}")
        ids = np.empty(stop - start, np.int64)
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        filled = 0
        while filled < len(ids):
            offset = start + filled - int(self._starts[shard])
            part = self._files[shard].read(offset, offset + len(ids) - filled)
            ids[filled : filled + len(part)] = part
            filled += len(part)
            shard += 1
        return ids

    def bounds(self, i: int) -> tuple[int, int]:
        """Where document `i` (from 0) begins and ends; its last token, `eos`, is at the end less one.

        Raises:
            IndexError: there is no such document.
            UserError: the list of documents is damaged.
        """
        if not 0 <= i < self.documents:
            raise IndexError(f"document {i} of {self.documents}")
        start, stop = (int(place) for place in self._documents.read(i, i + 2))
        if not 0 <= start < stop <= self.tokens:
            raise damaged(self._documents.path, f"document {i} lies at {start}..{stop} of {self.tokens} tokens")
        return start, stop

    def document(self, i: int) -> np.ndarray:
        """The ids of document `i` (from 0), without its `eos`: int64, (n,); raises as `bounds` and `read` do."""
        start, stop = self.bounds(i)
        return self.read(start, stop - 1)

    def verify(self) -> None:
        """Read and check everything, the tokenizer included.

        Raises:
            UserError: something is damaged; it is named.
        """
        open_tokenizer(self.folder)
        for file in [*self._files, self._documents]:
            file.read(0, file.size)


class CheckedFile:
    """A file of numbers, mapped into memory; each 256 KiB is checked against its sha256 when first read."""

    def __init__(self, path: Path, dtype: str, size: int, digests: bytes, below: int):
        """Map the file, which must hold exactly `size` numbers, all less than `below`; `digests` are of its blocks."""
        numbers = np.dtype(dtype)
        check_size(path, size * numbers.itemsize)
        self.path = path
        self.size = size
        self.digests = digests
        self.below = below
        with read_errors(path):
            self.numbers = np.memmap(path, numbers, "r", shape=(size,))
        self.block = HASHED // numbers.itemsize
        self.unread = bytearray(b"\1") * (len(digests) // DIGEST)

    def read(self, start: int, stop: int) -> np.ndarray:
        """A view of the numbers from `start` up to `stop`, or up to the end of the file."""
        stop = min(stop, self.size)
        first, last = start // self.block, -(-stop // self.block)
        if any(self.unread[first:last]):
            for block in range(first, last):
                self._check(block)
        return self.numbers[start:stop]

    def _check(self, block: int) -> None:
        if not self.unread[block]:
            return
        # Read, not mapped: faulting the map in page by page takes seven times as long.
        with read_errors(self.path), open(self.path, "rb") as file:
            file.seek(block * HASHED)
            data = file.read(HASHED)
        found, expected = hashlib.sha256(data).digest(), self.digests[block * DIGEST : (block + 1) * DIGEST]
        if found != expected:
            raise damaged(
                self.path,
                f"the 256 KiB from byte {block * HASHED:,} have sha256 {found.hex()[:16]}... "
                f"(expected {expected.hex()[:16]}...)",
            )
        greatest = int(np.frombuffer(data, self.numbers.dtype).max())
        if greatest >= self.below:  # the digest matches, but pkmlm has not written this
            raise damaged(self.path, f"it holds {greatest:,} (expected less than {self.below:,})")
        self.unread[block] = 0


def open_files(folder: Path, split: str, index: Index) -> tuple[list[CheckedFile], CheckedFile]:
    """The shards of a split, and its list of documents.

    Raises:
        UserError: a file is missing or of another size, or the list of hashes is damaged.
    """
    about = index.splits[split]
    dtype = f"<u{TOKEN_BYTES[index.dtype]}"
    files = [(shard.name, dtype, shard.tokens, index.vocab_size) for shard in about.shards]
    files.append((f"{split}.documents", "<i8", about.documents + 1, about.tokens + 1))
    blocks = [-(-size * np.dtype(kind).itemsize // HASHED) for _, kind, size, _ in files]
    path = folder / f"{split}.hashes"
    check_size(path, sum(blocks) * DIGEST)
    with read_errors(path):
        hashes = path.read_bytes()
    check_sha256(path, hashlib.sha256(hashes).hexdigest(), about.hashes_sha256)
    ends = np.cumsum(blocks) * DIGEST
    digests = [hashes[end - count * DIGEST : end] for end, count in zip(ends, blocks, strict=True)]
    *shards, documents = (
        CheckedFile(folder / name, kind, size, part, below)
        for (name, kind, size, below), part in zip(files, digests, strict=True)
    )
    return shards, documents


def check_size(path: Path, expected: int) -> None:
    """Refuse a file that is missing or has another size: mapping it would end in a crash of the process."""
    with read_errors(path):
        found = size_of(path)
    if found is None:
        raise damaged(path, f"the file is missing (expected {expected:,} bytes)")
    if found != expected:
        raise damaged(path, f"it has {found:,} bytes (expected {expected:,})")


def check_sha256(path: Path, found: str, expected: str) -> None:
    """Refuse a file whose sha256 is not the one in the index."""
    if found != expected:
        raise damaged(path, f"its sha256 is {found[:16]}... (expected {expected[:16]}...)")


def open_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a corpus.

    Raises:
        UserError: it is missing, it is not the one that made the tokens, or the index contradicts it.
    """
    index = read_index(Path(folder))
    tokenizer = load_tokenizer(Path(folder), index.tokenizer_sha256)
    check_vocabulary(Path(folder), index.vocab_size, index.eos, tokenizer)
    return tokenizer


def load_tokenizer(folder: Path, sha256: str) -> Tokenizer:
    """The tokenizer in a folder of tokens, whose index gives its sha256."""
    path = folder / TOKENIZER
    if path.is_file():
        check_sha256(path, sha256_of(path), sha256)
    return Tokenizer.load(path)


def check_vocabulary(folder: Path, vocab_size: int, eos: int, tokenizer: Tokenizer) -> None:
    """Refuse tokens whose index says another number of ids, or another end of documents, than their tokenizer."""
    if (vocab_size, eos) != (tokenizer.size, tokenizer.eos):
        found = f"it says {vocab_size:,} ids and eos {eos:,}"
        raise damaged(folder / FILE, f"{found} (the tokenizer has {tokenizer.size:,} and {tokenizer.eos:,})")


def corpus_warnings(
    folder: Path, index: Index, tokenizer: Tokenizer, known: Collection[tuple[str, str]] = ()
) -> list[str]:
    """What is probably wrong with the text of a corpus, one line each: files or documents that are in two splits, and a
    separator that occurs nowhere.

    Args:
        folder, index, tokenizer: the corpus.
        known: (split, name) of files that the user knows to be in an earlier split too.
    """
    warnings = []
    first: dict[str, tuple[str, str]] = {}
    for split, about in index.splits.items():
        for origin in about.sources:
            other, name = first.setdefault(origin.sha256, (split, origin.name))
            if other != split and origin.bytes and (split, origin.name) not in known:
                alias = "" if name == origin.name else f" (as {name})"
                warnings.append(f"{origin.name} is in both {other} and {split}{alias}")
    for earlier, later, shared, documents in overlaps(folder, index, tokenizer):
        if shared:
            found = f"{shared:,} of {documents:,} document{'s' * (documents != 1)} of {later}"
            are = "is" if shared == 1 else "are"
            warnings.append(f"{found} (of {LEAST} tokens or more) {are} in {earlier} too, word for word")
    separator = index.separator
    divided = any(
        split.documents + split.empty != len(split.sources)  # one novel to test on is one document
        or any(kind in origin.name.lower() for origin in split.sources for kind in (".jsonl", ".parquet"))
        for split in index.splits.values()
    )
    if separator is not None and not divided:
        crlf = re.sub("(?<!\r)\n", "\r\n", separator)
        hint = f" (where lines end in CRLF, it is {crlf!r})" if crlf != separator else ""
        warnings.append(f"{separator!r} occurs nowhere: each file is one document{hint}")
    return warnings


class Overlap(NamedTuple):
    """`shared` of the `documents` of the split `later` are in the split `earlier` too."""

    earlier: str
    later: str
    shared: int
    documents: int


def overlaps(folder: Path, index: Index, tokenizer: Tokenizer) -> list[Overlap]:
    """How many documents of valid and test, of LEAST tokens or more, are in train, and how many of test in valid.

    Whole documents are compared, by hashes of 128 bits (BLAKE2b) of their tokens, which are equal if and only if the
    texts are: the tokenizer loses nothing. One newline at either end is left out, as the last document of a file often
    has one more than the same document elsewhere. Documents that differ in anything else are not the same.

    Memory holds the hashes of valid and test, not of train: of train, documents that are as long as one of these are
    read again, once, and hashed.
    """
    ids = tokenizer.encode("\n")
    newline = ids[0] if len(ids) == 1 else -1
    counts: dict[str, Counter[bytes]] = {}
    lengths: set[int] = set()
    for split in ("valid", "test"):
        if split in index.splits:
            counts[split] = Counter()
            for length, digest in hashes(folder, split, index, newline):
                counts[split][digest] += 1
                lengths.add(length)
    wanted = set().union(*counts.values())
    seen: dict[str, Collection[bytes]] = {
        "train": {digest for _, digest in hashes(folder, "train", index, newline, lengths) if digest in wanted},
        **counts,
    }
    found = []
    for earlier, later in (("train", "valid"), ("train", "test"), ("valid", "test")):
        if earlier in seen and later in counts:
            shared = sum(count for digest, count in counts[later].items() if digest in seen[earlier])
            found.append(Overlap(earlier, later, shared, counts[later].total()))
    return found


def hashes(
    folder: Path, split: str, index: Index, newline: int, lengths: Collection[int] | None = None
) -> Iterator[tuple[int, bytes]]:
    """The length in tokens and the hash of every document of LEAST tokens or more, without a newline at its ends.

    Args:
        folder, split, index: the documents.
        newline: the id of a newline; -1: there is none.
        lengths: leave out documents whose length is not one of these; None: leave out none.
    """
    tokens = TokenReader(folder, split, index)
    about = index.splits[split]
    path = folder / f"{split}.documents"
    if lengths is not None:
        wanted_sizes = np.array(sorted({length + more for length in lengths for more in (1, 2, 3)}), np.int64)
    for first in range(0, about.documents, GROUP):
        with read_errors(path):
            places = np.fromfile(path, "<i8", min(GROUP, about.documents - first) + 1, offset=8 * first)
        sizes = np.diff(places)
        chosen = np.isin(sizes, wanted_sizes) if lengths is not None else sizes > LEAST
        for start, stop in zip(places[:-1][chosen].tolist(), places[1:][chosen].tolist(), strict=True):
            length, digest = tokens.hashed(start, stop - 1, newline)
            if length >= LEAST:
                yield length, digest


class TokenReader:
    """The tokens of a split, read from its shards from front to back (mapped, all would stay in memory)."""

    def __init__(self, folder: Path, split: str, index: Index):
        shards = index.splits[split].shards
        self.paths = [folder / shard.name for shard in shards]
        self.starts = np.cumsum([0, *(shard.tokens for shard in shards[:-1])])
        self.dtype = np.dtype(f"<u{TOKEN_BYTES[index.dtype]}")
        self.begin = 0  # where in the split the tokens in `buffer` begin
        self.buffer = memoryview(b"")

    def hashed(self, start: int, stop: int, newline: int) -> tuple[int, bytes]:
        """The number and the hash of the tokens from `start` up to `stop`, which must be more than two, without a
        `newline` at either end."""
        hash = hashlib.blake2b(digest_size=16)
        piece = self.read(start, stop)
        if piece[0] == newline:
            start += 1
            piece = piece[1:]
        at = start + len(piece)
        while at < stop:
            hash.update(piece)
            piece = self.read(at, stop)
            at += len(piece)
        if piece[-1] == newline:
            stop -= 1
            piece = piece[:-1]
        hash.update(piece)
        return stop - start, hash.digest()

    def read(self, start: int, stop: int) -> memoryview:
        """Tokens from `start` on, at least one and at most up to `stop`."""
        if not self.begin <= start < self.begin + len(self.buffer):
            shard = int(np.searchsorted(self.starts, start, side="right")) - 1
            path = self.paths[shard]
            offset = (start - int(self.starts[shard])) * self.dtype.itemsize
            with read_errors(path):
                self.begin = start
                self.buffer = np.fromfile(path, self.dtype, RUN, offset=offset).data
            if not len(self.buffer):
                raise damaged(path, f"it ends before byte {offset:,}")
        return self.buffer[start - self.begin : stop - self.begin]
