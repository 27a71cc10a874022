"""Which bytes of a corpus each of several machines encodes: cut between documents, and the same on every machine.

The stored bytes of a split's sources, one after another, are shared out evenly. Plain JSON lines, and plain text with a
separator, are cut where the first document ends after an even share; any other file is whole in the part that its
middle falls in. Only sizes, and the text around the cuts, are read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pkmlm.data.sources import READ, Source, compression_of


@dataclass(frozen=True)
class Range:
    """The bytes of a source, from `start` up to `stop`, that a part (counted from 1) encodes."""

    part: int
    start: int
    stop: int


@dataclass(frozen=True)
class Division:
    """A source of the whole corpus, and its ranges in order; separators at the cuts belong to no range."""

    name: str
    bytes: int
    ranges: tuple[Range, ...]


def divide(sources: Sequence[Source], separator: str | None, parts: int) -> tuple[Division, ...]:
    """Share the files of a split out to `parts` parts.

    Raises:
        UserError: a file cannot be read.
    """
    sizes = [source.size or 0 for source in sources]
    shares = [sum(sizes) * part // parts for part in range(1, parts)]
    divisions = []
    before = 0
    for source, size in zip(sources, sizes, strict=True):
        places = [share - before for share in shares]
        divisions.append(Division(source.plain_name, size, ranges_of(source, size, places, separator)))
        before += size
    return tuple(divisions)


def ranges_of(source: Source, size: int, places: Sequence[int], separator: str | None) -> tuple[Range, ...]:
    """Who reads what of one file of `size` bytes; `places`: where the even shares end, counted from its beginning."""
    end = end_of_documents(source, separator)
    if end is None:
        return (Range(1 + sum(place <= size // 2 for place in places), 0, size),)
    ranges = []
    part, start = 1, 0
    for next_part, place in enumerate(places, 2):
        if place > start:
            if place >= size:
                break
            stop = next_document_end(source, end, place)
            if stop is None:
                break
            ranges.append(Range(part, start, stop))
            start = stop + len(end)
        part = next_part
    return (*ranges, Range(part, start, size))


def end_of_documents(source: Source, separator: str | None) -> bytes | None:
    """The bytes between the documents of a file; None: it cannot be cut."""
    with source.open() as stream:
        head = stream.file.read(4)
    if source.compression or compression_of(head):
        return None
    if source.format == "txt":
        return separator.encode() if separator is not None else None
    return b"\n" if source.format == "jsonl" else None


def next_document_end(source: Source, end: bytes, place: int) -> int | None:
    """Where the first separator at or after `place` begins; None: there is none.

    One that overlaps an earlier one ("\\n\\n" within "\\n\\n\\n") is passed over: whether it divides documents depends
    on the text before it.
    """
    with source.open() as stream:
        here = max(0, place - len(end) + 1)
        stream.file.seek(here)
        latest = here - len(end)
        held = b""
        while block := stream.file.read(READ):
            held += block
            at = held.find(end)
            while at >= 0:
                if here + at >= place and here + at - latest >= len(end):
                    return here + at
                latest = here + at
                at = held.find(end, at + 1)
            passed = max(0, len(held) - len(end) + 1)
            here, held = here + passed, held[passed:]
    return None
