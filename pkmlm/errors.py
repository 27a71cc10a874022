"""Errors that a user can fix: shown as one `error:` line and one `hint:` line, never as a traceback."""

import errno
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

LONGEST, MOST = 300, 2000  # characters of a word and of a line in an error, which may quote text of any length
SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO)  # whichever file the user names


class UserError(Exception):
    """What is wrong, where, what was found and what was expected, in one line.

    Args:
        message: one line: what, where, found (expected); the middle of what is too long is left out.
        hint: what to do about it, in one line; may be empty.
        exit_code: 2 for wrong usage, recipe or input; 1 where the machine failed (a full disk, say); 3 for divergence.
    """

    def __init__(self, message: str, hint: str = "", exit_code: int = 2):
        message = without_middle(
            re.sub(rf"\S{{{LONGEST},}}", lambda word: without_middle(word[0], LONGEST), message), MOST
        )
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code
        if hint and sys.version_info >= (3, 11):
            self.add_note(f"hint: {hint}")  # shown under a traceback, in Python


class NotFinite(UserError):
    """A model's numbers are infinite or NaN; if it is being trained, training has diverged."""


def without_middle(text: str, most: int) -> str:
    """A text, with "..." in place of its middle if it has more than `most` characters."""
    return text if len(text) <= most else f"{text[: most // 2]}...{text[3 - most // 2 :]}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without the traces and advice that torch adds below it."""
    return str(error).strip().partition("\n")[0]


def printable(text: str) -> str:
    """`text` with control characters escaped, so that a file name or a document cannot drive the terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


@contextmanager
def read_errors(what: object, exit_code: int = 2) -> Iterator[None]:
    """Turn a failure to read a file into a UserError that names it: the system's (OSError), or Python's for a name
    that no file can have (ValueError). Failures of the machine (`SHORTAGES`) have exit code 1.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        code = 1 if getattr(error, "errno", None) in SHORTAGES else exit_code
        raise UserError(f"cannot read {what}: {reason}", exit_code=code) from None


@contextmanager
def memory_errors(message: str, hint: str = "") -> Iterator[None]:
    """Turn an error that says that memory has run out into a UserError with this message (exit code 1)."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise UserError(message, hint, exit_code=1) from None
        raise


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory has run out, in the words of Python, numpy, torch, oneDNN, Triton or CUDA."""
    words = ("allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "could not create a primitive")
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # the latter is torch's
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)
