"""Stopping on request: a signal sets a flag, which the loop reads at the end of a step."""

import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

PR_SET_PDEATHSIG = 1  # linux/prctl.h
SAME_REQUEST = 1.0  # seconds: make and launchers pass on a signal that the process group has had already
PATIENCE = 5.0  # seconds from a second request that no handler answers to the end of the process
AGAIN = 0.1  # seconds from one try to reach the handler to the next
Handler = Callable[[int, FrameType | None], None]
EXIT_CODES: dict[int, int] = {signal.SIGTERM: 75, signal.SIGHUP: 75, signal.SIGINT: 130}


class StopRequest:
    """Whether a signal asked to stop, and which exit code it stands for (None: nobody asked).

    Args:
        agree: the largest of what it is called with on all ranks. One rank is asked, and all stop at the same place:
            whether to stop is therefore asked by all of them together.
    """

    def __init__(self, agree: Callable[[int], int] = int) -> None:
        self.exit_code: int | None = None
        self.agree = agree

    def agreed(self) -> int | None:
        """The exit code for all ranks, if any of them was asked to stop."""
        return self.agree(self.exit_code or 0) or None


@contextmanager
def stop_on_signals(agree: Callable[[int], int] = int, told: str = "") -> Iterator[StopRequest]:
    """Note signals that ask to stop, instead of dying; one more than a second later ends the process at once
    (KeyboardInterrupt).

    Args:
        agree: see `StopRequest`.
        told: a line for standard error when the first comes.
    """
    request, second = StopRequest(agree), SecondRequest()

    def note(number: int, frame: FrameType | None) -> None:
        if second.heard.is_set():
            second.answered.set()
            raise KeyboardInterrupt
        if request.exit_code is None:
            request.exit_code = EXIT_CODES[signal.Signals(number)]
            signal_at_parents_death(0)  # it comes for each dying thread of the parent: one is enough

    with watched(second, told), handled(note):
        yield request


class SecondRequest:
    """A signal more than `SAME_REQUEST` seconds after the first: whether it was heard, and whether a handler has ended
    what was to be ended.
    """

    def __init__(self) -> None:
        self.heard, self.answered = threading.Event(), threading.Event()


@contextmanager
def watched(second: SecondRequest, told: str) -> Iterator[None]:
    """Hear signals in a thread: the interpreter runs no handler while it waits for a call of a library, which may be
    long (half precision on a CPU) or never end (another rank's share of a sum). The thread alone has a clock, since it
    alone sees when a signal comes.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(target=_hear, args=(reader, second, told), daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        second.answered.set()
        os.write(writer, b"\0")  # a forked child may hold the pipe open: its end would not be seen
        thread.join()
        os.close(writer)
        os.close(reader)


def _hear(reader: int, second: SecondRequest, told: str) -> None:
    """Say that the first request was heard; have a second one handled, and end the process where no handler answers it
    in `PATIENCE`.
    """
    asked_at = 0.0
    while not second.answered.is_set():
        requests = [number for number in os.read(reader, 64) if number in EXIT_CODES]
        if requests and not asked_at:
            asked_at = time.monotonic()
            say(told)
        elif requests and time.monotonic() - asked_at > SAME_REQUEST:
            second.heard.set()
            for _ in range(round(PATIENCE / AGAIN)):
                if second.answered.wait(AGAIN):
                    return
                signal.pthread_kill(threading.main_thread().ident or 0, requests[-1])  # it wakes from a sleep, too
            os._exit(EXIT_CODES[signal.SIGINT])


def say(told: str) -> None:
    """A line on standard error, over the terminal's ^C; nothing where the terminal has gone or nobody reads."""
    with suppress(OSError, ValueError, TypeError):
        if told and select.select([], [sys.stderr], [], 0)[1]:
            print(("\r\x1b[2K" if sys.stderr.isatty() else "") + told, file=sys.stderr, flush=True)


@contextmanager
def handled(handler: Handler) -> Iterator[None]:
    """Let a function have SIGTERM, SIGHUP (the terminal has gone) and SIGINT; the handlers that stood before are put
    back at the end. Under nohup, SIGHUP stays ignored.
    """
    heeded = [each for each in EXIT_CODES if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heeded}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def signal_at_parents_death(number: int) -> None:
    """Have the system send this process a signal when the one that started it has ended (0: none); Linux alone can."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_PDEATHSIG, number)
