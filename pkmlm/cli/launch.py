"""`pkmlm train --nproc N`: several processes on this machine, started by torchrun within this one.

`main` is where those processes begin, as do the commands of a sweep (`environment.child_command`). If the process that
has started one dies without asking its children to stop (when it is killed, say), Linux sends the child SIGTERM, and
training saves a checkpoint and ends. On other systems the command runs on.
"""

import ctypes
import logging
import os
import signal
import sys
from contextlib import suppress
from tempfile import TemporaryDirectory
from types import FrameType

import pkmlm
from pkmlm.environment import child_command, collective_timeout, launched_processes, source_sha256, usable_cores
from pkmlm.errors import UserError
from pkmlm.signals import EXIT_CODES, handled, signal_name

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def launches(processes: int | None) -> bool:
    """Whether this process starts the others; False if a launcher has started it, or if it trains alone.

    Raises:
        UserError: a launcher has started another number of processes, or the environment is not valid.
    """
    before = launched_processes()
    if processes is None or processes == before:
        return False
    if before > 1:
        raise UserError(
            f"--nproc {processes} under a launcher that has started {before} processes",
            "leave --nproc out under torchrun",
        )
    collective_timeout()  # an error in its setting is reported here once, not by each process
    return True


def launch(processes: int) -> int:
    """Run this command line in several processes, and return the exit code that they agree on.

    Ctrl-C, SIGTERM and SIGHUP go to all of them: they save a checkpoint and end, as they do if this process dies. If
    one of them fails, the others are ended: with SIGTERM, and half a minute later with SIGKILL.

    Raises:
        UserError: a process was killed, or this machine has fewer GPUs (exit codes 1 and 2).
    """
    import psutil
    import torch
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    def pass_on(number: int, frame: FrameType | None) -> None:
        # Each rank leads a session of its own once it has started; a child that does not is not a rank yet.
        passed = False
        for child in psutil.Process().children():
            with suppress(ProcessLookupError):  # it has ended meanwhile
                if os.getsid(child.pid) == child.pid:
                    os.kill(child.pid, number)
                    passed = True
        if not passed:
            raise SystemExit(EXIT_CODES[number])

    if 0 < torch.cuda.device_count() < processes:
        found = f"found {processes} (expected at most {torch.cuda.device_count()}, the GPUs of this machine)"
        raise UserError(f"--nproc: {found}", "lower it, or set CUDA_VISIBLE_DEVICES= to use the CPU")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // processes)))
    logging.disable(logging.ERROR)  # torchrun's own account of failures: we report them in one line
    with TemporaryDirectory() as logs, handled(pass_on):
        # Signals that torchrun handles itself hide the exit codes, and cut off a save that takes over half a minute.
        options = ["--standalone", "--local-addr=127.0.0.1", f"--log-dir={logs}", "--signals-to-handle=SIGQUIT"]
        # Without "--", torchrun would take our --nproc for an abbreviation of its own option.
        command = ["--no-python", "--", *child_command(sys.argv[1:])]
        try:
            torchrun([*options, f"--nproc-per-node={processes}", *command])
            return 0
        except ChildFailedError as error:
            failures = sorted(error.failures.items(), key=lambda failure: failure[1].timestamp)
    codes = {rank: failure.exitcode for rank, failure in failures}
    for rank, code in codes.items():
        if code < 0 and -code not in EXIT_CODES:
            message = f"rank {rank} was killed ({signal_name(-code)}), and the others were ended"
            hint = "if nobody killed it, memory ran out, or a library gave up, as NCCL does if no rank answers in time"
            raise UserError(message, f"{hint}; the same command resumes from the last checkpoint", exit_code=1)
    ended = [code for code in codes.values() if code > 0]  # 1 where a rank has lost another
    return min(ended) if ended else EXIT_CODES[-max(codes.values())]  # a signal that came before they had handlers


def main(parent: int, source: str) -> None:
    """Run this process's command line, unless the process that has started it has already died.

    Args:
        parent: the id of that process.
        source: the `source_sha256` of its code. Where that has been edited or replaced since, the command is refused:
            one sweep's numbers are those of one code.
    """
    from pkmlm.cli import main as command
    from pkmlm.cli import print_error

    sys.argv[0] = "pkmlm"
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return
    if source_sha256() != source:
        message = f"the code of pkmlm in {os.path.dirname(pkmlm.__file__)} has changed since this command was started"
        sys.exit(print_error(UserError(message, "give the command again: it goes on with the new code", exit_code=1)))
    command()
