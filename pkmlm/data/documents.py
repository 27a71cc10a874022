"""The documents of a source, whatever its format."""

from collections.abc import Iterator

from pkmlm.data.json_lines import json_documents
from pkmlm.data.parquet import parquet_documents
from pkmlm.data.sources import Stream
from pkmlm.data.text import Chunk, cut, decoded, split_documents


def read_chunks(stream: Stream, separator: str | None = None, field: str = "text") -> Iterator[Chunk]:
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


def read_documents(stream: Stream, separator: str | None = None, field: str = "text") -> Iterator[str]:
    """The documents of one source as whole strings, without the empty ones: for texts that fit in memory."""
    parts: list[str] = []
    for chunk in read_chunks(stream, separator, field):
        parts.append(chunk.text)
        if chunk.ends_document:
            if text := "".join(parts):
                yield text
            parts = []
