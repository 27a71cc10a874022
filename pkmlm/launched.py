"""Joining the processes that a launcher such as torchrun has started; `distributed` is what they then do together."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from pkmlm.distributed import CommState, World
from pkmlm.environment import SIZE, collective_timeout, launched_processes
from pkmlm.errors import UserError, first_line, printable

PATIENCE = 10.0  # seconds of waiting before it is said


@contextmanager
def init_distributed() -> Iterator[World]:
    """Join the processes of the launcher and leave them at the end; with GPUs, select this rank's.

    Tensors on GPUs go over NCCL, those in main memory over gloo. The error of any rank but the first names the rank.

    Raises:
        UserError: the launcher's environment is incomplete (exit code 2), this rank's GPU cannot be used, or the other
            ranks cannot be reached (1).
    """
    if launched_processes() == 1:
        yield World()
        return
    timeout = collective_timeout()
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():  # a launcher may show each rank only one GPU; NCCL refuses two ranks on one
        local = os.environ.get("LOCAL_RANK", "0")
        try:
            torch.cuda.set_device(int(local) % torch.cuda.device_count())
        except RuntimeError as error:
            raise UserError(f"the GPU of rank {local} on this machine: {first_line(error)}", exit_code=1) from None
    try:
        with saying_who_is_awaited(timeout):
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
            dist.all_reduce(torch.zeros(1))  # a rank that exits before the others join looks like a crash to them
    except ValueError as error:
        raise UserError(
            f"{SIZE} is set, but a variable that belongs to it is not: {error}", f"start with torchrun, or unset {SIZE}"
        ) from None
    except RuntimeError as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        message = f"rank {os.environ['RANK']} cannot reach the others at {place}: {first_line(error)}"
        hint = f"start all ranks, and check that they can reach that address; to work alone, unset {SIZE}"
        raise UserError(message, hint, exit_code=1) from None
    try:
        yield World(dist.get_rank(), dist.get_world_size(), comm_state=CommState(timeout))
    except BaseException as error:
        own = f"rank {dist.get_rank()}"
        if isinstance(error, UserError) and dist.get_rank() > 0 and not error.message.startswith(own):
            error.message = f"{own}: {error.message}"
        if "nccl" not in backend:  # it would wait here for the others, and they may wait for this rank in a sum
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


@contextmanager
def saying_who_is_awaited(timeout: float) -> Iterator[None]:
    """If joining the others takes long, say on standard error for how many this rank waits, where, and what to unset if
    there are none: the launcher's variables may be left over in a shell or a job. Ctrl-C ends the process meanwhile: no
    handler would run before torch's wait is over.

    Args:
        timeout: seconds after which it gives up.
    """
    size, rank = launched_processes(), os.environ.get("RANK", "")
    place = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
    text = f"rank {rank} waits, up to {timeout:,.0f} seconds, for all {size} processes at {place}"
    text += f"; if no launcher has started them, unset {SIZE}"
    timer = threading.Timer(PATIENCE, lambda: print(printable(text), file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    handler = signal.getsignal(signal.SIGINT)
    ends = handler not in (None, signal.SIG_IGN)
    if ends:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        timer.cancel()
        if ends:
            signal.signal(signal.SIGINT, handler)
