"""Text as streams of short chunks, and where one document ends and the next begins.

A document is never held as a whole: it is a run of chunks, the last of which says so. Where it is cut depends
on its text alone, never on how it was stored or read, so that its tokens are the same on every machine and in
every command.
"""

import codecs
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pkmlm.data.sources import Stream
from pkmlm.errors import UserError

WINDOW = 2048  # characters: BPE slows down on long strings
LAST_SINGLE_SPACE = re.compile(r".*[^ ](?= [^ ])", re.DOTALL)
ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[nrtfv0\\]|)")
SURROGATE = re.compile("[\ud800-\udfff]")


class Chunk(NamedTuple):
    """A part of a document, of 1 to 2048 characters; an empty document is one empty chunk."""

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
            # Words are runs of white space + 1: counted here are the runs, one across a cut once; the 1 is added below.
            self.words += solid - 1 + starts + ends if solid else 1
            self.words -= starts and self.after_space
            self.bytes += len(text) if text.isascii() else len(text.encode())
            self.after_space = ends
        if chunk.ends_document:
            self.documents += bool(text)
            self.empty += not text
            self.words += bool(text)
            self.after_space = False


def cut(pieces: Iterable[tuple[str, bool]]) -> Iterator[Chunk]:
    """Cut documents into chunks of at most 2048 characters.

    A cut falls after the last newline of the window; if it has none, before its last single space; if it has
    none of these either, at its end. The first two kinds of cut change no id of a BPE model learnt here.

    Args:
        pieces: (text, whether the document ends here), of any length; only the result's cuts are the rule's.
    """
    rest = ""
    for text, ends in pieces:
        rest = rest + text if rest else text
        start = 0
        while len(rest) - start > WINDOW:
            stop = cut_before(rest, start)
            yield Chunk(rest[start:stop], False)
            start = stop
        rest = rest[start:]
        if ends:
            yield Chunk(rest, True)
            rest = ""


def cut_before(text: str, start: int) -> int:
    """Where the chunk that begins at `start` ends; more than a window of text must follow."""
    stop = start + WINDOW
    newline = text.rfind("\n", start, stop)
    if newline >= 0:
        return newline + 1
    space = LAST_SINGLE_SPACE.match(text, start, stop + 1)
    return space.end() if space else stop


def chunks_of(text: str) -> list[str]:
    """The chunks of one document that is held whole."""
    return [chunk.text for chunk in cut([(text, True)]) if chunk.text]


def decoded(stream: Stream) -> Iterator[str]:
    """The text of a stream of UTF-8. Nothing is changed: line ends, a byte-order mark and NUL are text."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    read = 0

    def decode(block: bytes, final: bool) -> str:
        pending = len(decoder.getstate()[0])
        try:
            return decoder.decode(block, final)
        except UnicodeDecodeError as error:
            raise bad_utf8(stream, read - pending + error.start, error) from None

    for block in stream.blocks():
        yield decode(block, False)
        read += len(block)
    yield decode(b"", True)


def bad_utf8(stream: Stream, offset: int, error: UnicodeDecodeError) -> UserError:
    """The error that names the byte, counted from the beginning of the file."""
    byte = error.object[error.start]
    return UserError(
        f"{stream.source.label}: not UTF-8 at byte {stream.source.start + offset:,} (0x{byte:02x}: {error.reason})",
        "convert it first, e.g. with iconv -t UTF-8",
    )


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
    r"""A separator as typed in a shell: \n \r \t \f \v \0 \\ \xNN \uNNNN \UNNNNNNNN stand for characters.

    Raises:
        UserError: it is empty, not Unicode, or has another escape.
    """

    def character(match: re.Match[str]) -> str:
        if not match[1]:
            raise UserError(f"--separator: unknown escape in {separator!r} (expected \\n, \\t, \\\\, \\xNN, \\uNNNN)")
        return codecs.decode(match[0].encode("ascii"), "unicode_escape")

    try:
        text = ESCAPE.sub(character, separator)
    except UnicodeDecodeError as error:
        raise UserError(f"--separator: {separator!r} has no such character ({error.reason})") from None
    if not text or has_surrogate(text):
        raise UserError(f"--separator: {separator!r} is {'not Unicode' if text else 'empty'} (expected some text)")
    return text


def has_surrogate(text: str) -> bool:
    """Whether a string has half of a surrogate pair, which UTF-8 cannot hold."""
    return not text.isascii() and SURROGATE.search(text) is not None
