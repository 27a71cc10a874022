"""How many cores there are to work on."""

import os


def usable_cores() -> int:
    """The cores that this process may use: those of the machine, or fewer where it is held to some of them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
