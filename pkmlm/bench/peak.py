"""The memory of a layer's training step at its height, measured in a process of its own."""

import resource
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import psutil
import torch

from pkmlm.bench.contenders import CONTENDERS, backward, inputs, product_key_layer
from pkmlm.bench.shape import Shape
from pkmlm.device import default_device
from pkmlm.errors import UserError


def peak_of_step(shape: Shape, name: str, say: Callable[[str], None]) -> int:
    """Bytes that a layer of `pkmlm.bench.LAYERS` holds at the height of a training step.

    Raises:
        UserError: the process was killed (exit code 1).
    """
    say(f"peak memory of {name}")
    try:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            return pool.submit(own_peak, shape, name).result()
    except BrokenProcessPool:
        message = f"the process that took a step of {name} with {shape.slots:,} slots was killed (out of memory?)"
        raise UserError(message, "give fewer --slots or a smaller --dim", exit_code=1) from None


def own_peak(shape: Shape, name: str) -> int:
    """Peak bytes of this process over two steps, less what it held before there was a table.

    A step on a small table comes first, so that compilers and buffers of the libraries do not count.
    """
    device = default_device()
    two_steps(replace(shape, num_keys=max(16, shape.topk)), name, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        two_steps(shape, name, device)
        return torch.cuda.max_memory_allocated(device) - before
    before = psutil.Process().memory_info().rss
    two_steps(shape, name, device)
    return most_resident() - before


def most_resident() -> int:
    """Bytes that this process has held at most. (On Linux, ru_maxrss also counts what its parent had held before.)"""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS: in bytes
    peak = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(peak.split()[1]) * 1024


def two_steps(shape: Shape, name: str, device: torch.device) -> None:
    """Two training steps of a layer."""
    one = CONTENDERS[name](shape, product_key_layer(shape, device))
    x_1ND, grad_1ND = inputs(shape, device)
    for _ in range(2):
        backward(one, x_1ND, grad_1ND, update=True)
