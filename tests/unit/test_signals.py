"""Stop requests by real signals."""

import os
import signal
import subprocess
import sys
import time

import pytest

from pkmlm.runtime import signals
from pkmlm.runtime.signals import stop_on_signals


def send(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.01)


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
        send(signal.SIGTERM)
        time.sleep(0.1)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_a_signal_within_the_handling_of_another_is_the_same_request(monkeypatch):
    """As when a launcher of many threads is killed: each thread's end sends one."""
    clock, more = time.monotonic, [signal.SIGTERM]

    def monotonic() -> float:
        if more:
            os.kill(os.getpid(), more.pop())
        return clock()

    with stop_on_signals() as request:
        monkeypatch.setattr(signals.time, "monotonic", monotonic)
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt:
            pytest.fail("taken for a second request")
        assert request.agreed() == 75


DEAF = """
import ctypes, sys
from pkmlm.runtime import signals
signals.PATIENCE = 0.2
with signals.stop_on_signals(told="heard"):
    mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    print("waiting", flush=True)
    lock(mutex)  # for ever, and no signal interrupts it
"""


def test_a_second_request_ends_a_process_that_waits_for_a_library():
    process = subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGTERM)
        assert process.stderr.readline() == "heard\n"
        process.send_signal(signal.SIGTERM)  # passed on by a launcher: the same request
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 130
    finally:
        process.kill()
        process.communicate()
