"""A folder of tokens: its index, and its files, which are mapped into memory and checked block by block.

`index.json` is written last and checked first. Beside it are the tokenizer (`tokenizer.model` or `tokenizer.json`)
and, for each split,
  SPLIT-00000.bin ...  token ids, little-endian, each document followed by `eos`;
  SPLIT.documents      little-endian int64: where each document begins, then the number of tokens;
  SPLIT.hashes         sha256 digests (32 bytes) of every 256 KiB of the shards, then of SPLIT.documents.
"""

import hashlib
import io
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from pkmlm.data.tokenizer import Tokenizer
from pkmlm.data.tokenizer_file import tokenizer_file
from pkmlm.errors import UserError, read_errors
from pkmlm.files import json_text, open_file, read_bytes, read_json, size_of, write_json

FORMAT = "pkmlm-tokens-1"
FILE = "index.json"
HASHED = 256 << 10  # bytes that one digest covers
DIGEST = 32  # bytes of a sha256
OWN_FILES = re.compile(r"index\.json|tokenizer\.(model|json)|(train|valid|test)(-\d{5}\.bin|\.documents|\.hashes)")

STRICT = ConfigDict(extra="forbid", strict=True)
Count = Annotated[int, Field(ge=0)]
Record = TypeVar("Record")


@dataclass(frozen=True, config=STRICT)
class Shard:
    name: str
    tokens: Count
    bytes: Count


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
    hashes_sha256: str
    sources: tuple[Origin, ...]


@dataclass(frozen=True, config=STRICT)
class Index:
    """The content of `index.json`, except for its format and its own sha256.

    `held_out` is the percentage of the documents of train's sources that each split without its own sources was given.
    """

    dtype: Literal["uint16", "uint32"]
    vocab_size: Count
    eos: Count
    tokenizer_sha256: str
    separator: str | None
    splits: dict[str, Split]
    held_out: dict[str, float] = Field(default_factory=dict)

    @property
    def sha256(self) -> str:
        """The sha256 of this index and, through the hashes in it, of every token: the identity of the corpus."""
        return sha256_of_record(self)

    def write(self, folder: Path) -> None:
        write_json(folder / FILE, stamped(self, FORMAT))


def dtype_for(vocab_size: int) -> Literal["uint16", "uint32"]:
    """The smallest type that holds every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def read_index(folder: Path) -> Index:
    """Read and check the index of a folder that `pkmlm tokenize` wrote.

    Raises:
        UserError: the index is missing, damaged or of another format, or the folder has a file of tokens that the index
            does not list.
    """
    path = folder / FILE
    if not path.exists():
        raise UserError(f"{folder} holds no tokens (expected {FILE})", f"make them: pkmlm tokenize TEXT... -o {folder}")
    index = read_stamped(path, Index, FORMAT)
    listed = {FILE, tokenizer_file(folder).name}
    for name, split in index.splits.items():
        listed |= {f"{name}.documents", f"{name}.hashes", *(shard.name for shard in split.shards)}
    own = {entry.name for entry in folder.iterdir() if OWN_FILES.fullmatch(entry.name)}
    if unlisted := sorted(own - listed):
        raise damaged(folder / unlisted[0], f"{FILE} does not list it")
    return index


def values_of(record: Any) -> dict[str, Any]:
    """The values of a dataclass, without an empty `held_out`: older indexes were written without it."""
    return asdict(record, dict_factory=lambda pairs: {key: each for key, each in pairs if key != "held_out" or each})


def sha256_of_record(record: Any) -> str:
    """The sha256 of the values of a dataclass."""
    return hashlib.sha256(json.dumps(values_of(record), sort_keys=True).encode()).hexdigest()


def stamped(record: Any, form: str) -> dict[str, Any]:
    """A dataclass as JSON, preceded by the name of its format and the sha256 of the rest."""
    return {"format": form, "sha256": sha256_of_record(record), **values_of(record)}


def read_stamped(path: Path, kind: type[Record], form: str) -> Record:
    """Read a dataclass from the JSON that `stamped` made of it.

    Raises:
        UserError: the file is missing, damaged, or of another format.
    """
    content = read_json(path, "the token index")
    if not isinstance(content, dict) or content.get("format") != form:
        found = content.get("format") if isinstance(content, dict) else content
        raise UserError(f"{path}: found format {str(found)[:40]!r} (expected {form!r})", "tokenize the text again")
    values = {key: value for key, value in content.items() if key not in ("format", "sha256")}
    try:
        record = TypeAdapter(kind).validate_json(json.dumps(values))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "content"
        raise damaged(path, f"{where}: {first['msg']} (found {str(first['input'])[:40]!r})") from None
    if read_bytes(path) != json_text(stamped(record, form)).encode():
        raise damaged(path, "it differs from what was written")
    return record


def damaged(path: Path, what: str) -> UserError:
    """The error for a file that differs from what `pkmlm tokenize` wrote."""
    return UserError(f"{path} is damaged: {what}", "tokenize the text again, or copy the folder again")


# Reading.


class Corpus:
    """One split of a tokenized corpus: a stream of `tokens` ids in which `eos` follows each of the `documents`.

    Attributes:
        tokens, documents: their numbers; `tokens` includes each `eos`.
        words, bytes: of the text: words as lm-eval counts them, bytes in UTF-8.
        eos, vocab_size, tokenizer_sha256: of the tokenizer.
        splits: the names of all splits of the corpus.
        sha256: of this split's tokens and of where its documents begin: its identity, whatever its sources are called.
        hashes: the `sha256` of the splits "train" and "valid" (if there is one), and under "tokenizer" the tokenizer's:
            all that training depends on.
    """

    def __init__(self, folder: str | Path, split: str):
        """Open a split: check its sizes and its list of hashes, but do not read tokens yet.

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
        """The ids from `start` up to `stop`: int64, (stop - start,); the caller may change the array.

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
        """Read and check all tokens.

        Raises:
            UserError: a file is damaged; the message names it.
        """
        for file in [*self._files, self._documents]:
            file.read(0, file.size)


class CheckedFile:
    """A file of numbers, mapped into memory; each 256 KiB is checked against its sha256 when first read."""

    def __init__(self, path: Path, dtype: np.dtype[Any], size: int, digests: bytes):
        """Map the file, which must hold exactly `size` numbers; `digests` are those of its blocks."""
        expected = size * dtype.itemsize
        with read_errors(path):
            found = size_of(path)
        if found != expected:  # reading such a map would kill the process
            what = "the file is missing" if found is None else f"it has {found:,} bytes"
            raise damaged(path, f"{what} (expected {expected:,} bytes)")
        self.path = path
        self.size = size
        self.digests = digests
        with read_errors(path), open_file(path) as file:
            self.numbers = np.memmap(file, dtype, "r", shape=(size,))
        self.block = HASHED // dtype.itemsize
        self.unread = bytearray(b"\1") * (len(digests) // DIGEST)

    def read(self, start: int, stop: int) -> np.ndarray:
        """A view of the numbers from `start` up to `stop`, or up to the end of the file."""
        stop = min(stop, self.size)
        first, last = start // self.block, -(-stop // self.block)
        for block in range(first, last):
            if self.unread[block]:
                self._check(block)
        return self.numbers[start:stop]

    def _check(self, block: int) -> None:
        # Read, not mapped: faulting the map in page by page takes seven times as long.
        with read_errors(self.path), open_file(self.path) as file:
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
    ids, places = np.dtype(index.dtype).newbyteorder("<"), np.dtype("<i8")
    files = [(shard.name, ids, shard.tokens) for shard in about.shards]
    files.append((f"{split}.documents", places, about.documents + 1))
    hashes = io.BytesIO(read_checked(folder / f"{split}.hashes", about.hashes_sha256))
    opened = []
    for name, dtype, size in files:
        blocks = -(-size * dtype.itemsize // HASHED)
        opened.append(CheckedFile(folder / name, dtype, size, hashes.read(blocks * DIGEST)))
    *shards, documents = opened
    return shards, documents


def read_checked(path: Path, sha256: str) -> bytes:
    """Read a file and check it against its sha256 in the index."""
    with read_errors(path):
        data = read_bytes(path)
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise damaged(path, f"its sha256 is {found[:16]}... (expected {sha256[:16]}...)")
    return data


def open_tokenizer(folder: str | Path, index: Index | None = None) -> Tokenizer:
    """The tokenizer of a corpus.

    Args:
        folder: a folder that `pkmlm tokenize` wrote.
        index: its index; None: read it from the folder.

    Raises:
        UserError: it is missing, or is not the one that made the tokens.
    """
    path = tokenizer_file(Path(folder))
    return Tokenizer(read_checked(path, (index or read_index(Path(folder))).tokenizer_sha256), str(path))
