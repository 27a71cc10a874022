"""Join the parts of a corpus, which several machines have encoded, into what one would have written: byte for byte."""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from pkmlm.data.corpus import mapped_files, tokenizer_of
from pkmlm.data.index import TOKENIZER, Index, Origin, Split, damaged
from pkmlm.data.parts import Part, read_part
from pkmlm.data.shards import SHARD_BYTES, Watch, no_text, write_tokens
from pkmlm.data.text import Tally
from pkmlm.errors import UserError
from pkmlm.runs.files import writing, writing_folder

Parts = Sequence[tuple[Path, Part]]  # in order, from 1


def join_parts(
    folder: Path,
    places: Sequence[Path],
    *,
    replace: bool = False,
    shard_bytes: int = SHARD_BYTES,
    watch: Watch = lambda split, count: None,
) -> Index:
    """Join all parts of a corpus, in any order, into a new folder: what `write_corpus` makes of the same sources.

    The text is not needed; the tokens are read once, checked against their hashes, and written once. The parts stay.

    Args:
        watch: called as watch(split, bytes of its tokens read so far).

    Raises:
        UserError: a part is missing, damaged, given twice, or of another corpus or tokenizer; no text; no room; the
            new folder is one of the parts.
    """
    if os.path.realpath(folder) in map(os.path.realpath, places):
        raise UserError(f"-o {folder} is one of the parts to join (expected another folder)", "the parts stay")
    parts = read_parts(places)
    first_place, first = parts[0]
    tokenizer = tokenizer_of(first_place, first.index.tokenizer_sha256)
    sources = {split: joined_origins(parts, split) for split in first.divisions}
    with writing_folder(folder, replace=replace) as place:
        with writing(place / TOKENIZER) as file:
            file.write(tokenizer.model_bytes)
        splits = {
            split: join_split(place, split, parts, origins, shard_bytes, watch) for split, origins in sources.items()
        }
        index = dataclasses.replace(first.index, splits=splits)
        index.write(place)
    return index


def read_parts(places: Sequence[Path]) -> Parts:
    """All parts of one corpus, in order."""
    parts: dict[int, tuple[Path, Part]] = {}
    read = [(place, read_part(place)) for place in places]
    first_place, first = read[0]
    for place, part in read:
        if problem := difference(first, part):
            raise UserError(f"{place} is no part of the same corpus as {first_place}: {problem}")
        if part.part in parts:
            raise UserError(f"part {part.part} of {part.parts} is there twice: {parts[part.part][0]} and {place}")
        parts[part.part] = place, part
    absent = (str(number) for number in range(1, first.parts + 1) if number not in parts)
    if missing := list(islice(absent, 9)):  # a few at most: the number of parts is read from a file, and may be absurd
        some = ", ".join(missing[:8]) + ", ..." * (len(missing) > 8)
        raise UserError(
            f"part {some} of {first.parts} is missing (found {len(parts)} of them)",
            f"make it: pkmlm tokenize ... --shard {missing[0]}/{first.parts}, with the options of the others",
        )
    return [parts[number] for number in sorted(parts)]


def difference(one: Part, other: Part) -> str:
    """Why two parts are not of the same corpus, or nothing."""
    pairs = {
        "number of parts": (other.parts, one.parts),
        "tokenizer": (other.index.tokenizer_sha256[:16], one.index.tokenizer_sha256[:16]),
        "--separator": (other.index.separator, one.index.separator),
        "--field": (other.field, one.field),
        "splits": (list(other.divisions), list(one.divisions)),
    }
    for name, (found, expected) in pairs.items():
        if found != expected:
            return f"its {name} is {found!r} (expected {expected!r})"
    for split, expected_sources in one.divisions.items():
        sources = other.divisions[split]
        if len(sources) != len(expected_sources):
            files = f"{len(sources)} file{'s' * (len(sources) > 1)}"
            return f"it has {files} for {split} (expected {len(expected_sources)})"
        for source, expected_source in zip(sources, expected_sources, strict=True):
            if source != expected_source:
                found, expected = (f"{each.name} of {each.bytes:,} bytes" for each in (source, expected_source))
                return f"for {split} it has {found} (expected {expected}, divided at the same places)"
    return ""


def joined_origins(parts: Parts, split: str) -> tuple[Origin, ...]:
    """The sources of a split, whole; refuses parts that have read different files."""
    read = {part.part: iter(part.index.splits[split].sources) for _, part in parts}
    wholes = {part.part: iter(part.wholes[split]) for _, part in parts}
    origins = []
    for division in parts[0][1].divisions[split]:
        own = [next(read[each.part]) for each in division.ranges]
        if len(own) == 1:
            origins.append(own[0])
            continue
        opener = division.ranges[0].part
        whole = next(wholes[opener])
        for each, origin, expected in zip(division.ranges, own, whole.ranges, strict=True):
            if origin.sha256 != expected:
                raise UserError(
                    f"{parts[each.part - 1][0]} was made from another {division.name} than {parts[opener - 1][0]}: "
                    f"bytes {each.start:,} to {each.stop:,} have sha256 {origin.sha256[:16]}... (expected "
                    f"{expected[:16]}...)",
                    "copy the file again to the machine where it is wrong, and encode that part again",
                )
        origins.append(Origin(division.name, division.bytes, whole.sha256))
    return tuple(origins)


def join_split(
    folder: Path, split: str, parts: Parts, sources: tuple[Origin, ...], shard_bytes: int, watch: Watch
) -> Split:
    """Write the files of one split from those of its parts."""
    watch(split, 0)
    read = [part.index.splits[split] for _, part in parts]
    words, bytes, empty = (sum(getattr(about, name) for about in read) for name in ("words", "bytes", "empty"))
    tally = Tally(words=words, bytes=bytes, empty=empty)
    eos = parts[0][1].index.eos
    about = write_tokens(folder, split, tokens_of(parts, split, watch), eos, shard_bytes, tally, sources)
    if not about.documents:
        raise no_text(split, [origin.name for origin in sources], about.empty)
    return about


def tokens_of(parts: Parts, split: str, watch: Watch) -> Iterator[np.ndarray]:
    """The tokens of a split, part after part, each block checked against its hash."""
    count = 0
    for place, part in parts:
        about = part.index.splits[split]
        shards, _ = mapped_files(place, split, part.index)
        documents = 0
        for file in shards:
            for start in range(0, file.size, file.block):
                block = file.read(start, start + file.block)
                documents += int(np.count_nonzero(block == part.index.eos))
                yield block
                count += block.nbytes
                watch(split, count)
        if documents != about.documents:
            raise damaged(place, f"{split} holds {documents:,} documents (expected {about.documents:,})")
