"""Ctrl-C while libraries are imported, by real signals."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBRARY = """
import os, signal, sys
os.kill(os.getpid(), signal.SIGINT)
for _ in range(10_000_000):  # half a second of work
    pass
print("whole", flush=True)
"""
COMMAND = """
import time
from pkmlm.cli import interrupts
interrupts.prepare()
try:
    import library
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_import_ends_before_it_is_interrupted(tmp_path: Path) -> None:
    (tmp_path / "library.py").write_text(LIBRARY)
    begun = [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\n{COMMAND}"]
    done = subprocess.run(begun, capture_output=True, text=True, timeout=30)
    assert (done.stdout, done.stderr) == ("whole\ninterrupted\n", "")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what a process has loaded")
@pytest.mark.parametrize("library", ["_multiarray_umath", "libtorch_cpu", "libtorch_python"])
def test_a_command_may_be_interrupted_as_it_begins(library: str) -> None:
    words = [sys.executable, "-m", "pkmlm", "bench", "memory", "--rounds", "99"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        while library not in Path(f"/proc/{process.pid}/maps").read_text():
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said.split()) == (130, ["interrupted"])
