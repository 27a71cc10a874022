"""Processes by the hundred: a server imports torch once and forks for every trial.

The server has one thread, whatever it has warmed itself up with, so that no thread is torn by a fork. A child runs
one function of `tests.torture.jobs`, with its standard output and error in files, and ends without the interpreter's
shutdown.
"""

import json
import os
import resource
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

ROOT = Path(__file__).parents[2]
CRASHED = 99  # the exit code of a child whose job raised: no command ends so


@dataclass(frozen=True)
class Ended:
    """How a child ended: its exit code (negative: the signal), what it said, and after how many seconds."""

    code: int
    stdout: str
    stderr: str
    seconds: float


class Child:
    """A child of the server that is still running."""

    def __init__(self, server: "Forks", pid: int):
        self.server, self.pid, self.began = server, pid, time.monotonic()
        self.code: int | None = None

    def running(self) -> bool:
        """Whether it still runs (a zombie does not)."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    def signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.running():
            os.kill(self.pid, number)

    def end(self) -> Ended:
        """Wait until it has ended."""
        code = self.server.read()["code"]
        seconds = time.monotonic() - self.began
        said = [self.server.folder.joinpath(name).read_text(errors="replace") for name in ("stdout", "stderr")]
        return Ended(code, *said, seconds)


class Forks:
    """The server, one child at a time. Use as a context manager.

    Args:
        folder: where children find the files of their standard output and error.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def __enter__(self) -> "Forks":
        self.folder.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "tests.torture.forks", str(self.folder)]
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

    def start(self, job: str, limit: float = 120.0, here: bool = False, **arguments: Any) -> Child:
        """Fork a child that runs `job`; it is ended (SIGALRM) where it takes more than `limit` seconds."""
        assert self.process.stdin
        request = {"job": job, "limit": limit, "here": here, "arguments": arguments}
        self.process.stdin.write(json.dumps(request, default=str) + "\n")
        self.process.stdin.flush()
        return Child(self, self.read()["pid"])

    def run(self, job: str, limit: float = 120.0, **arguments: Any) -> Ended:
        """Run a job to its end."""
        return self.start(job, limit, **arguments).end()

    def warm(self, *words: object) -> None:
        """Run a command line in the server itself: its children find every module and kernel loaded."""
        self.pkmlm(*words, here=True)

    def pkmlm(self, *words: object, code: int | None = 0, **arguments: Any) -> Ended:
        """Run a command line to its end, and check its exit code (None: any)."""
        ended = self.run("command", words=[str(word) for word in words], **arguments)
        assert code is None or ended.code == code, f"{words}: {ended}"
        return ended

    def read(self) -> dict[str, int]:
        """The server's next word."""
        assert self.process.stdout
        found: dict[str, int] = json.loads(self.process.stdout.readline())
        return found


def serve(folder: Path) -> None:
    """Fork a child for each line of standard input, and say its process id and then its exit code."""
    import torch

    import tests.torture.jobs as jobs

    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        if request["here"]:
            print(json.dumps({"pid": os.getpid()}), flush=True)
            out, err = folder / "stdout", folder / "stderr"
            with open(out, "w") as one, open(err, "w") as two, redirect_stdout(one), redirect_stderr(two):
                code = getattr(jobs, request["job"])(**request["arguments"])
            assert threading.active_count() == 1
            print(json.dumps({"code": code}), flush=True)
            continue
        pid = os.fork()
        if not pid:
            os._exit(child(folder, getattr(jobs, request["job"]), request["limit"], request["arguments"]))
        print(json.dumps({"pid": pid}), flush=True)
        status = os.waitpid(pid, 0)[1]
        print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), flush=True)


def child(folder: Path, job: Any, limit: float, arguments: dict[str, Any]) -> int:
    """What the forked process does; its exit code."""
    import signal

    signal.setitimer(signal.ITIMER_REAL, limit)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, flags), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    code = CRASHED
    try:
        code = job(**arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    return int(code)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
