"""What a forked child does."""

import resource
import sys
from pathlib import Path

from tests.torture.disk import Disk


def command(
    words: list[str],
    disk: dict[str, object] | None = None,
    memory: int = 0,
    file_size: int = 0,
    init_scale: float = 0.0,
) -> int:
    """Run a command line; return its exit code.

    Args:
        disk: of `Disk`.
        memory, file_size: limits in bytes (memory: beyond what the process has when it begins).
        init_scale: the loss scale that fp16 begins with; large ones make the first steps overflow.
    """
    from pkmlm.cli import main

    if init_scale:
        start_scale_at(init_scale)
    if memory:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
    if file_size:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
    if disk is not None:
        trace = disk.pop("trace", None)
        Disk(Path(str(trace)) if trace else None, **disk).install()  # type: ignore[arg-type]
    sys.argv = ["pkmlm", *words]
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def start_scale_at(scale: float) -> None:
    from functools import partial

    from pkmlm.train import step

    step.LossScale = partial(step.LossScale, scale)  # type: ignore[assignment,misc]
