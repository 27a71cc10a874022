"""Ctrl-C while libraries are imported, which for torch takes a second: it waits until they are whole. Raised within,
KeyboardInterrupt is swallowed by some and leaves half a library behind; in others it ends the process with SIGABRT.
"""

import os
import signal
import threading
from types import FrameType

AGAIN = 0.05  # seconds


def prepare() -> None:
    """Handle SIGINT, unless it is ignored or another has it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, now or after the import that is going on."""
    if not importing(frame):
        raise KeyboardInterrupt
    later = threading.Timer(AGAIN, os.kill, (os.getpid(), number))
    later.daemon = True
    later.start()


def importing(frame: FrameType | None) -> bool:
    """Whether a frame, or one that called it, belongs to an import."""
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib."):
        frame = frame.f_back
    return frame is not None
