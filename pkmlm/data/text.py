"""The documents of text files, JSON lines, and parquet and Arrow files, as streams of short chunks.

A document is never held as a whole: it is a sequence of chunks, the last of which is marked. Where it is cut depends on
its text alone, never on how it was stored or read, so that its tokens are the same on every machine and in every
command.
"""

import codecs
import hashlib
import itertools
import json
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from pkmlm.data.sources import STANDARD_INPUT, Source, Stream, temporary_copy
from pkmlm.errors import UserError
from pkmlm.files import open_file

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

WINDOW = 2048  # characters: SentencePiece's BPE slows down on long strings
FIELD = "text"  # the usual name of the key or column that holds the text
ROWS = 64  # rows of a table that are read at a time
ARROW_FILE, ARROW_END = b"ARROW1", b"\xff\xff\xff\xff\0\0\0\0"  # how an indexed file begins; how a stream ends
HEAD = 1 << 20  # characters of a document that decide which split it falls into
SURROGATE = re.compile("[\ud800-\udfff]")

Row = tuple[str, tuple[str, ...]]  # where it stands, and its texts


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
    """A part of a document, not empty and within the window of its cuts; an empty document is one empty chunk.

    Attributes:
        learnt: whether a model learns it; not, if it is a part of a prompt.
    """

    text: str
    ends_document: bool
    learnt: bool = True


@dataclass
class Tally:
    """Counts over a stream of chunks. Empty documents are counted in `empty` and nowhere else.

    `words` counts as lm-eval does: len(re.split(r"\\s+", document)), summed; `bytes` are those of UTF-8. Prompts are
    not counted: the document is then the answer.
    """

    documents: int = 0
    empty: int = 0
    words: int = 0
    bytes: int = 0
    after_space: bool = False

    def add(self, chunk: Chunk) -> None:
        text = chunk.text
        if not chunk.learnt:
            return
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
    stream: Stream,
    separator: str | None = None,
    field: str = FIELD,
    cuts: Cuts = AT_LINES,
    answer: str | None = None,
) -> Iterator[Chunk]:
    """The documents of one source, in chunks.

    Args:
        stream: `source.open()`; the source says what format it has.
        separator: the text between the documents of a text file; None: the file is one document.
        field: the key of a JSON line, or the column of a table, that holds the text, or one within it: "doc.text"; null
            is an empty document.
        cuts: where the documents are cut.
        answer: a field, likewise, whose text follows that of `field`, and alone is learnt; a chunk holds text of one of
            the two.

    Raises:
        UserError: damaged data, a row without an answer, bad UTF-8 (with its byte in the decompressed stream), a bad
            line or row, a separator with the line ends of Windows in place of those of `separator`.
    """
    if stream.source.format == "txt":
        texts = decode(stream)
        if separator is not None:
            texts = watched(texts, separator, stream)
        return cut(split_documents(texts, separator), cuts)
    read_rows = json_rows if stream.source.format == "jsonl" else table_rows
    rows = read_rows(stream, (field,) if answer is None else (field, answer))
    if answer is None:
        return cut(((text, True) for _, (text,) in rows), cuts)
    return prompts_and_answers(rows, cuts)


def prompts_and_answers(rows: Iterable[Row], cuts: Cuts) -> Iterator[Chunk]:
    """The chunks of documents that are a prompt and its answer."""
    for where, (prompt, answer) in rows:
        if not answer:
            raise UserError(f"{where}: no answer (expected some text)")
        yield from (chunk._replace(ends_document=False, learnt=False) for chunk in cut([(prompt, bool(prompt))], cuts))
        yield from cut([(answer, True)], cuts)


def check_separator_and_field(
    sources: Iterable[Source], separator: str | None, field: str = FIELD, answer: str | None = None
) -> None:
    """Refuse a separator or a field that no source can use.

    Raises:
        UserError: a separator without text files, a field with text files only, or an answer with any.
    """
    formats = {source.format for source in sources}
    if answer is not None and "txt" in formats:
        raise UserError("--answer is for JSON lines, parquet and Arrow files, and an input is a text file")
    if separator is not None and "txt" not in formats:
        raise UserError("--separator is for text files, and no input is one")
    if field != FIELD and formats == {"txt"}:
        raise UserError("--field is for JSON lines, parquet and Arrow files, and no input is one")


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
            head = "".join(each.text for each in held)[:HEAD].strip("\n")
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


def watched(texts: Iterable[str], separator: str, stream: Stream) -> Iterator[str]:
    """The same texts, in which the separator is looked for. Where it is nowhere, `stream.undivided` says so at the end.

    Raises:
        UserError: it occurs with the line ends of Windows, a part of which would be left in every document.
    """
    plain = separator.replace("\r\n", "\n").replace("\r", "\n")
    windows, *others = (plain.replace("\n", end) for end in ("\r\n", "\r", "\n"))
    forms = dict.fromkeys((separator, windows, *others))
    found: set[str] = set()
    recent, most = "", max(map(len, forms)) - 1
    for text in texts:
        recent = recent[max(0, len(recent) - most) :] + text
        found.update(form for form in forms if form not in found and form in recent)
        if windows in found and windows != separator:
            raise UserError(
                f"{stream.source.label}: found {windows!r} (expected {separator!r}, as given by --separator)",
                "convert the line ends first, e.g. with dos2unix",
            )
        yield text
    if separator not in found:
        stream.undivided = next((form for form in forms if form in found), "")


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


def json_rows(stream: Stream, fields: Sequence[str]) -> Iterator[Row]:
    """The texts of some fields in each line of a file of JSON lines; null is empty, and blank lines are skipped."""
    number = 1
    parts: list[str] = []
    for part, ends in split_documents(decode(stream), "\n"):
        where = f"{stream.source.label}:{number}"
        parts.append(part)
        if not ends:
            continue
        line = "".join(parts)
        number, parts = number + 1, []
        if not line.strip():
            continue
        row = json_object(line, where)
        texts = {field: member(row, field, where) for field in fields}
        for field, text in texts.items():
            if not isinstance(text, str | None):
                raise UserError(f"{where}: {field!r} is {json.dumps(text):.40} (expected a string or null)")
            if text and has_surrogate(text):
                raise UserError(f"{where}: {field!r} has a lone surrogate, which is not Unicode text")
        yield where, tuple(texts[field] or "" for field in fields)


def json_object(line: str, where: str) -> dict[str, Any]:
    """The object in a line of JSON, which errors call `where`.

    Raises:
        UserError: it is not JSON or not an object.
    """
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError also for numbers of more than 4,300 digits
        what = str(error)
        if isinstance(error, json.JSONDecodeError):
            what = f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"
        raise UserError(f"{where}: not valid JSON: {what}") from None
    if not isinstance(value, dict):
        raise UserError(f"{where}: found {json.dumps(value):.40} (expected an object)")
    return value


def member(row: dict[str, Any], field: str, where: str, above: str = "") -> Any:
    """The value of a key, or, for "doc.text", of the key text in that of doc; None where doc is null.

    Args:
        where: what errors call the row.
        above: the keys that led to the row, with their dots.

    Raises:
        UserError: there is no such key.
    """
    if field in row:
        return row[field]
    name, dot, rest = field.partition(".")
    inner = row.get(name)
    if dot and isinstance(inner, dict):
        return member(inner, rest, where, f"{above}{name}.")
    if dot and name in row and inner is None:
        return None
    keys = ", ".join(repr(above + key) for key in list(row)[:8]) or "no keys"
    raise UserError(
        f"{where}: no key {above + field!r} (found {keys})",
        "name it with --field, or --prompt and --answer; doc.text is the key text within doc",
    )


# Parquet and Arrow


def table_rows(stream: Stream, fields: Sequence[str]) -> Iterator[Row]:
    """The texts in some columns of a parquet or Arrow file, row by row; null is empty."""
    import pyarrow

    source = stream.source
    read_rows, kind = {"parquet": (parquet_rows, "parquet"), "arrow": (arrow_rows, "Arrow")}[source.format]
    plain = source.copy is None and source.name != STANDARD_INPUT and source.compression is None
    row = 0
    with open_file(source.name) if plain else temporary_copy(stream, decompress=True) as file:
        try:
            for columns, share in read_rows(file, fields, source.label):
                for texts in columns:
                    texts.validate(full=True)  # Arrow trusts the offsets that it finds
                for texts in zip(*columns, strict=True):
                    row += 1
                    yield f"{source.label}: row {row:,}", tuple(text.as_py() or "" for text in texts)
                read_up_to(stream, share)
        except (pyarrow.ArrowException, OSError) as error:
            reason = str(error).splitlines()[0]
            if "UTF8" in reason:
                names = " or ".join(map(repr, fields))
                raise UserError(f"{source.label}: {names} is not UTF-8 after row {row:,}") from None
            raise UserError(f"{source.label}: not a complete {kind} file: {reason}") from None
    read_up_to(stream, 1.0)


def parquet_rows(file: IO[bytes], fields: Sequence[str], label: str) -> "Iterator[tuple[list[pyarrow.Array], float]]":
    """Columns of a parquet file, some rows at a time, and the share of the rows that have been read."""
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(file, buffer_size=1 << 20)
    paths, rows = [column_path(table.schema_arrow, field, label) for field in fields], 0
    for batch in table.iter_batches(batch_size=ROWS, columns=[*dict.fromkeys(fields)]):
        rows += len(batch)
        yield [column_of(batch, path) for path in paths], rows / table.metadata.num_rows


def arrow_rows(file: IO[bytes], fields: Sequence[str], label: str) -> "Iterator[tuple[list[pyarrow.Array], float]]":
    """As `parquet_rows`, of a file of Arrow's: a stream, as `datasets` writes it, or a file with an index (Feather)."""
    import pyarrow
    import pyarrow.ipc

    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - len(ARROW_END)))
    end = file.read()
    file.seek(0)
    indexed = file.read(len(ARROW_FILE)) == ARROW_FILE
    file.seek(0)
    if not indexed and end != ARROW_END:  # a stream that was cut between two batches would be taken for a whole one
        raise pyarrow.ArrowInvalid("its end is missing")
    reader = pyarrow.ipc.open_file(file) if indexed else pyarrow.ipc.open_stream(file)
    paths = [column_path(reader.schema, field, label) for field in fields]
    batches = map(reader.get_batch, range(reader.num_record_batches)) if indexed else reader
    for batch in batches:
        columns = [column_of(batch, path) for path in paths]
        for start in range(0, len(batch), ROWS):
            yield [texts.slice(start, ROWS) for texts in columns], file.tell() / size


def column_path(schema: "pyarrow.Schema", field: str, label: str) -> list[str]:
    """The names that lead to the column `field`, which may be a field of a column: "doc.text".

    Raises:
        UserError: it is missing, occurs more than once, or does not hold text.
    """
    import pyarrow.types as types

    names: list[str] = list(schema.names)
    found: Any = schema
    path = [field] if field in names else field.split(".")
    for depth, name in enumerate(path):
        if (times := names.count(name)) != 1:
            above = "".join(f"{each}." for each in path[:depth])
            shown = ", ".join(repr(above + each) for each in names[:8])
            raise UserError(
                f"{label}: {times or 'no'} column{'s' * (times > 1)} {field!r} (found {shown})",
                "name it with --field, or --prompt and --answer; doc.text is text within doc",
            )
        found = found.field(name).type
        names = [each.name for each in found] if types.is_struct(found) else []
    value = found.value_type if types.is_dictionary(found) else found
    texts = (types.is_null, types.is_string, types.is_large_string, types.is_string_view)
    if not any(holds(value) for holds in texts):
        raise UserError(f"{label}: column {field!r} holds {found} (expected strings)")
    return path


def column_of(batch: "pyarrow.RecordBatch", path: Sequence[str]) -> "pyarrow.Array":
    """The column that `column_path` leads to; null where a column above it is."""
    import pyarrow.compute

    column = batch.column(batch.schema.get_field_index(path[0]))
    return pyarrow.compute.struct_field(column, list(path[1:])) if path[1:] else column


def read_up_to(stream: Stream, share: float) -> None:
    """Count and hash the first `share` of a file's bytes, which pyarrow reads out of order."""
    size = stream.source.size or 0
    while stream.count < size * share and stream.read(1 << 20):
        pass
