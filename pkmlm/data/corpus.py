"""Read a tokenized corpus: mapped into memory, checked block by block as it is read."""

import hashlib
from pathlib import Path

import numpy as np

from pkmlm.data.index import DIGEST, HASHED, TOKEN_BYTES, TOKENIZER, Index, damaged, read_index
from pkmlm.data.tokenizer import Tokenizer
from pkmlm.errors import UserError, read_errors
from pkmlm.runs.files import size_of


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

    def boundaries(self, first: int, stop: int) -> np.ndarray:
        """Where documents `first` up to `stop` begin and where the last of them ends: int64, (stop - first + 1,).

        Raises:
            IndexError: there are no such documents.
            UserError: the list of documents is damaged.
        """
        if not 0 <= first < stop <= self.documents:
            raise IndexError(f"documents {first}..{stop} of {self.documents}")
        return self._documents.read(first, stop + 1)

    def document(self, i: int) -> np.ndarray:
        """The ids of document `i` (from 0), without its `eos`: int64, (n,); raises as `boundaries` and `read` do."""
        start, stop = self.boundaries(i, i + 1).tolist()
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

    def __init__(self, path: Path, dtype: str, size: int, digests: bytes):
        """Map the file, which must hold exactly `size` numbers; `digests` are of its blocks."""
        numbers = np.dtype(dtype)
        expected = size * numbers.itemsize
        with read_errors(path):
            found = size_of(path)
        if found != expected:  # reading a map of it would kill the process
            what = "the file is missing" if found is None else f"it has {found:,} bytes"
            raise damaged(path, f"{what} (expected {expected:,} bytes)")
        self.path = path
        self.size = size
        self.digests = digests
        with read_errors(path):
            self.numbers = np.memmap(path, numbers, "r", shape=(size,))
        self.block = HASHED // numbers.itemsize
        self.unread = bytearray(b"\1") * (len(digests) // DIGEST)

    def read(self, start: int, stop: int) -> np.ndarray:
        """A view of the numbers from `start` up to `stop`, or up to the end of the file."""
        stop = min(stop, self.size)
        first, last = start // self.block, -(-stop // self.block)
        for block in range(first, last) if any(self.unread[first:last]) else ():
            if self.unread[block]:
                self._check(block)
        return self.numbers[start:stop]

    def _check(self, block: int) -> None:
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
        self.unread[block] = 0


def open_files(folder: Path, split: str, index: Index) -> tuple[list[CheckedFile], CheckedFile]:
    """The shards of a split, and its list of documents.

    Raises:
        UserError: a file is missing or of another size, or the list of hashes is damaged.
    """
    about = index.splits[split]
    dtype = f"<u{TOKEN_BYTES[index.dtype]}"
    files = [(shard.name, dtype, shard.tokens) for shard in about.shards]
    files.append((f"{split}.documents", "<i8", about.documents + 1))
    blocks = [-(-size * np.dtype(kind).itemsize // HASHED) for _, kind, size in files]
    hashes = read_checked(folder / f"{split}.hashes", about.hashes_sha256)
    ends = np.cumsum(blocks) * DIGEST
    digests = [hashes[end - count * DIGEST : end] for end, count in zip(ends, blocks, strict=True)]
    *shards, documents = (
        CheckedFile(folder / name, kind, size, part) for (name, kind, size), part in zip(files, digests, strict=True)
    )
    return shards, documents


def read_checked(path: Path, sha256: str) -> bytes:
    """Read a whole file, whose sha256 is in the index."""
    with read_errors(path):
        data = path.read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise damaged(path, f"its sha256 is {found[:16]}... (expected {sha256[:16]}...)")
    return data


def open_tokenizer(folder: str | Path, index: Index | None = None) -> Tokenizer:
    """The tokenizer of a corpus.

    Args:
        folder: what `pkmlm tokenize` wrote.
        index: its index; None: the one in the folder.

    Raises:
        UserError: it is missing, or is not the one that made the tokens.
    """
    path = Path(folder) / TOKENIZER
    return Tokenizer(read_checked(path, (index or read_index(Path(folder))).tokenizer_sha256), str(path))
