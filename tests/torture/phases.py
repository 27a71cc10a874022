"""In which phase a process is, told through a small shared file that outlives a kill."""

import functools
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

# (module, name of a function in it, phase while it runs); the innermost counts.
TRAINING = (
    ("pkmlm.train.run", "begin", "begin"),
    ("pkmlm.train.run", "build_model", "build"),
    ("pkmlm.train.loop.Training", "_restore", "restore"),
    ("pkmlm.train.loop.Training", "_train_step", "step"),
    ("pkmlm.train.loop.Training", "_validate", "validate"),
    ("pkmlm.runs.saving.Saver", "_write", "write"),
    ("pkmlm.runs.saving", "write_tensors", "tensors"),
    ("pkmlm.runs.saving", "write_json", "manifest"),
    ("pkmlm.train.loop", "prune", "prune"),
    ("pkmlm.runs.directory.RunDirectory", "set_pointer", "point"),
    ("pkmlm.train.log.TrainingLog", "event", "log"),
)
TOKENIZING = (
    ("pkmlm.data.tokenizer.Tokenizer", "learn", "learn"),
    ("pkmlm.data.shards", "write_tokens", "split"),
    ("pkmlm.data.shards", "write_tokens", "shards"),
    ("pkmlm.data.corpus.Index", "write", "index"),
    ("pkmlm.cli.show.Output", "show", "result"),
)


class Phases:
    """Marks: byte i of the file is how often phase i has been entered (at most 255); the first byte is the phase of the
    main thread, the last that of the thread that writes checkpoints.

    Args:
        path: the file.
        names: the phases, in order; index 0 is "outside" of all.
    """

    def __init__(self, path: Path, names: list[str]):
        self.names = ["outside", *names]
        if not path.exists() or path.stat().st_size != 256:
            path.write_bytes(bytes(256))
        descriptor = os.open(path, os.O_RDWR)
        self.map = mmap.mmap(descriptor, 256)
        os.close(descriptor)

    def now(self) -> str:
        return self.names[self.map[-1] or self.map[0]]

    def times(self, name: str) -> int:
        return self.map[self.names.index(name)]

    def clear(self) -> None:
        self.map[:] = bytes(256)

    def watch(self, places: tuple[tuple[str, str, str], ...]) -> None:
        """Let every function of `places` mark its phase, in this process."""
        import importlib

        for where, name, phase in places:
            module, _, owner = where.rpartition(".") if where.rpartition(".")[2][0].isupper() else (where, "", "")
            holder: Any = importlib.import_module(module)
            holder = getattr(holder, owner) if owner else holder
            setattr(holder, name, self._marked(getattr(holder, name), self.names.index(phase)))

    def _marked(self, function: Callable[..., Any], number: int) -> Callable[..., Any]:
        @functools.wraps(function)
        def marked(*arguments: Any, **named: Any) -> Any:
            place = 0 if threading.current_thread() is threading.main_thread() else 255
            before = self.map[place]
            self.map[number] = min(255, self.map[number] + 1)
            self.map[place] = number
            try:
                return function(*arguments, **named)
            finally:
                self.map[place] = before

        return marked


def phases_of(places: tuple[tuple[str, str, str], ...]) -> list[str]:
    return [phase for _, _, phase in places]
