"""Kernels in Python that numba compiles: their cache on disk, their threads, and torch's memory as they see it."""

import hashlib
import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from numba import njit
from numba.core.caching import FunctionCache, IndexDataCacheFile
from torch import Tensor

# Sums may be reordered and multiply-adds fused, so that loops become vector instructions; the order is the same on
# every run and for any number of threads. Infinities and NaN keep their meaning: a step must see them.
ARITHMETIC = ("reassoc", "contract", "nsz")
# The "numpy" model divides by zero as the hardware does; Python's would test each divisor, in scalar code.
OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": {*ARITHMETIC}, "error_model": "numpy"}
WORK_PER_THREAD = 1 << 17  # numbers a thread, under which starting it costs more than it does


def compiled(function: Callable[..., Any]) -> Any:
    """Compile for the types of the first call, without the interpreter's lock, and keep the result on disk.

    The cache lies beside the source or in the user's cache folder; where neither can be written, or numba's cache is
    another than is known here, each process compiles for itself.
    """
    dispatcher: Any = njit(function, **OPTIONS)
    with suppress(RuntimeError, AttributeError, TypeError):  # no folder to cache in, or another cache
        dispatcher._cache = KernelCache(function)
    return dispatcher


class KernelCache(FunctionCache):
    """numba's cache of one function, in which the name of a file says for which source, options, types and processor
    its code is. Where reading or writing fails (a full disk, a file cut short), the function is compiled anew.

    numba's own files are numbered, and an index says which is which. Processes that save code for different types at
    the same time can leave one's code under the other's types (sums of float64 were taken by the code for int64), and
    one that is killed between its two writes leaves the code of an older source. A lock would prevent only the former.
    """

    def __init__(self, function: Callable[..., Any]):
        super().__init__(function)
        # A kernel may contain functions of the files beside its own.
        files = sorted(Path(function.__code__.co_filename).parent.glob("*.py"))
        self._stamp = [(file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files]
        self._files: Any = IndexDataCacheFile(self.cache_path, self._impl.filename_base, self._stamp)
        self._cache_file: Any = self  # of which numba's cache calls `load` and `save`

    def load_overload(self, *arguments: Any) -> Any:
        """The code for these types, or None."""
        with suppress(Exception):
            return super().load_overload(*arguments)
        return None

    def save_overload(self, *arguments: Any) -> None:
        """Save the code for these types, if that is possible."""
        with suppress(Exception):
            super().save_overload(*arguments)

    def load(self, key: Any) -> Any:
        """What the file of a key holds; `load_overload` takes care of one that is not there."""
        return self._files._load_data(self._file_name(key))

    def save(self, key: Any, data: Any) -> None:
        """Write the file of a key."""
        self._files._save_data(self._file_name(key), data)

    def _file_name(self, key: Any) -> str:
        whose = repr((self._files._version, ARITHMETIC, OPTIONS["error_model"], self._stamp, key))
        return f"{self._impl.filename_base}.{hashlib.sha256(whose.encode()).hexdigest()[:32]}.nbc"


def over_threads(kernel: Callable[..., None], bounds: Sequence[int], *arguments: Any) -> None:
    """Run kernel(first, stop, *arguments) for each pair of neighbours in `bounds`, each on a thread.

    The threads live for one call (some 50 us each): no pool that a fork could tear, none that spins beside torch's.

    Raises:
        Exception: what a part raised, once all have ended.
    """
    if len(bounds) == 2:
        kernel(*bounds, *arguments)
        return
    errors: list[BaseException] = []

    def run(first: int, stop: int) -> None:
        try:
            kernel(first, stop, *arguments)
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
    """Split `items` evenly over torch's threads; on one thread where all of them together are little `work`.

    Args:
        work: numbers that an item handles.
    """
    threads = max(1, min(torch.get_num_threads(), items, items * work // WORK_PER_THREAD))
    return [items * part // threads for part in range(threads + 1)]


def array_of(x: Tensor) -> Any:
    """The memory of a tensor on the CPU, or of a copy where it is not contiguous."""
    return x.detach().contiguous().numpy()
