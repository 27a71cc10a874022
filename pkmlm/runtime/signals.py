"""Stopping on request: a signal sets a flag, which the loop reads at the end of a step."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_CODES = {signal.SIGTERM: 75, signal.SIGINT: 130}


class StopRequest:
    """Whether a signal asked to stop, and which exit code it stands for (None: nobody asked)."""

    def __init__(self) -> None:
        self.exit_code: int | None = None

    def __bool__(self) -> bool:
        return self.exit_code is not None


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Note SIGTERM and SIGINT instead of dying; a second signal ends the process at once (KeyboardInterrupt).

    The handlers that stood before are put back at the end.
    """
    request = StopRequest()

    def note(number: int, frame: FrameType | None) -> None:
        if request:
            raise KeyboardInterrupt
        request.exit_code = EXIT_CODES[signal.Signals(number)]

    before = {number: signal.signal(number, note) for number in EXIT_CODES}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
