"""One part of a corpus that several machines encode: a folder like that of a corpus, with `part.json` for its index."""

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pkmlm.data.division import Division, Range, divide
from pkmlm.data.index import PART, Index, contradiction, damaged, read_stamped, stamped
from pkmlm.data.shards import Encoding, write_content
from pkmlm.data.sources import READ, Source
from pkmlm.errors import UserError
from pkmlm.runs.files import write_json, writing_folder

FORMAT = "pkmlm-tokens-part-1"


@dataclass(frozen=True)
class Whole:
    """The sha256 of a source that several parts share, and of each of its ranges."""

    sha256: str
    ranges: tuple[str, ...]


@dataclass(frozen=True)
class Part:
    """The content of `part.json`.

    Attributes:
        part, parts: which it is, from 1, of how many.
        field: the key or column that was read.
        divisions: of each split, all sources of the corpus and who reads them; the same in all parts.
        wholes: of each split, the shared sources whose first range is this part's, in order.
        index: of this part's tokens; its sources are the ranges that it read.
    """

    part: int
    parts: int
    field: str
    divisions: dict[str, tuple[Division, ...]]
    wholes: dict[str, tuple[Whole, ...]]
    index: Index

    def ranges(self, split: str) -> list[tuple[Division, Range]]:
        """What this part reads of a split, in order."""
        every = ((division, own) for division in self.divisions[split] for own in division.ranges)
        return [(division, own) for division, own in every if own.part == self.part]

    def shared(self, split: str) -> list[Division]:
        """The sources of which other parts read the rest, and this one the beginning."""
        return [each for each in self.divisions[split] if len(each.ranges) > 1 and each.ranges[0].part == self.part]


def write_part(
    folder: Path,
    sources: Mapping[str, Sequence[Source]],
    encoding: Encoding,
    part: int,
    parts: int,
    *,
    replace: bool = False,
) -> Index:
    """Tokenize one part of every split into a new folder; arguments, and errors, as of `write_corpus`.

    Args:
        sources: files, all those of the whole corpus.
        part, parts: which part, from 1, of how many.

    Returns:
        The index of this part.
    """
    divisions = {split: divide(inputs, encoding.separator, parts) for split, inputs in sources.items()}
    own = {split: own_sources(inputs, divisions[split], part) for split, inputs in sources.items()}
    with writing_folder(folder, replace=replace) as place:
        index = write_content(place, own, encoding)
        record = Part(part, parts, encoding.field, divisions, {}, index)
        wholes = {}
        for split, inputs in sources.items():
            refuse_changed(record, split)
            shared, each_source = record.shared(split), zip(divisions[split], inputs, strict=True)
            wholes[split] = tuple(whole_of(source, each) for each, source in each_source if each in shared)
        write_json(place / PART, stamped(dataclasses.replace(record, wholes=wholes), FORMAT))
    return index


def own_sources(sources: Sequence[Source], divisions: Sequence[Division], part: int) -> list[Source]:
    """What a part reads: whole files, and ranges of those that are shared."""
    own = []
    for source, division in zip(sources, divisions, strict=True):
        for each in division.ranges:
            if each.part == part:
                shared = len(division.ranges) > 1
                own.append(dataclasses.replace(source, start=each.start, stop=each.stop) if shared else source)
    return own


def refuse_changed(part: Part, split: str) -> None:
    """Refuse sources that were not of their size any more when they were read."""
    for (division, own), origin in zip(part.ranges(split), part.index.splits[split].sources, strict=True):
        if origin.bytes != own.stop - own.start:
            raise UserError(
                f"{division.name} changed while it was read: {origin.bytes:,} bytes from byte {own.start:,} "
                f"(expected {own.stop - own.start:,})"
            )


def whole_of(source: Source, division: Division) -> Whole:
    """Hash a shared source, and each of its ranges, in one pass."""
    whole, ranges = hashlib.sha256(), []
    with source.open() as stream:
        for each in division.ranges:
            for block in blocks_up_to(stream.file, each.start):  # the separator at the cut, which no range holds
                whole.update(block)
            own = hashlib.sha256()
            for block in blocks_up_to(stream.file, each.stop):
                whole.update(block)
                own.update(block)
            ranges.append(own.hexdigest())
    return Whole(whole.hexdigest(), tuple(ranges))


def blocks_up_to(file: IO[bytes], stop: int) -> Iterator[bytes]:
    """The bytes of a file from where it stands up to `stop`, or to its end."""
    while (room := stop - file.tell()) > 0 and (block := file.read(min(READ, room))):
        yield block


def read_part(place: Path) -> Part:
    """Read and check the `part.json` of a folder."""
    path = place / PART
    if not path.exists():
        raise UserError(f"{place} holds no part of a corpus (expected {PART})", "make it: pkmlm tokenize --shard I/N")
    part: Part = read_stamped(path, Part, FORMAT)
    if problem := contradiction(part.index, partial=True) or inconsistency(part):
        raise damaged(path, problem)
    return part


def inconsistency(part: Part) -> str:
    """What of a part contradicts the rest of it, or nothing."""
    if not 1 <= part.part <= part.parts:
        return f"it is part {part.part} of {part.parts}"
    if not set(part.divisions) == set(part.wholes) == set(part.index.splits):
        return "its splits are not those of its sources"
    for split, about in part.index.splits.items():
        sizes = [own.stop - own.start for _, own in part.ranges(split)]
        if sizes != [origin.bytes for origin in about.sources]:
            return f"the sources of {split} are not its ranges of them"
        if [len(each.ranges) for each in part.shared(split)] != [len(whole.ranges) for whole in part.wholes[split]]:
            return f"the shared sources of {split} are not hashed"
        if any(not 1 <= own.part <= part.parts for each in part.divisions[split] for own in each.ranges):
            return f"the sources of {split} are for other parts"
    return ""
