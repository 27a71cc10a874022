"""Folders of tokens: their indexes, and their files, which are mapped into memory and checked when they are first read.

In each folder, `index.json` is written last and checked first; it holds the sha256 of every other file. Beside it are
the tokenizer (`tokenizer.model` or `tokenizer.json`) and, for each split,
  SPLIT-00000.bin ...  token ids, little-endian, each document followed by `eos`;
  SPLIT.documents      little-endian int64: where each document begins, then the number of tokens.
"""

import hashlib
import json
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from pkmlm.data.tokenizer import Tokenizer
from pkmlm.data.tokenizer_file import TOKENIZERS, tokenizer_file
from pkmlm.errors import UserError, read_errors
from pkmlm.files import open_file, read_bytes, sha256_of, size_of, write_json

FILE = "index.json"
OWN_FILES = re.compile(r"index\.json|tokenizer\.(model|json)|(train|valid|test)(-\d{5}\.bin|\.documents|\.answers)")

Folders = str | Path | Sequence[str | Path]  # one folder that `pkmlm tokenize -o` wrote, or several with one tokenizer

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
    """`tokens` includes the `eos` of each document; `words` and `bytes` (UTF-8) count the text, without prompts."""

    tokens: Count
    documents: Count
    empty: Count
    words: Count
    bytes: Count
    shards: tuple[Shard, ...]
    documents_sha256: str
    answers_sha256: str | None
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
    begin: Count
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

    def write(self, folder: Path) -> "Index":
        """Write `index.json`; return it as written."""
        index = self.sealed()
        write_json(folder / FILE, asdict(index))
        return index


def dtype_for(vocab_size: int) -> Literal["uint16", "uint32"]:
    """The smallest type that holds every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def holds_tokens(folder: str | Path) -> bool:
    """Whether there are tokens in a folder."""
    return (Path(folder) / FILE).exists()


def read_index(folder: Path) -> Index:
    """Read and check the index of a folder that `pkmlm tokenize` wrote.

    Raises:
        UserError: the index is missing, damaged or of another format.
    """
    path = folder / FILE
    if not holds_tokens(folder):
        hint = f"if they have moved, add -s data.dir=DIR; to make them: pkmlm tokenize TEXT... -o {folder}"
        raise UserError(f"{folder} holds no tokens (expected {FILE})", hint)
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


def read_indexes(folders: Folders) -> list[tuple[Path, Index]]:
    """The folders of a corpus and their indexes, in order.

    Raises:
        UserError: as `read_index`; or no folder is named, one twice, or two have different tokenizers.
    """
    paths = [folders] if isinstance(folders, str | Path) else folders
    if not paths:
        raise UserError("no folder of tokens is named", "give one that `pkmlm tokenize` wrote")
    if len({Path(path).resolve() for path in paths}) < len(paths):
        raise UserError(f"{', '.join(map(str, paths))}: a folder of tokens is named twice", "name each once")
    first, *others = found = [(Path(path), read_index(Path(path))) for path in paths]
    for folder, index in others:
        if index.tokenizer_sha256 != first[1].tokenizer_sha256:
            raise UserError(
                f"{folder} has another tokenizer ({index.tokenizer_sha256[:12]}) than {first[0]} "
                f"({first[1].tokenizer_sha256[:12]})",
                f"tokenize the text of {folder} again with --tokenizer {tokenizer_file(first[0])}",
            )
    return found


def damaged(path: Path, what: str) -> UserError:
    """The error for a file that differs from what `pkmlm tokenize` wrote."""
    return UserError(f"{path} is damaged: {what}", "tokenize the text again, or copy the folder again")


def content_sha256(splits: Sequence[Split]) -> str:
    """What identifies the tokens of a split, in one or several folders, and what is learnt of them. Their documents
    follow from the tokens.
    """
    found = [shard.sha256 for split in splits for shard in split.shards]
    found += [split.answers_sha256 for split in splits if split.answers_sha256 is not None]
    return hashlib.sha256(" ".join(found).encode()).hexdigest()


# Reading.


class Corpus:
    """One split of a tokenized corpus: a stream of `tokens` ids in which `eos` follows each of the `documents`.

    Attributes:
        folders: where it is, in the order in which they are read; name: what errors call them.
        tokens, documents: their numbers; `tokens` includes each `eos`.
        words, bytes: of the text: words as lm-eval counts them, bytes in UTF-8.
        eos, begin, vocab_size, tokenizer_sha256: of the tokenizer.
        splits: the names of all splits of the corpus.
        sha256: of this split's tokens: its identity, whatever its sources are called.
        hashes: the `sha256` of the splits "train" and "valid" (if there is one), and under "tokenizer" the tokenizer's:
            all that training depends on.
    """

    def __init__(self, folders: Folders, split: str):
        """Open a split: check the sizes of its files, but do not read tokens yet.

        Args:
            folders: a folder that `pkmlm tokenize -o` wrote; or several with one tokenizer, whose tokens follow each
                other in this order. Not all of them need to have the split.
            split: "train", "valid" or "test".

        Raises:
            UserError: there is no such corpus or split, or a file is missing, of another size, or damaged.
        """
        indexes = read_indexes(folders)
        self.folders = tuple(folder for folder, _ in indexes)
        self.name = ", ".join(map(str, self.folders))
        self.split = split
        self.splits = tuple(dict.fromkeys(name for _, index in indexes for name in index.splits))
        if split not in self.splits:
            raise UserError(
                f"{self.name} has no split {split!r} (found {', '.join(self.splits)})",
                f"give --split {self.splits[-1]} or --text FILE"
                + (f", or tokenize again with --{split} FILE" if split in ("valid", "test") else ""),
            )
        first = indexes[0][1]
        self.eos, self.begin = first.eos, first.begin
        self.vocab_size, self.tokenizer_sha256 = first.vocab_size, first.tokenizer_sha256
        held = {name: [index.splits[name] for _, index in indexes if name in index.splits] for name in self.splits}
        hashes = {name: content_sha256(splits) for name, splits in held.items()}
        self.sha256 = hashes[split]
        self.hashes = {"tokenizer": self.tokenizer_sha256} | {
            name: sha256 for name, sha256 in hashes.items() if name != "test"
        }
        self.tokens = self.documents = self.words = self.bytes = 0
        self._shards: list[MappedFile] = []
        self._starts: list[int] = []  # the first token of each shard
        self._documents: list[tuple[MappedFile, int, int]] = []  # of a folder, with its first document and first token
        self._answers: list[MappedFile | None] = []  # of each folder, the numbers of tokens that are learnt
        ids, places = np.dtype(first.dtype).newbyteorder("<"), np.dtype("<i8")
        for folder, index in indexes:
            if split not in index.splits:
                continue
            about = index.splits[split]
            starts = MappedFile(folder / f"{split}.documents", places, about.documents + 1, about.documents_sha256)
            self._documents.append((starts, self.documents, self.tokens))
            lengths = folder / f"{split}.answers"
            digest = about.answers_sha256
            self._answers.append(None if digest is None else MappedFile(lengths, places, about.documents, digest))
            for shard in about.shards:
                self._shards.append(MappedFile(folder / shard.name, ids, shard.tokens, shard.sha256))
                self._starts.append(self.tokens)
                self.tokens += shard.tokens
            self.documents += about.documents
            self.words += about.words
            self.bytes += about.bytes

    def read(self, start: int, stop: int) -> np.ndarray:
        """The ids from `start` up to `stop`: int64, (stop - start,); the caller may change the array.

        Raises:
            IndexError: they are not all in the corpus.
            UserError: a shard that is read for the first time is damaged.
        """
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"tokens {start}..{stop} of {self.tokens}")
        ids = np.empty(stop - start, np.int64)
        shard = bisect_right(self._starts, start) - 1
        filled = 0
        while filled < len(ids):
            offset = start + filled - self._starts[shard]
            part = self._shards[shard].read(offset, offset + len(ids) - filled)
            ids[filled : filled + len(part)] = part
            filled += len(part)
            shard += 1
        return ids

    def as_input(self, ids: np.ndarray) -> np.ndarray:
        """Ids of the stream as a model reads them: what ends a document begins the next one."""
        return ids if self.begin == self.eos else np.where(ids == self.eos, self.begin, ids)

    def boundaries(self, first: int, stop: int) -> np.ndarray:
        """Where documents `first` up to `stop` begin and where the last of them ends: int64, (stop - first + 1,).

        Raises:
            IndexError: there are no such documents.
            UserError: the list of documents is damaged.
        """
        if not 0 <= first < stop <= self.documents:
            raise IndexError(f"documents {first}..{stop} of {self.documents}")
        places: list[np.ndarray] = []
        for starts, document, token in self._documents:
            begin, end = max(first - document, 0), min(stop - document, starts.size - 1)
            if begin < end:
                places.append(starts.read(begin, end + 1) + token)
        return np.concatenate([*(each[:-1] for each in places), places[-1][-1:]])

    def document(self, i: int) -> np.ndarray:
        """The ids of document `i` (from 0), without its `eos`: integers, (n,), mapped from its file unless that ends
        within the document; raises as `boundaries` and `read` do.
        """
        start, end = self.boundaries(i, i + 1).tolist()
        shard, stop = bisect_right(self._starts, start) - 1, end - 1
        offset = start - self._starts[shard]
        ids = np.asarray(self._shards[shard].read(offset, offset + stop - start))
        return ids if len(ids) == stop - start else self.read(start, stop)

    @property
    def has_answers(self) -> bool:
        """Whether documents have prompts, of which nothing is learnt."""
        return any(lengths is not None for lengths in self._answers)

    @property
    def scored(self) -> int:
        """The tokens whose text `words` and `bytes` count: those of answers, or of whole documents, without ends.
        Raises as `boundaries` does.
        """
        learnt = int(self.answer_lengths(0, self.documents).sum()) if self.has_answers else self.tokens
        return learnt - self.documents

    def answer_lengths(self, first: int, stop: int) -> np.ndarray:
        """How many tokens at the end of documents `first` up to `stop` are learnt, each with its `eos`: int64; all of a
        document without a prompt. Raises as `boundaries` does.
        """
        found = np.diff(self.boundaries(first, stop))
        for (_, document, _), lengths in zip(self._documents, self._answers, strict=True):
            if lengths is not None:
                begin, end = max(first - document, 0), min(stop - document, lengths.size)
                if begin < end:
                    found[document + begin - first : document + end - first] = lengths.read(begin, end)
        return found

    def learnt(self, start: int, stop: int) -> np.ndarray:
        """Which of the tokens from `start` up to `stop` are learnt: bool, (stop - start,)."""
        mask = np.ones(stop - start, bool)
        for (starts, _, token), lengths in zip(self._documents, self._answers, strict=True):
            if lengths is None:
                continue
            places = starts.read(0, starts.size)
            document = max(0, int(np.searchsorted(places, start - token, "right")) - 1)
            while document < lengths.size and token + places[document] < stop:
                prompt = token + int(places[document + 1]) - int(lengths.read(document, document + 1)[0])
                mask[max(0, token + int(places[document]) - start) : max(0, prompt - start)] = False
                document += 1
        return mask

    def verify(self) -> None:
        """Check every byte of the split and of its tokenizer.

        Raises:
            UserError: a file is damaged; the message names it.
        """
        for folder in self.folders:
            read_checked(tokenizer_file(folder), self.tokenizer_sha256)
        for file in [*self._shards, *(starts for starts, _, _ in self._documents), *filter(None, self._answers)]:
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
        self.size = size
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


def open_tokenizer(folders: Folders) -> Tokenizer:
    """The tokenizer of a corpus in one or several folders.

    Raises:
        UserError: it is missing, or is not the one that made the tokens.
    """
    folder, index = read_indexes(folders)[0]
    path = tokenizer_file(folder)
    if not path.exists():
        message = f"{folder} has lost its tokenizer (expected {' or '.join(TOKENIZERS)})"
        raise UserError(message, "copy the folder of tokens again, or tokenize again", exit_code=1)
    return Tokenizer(read_checked(path, index.tokenizer_sha256), str(path))
