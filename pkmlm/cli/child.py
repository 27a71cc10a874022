"""A command of a sweep: `python -m pkmlm.cli.child PID ARGUMENTS...`, where PID is the sweep's process.

It is asked to stop (SIGTERM: it saves a checkpoint) when the sweep has died, killed say, which could not ask any more.
Linux alone can do that; elsewhere the command goes on by itself.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Run the command, unless the sweep has died already."""
    from pkmlm.cli import main as command

    sweep, sys.argv = int(sys.argv[1]), ["pkmlm", *sys.argv[2:]]
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == sweep:
        command()


if __name__ == "__main__":
    main()
