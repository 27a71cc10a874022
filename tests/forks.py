"""Processes by the hundred: a server imports torch once and forks children that run jobs.

The server has one thread, whatever it has warmed itself up with, so that no thread is torn by a fork. A child runs one
function of a module of jobs, with its standard output and error in files, and ends without the interpreter's shutdown.
Children that are started together have the environment that torchrun would give them.
"""

import importlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tests import PATIENCE

ROOT = Path(__file__).parents[1]
CRASHED = 99  # the exit code of a child whose job raised: no command ends so


@dataclass(frozen=True)
class Ended:
    """How a child ended: its exit code (negative: the signal), what it said, and after how many seconds."""

    code: int
    stdout: str
    stderr: str
    seconds: float


class Children:
    """Children of a server that were started together, and may still be running."""

    def __init__(self, server: "Forks", pids: list[int]):
        self.server, self.pids, self.began = server, pids, time.monotonic()

    def running(self, rank: int = 0) -> bool:
        """Whether one of them still runs (a zombie does not)."""
        try:
            return Path(f"/proc/{self.pids[rank]}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    def signal(self, number: int, rank: int = 0) -> None:
        """Send one of them a signal, unless it has ended."""
        if self.running(rank):
            os.kill(self.pids[rank], number)

    def end(self) -> list[Ended]:
        """Wait until all have ended."""
        codes = self.server.read()
        seconds = time.monotonic() - self.began
        return [Ended(code, *self.said(rank), seconds) for rank, code in enumerate(codes)]

    def said(self, rank: int) -> tuple[str, str]:
        """Standard output and error of one of them so far."""
        one, two = (self.server.folder / f"{name}-{rank}" for name in ("stdout", "stderr"))
        return one.read_text(errors="replace"), two.read_text(errors="replace")


class Forks:
    """The server: its children are started and ended before the next ones. Use as a context manager.

    Args:
        folder: where children find the files of their standard output and error.
        jobs: the module whose functions they run.
    """

    def __init__(self, folder: Path, jobs: str):
        self.folder, self.jobs = folder, jobs

    def __enter__(self) -> "Forks":
        self.folder.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "tests.forks", str(self.folder), self.jobs]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(PATIENCE)

    def start(self, job: str, size: int = 1, limit: float = PATIENCE, here: bool = False, **arguments: Any) -> Children:
        """Fork `size` children that run `job`; those that take more than `limit` seconds are ended (SIGALRM). `here`:
        run it in the server itself, whose later children find every module and kernel loaded.
        """
        assert self.process.stdin
        request = {"job": job, "size": size, "limit": limit, "here": here, "arguments": arguments}
        self.process.stdin.write(json.dumps(request, default=str) + "\n")
        self.process.stdin.flush()
        return Children(self, self.read())

    def run(self, job: str, **arguments: Any) -> list[Ended]:
        """Run a job to its end."""
        return self.start(job, **arguments).end()

    def pkmlm(self, *words: object, code: int | None = 0, **arguments: Any) -> Ended:
        """Run a command line to its end, and check its exit code (None: any)."""
        (ended,) = self.run("command", words=[str(word) for word in words], **arguments)
        assert code is None or ended.code == code, f"{words}: {ended}"
        return ended

    def read(self) -> list[int]:
        """The server's next word."""
        assert self.process.stdout
        found: list[int] = json.loads(self.process.stdout.readline())
        return found


def serve(folder: Path, jobs: Any) -> None:
    """Fork children for each line of standard input; say their process ids, and then their exit codes."""
    import torch

    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        job, size, arguments = getattr(jobs, request["job"]), request["size"], request["arguments"]
        if request["here"]:
            print(json.dumps([os.getpid()]), flush=True)
            out, err = folder / "stdout-0", folder / "stderr-0"
            with open(out, "w") as one, open(err, "w") as two, redirect_stdout(one), redirect_stderr(two):
                code = job(**arguments) or 0
            assert threading.active_count() == 1
            print(json.dumps([code]), flush=True)
            continue
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        pids = []
        for rank in range(size):
            if not (pid := os.fork()):
                if size > 1:
                    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
                    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
                os._exit(child(folder, rank, job, request["limit"], arguments))
            pids.append(pid)
        print(json.dumps(pids), flush=True)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)


def child(folder: Path, rank: int, job: Any, limit: float, arguments: dict[str, Any]) -> int:
    """What a forked process does; its exit code."""
    signal.setitimer(signal.ITIMER_REAL, limit)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / f"{name}-{rank}", flags), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    code = CRASHED
    try:
        code = job(**arguments) or 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    return int(code)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), importlib.import_module(sys.argv[2]))
