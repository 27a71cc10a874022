"""Stop requests, and Ctrl-C while libraries are imported, by real signals."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from pkmlm import signals
from pkmlm.signals import stop_on_signals
from tests import PATIENCE


def send(number: int, seconds: float = 0.01) -> None:
    os.kill(os.getpid(), number)
    time.sleep(seconds)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGHUP, 75), (signal.SIGINT, 130)])
def test_a_signal_is_noted_and_the_handlers_come_back(number, code):
    before = signal.default_int_handler
    found = signal.signal(number, before)  # SIGHUP is ignored where the tests run under nohup
    with stop_on_signals() as stop:
        assert stop.agreed() is None
        send(number)
        assert stop.agreed() == code
        send(signal.SIGTERM)  # passed on by a launcher: the same request
        assert stop.agreed() == code
    assert signal.signal(number, found) is before


def test_a_hangup_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals() as stop:
            send(signal.SIGHUP)
            assert stop.agreed() is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_later_signal_ends_at_once(monkeypatch):
    monkeypatch.setattr(signals, "SAME_REQUEST", 0.05)
    with stop_on_signals():
        send(signal.SIGTERM, 0.1)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT, 10)


def test_signals_that_come_together_are_one_request():
    """As when a launcher of many threads is killed (each thread's end sends one); however late they are handled."""
    with stop_on_signals() as request:
        try:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM) * 10:
                os.kill(os.getpid(), number)
        except KeyboardInterrupt:
            pytest.fail("taken for a second request")
        assert request.agreed() == 130


DEAF = """
import ctypes
mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
lock(mutex)
print("waiting", flush=True)
lock(mutex)  # for ever, and no signal interrupts it
"""
SLOW = """
import time
try:
    print("waiting", flush=True)
    time.sleep(60)
finally:
    time.sleep(0.2)
    print("cleaned", flush=True)
"""
AGAIN = """
import os, signal, time
try:
    print("waiting", flush=True)
    time.sleep(60)
finally:
    os.kill(os.getpid(), signal.SIGTERM)  # of the same request: passed on, or sent by the thread meanwhile
    time.sleep(0.2)
    print("cleaned", flush=True)
    time.sleep(60)
"""
LATE = """
import ctypes, threading
mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
libc.pthread_mutex_lock(mutex)
threading.Timer(0.5, libc.pthread_mutex_unlock, (mutex,)).start()
print("waiting", flush=True)
libc.pthread_mutex_lock(mutex)  # a signal that comes now is handled half a second later
"""


@pytest.fixture
def process(request):
    """A process that stops on signals, with shorter times than those of a command."""
    begun = "from pkmlm import signals\nsignals.GRACE, signals.SAME_REQUEST = 1, 0.4\n"
    begun += "with signals.stop_on_signals(message='heard'):\n"
    body = textwrap.indent(request.param, "    ")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    heed = lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL)  # noqa: E731 (ignored where the tests run under nohup)
    with subprocess.Popen([sys.executable, "-c", begun + body], text=True, preexec_fn=heed, **pipes) as started:
        assert started.stdout.readline() == "waiting\n"
        yield started
        started.kill()


@pytest.mark.parametrize("process", [DEAF], indirect=True)
def test_a_second_request_ends_a_process_that_waits_for_a_library(process):
    process.send_signal(signal.SIGTERM)
    assert process.stderr.readline() == "heard\n"
    process.send_signal(signal.SIGTERM)  # passed on by a launcher: the same request
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 130


@pytest.mark.parametrize("process", [SLOW, LATE + SLOW], indirect=True, ids=["slow", "late"])
def test_a_second_request_that_is_answered_leaves_time_to_clean_up(process):
    time.sleep(0.1)  # it has said that it waits, and now does
    process.send_signal(signal.SIGTERM)
    assert process.stderr.readline() == "heard\n"
    time.sleep(0.6)
    process.send_signal(signal.SIGTERM)
    assert process.stdout.read().endswith("cleaned\n")
    assert process.wait(PATIENCE) not in (0, 130), "KeyboardInterrupt, which the command line turns into 130"


@pytest.mark.parametrize("process", [AGAIN], indirect=True)
def test_only_a_third_request_interrupts_the_cleaning_up(process):
    process.send_signal(signal.SIGTERM)
    assert process.stderr.readline() == "heard\n"
    time.sleep(0.6)
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "cleaned\n"
    time.sleep(0.4)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) not in (0, 130), "KeyboardInterrupt, which the command line turns into 130"


@pytest.mark.parametrize("process", [DEAF], indirect=True)
def test_requests_are_heard_after_the_terminal_has_gone(process):
    process.stderr.close()
    process.send_signal(signal.SIGHUP)
    time.sleep(0.7)
    process.send_signal(signal.SIGHUP)
    assert process.wait(PATIENCE) == 130


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
from pkmlm.signals import interrupt_after_imports
interrupt_after_imports()
try:
    import library
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_import_ends_before_it_is_interrupted(tmp_path: Path) -> None:
    (tmp_path / "library.py").write_text(LIBRARY)
    begun = [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\n{COMMAND}"]
    done = subprocess.run(begun, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.stdout, done.stderr) == ("whole\ninterrupted\n", "")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what a process has loaded")
@pytest.mark.parametrize("library", ["_multiarray_umath", "libtorch_python"])
@pytest.mark.slow
def test_a_command_may_be_interrupted_as_it_begins(library: str) -> None:
    words = [sys.executable, "-m", "pkmlm", "bench", "memory", "--rounds", "99"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        while library not in Path(f"/proc/{process.pid}/maps").read_text():
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE)
    assert (process.returncode, said.split()) == (130, ["interrupted"])
