"""A command that another process has started: `python -m pkmlm.cli.child PID ARGUMENTS...`, where PID is that process.

It is asked to stop (SIGTERM: training saves a checkpoint) when the other has died, killed say, which could not ask any
more. Linux alone can do that; elsewhere the command goes on by itself.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Run the command, unless the other process has died already."""
    from pkmlm.cli import main as command

    parent, sys.argv = int(sys.argv[1]), ["pkmlm", *sys.argv[2:]]
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == parent:
        command()


if __name__ == "__main__":
    main()
