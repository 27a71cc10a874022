"""A folder of tokens: its index, and its files, which are mapped into memory and checked when they are first read.

`index.json` is written last and checked first; it holds the sha256 of every other file. Beside it are the tokenizer
(`tokenizer.model` or `tokenizer.json`) and, for each split,
  SPLIT-00000.bin ...  token ids, little-endian, each document followed by `eos`;
  SPLIT.documents      little-endian int64: where each document begins, then the number of tokens.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from pkmlm.data.tokenizer import Tokenizer
from pkmlm.data.tokenizer_file import tokenizer_file
from pkmlm.errors import UserError, read_errors
from pkmlm.files import open_file, read_bytes, sha256_of, size_of, write_json

FILE = "index.json"
OWN_FILES = re.compile(r"index\.json|tokenizer\.(model|json)|(train|valid|test)(-\d{5}\.bin|\.documents)")

STRICT = ConfigDict(extra="forbid", strict=True)
Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, config=STRICT)
class Shard:
    """A file of tokens."""

    name: str
    tokens: Count
    sha256: str


@dataclass(frozen=True, config=STRICT)
class Origin:
    """A source as it was stored when it was read."""

    name: str
    bytes: Count
    sha256: str


@dataclass(frozen=True, config=STRICT)
class Split:
    """`tokens` includes the `eos` of each document; `words` and `bytes` (UTF-8) count the text."""

    tokens: Count
    documents: Count
    empty: Count
    words: Count
    bytes: Count
    shards: tuple[Shard, ...]
    documents_sha256: str
    sources: tuple[Origin, ...]


@dataclass(frozen=True, config=STRICT)
class Index:
    """The content of `index.json`.

    `held_out` is the percentage of the documents of train's sources that each split without its own sources was given;
    `sha256` is that of all other values, see `sealed`.
    """

    dtype: Literal["uint16", "uint32"]
    vocab_size: Count
    eos: Count
    tokenizer_sha256: str
    separator: str | None
    splits: dict[str, Split]
    held_out: dict[str, float]
    format: Literal["pkmlm-tokens-2"] = "pkmlm-tokens-2"
    sha256: str = ""

    def sealed(self) -> "Index":
        """The same index with its sha256."""
        values = json.dumps(asdict(replace(self, sha256="")), sort_keys=True)
        return replace(self, sha256=hashlib.sha256(values.encode()).hexdigest())

    def write(self, folder: Path) -> None:
        write_json(folder / FILE, asdict(self))


def dtype_for(vocab_size: int) -> Literal["uint16", "uint32"]:
    """The smallest type that holds every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def read_index(folder: Path) -> Index:
    """Read and check the index of a folder that `pkmlm tokenize` wrote.

    Raises:
        UserError: the index is missing, damaged or of another format.
    """
    path = folder / FILE
    if not path.exists():
        raise UserError(f"{folder} holds no tokens (expected {FILE})", f"make them: pkmlm tokenize TEXT... -o {folder}")
    with read_errors(path):
        content = read_bytes(path)
    try:
        index = TypeAdapter(Index).validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "content"
        raise damaged(path, f"{where}: {first['msg']} (found {str(first['input'])[:40]!r})") from None
    if index != index.sealed():
        raise damaged(path, "it differs from what was written")
    return index


def damaged(path: Path, what: str) -> UserError:
    """The error for a file that differs from what `pkmlm tokenize` wrote."""
    return UserError(f"{path} is damaged: {what}", "tokenize the text again, or copy the folder again")


def content_sha256(shards: Iterable[Shard]) -> str:
    """What identifies tokens, in these shards: their documents follow from the tokens."""
    return hashlib.sha256(" ".join(shard.sha256 for shard in shards).encode()).hexdigest()


# Reading.


class Corpus:
    """One split of a tokenized corpus: a stream of `tokens` ids in which `eos` follows each of the `documents`.

    Attributes:
        tokens, documents: their numbers; `tokens` includes each `eos`.
        words, bytes: of the text: words as lm-eval counts them, bytes in UTF-8.
        eos, vocab_size, tokenizer_sha256: of the tokenizer.
        splits: the names of all splits of the corpus.
        sha256: of this split's tokens: its identity, whatever its sources are called.
        hashes: the `sha256` of the splits "train" and "valid" (if there is one), and under "tokenizer" the tokenizer's:
            all that training depends on.
    """

    def __init__(self, folder: str | Path, split: str):
        """Open a split: check the sizes of its files, but do not read tokens yet.

        Args:
            folder: a folder that `pkmlm tokenize -o` wrote.
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
        hashes = {name: content_sha256(each.shards) for name, each in index.splits.items()}
        self.folder = folder
        self.split = split
        self.splits = tuple(index.splits)
        self.sha256 = hashes[split]
        self.tokens = about.tokens
        self.documents = about.documents
        self.words = about.words
        self.bytes = about.bytes
        self.eos = index.eos
        self.vocab_size = index.vocab_size
        self.tokenizer_sha256 = index.tokenizer_sha256
        self.hashes = {"tokenizer": index.tokenizer_sha256} | {
            name: each for name, each in hashes.items() if name != "test"
        }
        ids = np.dtype(index.dtype).newbyteorder("<")
        self._shards = [MappedFile(folder / shard.name, ids, shard.tokens, shard.sha256) for shard in about.shards]
        self._starts = np.cumsum([0, *(shard.tokens for shard in about.shards[:-1])])
        self._documents = MappedFile(
            folder / f"{split}.documents", np.dtype("<i8"), about.documents + 1, about.documents_sha256
        )

    def read(self, start: int, stop: int) -> np.ndarray:
        """The ids from `start` up to `stop`: int64, (stop - start,); the caller may change the array.

        Raises:
            IndexError: they are not all in the corpus.
            UserError: a shard that is read for the first time is damaged.
        """
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"tokens {start}..{stop} of {self.tokens}")
        ids = np.empty(stop - start, np.int64)
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        filled = 0
        while filled < len(ids):
            offset = start + filled - int(self._starts[shard])
            part = self._shards[shard].read(offset, offset + len(ids) - filled)
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
        """Check every byte of the split and of the tokenizer.

        Raises:
            UserError: a file is damaged; the message names it.
        """
        read_checked(tokenizer_file(self.folder), self.tokenizer_sha256)
        for file in [*self._shards, self._documents]:
            file.check()


class MappedFile:
    """A file of numbers, mapped into memory, and checked against its sha256 when it is first read."""

    def __init__(self, path: Path, dtype: np.dtype[Any], size: int, sha256: str):
        """Map the file, which must hold exactly `size` numbers."""
        expected = size * dtype.itemsize
        with read_errors(path):
            found = size_of(path)
        if found != expected:  # reading such a map would kill the process
            what = "the file is missing" if found is None else f"it has {found:,} bytes"
            raise damaged(path, f"{what} (expected {expected:,} bytes)")
        self.path = path
        self.sha256 = sha256
        self.checked = False
        with read_errors(path), open_file(path) as file:
            self.numbers = np.memmap(file, dtype, "r", shape=(size,))

    def read(self, start: int, stop: int) -> np.ndarray:
        """A view of the numbers from `start` up to `stop`, or up to the end of the file."""
        if not self.checked:
            self.check()
        return self.numbers[start:stop]

    def check(self) -> None:
        """Check the whole file; raise UserError if it is damaged."""
        check_sha256(self.path, sha256_of(self.path), self.sha256)  # not through the map: page by page is slow
        self.checked = True


def check_sha256(path: Path, found: str, expected: str) -> None:
    """Refuse a file whose sha256 is not the one in the index."""
    if found != expected:
        raise damaged(path, f"its sha256 is {found[:16]}... (expected {expected[:16]}...)")


def read_checked(path: Path, sha256: str) -> bytes:
    """Read a file and check it against its sha256 in the index."""
    with read_errors(path):
        content = read_bytes(path)
    check_sha256(path, hashlib.sha256(content).hexdigest(), sha256)
    return content


def open_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a corpus, in a folder that `pkmlm tokenize` wrote.

    Raises:
        UserError: it is missing, or is not the one that made the tokens.
    """
    path = tokenizer_file(Path(folder))
    return Tokenizer(read_checked(path, read_index(Path(folder)).tokenizer_sha256), str(path))
