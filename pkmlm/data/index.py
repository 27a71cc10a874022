"""What a folder of tokens says about itself: `index.json` (of a part of a corpus `part.json`), written last and checked
first.

The folder holds `tokenizer.model`, and for each split
  SPLIT-00000.bin ...  token ids, little-endian, each document followed by `eos`;
  SPLIT.documents      little-endian int64: where each document begins, then the number of tokens;
  SPLIT.hashes         sha256 digests (32 bytes) of every 256 KiB of the shards, then of SPLIT.documents.
"""

import hashlib
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from pkmlm.errors import UserError
from pkmlm.runs.files import json_text, read_json, write_json

FORMAT = "pkmlm-tokens-1"
PART_FORMAT = "pkmlm-tokens-part-2"
FILE = "index.json"
PART = "part.json"  # replaces index.json in a folder that holds one part of a corpus
TOKENIZER = "tokenizer.model"
HASHED = 256 << 10  # bytes that one digest covers
DIGEST = 32  # bytes of a sha256
TOKEN_BYTES = {"uint16": 2, "uint32": 4}
OWN_FILES = re.compile(r"(index|part)\.json|tokenizer\.model|(train|valid|test)(-\d{5}\.bin|\.documents|\.hashes)")

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
    """The content of `index.json`, except for its format and its own sha256."""

    dtype: Literal["uint16", "uint32"]
    vocab_size: Count
    eos: Count
    tokenizer_sha256: str
    separator: str | None
    splits: dict[str, Split]

    @property
    def sha256(self) -> str:
        """The sha256 of this index, and through its hashes of every token: the identity of the corpus."""
        return sha256_of_record(self)

    def write(self, folder: Path) -> None:
        write_json(folder / FILE, stamped(self, FORMAT))


@dataclass(frozen=True, config=STRICT)
class PartFile:
    """A file of the whole corpus, and the part, counted from 1, that encodes it."""

    name: str
    bytes: Count
    part: Count


@dataclass(frozen=True, config=STRICT)
class Part:
    """The content of `part.json`, which replaces `index.json` in a folder with one part of a corpus.

    Attributes:
        part, parts: which it is, from 1, of how many.
        field: the key or column that was read.
        files: all files of each split of the corpus, in order; the same in all parts.
        index: of the tokens of this part; its sources are the files that this part encodes.
    """

    part: Count
    parts: Count
    field: str
    files: dict[str, tuple[PartFile, ...]]
    index: Index

    @property
    def identity(self) -> dict[str, object]:
        """What all parts of a corpus have in common, by names for errors."""
        common = {
            "number of parts": self.parts,
            "tokenizer": self.index.tokenizer_sha256[:16],
            "--separator": repr(self.index.separator),
            "--field": repr(self.field),
        }
        for split, files in self.files.items():
            for number, file in enumerate(files, 1):
                common[f"file {number} of {split}"] = f"{file.name} of {file.bytes:,} bytes"
        return common

    def write(self, folder: Path) -> None:
        write_json(folder / PART, stamped(self, PART_FORMAT))


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
        if (folder / PART).exists():
            raise UserError(
                f"{folder} is one part of a corpus (expected the whole)", "join its parts: pkmlm tokenize --join"
            )
        raise UserError(f"{folder} holds no tokens (expected {FILE})", f"make them: pkmlm tokenize TEXT... -o {folder}")
    index = read_stamped(path, Index, FORMAT)
    listed = {FILE, TOKENIZER}
    for name, split in index.splits.items():
        listed |= {f"{name}.documents", f"{name}.hashes", *(shard.name for shard in split.shards)}
    own = {entry.name for entry in folder.iterdir() if OWN_FILES.fullmatch(entry.name)}
    if unlisted := sorted(own - listed):
        raise damaged(folder / unlisted[0], f"{FILE} does not list it")
    return index


def read_part(folder: Path) -> Part:
    """Read and check the `part.json` of a folder.

    Raises:
        UserError: the folder holds no part, or its `part.json` is damaged or of another format.
    """
    path = folder / PART
    if not path.exists():
        raise UserError(f"{folder} holds no part of a corpus (expected {PART})", "make it: pkmlm tokenize --shard I/N")
    return read_stamped(path, Part, PART_FORMAT)


def sha256_of_record(record: Any) -> str:
    """The sha256 of the values of a dataclass."""
    return hashlib.sha256(json.dumps(asdict(record), sort_keys=True).encode()).hexdigest()


def stamped(record: Any, form: str) -> dict[str, Any]:
    """A dataclass as JSON, preceded by the name of its format and the sha256 of the rest."""
    return {"format": form, "sha256": sha256_of_record(record), **asdict(record)}


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
    if path.read_bytes() != json_text(stamped(record, form)).encode():
        raise damaged(path, "it is not as it was written")
    return record


def damaged(path: Path, what: str) -> UserError:
    """The error for a file that differs from what `pkmlm tokenize` wrote."""
    return UserError(f"{path} is damaged: {what}", "tokenize the text again, or copy the folder again")
