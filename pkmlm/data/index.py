"""What a tokenized corpus says about itself: `index.json`, written last and checked first.

The folder holds `tokenizer.model`, and for each split
  SPLIT-00000.bin ...  token ids, little-endian, each document followed by `eos`;
  SPLIT.documents      little-endian int64: where each document begins, and at last the number of tokens;
  SPLIT.hashes         sha256 digests (32 bytes) of every 256 KiB of the shards, then of SPLIT.documents.
"""

import hashlib
import json
import re
import typing
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from pkmlm.errors import UserError
from pkmlm.runs.files import json_text, read_json, write_json

FORMAT = "pkmlm-tokens-1"
FILE = "index.json"
PART = "part.json"  # takes the place of index.json in a folder that holds one part of a corpus
TOKENIZER = "tokenizer.model"
HASHED = 256 << 10  # bytes that are hashed together
DIGEST = 32  # bytes of a sha256
SPLITS = ("train", "valid", "test")
OWN_FILES = re.compile(r"(index|part)\.json|tokenizer\.model|(train|valid|test)(-\d{5}\.bin|\.documents|\.hashes)")


@dataclass(frozen=True)
class Shard:
    name: str
    tokens: int
    bytes: int


@dataclass(frozen=True)
class Origin:
    """A source as it was stored when it was read."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Split:
    """`tokens` counts each document's `eos` too; `words` and `bytes` (UTF-8) are those of the text."""

    tokens: int
    documents: int
    empty: int
    words: int
    bytes: int
    shards: tuple[Shard, ...]
    hashes_sha256: str
    sources: tuple[Origin, ...]


@dataclass(frozen=True)
class Index:
    """The content of `index.json`, less its format and its own sha256."""

    dtype: str
    vocab_size: int
    eos: int
    tokenizer_sha256: str
    separator: str | None
    splits: dict[str, Split]

    @property
    def sha256(self) -> str:
        """The sha256 of this index, and through its hashes of every token: the identity of the corpus."""
        return sha256_of_record(self)

    @property
    def files(self) -> set[str]:
        """The names of all files of the corpus."""
        names = {FILE, TOKENIZER}
        for name, split in self.splits.items():
            names |= {f"{name}.documents", f"{name}.hashes", *(shard.name for shard in split.shards)}
        return names

    def write(self, folder: Path) -> None:
        write_json(folder / FILE, stamped(self, FORMAT))


def sha256_of_record(record: Any) -> str:
    """The sha256 of what a dataclass holds."""
    return hashlib.sha256(json.dumps(asdict(record), sort_keys=True).encode()).hexdigest()


def stamped(record: Any, form: str) -> dict[str, Any]:
    """A dataclass as JSON, with the name of its format and the sha256 of the rest."""
    return {"format": form, "sha256": sha256_of_record(record), **asdict(record)}


def dtype_for(vocab_size: int) -> str:
    """The smallest type that holds every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def token_bytes(dtype: str) -> int:
    """Bytes of one id."""
    return {"uint16": 2, "uint32": 4}[dtype]


def read_index(folder: Path) -> Index:
    """Read and check the index of a folder written by `pkmlm tokenize`.

    Raises:
        UserError: it is missing, damaged, of another format, contradicts itself, or does not list a file that is there.
    """
    path = folder / FILE
    if not path.exists():
        if (folder / PART).exists():
            raise UserError(
                f"{folder} is one part of a corpus (expected the whole)", "join its parts: pkmlm tokenize --join"
            )
        raise UserError(f"{folder} holds no tokens (expected {FILE})", f"make them: pkmlm tokenize TEXT... -o {folder}")
    index = read_stamped(path, Index, FORMAT)
    if problem := contradiction(index):
        raise damaged(path, problem)
    own = {entry.name for entry in folder.iterdir() if OWN_FILES.fullmatch(entry.name)}
    if strange := sorted(own - index.files):
        raise damaged(folder / strange[0], "the index knows no such file")
    return typing.cast(Index, index)


def read_stamped(path: Path, kind: Any, form: str) -> Any:
    """Read back a dataclass that was written as `stamped` has it.

    Raises:
        UserError: it is missing, damaged, or of another format.
    """
    content = read_json(path, "the token index")
    if not isinstance(content, dict) or content.get("format") != form:
        found = content.get("format") if isinstance(content, dict) else content
        raise UserError(f"{path}: found format {str(found)[:40]!r} (expected {form!r})", "tokenize the text again")
    del content["format"]
    content.pop("sha256", None)
    record = bound(kind, content, str(path))
    if path.read_bytes() != json_text(stamped(record, form)).encode():
        raise damaged(path, "it is not as it was written")
    return record


def damaged(path: Path, what: str) -> UserError:
    """The error for a file that is not as `pkmlm tokenize` wrote it."""
    return UserError(f"{path} is damaged: {what}", "tokenize the text again, or copy the folder again")


def contradiction(index: Index, partial: bool = False) -> str:
    """What cannot be true of an index, or nothing; `partial`: that of a part, which may have no documents."""
    if index.dtype not in ("uint16", "uint32"):
        return f"dtype is {index.dtype[:40]!r} (expected 'uint16' or 'uint32')"
    if not index.eos < index.vocab_size <= 1 << (8 * token_bytes(index.dtype)):
        return f"{index.vocab_size} ids do not fit {index.dtype}, or eos {index.eos} is not one"
    for name, split in index.splits.items():
        if name not in SPLITS:
            return f"unknown split {name[:40]!r}"
        names = [shard.name for shard in split.shards]
        if names != [f"{name}-{number:05d}.bin" for number in range(len(names))]:
            return f"the shards of {name} are named {str(names[:3])[:80]}"
        if any(shard.bytes != shard.tokens * token_bytes(index.dtype) or shard.tokens < 1 for shard in split.shards):
            return f"the bytes of a shard of {name} are not those of its tokens"
        if any(shard.bytes % HASHED for shard in split.shards[:-1]):
            return f"a shard of {name} before the last is not full"
        least = 0 if partial else 1
        if split.tokens != sum(shard.tokens for shard in split.shards) or not least <= split.documents <= split.tokens:
            return f"the tokens or documents of {name} do not add up"
    return ""


def bound(kind: Any, value: Any, where: str) -> Any:
    """Build `kind` (dataclass, tuple, dict, int, str) from parsed JSON, or name the part that cannot be."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind) and isinstance(value, dict) and set(value) == {field.name for field in fields(kind)}:
        kinds = typing.get_type_hints(kind)
        parts = {key: bound(kinds[key], part, f"{where}: {key}") for key, part in value.items()}
        return typing.cast(Any, kind)(**parts)
    if origin is tuple and isinstance(value, list):
        return tuple(bound(arguments[0], part, where) for part in value)
    if origin is dict and isinstance(value, dict):
        return {key: bound(arguments[1], part, f"{where}: {key}") for key, part in value.items()}
    if (kind is int and type(value) is int and value >= 0) or (kind is str and type(value) is str):
        return value
    if kind == str | None and (value is None or type(value) is str):
        return value
    raise UserError(f"{where}: unexpected content {str(value)[:40]!r}", "it is damaged: tokenize the text again")
