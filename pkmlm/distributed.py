"""The processes that work together when a launcher such as torchrun has started several.

W: ranks; N: rows of one rank's tensor.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pkmlm.errors import NotFinite, UserError

# torch 2.13 has new names for these, and warns of the old ones.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass
class CommState:
    """How long this rank waits for others, and what its errors report.

    Attributes:
        timeout: seconds that a rank waits for another.
        step: the training step, for errors; 0: none.
        failed: the rank whose error ended a block of `collective_errors`; None: none, or it is not known which.
    """

    timeout: float = 1800.0
    step: int = 0
    failed: int | None = None


@dataclass(frozen=True)
class World:
    """Processes that work together, and this one's rank among them; alone, rank 0 of 1.

    All ranks call each method, in the same order, with tensors of the same shapes and dtypes. Sums are taken in the
    same order on all ranks, so that all have the same bits. A network error, a rank that has died or one that does not
    answer in time raises a UserError (exit code 1) that names this rank and its step.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)
    comm_state: CommState = field(default_factory=CommState, compare=False, repr=False)

    def all_sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in the tensor's dtype: written into the tensor itself, and returned."""
        return self._all_reduce(tensor, dist.ReduceOp.SUM)

    def all_any(self, flags: Tensor) -> Tensor:
        """Which flags (bool) are set on any rank."""
        return flags if self.size == 1 else self._all_reduce(flags.to(torch.uint8), dist.ReduceOp.MAX).bool()

    def all_max(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        return int(self._all_reduce(torch.tensor(number), dist.ReduceOp.MAX))

    def _all_reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.size > 1:
            with self._network_errors():
                dist.all_reduce(tensor, operation, self.group)
        return tensor

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' rows, by rank: (W * N, ...)."""
        if self.size == 1:
            return x
        out = x.new_empty(self.size * len(x), *x.shape[1:])
        with self._network_errors():
            ALL_GATHER(out, x.contiguous(), self.group)
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's N rows of the sum of x (W * N, ...) over all ranks: the transpose of `all_gather`."""
        if self.size == 1:
            return x
        out = x.new_empty(len(x) // self.size, *x.shape[1:])
        with self._network_errors():
            REDUCE_SCATTER(out, x.contiguous(), group=self.group)
        return out

    def all_to_all(self, x: Tensor) -> Tensor:
        """Send the j-th of W equal parts of x (its length is a multiple of W) to rank j; return the parts received, by
        rank. This is its own inverse.
        """
        if self.size == 1:
            return x
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        with self._network_errors():
            dist.all_to_all_single(out, x.contiguous(), group=self.group)
        return out

    def gather_objects(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank; they must be valid in JSON."""
        if self.size == 1:
            return [value]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        padded = torch.full((1, self.all_max(len(text))), ord(" "), dtype=torch.uint8)
        padded[0, : len(text)] = text
        return [json.loads(row.numpy().tobytes()) for row in self.all_gather(padded)]

    def broadcast(self, value: Any) -> Any:
        """The value of rank 0, on all ranks."""
        return self.gather_objects(value if self.rank == 0 else None)[0]

    @contextmanager
    def collective_errors(self) -> Iterator[None]:
        """Make a block succeed on all ranks or on none. A block in which one rank alone can fail must not contain a
        collective: the others would wait in it.

        Raises:
            UserError: on the first rank whose block raised one, that error.
            SystemExit: on the other ranks, with its exit code: the error is reported once.
        """
        failure = None
        try:
            yield
        except UserError as error:
            if self.size == 1:
                raise
            failure = error
        codes = self.gather_objects(failure.exit_code if failure else 0) if self.size > 1 else []
        first = next((rank for rank, code in enumerate(codes) if code), None)
        self.comm_state.failed = first
        if first is None:
            return
        if first != self.rank or failure is None:
            raise SystemExit(codes[first])
        where = f"rank {first}: " if first else ""
        raise UserError(where + failure.message, failure.hint, failure.exit_code) from failure

    def on_rank_zero(self, error: UserError) -> UserError | SystemExit:
        """What to raise for an error that occurs on all ranks: rank 0 reports it, the others exit with its code."""
        return error if self.rank == 0 else SystemExit(error.exit_code)

    @contextmanager
    def errors_on_rank_zero(self) -> Iterator[None]:
        """Report what occurs on all ranks, a user's mistake or numbers that are not finite, only on rank 0. Failures of
        one machine (exit code 1) are reported by the rank where they occur.
        """
        try:
            yield
        except UserError as error:
            of_one = error.exit_code == 1 and not isinstance(error, NotFinite)
            raise (error if of_one else self.on_rank_zero(error)) from None

    @contextmanager
    def _network_errors(self) -> Iterator[None]:
        """A block that sends tensors: no gradients in it, and failures of the network as a UserError."""
        try:
            with torch.no_grad():
                yield
        except RuntimeError as error:  # may also be the delayed error of an earlier kernel
            if is_network_error(error):
                raise self.network_error(error) from error
            raise

    def network_error(self, error: BaseException) -> UserError:
        """The one-line error for a network failure, which does not say which rank caused it."""
        at = f", step {self.comm_state.step}" if self.comm_state.step else ""
        first = "see the error of the rank that ended first"
        what, hint = "the connection to another rank is lost", first
        if re.search("timed? ?out", str(error), re.IGNORECASE):
            what = "another rank did not answer in time"
            hint = "PKMLM_TIMEOUT=SECONDS in the environment sets how long to wait"
        if reason := re.search(r"Last error:[ \t]*\n?(.+)", str(error)):  # as torch quotes NCCL
            what, hint = f"NCCL: {reason[1]}", f"NCCL_DEBUG=WARN in the environment says more; or {first}"
        return UserError(f"rank {dist.get_rank()}{at}: {what}", hint, exit_code=1)


@dataclass(frozen=True)
class ProcessGroups:
    """How the ranks of a training run share its work; a single process is a world of one.

    Attributes:
        world: all ranks; each takes its own sequences.
        memory: the neighbouring ranks that divide the columns of each table of rows among themselves.
        data: the ranks that hold the same columns as this one, one from each group of neighbours.
    """

    world: World = field(default_factory=World)
    memory: World = field(default_factory=World)
    data: World = field(default_factory=World)


def build_process_groups(world: World, memory: int = 1) -> ProcessGroups:
    """The process groups of a run; all ranks call it.

    Args:
        world: all ranks.
        memory: how many ranks divide each table; a divisor of the world's size.
    """
    if world.size == 1:
        return ProcessGroups(world)
    neighbours = [list(range(first, first + memory)) for first in range(0, world.size, memory)]
    same_columns = [list(range(first, world.size, memory)) for first in range(memory)]
    return ProcessGroups(world, _part(world, neighbours), _part(world, same_columns))


def _part(world: World, parts: list[list[int]]) -> World:
    """The part of the world that this rank is in, with the same timeout.

    Args:
        parts: the ranks of each part; every rank of the world is in one.
    """
    if len(parts) == 1:
        return world
    if len(parts) == world.size:
        return World(comm_state=world.comm_state)
    group, _ = dist.new_subgroups_by_enumeration(parts, timeout=timedelta(seconds=world.comm_state.timeout))
    return World(dist.get_rank(group), dist.get_world_size(group), group, world.comm_state)


def for_background(world: World) -> World:
    """The same ranks with a group of their own, over gloo, for collectives of a thread beside the main one; all ranks
    call it.
    """
    if world.size == 1:
        return World()
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=world.comm_state.timeout))
    return World(world.rank, world.size, group)


def ranks_of_machine() -> int:
    """How many ranks a launcher has started on this machine, neighbours in the world; without one, 1."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def is_network_error(error: BaseException) -> bool:
    """Whether torch reports a network failure, perhaps outside `World` (DDP sends by itself)."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def current_world() -> World:
    """The processes that have joined; this one alone, if none have."""
    return World(dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else World()
