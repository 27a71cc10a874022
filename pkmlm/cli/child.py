"""A command that another process has started: `python -m pkmlm.cli.child PID ARGUMENTS...`, where PID is that process.

When that process dies without asking its children to stop (it is killed, say), Linux sends this one SIGTERM, on which
training saves a checkpoint and ends. Elsewhere the command runs on by itself.
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
