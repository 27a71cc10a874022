"""Join the parts of a corpus, encoded by several machines, into what one machine would have written."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from pkmlm.data.corpus import Index, Part, open_files, open_tokenizer, read_part
from pkmlm.data.shards import Progress, TokenStream, Warn, warn_of_documents, write_index, write_splits
from pkmlm.data.text import Tally
from pkmlm.errors import UserError
from pkmlm.files import writing_folder


def join_parts(
    folder: Path,
    places: Sequence[Path],
    *,
    replace: bool = False,
    progress: Progress = lambda stage, done, total: None,
    warn: Warn = lambda text: None,
) -> Index:
    """Join all parts of a corpus into a new folder: byte for byte what `write_corpus` makes of the same files.

    The text is not needed. The tokens are read once, checked against their hashes and written once; the parts are kept.

    Args:
        folder: where to write.
        places: the folders of the parts, in any order.
        replace: whether to replace a folder that is not empty, once the new one is complete.
        progress: called with a split, the bytes of its tokens read so far, and their total.
        warn: called with each warning about the documents.

    Raises:
        UserError: a part is missing, damaged, given twice, or of another corpus or tokenizer; there is no text; the new
            folder is one of the parts, or already exists; (exit code 1) the disk is full.
    """
    if os.path.realpath(folder) in map(os.path.realpath, places):
        raise UserError(f"-o {folder} is one of the parts to join (expected another folder)", "choose another -o")
    parts = read_parts(places)
    first = parts[0][1].index
    tokenizer = open_tokenizer(parts[0][0], first)
    streams = {}
    for split in first.splits:
        read = [part.index.splits[split] for _, part in parts]
        counts = {
            name: sum(getattr(about, name) for about in read) for name in ("documents", "empty", "words", "bytes")
        }
        origins = [origin for about in read for origin in about.sources]
        streams[split] = TokenStream(joined_tokens(parts, split, progress), Tally(**counts), origins)
    with writing_folder(folder, replace=replace) as place:
        index = write_splits(place, streams, tokenizer, first.separator, first.held_out)
        write_index(place, index)
    warn_of_documents(folder, index, tokenizer, warn)
    return index


def read_parts(places: Sequence[Path]) -> list[tuple[Path, Part]]:
    """The folders and records of all parts of one corpus, in order."""
    parts: dict[int, tuple[Path, Part]] = {}
    read = [read_part(place) for place in places]
    first = read[0]
    expected = first.identity
    for place, part in zip(places, read, strict=True):
        found = part.identity
        for name in {**expected, **found}:
            if found.get(name) != expected.get(name):
                what = f"its {name} is {found.get(name, 'missing')} (expected {expected.get(name, 'none')})"
                raise UserError(f"{place} is not a part of the same corpus as {places[0]}: {what}")
        if part.part in parts:
            raise UserError(f"part {part.part} of {part.parts} is given twice: {parts[part.part][0]} and {place}")
        parts[part.part] = place, part
    if missing := [str(number) for number in range(1, first.parts + 1) if number not in parts]:
        some = f"{'s' * (len(missing) > 1)} {', '.join(missing[:8])}{', ...' * (len(missing) > 8)}"
        raise UserError(
            f"of {first.parts} parts, part{some} {'are' if len(missing) > 1 else 'is'} missing",
            f"make it: pkmlm tokenize ... --shard {missing[0]}/{first.parts}, with the options of the others",
        )
    return [parts[number] for number in sorted(parts)]


def joined_tokens(parts: Sequence[tuple[Path, Part]], split: str, progress: Progress) -> Iterator[np.ndarray]:
    """The tokens of a split, part after part, each block checked against its hash."""
    total = sum(shard.bytes for _, part in parts for shard in part.index.splits[split].shards)
    done = 0
    progress(split, done, total)
    for place, part in parts:
        shards, _ = open_files(place, split, part.index)
        for file in shards:
            for start in range(0, file.size, file.block):
                block = file.read(start, start + file.block)
                yield block
                done += block.nbytes
                progress(split, done, total)
