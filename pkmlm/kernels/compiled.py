"""How CPU kernels are compiled by numba, and run over threads."""

import hashlib
import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from numba import njit
from numba.core.caching import IndexDataCacheFile

# Sums may be reordered and multiply-adds fused, so that loops become vector instructions; the order is the same on
# every run and for any number of threads. Infinities and NaN keep their meaning: a step must see them.
ARITHMETIC = ("reassoc", "contract", "nsz")
# The "numpy" model divides by zero as the hardware does; Python's would test each divisor, in scalar code.
OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": {*ARITHMETIC}, "error_model": "numpy"}
LEAST_WORK = 1 << 17  # numbers a thread, under which starting it costs more than it does


def compiled(function: Callable[..., Any]) -> Any:
    """Compile for the types of the first call, without the interpreter's lock, and keep the result on disk.

    The cache lies beside the source or in the user's cache folder; where neither can be written, or numba's cache is
    another than is known here, each process compiles for itself.
    """
    try:
        dispatcher: Any = njit(function, cache=True, **OPTIONS)
        dispatcher._cache = Cache(dispatcher._cache)
    except (RuntimeError, AttributeError, TypeError):  # no folder to cache in, or another cache
        return njit(function, **OPTIONS)
    return dispatcher


class Cache:
    """numba's cache of one function; where it fails (a full disk, a file cut short), the function is compiled anew."""

    def __init__(self, cache: Any):
        self._cache = cache
        cache._cache_file = FileOfEachKey(cache.cache_path, cache._impl)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def load_overload(self, *arguments: Any) -> Any:
        with suppress(Exception):
            return self._cache.load_overload(*arguments)
        return None

    def save_overload(self, *arguments: Any) -> None:
        with suppress(Exception):
            self._cache.save_overload(*arguments)


class FileOfEachKey:
    """Compiled code on disk: the name of a file says for which source, options, types and processor it is.

    numba's own files are numbered, and an index says which is which. Processes that save code for different types at
    the same time can leave one's code under the other's types (sums of float64 were taken by the code for int64), and
    one that is killed between its two writes leaves the code of an older source.
    """

    def __init__(self, folder: str, function: Any):
        self._stamp = function.locator.get_source_stamp()
        self._function = function.filename_base
        self._files: Any = IndexDataCacheFile(folder, self._function, self._stamp)

    def load(self, key: Any) -> Any:
        with suppress(FileNotFoundError):
            return self._files._load_data(self._name(key))
        return None

    def save(self, key: Any, data: Any) -> None:
        self._files._save_data(self._name(key), data)

    def _name(self, key: Any) -> str:
        whose = repr((self._files._version, ARITHMETIC, OPTIONS["error_model"], self._stamp, key))
        return f"{self._function}.{hashlib.sha256(whose.encode()).hexdigest()[:32]}.nbc"


def over_threads(kernel: Callable[..., None], bounds: Sequence[int], *arguments: Any) -> None:
    """Run kernel(first, stop, *arguments) for each pair of neighbours in `bounds`, each on a thread.

    The threads live for one call (some 50 us each): no pool that a fork could tear, none that spins beside torch's.

    Raises:
        Exception: what a part raised, once all have ended.
    """
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
    threads = max(1, min(torch.get_num_threads(), items, items * work // LEAST_WORK))
    return [items * part // threads for part in range(threads + 1)]
