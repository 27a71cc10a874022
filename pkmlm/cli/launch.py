"""`pkmlm train --nproc N`: several processes on this machine, by torch's own launcher.

`python -m pkmlm.cli.launch PID ARGUMENTS...` runs a command for the process PID that has started it. If that process
dies without asking its children to stop (when it is killed, say), Linux sends this one SIGTERM, and training saves a
checkpoint and ends. On other systems the command runs on.
"""

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from tempfile import TemporaryDirectory
from types import FrameType
from typing import TYPE_CHECKING

from pkmlm.environment import collective_timeout, launched_processes, usable_cores
from pkmlm.errors import UserError
from pkmlm.signals import EXIT_CODES, handled, signal_name

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import ProcessFailure

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


def launch(processes: int, run: str | None) -> int:
    """Run this command line in several processes, and return the exit code that they agree on.

    Ctrl-C, SIGTERM and SIGHUP go to all of them: they save a checkpoint and end, as they do if this process dies. If
    one of them is killed or does not answer, the others are ended, and the run's run.json says which it was.

    Raises:
        UserError: a process was killed or did not answer, or this machine has fewer GPUs (exit codes 1, 1 and 2).
    """
    passed: list[int] = []
    with handled(lambda number, frame: passed.append(number)):  # noted, not raised: an import may swallow exceptions
        import psutil
        import torch
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        def pass_on(number: int, frame: FrameType | None) -> None:
            passed.append(number)
            # Each rank leads a session of its own once it has started; a child that does not is not a rank yet.
            ranks = [child.pid for child in psutil.Process().children() if os.getsid(child.pid) == child.pid]
            for rank in ranks:
                os.kill(rank, number)
            if not ranks:
                raise SystemExit(EXIT_CODES[number])

        if passed:
            return EXIT_CODES[passed[-1]]
        if 0 < torch.cuda.device_count() < processes:
            raise UserError(f"--nproc {processes}: this machine has {torch.cuda.device_count()} GPUs")
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // processes)))
        logging.disable(logging.ERROR)  # the launcher's own account of failures: we report them in one line
        with TemporaryDirectory() as logs, handled(pass_on):
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=processes,
                run_id=f"pkmlm-{os.getpid()}",
                rdzv_backend="c10d",
                rdzv_endpoint="127.0.0.1:0",
                local_addr="127.0.0.1",
                max_restarts=0,
                logs_specs=DefaultLogsSpecs(logs),
                signals_to_handle="SIGQUIT",  # we pass on the others, and wait without a limit
            )
            try:
                elastic_launch(config, sys.executable)("-m", "pkmlm.cli.launch", str(os.getpid()), *sys.argv[1:])
                return 0
            except ChildFailedError as error:
                failures: Mapping[int, ProcessFailure] = error.failures
    return outcome(failures, passed, run)


def outcome(failures: "Mapping[int, ProcessFailure]", passed: list[int], run: str | None) -> int:
    """The exit code that the processes have agreed on; `passed`: the signals that they were sent.

    Raises:
        UserError: one was killed, from outside or by the system, or did not answer; the run's run.json says which.
    """
    # Torch's launcher ends those that are left when one has failed: with SIGTERM, and half a minute later with SIGKILL.
    expected = {-signal.SIGTERM, *(-number for number in passed)}
    killed = {rank: each for rank, each in failures.items() if each.exitcode < 0 and each.exitcode not in expected}
    if not killed:
        codes = [each.exitcode for each in failures.values() if each.exitcode > 0]
        if not codes:  # the signal came before they had handlers
            return EXIT_CODES[passed[-1]] if passed else 1
        return 1 if 1 in codes else max(codes)
    first, rank = (min(each, key=lambda rank: (each[rank].timestamp, rank)) for each in (failures, killed))
    if killed[rank].timestamp > failures[first].timestamp + 1:
        what = f"did not answer after the end of rank {first} (exit code {failures[first].exitcode}), and was ended"
        status, why = "failed", "it hung, or somebody stopped it"
    else:
        name = signal_name(-killed[rank].exitcode)
        status, what = f"killed ({name})", f"was killed ({name}), and the others were ended"
        why = "if nobody killed it, memory ran out, or a library gave up, as NCCL does if no rank answers in time"
    note_end(run, rank, status)
    raise UserError(f"rank {rank} {what}", f"{why}; the same command resumes from the last checkpoint", exit_code=1)


def note_end(run: str | None, rank: int, status: str) -> None:
    """Say in run.json which process ended all, if there is a run by now and no other process holds it."""
    from pkmlm.runs.directory import RunDirectory

    if run is None or not os.path.isdir(run):
        return
    directory = RunDirectory(run)
    with suppress(UserError), directory.locked():
        facts = directory.facts()
        if facts.get("status") in ("running", "failed"):
            said_why = status == "failed" and facts.get("message")  # of another rank, which failed by itself
            blamed = {} if said_why else {"rank": rank}
            directory.write_facts(status=status, exit_code=1, step=max(directory.steps(), default=0), **blamed)


def main() -> None:
    """Run a command, unless the process that started it has already died."""
    from pkmlm.cli import main as command

    parent, sys.argv = int(sys.argv[1]), ["pkmlm", *sys.argv[2:]]
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == parent:
        command()


if __name__ == "__main__":
    main()
