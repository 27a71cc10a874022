"""The processes that work together, where a launcher such as torchrun has started several."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class World:
    """This process among those that work together; alone, rank 0 of 1."""

    rank: int = 0
    size: int = 1

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of a CPU tensor over all ranks, on all ranks; each must call it."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor


def world() -> World:
    """The processes that have joined; this one alone, where none have."""
    return World(dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else World()


@contextmanager
def joined() -> Iterator[World]:
    """Join the processes of the launcher (over gloo, on the CPU) and leave them at the end; on GPUs, take this rank's.

    Results that are small meet in main memory, so one backend does for every device.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield World()
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    dist.init_process_group("gloo")
    try:
        yield world()
    finally:
        dist.destroy_process_group()
