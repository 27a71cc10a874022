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
WORK_PER_THREAD = 1 << 17  # numbers; starting a thread for fewer takes longer than it saves


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a function when it is first called with given types, and keep the code on disk. It runs without the
    interpreter's lock.

    The cache is beside the source or in the user's cache folder. If neither can be written, or this version of numba
    has another kind of cache, each process compiles for itself.
    """
    dispatcher: Any = njit(function, **OPTIONS)
    with suppress(RuntimeError, AttributeError, TypeError):  # no folder to cache in, or another kind of cache
        dispatcher._cache = KernelCache(function)
    return dispatcher


class KernelCache(FunctionCache):
    """numba's cache of one function, in which a file's name states the source, options, types and processor that its
    code is for. If reading or writing fails (a truncated file, a full disk), the function is compiled again.

    numba's own files are numbered, and an index says which is which. Processes that save code for different types at
    the same time can leave one's code under the other's types (float64 was once summed by the code for int64), and a
    process killed between its two writes leaves the code of an older source. A lock would prevent only the former.
    """

    def __init__(self, function: Callable[..., Any]):
        super().__init__(function)
        # A kernel may include code from the files beside its own.
        files = sorted(Path(function.__code__.co_filename).parent.glob("*.py"))
        self._stamp = [(file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files]
        self._files: Any = IndexDataCacheFile(self.cache_path, self._impl.filename_base, self._stamp)
        self._cache_file: Any = self  # numba's cache calls its `load` and `save`

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
        """What the file of a key holds; `load_overload` handles a missing file."""
        return self._files._load_data(self._file_name(key))

    def save(self, key: Any, data: Any) -> None:
        """Write the file of a key."""
        self._files._save_data(self._file_name(key), data)

    def _file_name(self, key: Any) -> str:
        whose = repr((self._files._version, ARITHMETIC, OPTIONS["error_model"], self._stamp, key))
        return f"{self._impl.filename_base}.{hashlib.sha256(whose.encode()).hexdigest()[:32]}.nbc"


def over_threads(kernel: Callable[..., None], bounds: Sequence[int], *arguments: Any) -> None:
    """Run kernel(first, stop, *arguments) for each pair of successive `bounds`, each on its own thread.

    The threads live for one call (some 50 us each): a pool could break in a fork, or spin beside torch's.

    Raises:
        Exception: the first that a part raised, once all have ended.
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
    """Bounds that split `items` evenly over torch's threads, or over fewer if there is little work.

    Args:
        work: numbers that are handled for one item.
    """
    threads = max(1, min(torch.get_num_threads(), items, items * work // WORK_PER_THREAD))
    return [items * part // threads for part in range(threads + 1)]


def array_of(x: Tensor) -> Any:
    """The memory of a tensor on the CPU, or of a copy where it is not contiguous."""
    return x.detach().contiguous().numpy()
