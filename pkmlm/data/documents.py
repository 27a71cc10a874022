"""The documents of a source, whatever its format."""

from collections.abc import Iterable, Iterator

from pkmlm.data.json_lines import json_documents
from pkmlm.data.parquet import parquet_documents
from pkmlm.data.sources import Source, Stream
from pkmlm.data.text import Chunk, cut, decoded, split_documents
from pkmlm.errors import UserError

FIELD = "text"  # the name that the field or column with the text mostly has


def check_options(sources: Iterable[Source], separator: str | None, field: str = FIELD) -> None:
    """Refuse a way of reading that is of no source's format.

    Raises:
        UserError: a separator without text files, a field with nothing but these.
    """
    formats = {source.format for source in sources}
    if separator is not None and "txt" not in formats:
        raise UserError("--separator is for text files, and no input is one")
    if field != FIELD and formats == {"txt"}:
        raise UserError("--field is for JSON lines and parquet files, and no input is one")


def read_chunks(stream: Stream, separator: str | None = None, field: str = FIELD) -> Iterator[Chunk]:
    """The documents of one source.

    Args:
        stream: `source.open()`; the format is the source's.
        separator: what stands between the documents of a text file; None: a file is a document.
        field: the key of a JSON line, or the column of a parquet file, that holds the text; null is an empty document.

    Raises:
        UserError: damaged data, bad UTF-8 (names the byte of the decompressed stream), a bad line or row.
    """
    if stream.source.format == "txt":
        return cut(split_documents(decoded(stream), separator))
    if stream.source.format == "jsonl":
        return cut(json_documents(stream, field))
    return cut(parquet_documents(stream, field))


def read_documents(stream: Stream, separator: str | None = None, field: str = FIELD) -> Iterator[str]:
    """The documents of one source as whole strings, without the empty ones: for texts that fit in memory."""
    parts: list[str] = []
    for chunk in read_chunks(stream, separator, field):
        parts.append(chunk.text)
        if chunk.ends_document:
            if text := "".join(parts):
                yield text
            parts = []
