"""Kernels in Python that numba compiles: their cache on disk, their threads, and torch's memory as they see it."""

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from numba import njit
from torch import Tensor

# Sums may be reordered and multiply-adds fused, so that loops become vector instructions; the order is the same on
# every run and for any number of threads. Infinities and NaN keep their meaning: a step must see them.
ARITHMETIC = {"reassoc", "contract", "nsz"}
# The "numpy" model divides by zero as the hardware does; Python's would test each divisor, in scalar code.
OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": ARITHMETIC, "error_model": "numpy"}
WORK_PER_THREAD = 1 << 17  # numbers; starting a thread for fewer takes longer than it saves


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function that Python calls: at its first call, with nogil. numba keeps the code beside the source or in
    the user's cache folder (or in that of NUMBA_CACHE_DIR); if neither can be written, each process compiles.

    A kernel is always called with the same types. numba's cache is not made for processes that compile one function for
    several types at the same time: each could then find the code of the other. What it calls is `compiled` in its own
    file, by whose time of change numba knows that the code is old.
    """
    try:
        return njit(function, cache=True, **OPTIONS)
    except RuntimeError:
        return njit(function, **OPTIONS)


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a function that kernels call, as a part of them and for any types."""
    return njit(function, **OPTIONS)


def call(function: Any, *arguments: Any) -> Any:
    """Call a kernel. If its code cannot be saved when it has been compiled (a full disk), it is used all the same."""
    try:
        return function(*arguments)
    except OSError:
        return function(*arguments)


def over_threads(function: Callable[..., None], bounds: Sequence[int], *arguments: Any) -> None:
    """Run function(first, stop, *arguments) for each pair of successive `bounds`, each on its own thread.

    The threads live for one call (some 50 us each): a pool could break in a fork, or spin beside torch's.

    Raises:
        Exception: the first that a part raised, once all have ended.
    """
    if len(bounds) == 2:
        call(function, *bounds, *arguments)
        return
    errors: list[BaseException] = []

    def run(first: int, stop: int) -> None:
        try:
            call(function, first, stop, *arguments)
        except BaseException as error:
            errors.append(error)

    parts = list(itertools.pairwise(bounds))
    threads = [threading.Thread(target=run, args=part) for part in parts[1:]]
    for thread in threads:
        thread.start()
    run(*parts[0])
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def even_bounds(items: int, work: int) -> list[int]:
    """Bounds that split `items` evenly over torch's threads, or over fewer if there is little work.

    Args:
        work: numbers that are handled for one item.
    """
    threads = max(1, min(torch.get_num_threads(), items, items * work // WORK_PER_THREAD))
    return [items * part // threads for part in range(threads + 1)]


def array_of(x: Tensor) -> Any:
    """The memory of a tensor on the CPU, or of a copy where it is not contiguous."""
    return x.detach().contiguous().numpy()
