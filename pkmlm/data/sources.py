"""Where text comes from: files, globs and standard input, plain or compressed, read as streams of bytes.

Every stored byte is counted and hashed as it is read, so that the index of a corpus says exactly what it was made
from. (fsspec opens the same files, but reads a zstd file that was cut short as if it were whole, takes an empty file
for a gzip file without text, and hides the stored bytes.)
"""

import glob
import hashlib
import os
import shlex
import stat
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

from typing_extensions import TypedDict

from pkmlm.errors import SHORTAGES, UserError, read_errors
from pkmlm.files import open_file, read_json, write_errors

if TYPE_CHECKING:
    import bz2
    import lzma

FORMATS = ("txt", "jsonl", "parquet", "arrow")
COMPRESSIONS = {".gz": "gzip", ".xz": "xz", ".bz2": "bzip2", ".zst": "zstd"}
MAGIC = {  # no text of people, and no file of the other formats, begins with these
    b"\x1f\x8b": "gzip",
    b"\xfd7zXZ\0": "xz",
    **{b"BZh%d1AY&SY" % level: "bzip2" for level in range(1, 10)},
    b"\x28\xb5\x2f\xfd": "zstd",
}
SAVED = "state.json"  # in a folder that `datasets` wrote
KINDS = f".{', .'.join(FORMATS)}; plain, or with {', '.join(COMPRESSIONS)}"
STANDARD_INPUT = "-"
READ = 1 << 20  # bytes read at a time


@dataclass(frozen=True)
class Source:
    """One input.

    Attributes:
        name: the path of a file, or "-" for standard input.
        format: one of FORMATS.
        compression: as the suffix of the name says; None: look at the first bytes.
        copy: a temporary file with the bytes of standard input, from which they can be read more than once.
    """

    name: str
    format: str
    compression: str | None = None
    copy: IO[bytes] | None = None

    @property
    def label(self) -> str:
        return "standard input" if self.name == STANDARD_INPUT else self.name

    @property
    def plain_name(self) -> str:
        """The name of the file without its folder; bytes that are not UTF-8 are escaped."""
        return os.fsencode(os.path.basename(self.name)).decode("utf-8", "backslashreplace")

    @property
    def size(self) -> int | None:
        """Bytes as stored; None for standard input that has not been copied."""
        if self.copy:
            return os.fstat(self.copy.fileno()).st_size
        return None if self.name == STANDARD_INPUT else os.stat(self.name).st_size

    @contextmanager
    def open(self) -> Iterator["Stream"]:
        """Begin a pass over the bytes.

        Raises:
            UserError: the file cannot be opened.
        """
        if self.copy:
            self.copy.seek(0)
            yield Stream(self, self.copy)
        elif self.name == STANDARD_INPUT:
            yield Stream(self, sys.stdin.buffer)
        else:
            with read_errors(self.name):
                file = open_file(self.name)
            with file:
                yield Stream(self, file)


class Stream:
    """One pass over a source.

    Attributes:
        count: the stored bytes that have been read so far; digest: of these.
        advance: called whenever `count` has grown.
        undivided: None, unless the documents have been read and their separator is nowhere in the text: then the same
            separator with other line ends, if that is in it, or "".
    """

    def __init__(self, source: Source, file: IO[bytes]):
        self.source = source
        self.file = file
        self.count = 0
        self.advance: Callable[[], None] = lambda: None
        self.digest = hashlib.sha256()
        self.undivided: str | None = None
        self.unread = b""

    def read(self, size: int) -> bytes:
        """At most `size` stored bytes, maybe fewer; none at the end."""
        if self.unread:
            data, self.unread = self.unread[:size], self.unread[size:]
            return data
        data = self.file.read(size)
        self.digest.update(data)
        self.count += len(data)
        self.advance()
        return data

    def blocks(self) -> Iterator[bytes]:
        """The decompressed bytes, in blocks of which each is what up to 1 MiB of the file stands for; at the end every
        stored byte has been read.

        Raises:
            UserError: the file cannot be read, or its compressed data is damaged or cut short.
        """
        import bz2
        import lzma

        import zstandard

        label, compression = self.source.label, self.source.compression
        try:
            self.unread = self.read(max(map(len, MAGIC)))
            if compression is None:
                compression = next((name for magic, name in MAGIC.items() if self.unread.startswith(magic)), None)
            blocks: dict[str | None, Callable[[Stream], Iterator[bytes]]] = {
                "gzip": gzip_blocks,
                "xz": partial(stream_blocks, new=lzma.LZMADecompressor),
                "bzip2": partial(stream_blocks, new=bz2.BZ2Decompressor),
                "zstd": zstd_blocks,
                None: plain_blocks,
            }
            yield from blocks[compression](self)
            if compression and not self.count:
                raise EOFError("the file is empty")
        except (EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
            raise UserError(f"{label}: damaged or cut short ({compression}: {error})") from None
        except OSError as error:  # also gzip.BadGzipFile and that of bz2, which have no strerror
            reason = error.strerror or f"damaged or cut short ({error})"
            code = 1 if error.errno in SHORTAGES else 2
            raise UserError(f"cannot read {label}: {reason}", exit_code=code) from None


def plain_blocks(stored: Stream) -> Iterator[bytes]:
    return iter(lambda: stored.read(READ), b"")


def gzip_blocks(stored: Stream) -> Iterator[bytes]:
    """The decompressed bytes of all gzip members."""
    import gzip

    with gzip.GzipFile(fileobj=stored) as file:  # type: ignore[call-overload]  # it needs only read()
        yield from iter(lambda: file.read(READ), b"")


def stream_blocks(
    stored: Stream, new: "Callable[[], lzma.LZMADecompressor] | Callable[[], bz2.BZ2Decompressor]"
) -> Iterator[bytes]:
    """The decompressed bytes of all streams of an xz or bzip2 file; Python's own readers take what is damaged after the
    first stream for the end of the file.
    """
    decompressor, begun = new(), False
    for data in plain_blocks(stored):
        while data or not (decompressor.eof or decompressor.needs_input):
            if decompressor.eof:
                data = data.lstrip(b"\0")  # xz may fill up with NUL
                if not data:
                    break
                decompressor = new()
            begun = True
            if block := decompressor.decompress(data, READ):
                yield block
            data = decompressor.unused_data if decompressor.eof else b""
    if begun and not decompressor.eof:
        raise EOFError("the last stream is not complete")


def zstd_blocks(stored: Stream) -> Iterator[bytes]:
    """The decompressed bytes of all zstd frames; zstandard's own stream reader accepts a frame that is cut short."""
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)  # as `zstd --long=31` writes
    frame = decompressor.decompressobj()
    begun = False
    for data in plain_blocks(stored):
        while data:
            if frame.eof:
                frame = decompressor.decompressobj()
            begun = True
            if block := frame.decompress(data):
                yield block
            data = frame.unused_data if frame.eof else b""
    if begun and not frame.eof:
        raise EOFError("the last frame is not complete")


def temporary_copy(stream: Stream, *, decompress: bool) -> IO[bytes]:
    """Copy a stream to a temporary file that has no name and disappears when it is closed.

    Args:
        stream: an open stream, of which nothing has been read.
        decompress: whether to copy the decompressed bytes or the stored ones.

    Raises:
        UserError: the stream cannot be read; (exit code 1) there is no room for the copy.
    """
    with write_errors(Path(tempfile.gettempdir())):
        file = tempfile.TemporaryFile()  # noqa: SIM115
    for block in stream.blocks() if decompress else plain_blocks(stream):
        with write_errors(Path(tempfile.gettempdir())):
            file.write(block)
    with write_errors(Path(tempfile.gettempdir())):
        file.seek(0)  # what is still in the buffer is written now
    return file


def rereadable(source: Source, advance: Callable[[int], None]) -> Source:
    """The source itself; standard input is copied to a temporary file first, so that it can be read again.

    Args:
        advance: called with the bytes that have been copied so far.
    """
    if source.name != STANDARD_INPUT:
        return source
    with source.open() as stream:
        stream.advance = lambda: advance(stream.count)
        return replace(source, copy=temporary_copy(stream, decompress=False))


def find_sources(patterns: Sequence[str], format: str | None = None) -> list[Source]:
    """The inputs that file names, globs and `-` stand for: checked, sorted by name, each file once.

    Args:
        patterns: names of files, globs (`**` crosses folders), folders of data sets that `datasets` saved, or `-` for
            standard input.
        format: the format of every input; None: by its name (standard input: txt).

    Raises:
        UserError: a file is missing, unreadable, not regular or of no known format; a glob matches no file.
    """
    names = sorted({name for pattern in patterns for name in expand_glob(pattern)}, key=os.fsencode)
    found: dict[str, Source] = {}
    for name in names:
        place = name if name == STANDARD_INPUT else os.path.realpath(name)
        if place not in found:
            found[place] = find_source(name, format)
    return list(found.values())


def expand_glob(pattern: str) -> list[str]:
    """The files that one argument stands for; the name of an existing file is that file, even if it has a * or [. The
    folder of a saved data set stands for its files.

    Raises:
        UserError: it is empty, a glob that matches no file, or another folder.
    """
    if not pattern:
        raise UserError("found an empty file name")
    if pattern != STANDARD_INPUT and os.path.isdir(pattern):
        return saved_files(pattern)
    if pattern == STANDARD_INPUT or os.path.lexists(pattern) or not glob.has_magic(pattern):
        return [pattern]
    names = [name for name in glob.glob(pattern, recursive=True) if not os.path.isdir(name)]
    if not names:
        raise UserError(f"{pattern} matches no file")
    return names


class SavedDataset(TypedDict):
    """What is read of that file."""

    _data_files: list[dict[str, str]]


def saved_files(folder: str) -> list[str]:
    """The files of a data set that `save_to_disk` of the library `datasets` wrote into a folder, in their order; other
    files in it may be left over from its cache.

    Raises:
        UserError: the folder is not one of these, or holds several splits.
    """
    state = Path(folder, SAVED)
    if state.is_file():
        names = [file["filename"] for file in read_json(state, "the data set", schema=SavedDataset)["_data_files"]]
        return [os.path.join(folder, os.path.basename(name)) for name in names]
    problem = f"{folder} is a folder (expected a file)"
    if splits := sorted(path.parent for path in Path(folder).glob(f"*/{SAVED}")):
        found = ", ".join(path.name for path in splits)
        raise UserError(f"{problem}; found the splits {found}", f"give each by itself: {shlex.quote(str(splits[0]))}")
    for below in ("", "*"):
        for end in (f"*.{format}{suffix}" for format in FORMATS for suffix in ("", *COMPRESSIONS)):
            pattern = os.path.join(glob.escape(folder), below, end)
            if next(glob.iglob(pattern), None):
                raise UserError(problem, f"give its files: {shlex.quote(pattern)}")
    raise UserError(f"{problem}, and none of its files is {KINDS}")


def find_source(name: str, format: str | None) -> Source:
    """The source with this name.

    Raises:
        UserError: it cannot be read, or its format is not known.
    """
    if name == STANDARD_INPUT:
        return Source(name, format or "txt")
    stem, suffix = os.path.splitext(name)
    compression = COMPRESSIONS.get(suffix.lower())
    if compression:
        suffix = os.path.splitext(stem)[1]
    with read_errors(name):
        mode = os.stat(name).st_mode
        if not stat.S_ISREG(mode):
            hint = "write it to a file, or pipe it to standard input, whose name is -"
            raise UserError(f"{name} is not a regular file", hint)
        open_file(name).close()
    if format is None and suffix.lower()[1:] not in FORMATS:
        raise UserError(
            f"{name}: unknown kind of file (expected {KINDS})",
            "rename it to end in one of these, or pipe text to standard input, whose name is -; "
            "`pkmlm tokenize` also takes --format",
        )
    return Source(name, format or suffix.lower()[1:], compression)
