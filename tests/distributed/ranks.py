"""Real processes that meet over gloo on this machine: a server imports torch once and forks a child for each rank.

The server has one thread, so that none is torn by a fork. A child has the environment that torchrun would give it, and
its standard output and error in files; it runs one function of `tests.distributed.jobs`.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[2]
CRASHED = 99  # the exit code of a child whose job raised: no command ends so


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its exit code (negative: the signal), and what it said."""

    code: int
    stdout: str
    stderr: str


class Ranks:
    """The server. Use as a context manager.

    Args:
        folder: where children find the files of their standard output and error.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.pids: list[int] = []

    def __enter__(self) -> "Ranks":
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.distributed.ranks", str(self.folder)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(60)

    def start(self, size: int, job: str, limit: float = 60.0, **arguments: Any) -> None:
        """Fork `size` ranks that run `job`; those that take more than `limit` seconds are ended (SIGALRM)."""
        assert self.process.stdin
        request = {"size": size, "job": job, "limit": limit, "arguments": arguments}
        self.process.stdin.write(json.dumps(request, default=str) + "\n")
        self.process.stdin.flush()
        self.pids = self.read()

    def end(self) -> list[Ended]:
        """Wait until all have ended."""
        codes = self.read()
        return [Ended(code, *self.said(rank)) for rank, code in enumerate(codes)]

    def said(self, rank: int) -> tuple[str, str]:
        """Standard output and error of a rank so far."""
        one, two = (self.folder / f"{name}-{rank}" for name in ("stdout", "stderr"))
        return one.read_text(errors="replace"), two.read_text(errors="replace")

    def run(self, size: int, job: str, code: int | None = 0, **arguments: Any) -> list[Ended]:
        """Run a job on `size` ranks to its end, and check their exit codes (None: any)."""
        self.start(size, job, **arguments)
        ended = self.end()
        assert code is None or {rank.code for rank in ended} == {code}, ended
        return ended

    def pkmlm(self, size: int, *words: object, code: int | None = 0, **arguments: Any) -> list[Ended]:
        """Run a command line on `size` ranks."""
        return self.run(size, "command", code, words=[str(word) for word in words], **arguments)

    def read(self) -> list[int]:
        """The server's next word."""
        assert self.process.stdout
        found: list[int] = json.loads(self.process.stdout.readline())
        return found


def serve(folder: Path) -> None:
    """Fork children for each line of standard input; say their process ids, and then their exit codes."""
    import torch

    import tests.distributed.jobs as jobs

    torch.set_num_threads(1)
    jobs.warm()
    for line in sys.stdin:
        request = json.loads(line)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        pids = []
        for rank in range(request["size"]):
            if not (pid := os.fork()):
                join(rank, request["size"], port)
                job = getattr(jobs, request["job"])
                os._exit(child(folder, rank, job, request["limit"], request["arguments"]))
            pids.append(pid)
        print(json.dumps(pids), flush=True)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)


def join(rank: int, size: int, port: int) -> None:
    """Set the environment that torchrun sets."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def child(folder: Path, rank: int, job: Any, limit: float, arguments: dict[str, Any]) -> int:
    """What a rank does; its exit code."""
    signal.setitimer(signal.ITIMER_REAL, limit)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / f"{name}-{rank}", flags), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    code = CRASHED
    try:
        code = job(**arguments) or 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    return code


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
