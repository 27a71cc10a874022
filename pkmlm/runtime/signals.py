"""Stopping on request: a signal sets a flag, which the loop reads at the end of a step."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SAME_REQUEST = 1.0  # seconds: make and launchers pass on a signal that the process group has had already
EXIT_CODES = {signal.SIGTERM: 75, signal.SIGINT: 130}


class StopRequest:
    """Whether a signal asked to stop, and which exit code it stands for (None: nobody asked)."""

    def __init__(self) -> None:
        self.exit_code: int | None = None
        self.asked_at = 0.0

    def __bool__(self) -> bool:
        return self.exit_code is not None


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Note SIGTERM and SIGINT instead of dying; a signal more than a second later ends the process at once
    (KeyboardInterrupt).

    The handlers that stood before are put back at the end.
    """
    request = StopRequest()

    def note(number: int, frame: FrameType | None) -> None:
        if not request:
            request.exit_code = EXIT_CODES[signal.Signals(number)]
            request.asked_at = time.monotonic()
        elif time.monotonic() - request.asked_at > SAME_REQUEST:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, note) for number in EXIT_CODES}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
