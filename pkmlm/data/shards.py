"""Write a corpus: sources in, tokens in shards out, one pass, in bounded memory.

The files depend on the documents and the tokenizer alone: not on threads, block sizes or the machine.
"""

import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pkmlm.data.index import HASHED, TOKENIZER, Index, Origin, Shard, Split, dtype_for
from pkmlm.data.sources import Source
from pkmlm.data.text import FIELD, Chunk, Tally, read_chunks
from pkmlm.data.tokenizer import Tokenizer
from pkmlm.errors import UserError
from pkmlm.runs.files import writing, writing_folder

SHARD_BYTES = 1 << 30
BATCH_CHARACTERS = 1 << 20
BATCH_CHUNKS = 1 << 13
Watch = Callable[[str, int], None]


@dataclass(frozen=True)
class Encoding:
    """How text becomes tokens.

    Attributes:
        separator, field: where the text and its documents are; see `read_chunks`.
        jobs: threads that encode.
        shard_bytes: the size of a full shard, a multiple of 256 KiB.
        watch: called as watch(split, bytes of its sources read so far), at least before and after each split.
    """

    tokenizer: Tokenizer
    separator: str | None = None
    field: str = FIELD
    jobs: int = 1
    shard_bytes: int = SHARD_BYTES
    watch: Watch = lambda split, count: None


def write_corpus(
    folder: Path, sources: Mapping[str, Sequence[Source]], encoding: Encoding, *, replace: bool = False
) -> Index:
    """Tokenize every split into a new folder, which appears when all of it is there.

    Args:
        folder: where to; an existing folder goes, once the new one is whole, if `replace` says so.
        sources: the sources of each split ("train", "valid", "test").

    Raises:
        UserError: a source cannot be read, holds no text, or holds what the tokenizer cannot spell; no room.
    """
    with writing_folder(folder, replace=replace) as place:
        index = write_content(place, sources, encoding)
        for split, about in index.splits.items():
            if not about.documents:
                raise no_text(split, [source.label for source in sources[split]], about.empty)
        index.write(place)
    return index


def write_content(place: Path, sources: Mapping[str, Sequence[Source]], encoding: Encoding) -> Index:
    """Write all of a corpus, or of a part of one, but its index, which is returned; splits may be empty."""
    tokenizer = encoding.tokenizer
    with writing(place / TOKENIZER) as file:
        file.write(tokenizer.model_bytes)
    return Index(
        dtype=dtype_for(tokenizer.size),
        vocab_size=tokenizer.size,
        eos=tokenizer.eos,
        tokenizer_sha256=tokenizer.sha256,
        separator=encoding.separator,
        splits={split: write_split(place, split, inputs, encoding) for split, inputs in sources.items()},
    )


class SplitReader:
    """One pass over the sources of a split; `tally` and `origins` are whole when `batches` has ended."""

    def __init__(self, split: str, sources: Sequence[Source], separator: str | None, field: str, watch: Watch):
        self.split = split
        self.sources = sources
        self.separator = separator
        self.field = field
        self.watch = watch
        self.tally = Tally()
        self.origins: list[Origin] = []

    def batches(self) -> Iterator[list[Chunk]]:
        """The chunks of all documents that are not empty, about a million characters at a time."""
        batch: list[Chunk] = []
        size = before = 0
        for source in self.sources:
            with source.open() as stream:
                for chunk in read_chunks(stream, self.separator, self.field):
                    self.tally.add(chunk)
                    if chunk.text:
                        batch.append(chunk)
                        size += len(chunk.text)
                    if size >= BATCH_CHARACTERS or len(batch) >= BATCH_CHUNKS:
                        self.watch(self.split, before + stream.count)
                        yield batch
                        batch, size = [], 0
            before += stream.count
            self.origins.append(Origin(source.plain_name, stream.count, stream.digest.hexdigest()))
        if batch:
            self.watch(self.split, before)
            yield batch


def write_split(folder: Path, split: str, sources: Sequence[Source], encoding: Encoding) -> Split:
    """Write the files of one split into a folder and return its part of the index."""
    reader = SplitReader(split, sources, encoding.separator, encoding.field, encoding.watch)
    encoding.watch(split, 0)
    arrays = encoded(reader.batches(), encoding.tokenizer, encoding.jobs)
    eos, shard_bytes = encoding.tokenizer.eos, encoding.shard_bytes
    about = write_tokens(folder, split, arrays, eos, shard_bytes, reader.tally, reader.origins)
    assert about.documents == reader.tally.documents, "an end token within a document"
    encoding.watch(split, sum(origin.bytes for origin in about.sources))
    return about


def no_text(split: str, labels: Sequence[str], empty: int) -> UserError:
    """The error for files that have no documents, or empty ones alone."""
    names = ", ".join(labels[:3]) + ", ..." * (len(labels) > 3)
    found = f"{empty:,} empty document{'s' * (empty != 1)}" if empty else "no documents"
    return UserError(f"no text for {split} in {names} ({found})")


def write_tokens(
    folder: Path,
    split: str,
    arrays: Iterable[np.ndarray],
    eos: int,
    shard_bytes: int,
    tally: Tally,
    origins: Sequence[Origin],
) -> Split:
    """Write the shards of a split, its list of documents and its hashes; return its part of the index.

    Args:
        arrays: its tokens, in order.
        tally, origins: of its text, whole when the last of the tokens has been drawn.
    """
    shards, digests = write_shards(folder, split, arrays, eos, shard_bytes)
    documents = folder / f"{split}.documents"
    with open(documents, "rb") as file:
        digests += [hashlib.sha256(block).digest() for block in iter(lambda: file.read(HASHED), b"")]
    hashes = b"".join(digests)
    with writing(folder / f"{split}.hashes") as file:
        file.write(hashes)
    return Split(
        tokens=sum(shard.tokens for shard in shards),
        documents=documents.stat().st_size // 8 - 1,
        empty=tally.empty,
        words=tally.words,
        bytes=tally.bytes,
        shards=tuple(shards),
        hashes_sha256=hashlib.sha256(hashes).hexdigest(),
        sources=tuple(origins),
    )


def encoded(batches: Iterable[list[Chunk]], tokenizer: Tokenizer, jobs: int) -> Iterator[np.ndarray]:
    """The ids of every batch as one array, with the end token after each document.

    Reading stays on the main thread, so that Ctrl-C interrupts a wait for input; a second thread encodes the batch
    before.
    """
    with ThreadPoolExecutor(1) as thread:
        coming: Future[np.ndarray] | None = None
        for batch in batches:
            before, coming = coming, thread.submit(encoded_batch, batch, tokenizer, jobs)
            if before:
                yield before.result()
        if coming:
            yield coming.result()


def encoded_batch(batch: list[Chunk], tokenizer: Tokenizer, jobs: int) -> np.ndarray:
    """The ids of one batch, little-endian in the smallest type that holds every id."""
    end = np.array([tokenizer.eos], np.int32)
    parts = []
    for chunk, ids in zip(batch, tokenizer.encode_chunks([c.text for c in batch], jobs), strict=True):
        parts.append(ids)
        if chunk.ends_document:
            parts.append(end)
    tokens = np.concatenate(parts)
    if (tokens == tokenizer.unknown).any():
        raise unspellable(batch, tokenizer)
    return tokens.astype(np.dtype(dtype_for(tokenizer.size)).newbyteorder("<"))


def unspellable(batch: list[Chunk], tokenizer: Tokenizer) -> UserError:
    """The error for a character that a foreign tokenizer does not have."""
    characters = sorted({character for chunk in batch for character in chunk.text})
    lost = next((c for c in characters if tokenizer.unknown in tokenizer.encode(c)), "")
    return UserError(
        f"the tokenizer cannot spell {lost!a}, which is in the text",
        "leave --tokenizer out to learn one that spells everything",
    )


def write_shards(
    folder: Path, split: str, arrays: Iterable[np.ndarray], eos: int, shard_bytes: int
) -> tuple[list[Shard], list[bytes]]:
    """Write tokens to shards, and where documents begin to SPLIT.documents.

    Returns:
        The shards, and the sha256 digests of their blocks.
    """
    shards: list[Shard] = []
    digests: list[bytes] = []
    written = 0
    blocks = full_blocks(arrays)
    with writing(folder / f"{split}.documents") as documents:
        documents.write(np.zeros(1, "<i8").tobytes())
        for first in blocks:
            path = folder / f"{split}-{len(shards):05d}.bin"
            begin = written
            with writing(path) as file:
                for block in itertools.chain([first], itertools.islice(blocks, shard_bytes // HASHED - 1)):
                    file.write(block.data)
                    digests.append(hashlib.sha256(block.data).digest())
                    documents.write((np.flatnonzero(block == eos) + (written + 1)).astype("<i8").tobytes())
                    written += len(block)
            shards.append(Shard(path.name, written - begin, os.path.getsize(path)))
    return shards, digests


def full_blocks(arrays: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """The same tokens in arrays of 256 KiB, but for the last."""
    held: list[np.ndarray] = []
    count = 0
    for array in arrays:
        held.append(array)
        count += len(array)
        size = HASHED // array.itemsize
        if count >= size:
            whole = np.concatenate(held)
            stop = count - count % size
            yield from np.split(whole[:stop], stop // size)
            held, count = [whole[stop:]], count - stop
    if count:
        yield np.concatenate(held)
