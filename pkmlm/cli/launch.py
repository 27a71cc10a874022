"""`pkmlm train --nproc N`: several processes on this machine, by torch's own launcher."""

import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from tempfile import TemporaryDirectory
from types import FrameType
from typing import TYPE_CHECKING

from pkmlm.errors import UserError
from pkmlm.runtime.cores import usable_cores

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import ProcessFailure

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
RANK_FOUND = "WORLD_SIZE"  # in the environment of a process that a launcher has started


def launches(processes: int | None) -> bool:
    """Whether this process is to start the others; False in one that was started, or that is to train alone.

    Raises:
        UserError: another launcher has started another number of processes.
    """
    started = os.environ.get(RANK_FOUND)
    if processes is None or started is not None:
        if processes is not None and started != str(processes):
            raise UserError(
                f"--nproc {processes} within a launcher that has started {started} processes",
                "leave --nproc out under torchrun",
            )
        return False
    return processes > 1


def launch(processes: int, run: str | None) -> int:
    """Run this command line in so many processes, and return the exit code that they agree on.

    Ctrl-C, SIGTERM and SIGHUP go to all of them: they save a checkpoint and end. Where one is killed, the others are
    ended, and the run's run.json says which it was.

    Raises:
        UserError: a process was killed, or this machine has fewer GPUs (exit codes 1 and 2).
    """
    import torch
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if 0 < torch.cuda.device_count() < processes:
        raise UserError(f"--nproc {processes}: this machine has {torch.cuda.device_count()} GPUs")
    with threads_shared(processes), quiet_logs(), TemporaryDirectory() as logs, signals_passed_on() as passed:
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
            signals_to_handle="SIGQUIT",  # the others are passed on here, and waited for without a limit
        )
        try:
            elastic_launch(config, sys.executable)("-m", "pkmlm", *sys.argv[1:])
            return 0
        except ChildFailedError as error:
            failures: Mapping[int, ProcessFailure] = error.failures
    return outcome(failures, passed, run)


@contextmanager
def threads_shared(processes: int) -> Iterator[None]:
    """Give each process its share of the cores, unless the environment says how many threads it has."""
    if "OMP_NUM_THREADS" in os.environ:
        yield
        return
    os.environ["OMP_NUM_THREADS"] = str(max(1, usable_cores() // processes))
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]


@contextmanager
def signals_passed_on() -> Iterator[list[int]]:
    """Send SIGINT, SIGTERM and SIGHUP on to all processes that were started, each of which leads a session of its own;
    yields the list of those that came.
    """
    import psutil

    passed: list[int] = []

    def send(number: int, frame: FrameType | None) -> None:
        passed.append(number)
        ranks = [child for child in psutil.Process().children() if leads_session(child.pid)]
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.send_signal(number)
        if not ranks:  # none has been started so far
            raise SystemExit(128 + number)

    heeded = [each for each in PASSED_ON if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]
    before = {number: signal.signal(number, send) for number in heeded}
    try:
        yield passed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leads_session(process: int) -> bool:
    with suppress(ProcessLookupError):
        return os.getsid(process) == process
    return False


@contextmanager
def quiet_logs() -> Iterator[None]:
    """Keep the launcher's own account of failures to itself: it is told here, in one line."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


def outcome(failures: "Mapping[int, ProcessFailure]", passed: list[int], run: str | None) -> int:
    """The exit code that the processes have agreed on; `passed`: the signals that they were sent.

    Raises:
        UserError: one was killed, from outside or by the system; it is noted in the run's run.json.
    """
    codes = [each.exitcode for each in failures.values() if each.exitcode > 0]
    # The launcher itself ends with SIGTERM those that are left when one has failed.
    expected = {signal.SIGTERM, *passed}
    killed = [(rank, -each.exitcode) for rank, each in failures.items() if each.exitcode < 0]
    killed = [(rank, number) for rank, number in killed if number not in expected]
    if not killed and not codes:  # before they could heed a signal
        return 128 + passed[-1] if passed else 1
    if not killed:
        return 1 if 1 in codes else max(codes)
    rank, number = min(killed)
    name = signal.Signals(number).name
    if run is not None:
        note_killed(run, rank, name)
    raise UserError(
        f"rank {rank} was killed ({name}), and the others were ended",
        "if nobody did it, memory ran out; the same command goes on from the last checkpoint",
        exit_code=1,
    )


def note_killed(run: str, rank: int, name: str) -> None:
    """Say in run.json which process was killed, unless the run belongs to others by now."""
    from pkmlm.runtime.rundir import RunDirectory

    directory = RunDirectory(run)
    with suppress(UserError), directory.locked():
        if directory.facts().get("status") in ("running", "failed"):
            step = max(directory.steps(), default=0)
            directory.note(status=f"killed ({name})", exit_code=1, step=step, rank=rank)
