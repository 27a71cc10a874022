"""A command that another process has started: `python -m pkmlm.cli.child PID ARGUMENTS...`, where PID is that process.

It is asked to stop (SIGTERM: training saves a checkpoint) when the other has died, killed say, which could not ask any
more. Linux alone can do that; elsewhere the command goes on by itself.
"""

import os
import signal
import sys


def main() -> None:
    """Run the command, unless the other process has died already."""
    from pkmlm.cli import main as command
    from pkmlm.signals import signal_at_parents_death

    parent, sys.argv = int(sys.argv[1]), ["pkmlm", *sys.argv[2:]]
    signal_at_parents_death(signal.SIGTERM)
    if os.getppid() == parent:
        command()


if __name__ == "__main__":
    main()
