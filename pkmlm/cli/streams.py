"""Standard input, output and error, as a command finds them: some may be closed, full, or of another encoding."""

import errno
import io
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import IO, Any

from pkmlm.errors import UserError, printable

# Errors of an output that takes no more: a closed pipe, a full disk.
ENDED = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


class Dispensable:
    """A stream whose failures are passed over: what people are told on standard error is worth no hour of training.

    Args:
        stream: the stream.
    """

    def __init__(self, stream: IO[str]):
        self.stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def prepare() -> None:
    """Make the standard streams safe to use: no file of ours takes the number of a closed one, text that an encoding
    has not is escaped, and standard error may go away.
    """
    for number, flags in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, flags)  # takes this number, the lowest that is free; read-only, so that output fails
    with suppress(OSError):
        os.set_blocking(0, True)  # another process with the same pipe or terminal may have set it otherwise
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = Dispensable(sys.stderr or open(2, "w", closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def silence_output() -> None:
    """Let what is left unwritten on standard output go nowhere: there is nowhere it could go."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def warn(text: str) -> None:
    """A warning, on standard error."""
    print(f"warning: {printable(text)}", file=sys.stderr)


def warn_each(warnings: Iterable[str]) -> None:
    """Warnings, on standard error, each of them once."""
    for warning in dict.fromkeys(warnings):
        warn(warning)


def read_input() -> str:
    """All of standard input.

    Raises:
        UserError: it is not UTF-8.
    """
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise UserError(f"standard input: not UTF-8 at byte {error.start}") from None
