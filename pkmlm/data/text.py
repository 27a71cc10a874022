"""The documents of text files, JSON lines and parquet files, as streams of short chunks.

A document is never held as a whole: it is a sequence of chunks, the last of which is marked. Where it is cut depends on
its text alone, never on how it was stored or read, so that its tokens are the same on every machine and in every
command.
"""

import codecs
import hashlib
import itertools
import json
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from pkmlm.data.sources import STANDARD_INPUT, Source, Stream, temporary_copy
from pkmlm.errors import UserError
from pkmlm.files import open_file

WINDOW = 2048  # characters: SentencePiece's BPE slows down on long strings
FIELD = "text"  # the usual name of the key or column that holds the text
LINE_LIMIT = 128 << 20  # characters of one line of JSON, which must be read whole
ROWS = 64  # rows of a parquet file that are read at a time
HEAD = 1 << 20  # characters of a document that decide which split it falls into
SURROGATE = re.compile("[\ud800-\udfff]")


class Cuts(NamedTuple):
    """Where documents are cut.

    Attributes:
        window: the most characters of a chunk.
        places: patterns of a chunk that has text after it, in order of preference: the chunk is the longest match of
            the first pattern that matches within the window; the whole window, if none does.
    """

    window: int
    places: tuple[re.Pattern[str], ...]


# After a newline, else before a single space: neither cut changes an id of a SentencePiece BPE that is learnt here.
AT_LINES = Cuts(WINDOW, (re.compile(r".*\n(?=.)", re.DOTALL), re.compile(r".*[^ ](?= [^ ])", re.DOTALL)))
# After a letter or digit, before white space: the rules by which byte-level BPEs find words always divide there.
AFTER_WORDS = Cuts(1 << 16, (re.compile(r".*[^\W_](?=[ \t\r\n])", re.DOTALL),))


class Chunk(NamedTuple):
    """A part of a document, not empty and within the window of its cuts; an empty document is one empty chunk."""

    text: str
    ends_document: bool


@dataclass
class Tally:
    """Counts over a stream of chunks. Empty documents are counted in `empty` and nowhere else.

    `words` counts as lm-eval does: len(re.split(r"\\s+", document)), summed; `bytes` are those of UTF-8.
    """

    documents: int = 0
    empty: int = 0
    words: int = 0
    bytes: int = 0
    after_space: bool = False

    def add(self, chunk: Chunk) -> None:
        text = chunk.text
        if text:
            starts, ends = text[0].isspace(), text[-1].isspace()
            solid = len(text.split())
            # The words of a document are its runs of white space + 1. Here the runs are counted (only once if a cut
            # divides one); the 1 is added at the end of the document.
            self.words += solid - 1 + starts + ends if solid else 1
            self.words -= starts and self.after_space
            self.bytes += len(text) if text.isascii() else len(text.encode())
            self.after_space = ends
        if chunk.ends_document:
            self.documents += bool(text)
            self.empty += not text
            self.words += bool(text)
            self.after_space = False


def read_chunks(
    stream: Stream, separator: str | None = None, field: str = FIELD, cuts: Cuts = AT_LINES
) -> Iterator[Chunk]:
    """The documents of one source, in chunks.

    Args:
        stream: `source.open()`; the source says what format it has.
        separator: the text between the documents of a text file; None: the file is one document.
        field: the key of a JSON line, or the column of a parquet file, that holds the text; null is an empty document.
        cuts: where the documents are cut.

    Raises:
        UserError: damaged data, bad UTF-8 (with its byte in the decompressed stream), a bad line or row, a separator
            with other line ends than `separator`.
    """
    if stream.source.format == "txt":
        texts = decode(stream)
        if separator is not None:
            texts = same_line_ends(texts, separator, stream.source.label)
        return cut(split_documents(texts, separator), cuts)
    if stream.source.format == "jsonl":
        return cut(json_documents(stream, field), cuts)
    return cut(parquet_documents(stream, field), cuts)


def read_documents(stream: Stream, separator: str | None = None, field: str = FIELD) -> Iterator[str]:
    """The documents of one source as whole strings, without the empty ones: for texts that fit in memory."""
    parts: list[str] = []
    for chunk in read_chunks(stream, separator, field):
        parts.append(chunk.text)
        if chunk.ends_document:
            if text := "".join(parts):
                yield text
            parts = []


def check_separator_and_field(sources: Iterable[Source], separator: str | None, field: str = FIELD) -> None:
    """Refuse a separator or a field that no source can use.

    Raises:
        UserError: a separator without text files, or a field with text files only.
    """
    formats = {source.format for source in sources}
    if separator is not None and "txt" not in formats:
        raise UserError("--separator is for text files, and no input is one")
    if field != FIELD and formats == {"txt"}:
        raise UserError("--field is for JSON lines and parquet files, and no input is one")


# Chunks


def cut(pieces: Iterable[tuple[str, bool]], cuts: Cuts = AT_LINES) -> Iterator[Chunk]:
    """Cut documents into chunks.

    Args:
        pieces: (text, whether the document ends here), of any length; the chunks do not depend on where the pieces end.
        cuts: where to cut.
    """
    rest = ""
    for text, ends in pieces:
        rest = rest + text if rest else text
        start = 0
        while len(rest) - start > cuts.window:
            stop = start + cuts.window
            found = (place.match(rest, start, stop + 1) for place in cuts.places)
            end = next((match.end() for match in found if match), stop)
            yield Chunk(rest[start:end], False)
            start = end
        rest = rest[start:]
        if ends:
            yield Chunk(rest, True)
            rest = ""


def within(chunks: Iterable[Chunk], start: float, stop: float) -> Iterator[Chunk]:
    """The chunks of the documents whose hash, as a share of the largest hash, lies from `start` up to `stop`.

    The hash is of a document's first HEAD characters, without newlines at either end: copies of a document stay
    together, wherever they are, and little more than HEAD characters are held.
    """
    held: list[Chunk] = []
    size, chosen = 0, False
    for chunk in chunks:
        if size < HEAD:
            held.append(chunk)
            size += len(chunk.text)
            if size < HEAD and not chunk.ends_document:
                continue
            head = "".join(text for text, _ in held)[:HEAD].strip("\n")
            digest = hashlib.blake2b(head.encode(), digest_size=6).digest()  # 48 bits: a float holds the share exactly
            chosen = start <= int.from_bytes(digest, "big") / 2**48 < stop
            if chosen:
                yield from held
            held = []
        elif chosen:
            yield chunk
        if chunk.ends_document:
            size = 0


def chunks_of(text: str, cuts: Cuts = AT_LINES) -> list[str]:
    """The chunks of one document that is held whole."""
    return [chunk.text for chunk in cut([(text, True)], cuts) if chunk.text]


# Text files


def decode(stream: Stream) -> Iterator[str]:
    """The text of a stream of UTF-8, without a byte-order mark at its beginning. Nothing else is changed: line ends and
    NUL are text.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    read, begun = 0, False
    for block in itertools.chain(stream.blocks(), [b""]):
        pending = len(decoder.getstate()[0])
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise UserError(
                f"{stream.source.label}: not UTF-8 at byte {read - pending + error.start:,} "
                f"(0x{error.object[error.start]:02x}: {error.reason})",
                "convert it first, e.g. with iconv -f ENCODING -t UTF-8",
            ) from None
        read += len(block)
        yield text if begun else text.removeprefix("\ufeff")
        begun = begun or bool(text)


def same_line_ends(texts: Iterable[str], separator: str, label: str) -> Iterator[str]:
    """The same texts, checked for the separator with the line ends of Windows, which would divide nothing.

    Raises:
        UserError: it occurs in them.
    """
    windows = separator.replace("\r\n", "\n").replace("\n", "\r\n")
    if separator == windows:  # it has no line end, or that of Windows
        yield from texts
        return
    recent = ""
    for text in texts:
        recent = recent[1 - len(windows) :] + text
        if windows in recent:
            raise UserError(
                f"{label}: found {windows!r} (expected {separator!r}, as given by --separator)",
                "convert the line ends first, e.g. with dos2unix",
            )
        yield text


def split_documents(texts: Iterable[str], separator: str | None) -> Iterator[tuple[str, bool]]:
    """Pieces of the documents between separators, which are found from the left as str.split finds them."""
    held = ""
    for text in texts:
        if separator is None:
            yield text, False
            continue
        *documents, held = (held + text).split(separator)
        for document in documents:
            yield document, True
        keep = max(0, len(held) - len(separator) + 1)  # the rest may be the beginning of a separator
        yield held[:keep], False
        held = held[keep:]
    yield held, True


def unescape(separator: str) -> str:
    r"""A separator as typed in a shell, with the escapes of Python: \n \t \\ \xNN \uNNNN and so on.

    Raises:
        UserError: it is empty, not Unicode, or has another escape.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Python only warns of an escape that it does not know
            if re.search(r"(?<!\\)(\\\\)*\\[^\x00-\x7f]", separator):  # the next line would escape the backslash of \é
                raise Warning
            text = separator.encode("ascii", "backslashreplace").decode("unicode_escape")
    except (UnicodeDecodeError, Warning):
        expected = "\\n, \\t, \\\\, \\xNN or \\uNNNN"
        raise UserError(f"--separator {separator} has an unknown escape (expected {expected})") from None
    if not text or has_surrogate(text):
        raise UserError(f"--separator: {separator!r} is {'not Unicode' if text else 'empty'} (expected some text)")
    return text


def has_surrogate(text: str) -> bool:
    """Whether a string has half of a surrogate pair, which UTF-8 cannot hold."""
    return not text.isascii() and SURROGATE.search(text) is not None


# JSON lines


def json_documents(stream: Stream, field: str) -> Iterator[tuple[str, bool]]:
    """The documents of a file of JSON lines; null is an empty document, and blank lines are skipped."""
    number = 1
    parts: list[str] = []
    size = 0
    for part, ends in split_documents(decode(stream), "\n"):
        where = f"{stream.source.label}:{number}"
        parts.append(part)
        size += len(part)
        if size > LINE_LIMIT:
            raise UserError(f"{where}: line over {LINE_LIMIT:,} characters", "split the document into several")
        if not ends:
            continue
        line = "".join(parts)
        number, parts, size = number + 1, [], 0
        if not line.strip():
            continue
        row = json_object(line, where)
        if field not in row:
            keys = ", ".join(map(repr, list(row)[:8])) or "no keys"
            raise UserError(
                f"{where}: no key {field!r} (found {keys})", "give the key that holds the text with --field"
            )
        text = row[field]
        if not isinstance(text, str | None):
            raise UserError(f"{where}: {field!r} is {json.dumps(text):.40} (expected a string or null)")
        if text and has_surrogate(text):
            raise UserError(f"{where}: {field!r} has a lone surrogate, which is not Unicode text")
        yield text or "", True


def json_object(line: str, where: str) -> dict[str, Any]:
    """The object in a line of JSON, which errors call `where`.

    Raises:
        UserError: it is not JSON or not an object, or it repeats a key, so that the value meant is unknown.
    """

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            ((key, times),) = Counter(key for key, _ in pairs).most_common(1)
            raise UserError(f"{where}: found the key {key[:40]!r} {times} times (expected once)")
        return found

    try:
        value = json.loads(line, object_pairs_hook=members)
    except (ValueError, RecursionError) as error:  # ValueError also for numbers of more than 4,300 digits
        what = str(error)
        if isinstance(error, json.JSONDecodeError):
            what = f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"
        raise UserError(f"{where}: not valid JSON: {what}") from None
    if not isinstance(value, dict):
        raise UserError(f"{where}: found {json.dumps(value):.40} (expected an object)")
    return value


# Parquet


def parquet_documents(stream: Stream, field: str) -> Iterator[tuple[str, bool]]:
    """The documents in the column `field`, read a few rows at a time; null is an empty document."""
    import pyarrow
    import pyarrow.parquet

    source = stream.source
    plain = source.copy is None and source.name != STANDARD_INPUT and source.compression is None
    row = 0
    with open_file(source.name) if plain else temporary_copy(stream, decompress=True) as file:
        try:
            table = pyarrow.parquet.ParquetFile(file, buffer_size=1 << 20)
            check_column(table.schema_arrow, field, source.label)
            for batch in table.iter_batches(batch_size=ROWS, columns=[field]):
                yield from ((cell.as_py() or "", True) for cell in batch.column(field))
                row += len(batch)
                read_up_to(stream, row / table.metadata.num_rows)
        except UnicodeDecodeError as error:
            raise UserError(f"{source.label}: {field!r} is not UTF-8 after row {row:,} ({error.reason})") from None
        except (pyarrow.ArrowException, OSError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"{source.label}: not a complete parquet file: {reason}") from None
    read_up_to(stream, 1.0)


def check_column(schema: Any, field: str, label: str) -> None:
    """Refuse a column that is missing, occurs more than once, or does not hold text."""
    import pyarrow.types as types

    if (times := schema.names.count(field)) != 1:
        names = ", ".join(map(repr, schema.names[:8]))
        raise UserError(
            f"{label}: {times or 'no'} column{'s' * (times > 1)} {field!r} (found {names})",
            "give the column that holds the text with --field",
        )
    found = schema.field(field).type
    value = found.value_type if types.is_dictionary(found) else found
    texts = (types.is_null, types.is_string, types.is_large_string, types.is_string_view)
    if not any(holds(value) for holds in texts):
        raise UserError(f"{label}: column {field!r} holds {found} (expected strings)")


def read_up_to(stream: Stream, share: float) -> None:
    """Count and hash the first `share` of a file's bytes, which pyarrow reads out of order."""
    size = stream.source.size or 0
    while stream.count < size * share and stream.read(1 << 20):
        pass
