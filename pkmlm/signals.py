"""Signals that ask a command to stop: Ctrl-C (SIGINT), SIGTERM and SIGHUP (the terminal has gone).

At the first signal, training finishes its step, saves a checkpoint and stops; a second signal ends the process at once.
All other commands end on Ctrl-C, but not in the middle of an import.
"""

import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

SAME_REQUEST = 1.0  # seconds: make and launchers pass on a signal that the whole process group has received already
GRACE = 5.0  # seconds from a second request until a process that does not answer it is ended
RETRY = 0.05  # seconds from one attempt to raise KeyboardInterrupt to the next
Handler = Callable[[int, FrameType | None], None]
EXIT_CODES: dict[int, int] = {signal.SIGTERM: 75, signal.SIGHUP: 75, signal.SIGINT: 130}


def signal_name(number: int) -> str:
    """The name of a signal, such as SIGTERM; "signal 35" for one without a name."""
    return next((each.name for each in signal.Signals if each == number), f"signal {number}")


def interrupt_after_imports() -> None:
    """Make Ctrl-C wait until libraries are imported, which takes seconds for torch. During an import, some libraries
    swallow KeyboardInterrupt and stay half loaded; others end the process with SIGABRT. If SIGINT is ignored, it stays
    ignored.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib."):
            frame = frame.f_back
        if frame is None:
            raise KeyboardInterrupt
        again = threading.Timer(RETRY, os.kill, (os.getpid(), number))
        again.daemon = True
        again.start()

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)


class StopRequest:
    """Whether a signal has asked to stop, and the exit code for it (None: no signal has).

    Args:
        agree: returns the largest of the ranks' numbers, so that all ranks stop after the same step when one is asked.
            All ranks call it together.
    """

    def __init__(self, agree: Callable[[int], int] = int) -> None:
        self.exit_code: int | None = None
        self.agree = agree

    def agreed(self) -> int | None:
        """The exit code for all ranks, if any of them was asked to stop."""
        return self.agree(self.exit_code or 0) or None


@contextmanager
def stop_on_signals(agree: Callable[[int], int] = int, message: str = "") -> Iterator[StopRequest]:
    """Note a signal that asks to stop, instead of dying; another, over a second later, raises KeyboardInterrupt.

    A thread listens, too: the interpreter runs no handler while it waits for a library, which may take long (half
    precision on a CPU) or forever (a collective with a rank that has died). If KeyboardInterrupt cannot be raised
    within `GRACE`, the thread ends the process.

    Args:
        agree: see `StopRequest`.
        message: a line for standard error when the first signal comes.
    """
    request, insisting, answered = StopRequest(agree), threading.Event(), threading.Event()
    raised_at = -math.inf
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal raised_at
        if insisting.is_set():
            answered.set()
            if time.monotonic() - raised_at > SAME_REQUEST:  # the thread's next signal may be on its way already
                raised_at = time.monotonic()
                raise KeyboardInterrupt
        elif request.exit_code is None:
            request.exit_code = EXIT_CODES[number]

    def listen() -> None:
        asked_at = 0.0
        while not answered.is_set():
            for number in os.read(reader, 64):
                if number not in EXIT_CODES:
                    continue
                if not asked_at:
                    asked_at = time.monotonic()
                    with suppress(OSError, ValueError, TypeError):  # standard error may be closed
                        if message and select.select([], [sys.stderr], [], 0)[1]:
                            draws = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
                            over_prompt = "\r\x1b[2K" if draws else ""  # the terminal's ^C
                            print(over_prompt + message, file=sys.stderr, flush=True)
                elif time.monotonic() - asked_at > SAME_REQUEST:
                    insisting.set()
                    for _ in range(round(GRACE / RETRY)):  # a signal just before a call that sleeps would not wake it
                        signal.pthread_kill(threading.main_thread().ident or 0, number)
                        if answered.wait(RETRY):
                            return
                    os._exit(EXIT_CODES[signal.SIGINT])

    thread = threading.Thread(target=listen, daemon=True)
    with handled(note):
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        thread.start()
        try:
            yield request
        finally:
            signal.set_wakeup_fd(before)
            answered.set()
            os.write(writer, b"\0")  # not by closing it: a forked child may hold the pipe open
            thread.join()
            os.close(writer)
            os.close(reader)


@contextmanager
def handled(handler: Handler) -> Iterator[None]:
    """Handle SIGTERM, SIGHUP and SIGINT with a function, and restore the former handlers at the end. Under nohup,
    SIGHUP stays ignored.
    """
    heeded = [each for each in EXIT_CODES if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heeded}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
