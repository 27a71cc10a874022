"""Turn text into the files of a corpus: tokens in shards, in one pass and in bounded memory.

The files depend on the documents and the tokenizer alone: not on threads, block sizes or the machine.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pkmlm.data.corpus import Corpus, Index, Origin, Shard, Split, dtype_for
from pkmlm.data.overlap import overlap_warnings
from pkmlm.data.sources import STANDARD_INPUT, Source, Stream, find_sources, rereadable
from pkmlm.data.text import AT_LINES, FIELD, Chunk, Cuts, Tally, check_separator_and_field, read_chunks, within
from pkmlm.data.tokenizer import Tokenizer
from pkmlm.errors import UserError
from pkmlm.files import writing, writing_folder

SHARD_BYTES = 1 << 30  # of a full shard
BATCH_CHARACTERS = 1 << 20
BATCH_CHUNKS = 1 << 13
NAMED = 20  # files in a warning
LEARNING = "tokenizer"  # the stage of `tokenize` that learns one; the other stages are the splits

Progress = Callable[[str, int, int | None], None]  # takes a stage, the bytes of it that are done, and all
Warn = Callable[[str], None]


@dataclass(frozen=True)
class Encoding:
    """How text becomes tokens.

    Attributes:
        tokenizer: the tokenizer that encodes it.
        separator, field, answer: where the text and its documents are; see `read_chunks`.
        held_out: the percentage of the documents of the training sources that each split without its own sources takes.
        jobs: threads that encode.
        progress: called with a split and its bytes, see `Progress`; at least before and after each split.
        warn: called with each warning about the text.
    """

    tokenizer: Tokenizer
    separator: str | None = None
    field: str = FIELD
    answer: str | None = None
    held_out: Mapping[str, float] = dataclasses.field(default_factory=dict)
    jobs: int = 1
    progress: Progress = lambda stage, done, total: None
    warn: Warn = lambda text: None


def tokenize(
    folder: Path,
    files: Mapping[str, Sequence[str]],
    held_out: Mapping[str, float],
    *,
    model: Path | None = None,
    vocab_size: int | None = None,
    model_type: str = "bpe",
    format: str | None = None,
    separator: str | None = None,
    field: str = FIELD,
    answer: str | None = None,
    jobs: int = 1,
    replace: bool = False,
    progress: Progress,
    warn: Warn,
) -> Index:
    """Turn text into a folder of tokens, with a tokenizer that is given or learnt from the training text.

    Args:
        folder: where to write; see `write_corpus`.
        files: the files, globs or `-` of each split; splits without any are left out.
        held_out: see `Encoding`; its splits are not in `files`.
        model: the file of a tokenizer; None: learn one, of `vocab_size` ids (None: the default) and `model_type`.
        format: the format of all files; None: by their names.
        separator, field, answer: where the text and its documents are; see `read_chunks`.
        jobs: threads that encode.
        replace: whether to replace an existing folder.
        progress: called with a stage ("tokenizer", "learning", a split or "checking") and its bytes, see `Progress`.
        warn: called with each warning about the documents.

    Returns:
        The index of the corpus.

    Raises:
        UserError: the files or options contradict each other; or as for `write_corpus` and `Tokenizer.learn`.
    """
    sources = {split: find_sources(names, format) for split, names in files.items() if names}
    every = [source for inputs in sources.values() for source in inputs]
    if sum(source.name == STANDARD_INPUT for source in every) > 1:
        raise UserError("standard input is named for several splits (expected one)")
    check_separator_and_field(every, separator, field, answer)
    if held_out or not model:
        copied = lambda count: progress("standard input", count, None)  # noqa: E731
        sources["train"] = [rereadable(source, copied) for source in sources["train"]]
    sources |= dict.fromkeys(held_out, sources["train"])
    if model:
        tokenizer = Tokenizer.load(model)
    else:
        own = hash_range("train", held_out)
        reader = SplitReader(LEARNING, sources["train"], separator, field, progress, own, counts=False, answer=answer)

        def texts() -> Iterator[str]:
            yield from (chunk.text for batch in reader.batches() for chunk in batch)
            progress("learning", 0, None)  # which SentencePiece does without a word

        tokenizer = Tokenizer.learn(texts(), vocab_size, model_type)
        progress("learning", len(tokenizer.model_bytes), len(tokenizer.model_bytes))
        reader.report()
    encoding = Encoding(tokenizer, separator, field, answer, held_out, jobs, progress, warn)
    index = write_corpus(folder, sources, encoding, replace=replace)
    corpora = {split: Corpus(folder, split) for split in index.splits}
    written = sum(split.tokens for split in index.splits.values()) * np.dtype(index.dtype).itemsize
    progress("checking", 0, None)
    for corpus in corpora.values():
        corpus.verify()
    for text in overlap_warnings(corpora, tokenizer):
        warn(text)
    progress("checking", written, written)
    return index


def undivided_files(readers: Iterable["SplitReader"]) -> dict[str, str]:
    """The text files in which the separator is nowhere, as `SplitReader.undivided` has them.

    To validate or test on whole files is no fault: the files of such a split count only if the separator divides
    others of them, or is in them with other line ends.
    """
    found: dict[str, str] = {}
    for reader in readers:
        texts = sum(source.format == "txt" for source in reader.sources)
        whole = reader.stage != "train" and len(reader.undivided) == texts
        found |= {name: form for name, form in reader.undivided.items() if form or not whole}
    return found


def undivided_warning(files: Mapping[str, str], separator: str) -> str:
    """A warning of text files in which the separator is nowhere, by the form in which it is in them ("": in none)."""
    forms = ", ".join(sorted({repr(form) for form in files.values() if form}))
    what = "the file is one document" if len(files) == 1 else "each file is one document"
    seen = f" (found {forms}: convert the line ends, or divide the files by it)" if forms else ""
    shown = [*files][:NAMED] + ([f"{len(files) - NAMED:,} more files"] if len(files) > NAMED else [])
    return f"{', '.join(shown)}: the separator {separator!r} does not occur: {what}{seen}"


def write_corpus(
    folder: Path, sources: Mapping[str, Sequence[Source]], encoding: Encoding, *, replace: bool = False
) -> Index:
    """Tokenize every split into a new folder, which appears once it is complete.

    Args:
        folder: where to write.
        sources: the sources of each split ("train", "valid", "test"); for a held-out split, those of "train".
        encoding: how to tokenize.
        replace: whether to replace a folder that is not empty, once the new one is complete.

    Returns:
        The index of the corpus.

    Raises:
        UserError: a source cannot be read, has no text, or has a character that the tokenizer cannot spell; the folder
            already exists; (exit code 1) the disk is full.
    """
    streams, readers, tokenizer = {}, {}, encoding.tokenizer
    for split, inputs in sources.items():
        documents = hash_range(split, encoding.held_out)
        where, answers = (encoding.separator, encoding.field), None if encoding.answer is None else AnswerLengths()
        reader = SplitReader(
            split, inputs, *where, encoding.progress, documents, tokenizer.cuts, answer=encoding.answer
        )
        arrays = encode_batches(reader, tokenizer, encoding.jobs, answers)
        origins = [] if split in encoding.held_out else reader.origins
        streams[split] = TokenStream(arrays, reader.tally, origins, answers)
        if split not in encoding.held_out:
            readers[split] = reader
    with writing_folder(folder, replace=replace) as place:
        with writing(place / tokenizer.file) as file:
            file.write(tokenizer.model_bytes)
        index = Index(
            dtype=dtype_for(tokenizer.size),
            vocab_size=tokenizer.size,
            eos=tokenizer.eos,
            begin=tokenizer.begin,
            tokenizer_sha256=tokenizer.sha256,
            separator=encoding.separator,
            splits={name: write_tokens(place, name, stream, tokenizer.eos) for name, stream in streams.items()},
            held_out=dict(encoding.held_out),
        )
        refuse_empty_splits(index)
        index = index.write(place)
    if encoding.separator is not None and (files := undivided_files(readers.values())):
        encoding.warn(undivided_warning(files, encoding.separator))
    return index


def hash_range(split: str, held_out: Mapping[str, float]) -> tuple[float, float]:
    """The range, within 0 to 1, of the hashes of a split's documents; see `within`. A percentage holds out the same
    documents whatever the other percentage is.
    """
    test, valid = held_out.get("test", 0.0) / 100, held_out.get("valid", 0.0) / 100
    if split == "train":
        return test, 1 - valid
    if split not in held_out:
        return 0.0, 1.0
    return (0.0, test) if split == "test" else (1 - valid, 1.0)


@dataclass
class SplitReader:
    """One pass over the sources of a split.

    Attributes:
        origins, tally: complete when it has ended; `tally` only if `counts`.
        undivided: by the names of the sources in which the separator is nowhere, what `Stream.undivided` says.
    """

    stage: str
    sources: Sequence[Source]
    separator: str | None
    field: str
    progress: Progress
    hash_range: tuple[float, float]
    cuts: Cuts = AT_LINES
    counts: bool = True
    answer: str | None = None
    tally: Tally = dataclasses.field(default_factory=Tally)
    origins: list[Origin] = dataclasses.field(default_factory=list)
    undivided: dict[str, str] = dataclasses.field(default_factory=dict)
    done: int = 0

    def __post_init__(self) -> None:
        sizes = [source.size for source in self.sources]
        self.total = None if None in sizes else sum(size or 0 for size in sizes)

    def report(self, stream: Stream | None = None) -> None:
        """Report the bytes of the sources that have been read to their end, and those of the next one so far."""
        self.progress(self.stage, self.done + (stream.count if stream else 0), self.total)

    def batches(self) -> Iterator[list[Chunk]]:
        """The chunks of all documents that are not empty, about a million characters at a time."""
        batch: list[Chunk] = []
        size = 0
        self.report()
        for source in self.sources:
            with source.open() as stream:
                stream.advance = partial(self.report, stream)
                chunks = read_chunks(stream, self.separator, self.field, self.cuts, self.answer)
                for chunk in chunks if self.hash_range == (0.0, 1.0) else within(chunks, *self.hash_range):
                    if self.counts:
                        self.tally.add(chunk)
                    if chunk.text:
                        batch.append(chunk)
                        size += len(chunk.text)
                    if size >= BATCH_CHARACTERS or len(batch) >= BATCH_CHUNKS:
                        yield batch
                        batch, size = [], 0
            self.done += stream.count
            self.origins.append(Origin(source.plain_name, stream.count, stream.digest.hexdigest()))
            if stream.undivided is not None:
                self.undivided[source.label] = stream.undivided
        if batch:
            yield batch


@dataclass
class AnswerLengths:
    """How many tokens of each document are learnt: those of its answer, and its end.

    Attributes:
        lengths: of the documents that have ended.
        begun: tokens of the answer of the document under way.
    """

    lengths: list[int] = dataclasses.field(default_factory=list)
    begun: int = 0

    def add(self, chunk: Chunk, tokens: int) -> None:
        self.begun += tokens * chunk.learnt
        if chunk.ends_document:
            self.lengths.append(self.begun + 1)
            self.begun = 0


def encode_batches(
    reader: SplitReader, tokenizer: Tokenizer, jobs: int, answers: AnswerLengths | None = None
) -> Iterator[np.ndarray]:
    """The ids of every batch of a split as one array, with the end token after each document.

    Args:
        answers: what collects the lengths of answers; None: documents have none.

    Reading stays on the main thread, so that Ctrl-C interrupts a wait for input; a second thread encodes the previous
    batch meanwhile.
    """
    with ThreadPoolExecutor(1) as thread:
        coming: Future[np.ndarray] | None = None
        for batch in reader.batches():
            before, coming = coming, thread.submit(encode_batch, batch, tokenizer, jobs, answers)
            if before:
                yield before.result()
        if coming:
            yield coming.result()
    reader.report()


def encode_batch(
    batch: list[Chunk], tokenizer: Tokenizer, jobs: int, answers: AnswerLengths | None = None
) -> np.ndarray:
    """The ids of one batch, little-endian in the smallest type that holds every id."""
    end = np.array([tokenizer.eos], np.int32)
    parts = []
    for chunk, ids in zip(batch, tokenizer.encode_chunks([c.text for c in batch], jobs), strict=True):
        parts.append(ids)
        if answers is not None:
            answers.add(chunk, len(ids))
        if chunk.ends_document:
            parts.append(end)
    tokens = np.concatenate(parts)
    if (tokens == tokenizer.unknown).any():
        characters = sorted({character for chunk in batch for character in chunk.text})
        lost = next((c for c in characters if tokenizer.unknown in tokenizer.encode(c)), "")
        raise UserError(
            f"the tokenizer cannot spell {lost!a}, which is in the text",
            "leave --tokenizer out to learn one that spells everything",
        )
    return tokens.astype(np.dtype(dtype_for(tokenizer.size)).newbyteorder("<"))


class TokenStream(NamedTuple):
    """The tokens of a split; the counts, sources and answers of its text are complete after the last array."""

    arrays: Iterable[np.ndarray]
    tally: Tally
    origins: Sequence[Origin]
    answers: AnswerLengths | None


def write_tokens(folder: Path, split: str, stream: TokenStream, eos: int) -> Split:
    """Write the shards of a split and its list of documents; return its part of the index."""
    shards: list[Shard] = []
    written = documents = 0
    with writing(folder / f"{split}.documents") as starts:
        starts_digest = hashlib.sha256()

        def write_starts(places: np.ndarray) -> None:
            data = places.astype("<i8").tobytes()
            starts.write(data)
            starts_digest.update(data)

        write_starts(np.zeros(1))
        for number, pieces in itertools.groupby(cut_at_shards(stream.arrays), key=itemgetter(0)):
            path, digest, begin = folder / f"{split}-{number:05d}.bin", hashlib.sha256(), written
            with writing(path) as file:
                for _, tokens in pieces:
                    file.write(tokens.data)
                    digest.update(tokens.data)
                    ends = np.flatnonzero(tokens == eos) + 1
                    write_starts(ends + written)
                    written += len(tokens)
                    documents += len(ends)
            shards.append(Shard(path.name, written - begin, digest.hexdigest()))
    tally, answers_digest = stream.tally, None
    if stream.answers is not None:
        lengths = np.array(stream.answers.lengths, "<i8").tobytes()
        answers_digest = hashlib.sha256(lengths).hexdigest()
        with writing(folder / f"{split}.answers") as file:
            file.write(lengths)
    assert documents == tally.documents, "an end token within a document"
    return Split(
        tokens=written,
        documents=documents,
        empty=tally.empty,
        words=tally.words,
        bytes=tally.bytes,
        shards=tuple(shards),
        documents_sha256=starts_digest.hexdigest(),
        answers_sha256=answers_digest,
        sources=tuple(stream.origins),
    )


def cut_at_shards(arrays: Iterable[np.ndarray]) -> Iterator[tuple[int, np.ndarray]]:
    """The same tokens, cut where a shard is full, each array with the number of its shard."""
    written = 0
    for array in arrays:
        size = SHARD_BYTES // array.itemsize
        while len(array):
            number, filled = divmod(written, size)
            piece, array = np.split(array, [size - filled])
            written += len(piece)
            yield number, piece


def refuse_empty_splits(index: Index) -> None:
    """Refuse (UserError) a split without documents."""
    divided = [name for name in index.splits if name == "train" or name in index.held_out]
    documents = sum(index.splits[name].documents for name in divided)
    for split, about in index.splits.items():
        if not about.documents:
            if documents and split in divided:
                raise UserError(
                    f"of {documents:,} document{'s' * (documents != 1)}, none falls into {split}",
                    "get more documents with --separator, hold out another percentage, or give the split its own files",
                )
            names = ["standard input" if origin.name == STANDARD_INPUT else origin.name for origin in about.sources]
            files = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            found = f"{about.empty:,} empty document{'s' * (about.empty != 1)}" if about.empty else "no documents"
            raise UserError(f"no text for {split} in {files} ({found})")
