"""What of the text to tokenize is probably not as it was meant: warnings on standard error."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pkmlm.cli.streams import warn

if TYPE_CHECKING:
    from pkmlm.data.index import Index, Split
    from pkmlm.data.sources import Source
    from pkmlm.data.tokenizer import Tokenizer

Warned = set[tuple[str, str]]  # (split, name of a file) that a warning has named


def doubt_sources(sources: Mapping[str, Sequence["Source"]]) -> Warned:
    """Warn, before any work, of a file that is in two splits, by its own name or by a link's."""
    warned: Warned = set()
    seen: dict[str, str] = {}
    for split, inputs in sources.items():
        for source in inputs:
            other = seen.setdefault(os.path.realpath(source.name), split)
            if other != split:
                warn(f"{source.label} is in both {other} and {split}")
                warned.add((split, source.plain_name))
    return warned


def doubt_repeats(files: Mapping[str, Sequence[str]]) -> None:
    """Warn of files that were given for a split again, by name, glob or link: they are read once."""
    from pkmlm.data.sources import expanded

    for split, patterns in files.items():
        seen: set[str] = set()
        again = []
        for name in (name for pattern in patterns for name in expanded(pattern)):
            place = os.path.realpath(name)
            if place in seen:
                again.append(name)
            seen.add(place)
        if again:
            others = f" (and {len(again) - 1:,} more)" if len(again) > 1 else ""
            warn(f"{again[0]}{others} is given again for {split}: it is read once")


def doubt_tokens(folder: Path, index: "Index", tokenizer: "Tokenizer", warned: Warned) -> None:
    """Warn of what reading all the text of a corpus has shown: the same bytes in two splits under two names, documents
    in two splits, and a separator that no split has."""
    seen: dict[str, tuple[str, str]] = {}
    for split, about in index.splits.items():
        for origin in about.sources:
            other, name = seen.setdefault(origin.sha256, (split, origin.name))
            if other != split and origin.bytes and (split, origin.name) not in warned:
                warn(f"{origin.name} is in both {other} and {split}" + f" (as {name})" * (name != origin.name))
    doubt_documents(folder, index, tokenizer)
    separator = index.separator
    if separator is not None and all(map(undivided, index.splits.values())):  # one novel to test on is one document
        crlf = re.sub("(?<!\r)\n", "\r\n", separator)
        hint = f" (where lines end in CRLF, it is {crlf!r})" if crlf != separator else ""
        warn(f"{separator!r} occurs nowhere: each file is one document{hint}")


def doubt_documents(folder: Path, index: "Index", tokenizer: "Tokenizer") -> None:
    """Warn of documents of valid and test that are in train too, and of test in valid: a model is then measured on what
    it has learnt, or was chosen by."""
    from pkmlm.data.corpus import LEAST, overlaps

    for earlier, later, shared, documents in overlaps(folder, index, tokenizer):
        if shared:
            of = f"{shared:,} of {documents:,} document{'s' * (documents != 1)} of {later}"
            are = "is" if shared == 1 else "are"
            warn(f"{of} (of {LEAST} tokens or more) {are} in {earlier} too, word for word")


def undivided(split: "Split") -> bool:
    """Whether the files of a split are all text, as far as their names say, and each is one document."""
    texts = not any(f".{kind}" in origin.name.lower() for origin in split.sources for kind in ("jsonl", "parquet"))
    return texts and split.documents + split.empty == len(split.sources)
