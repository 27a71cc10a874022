"""A run is read while another process writes into it: what is there is found, whole, and without a warning."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest

from pkmlm.errors import UserError
from pkmlm.files import abandoned, remove_folder
from pkmlm.runs.directory import RunDirectory
from pkmlm.runs.record import Progress, checkpoint_digest, read_progress
from pkmlm.runs.results import read_usage, usage_stem, write_evaluation, write_usage
from tests.conftest import recipe_2019, write_checkpoint

LONG = 0.7  # seconds in which the two meet often enough


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run with two checkpoints, but no weights."""
    run = RunDirectory(tmp_path / "run")
    run.create(recipe_2019())
    for step in (1, 2):
        write_checkpoint(run.path, recipe_2019(), Progress(step, data={"tokenizer": "a"}))
    run.set_pointer("best", 2)
    return run


@contextmanager
def meanwhile(write: Callable[[int], object], first: int = 3) -> Iterator[None]:
    """Write, again and again, with a number that grows."""
    ended, failures = Event(), []

    def go() -> None:
        try:
            for number in count(first):
                if ended.is_set():
                    return
                write(number)
        except BaseException as error:
            failures.append(error)

    thread = Thread(target=go)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    assert not failures


def reads(read: Callable[[], object]) -> list[object]:
    until, found = time.monotonic() + LONG, []
    while time.monotonic() < until:
        found.append(read())
    return found


def better(run: RunDirectory, step: int) -> None:
    """What training does when a validation is the best so far."""
    write_checkpoint(run.path, recipe_2019(), Progress(step, data={"tokenizer": "a"}))
    run.set_pointer("best", step)
    for old in run.steps()[:-1]:
        remove_folder(run.checkpoint(old))


def test_the_best_checkpoint_is_found_when_a_better_one_has_just_taken_its_place(run, monkeypatch):
    steps, pending = RunDirectory.steps, [3]

    def looked_at(self: RunDirectory) -> list[int]:  # after the pointer has been read
        if pending:
            better(run, pending.pop())
        return steps(self)

    monkeypatch.setattr(RunDirectory, "steps", looked_at)
    assert run.best() == 3
    remove_folder(run.checkpoint(3))
    assert run.best() is None


def test_what_is_read_of_a_checkpoint_is_read_of_the_one_that_takes_its_place(run):
    for step in ("best", "latest"):
        pending = [max(run.steps()) + 1]

        def read(folder: Path, pending: list[int] = pending) -> str:
            if pending:
                better(run, pending.pop())
            return checkpoint_digest(folder)

        assert run.of(step, read) == checkpoint_digest(run.checkpoint(run.steps()[-1]))
    with pytest.raises(UserError, match="no checkpoint at step 2 "):
        run.of("2", checkpoint_digest)
    (run.checkpoint(4) / "manifest.json").unlink()
    with pytest.raises(UserError, match="missing"):
        run.of("latest", read_progress)


def test_results_that_are_written_again_are_told_without_a_warning(run, capsys):
    def result(number: int) -> None:
        record = {"step": 2, "checkpoint": digest, "perplexity": None, "stride": None, "source": None, "tasks": {}}
        record |= {"number": number, "padding": "x" * 500_000}
        write_evaluation(run.path, "tasks-step-2.json", record)

    digest = checkpoint_digest(run.checkpoint(2))
    result(2)
    with meanwhile(result):
        seen = reads(lambda: [found["number"] for found in run.evaluations()])
    assert {len(each) for each in seen} == {1}
    assert seen == sorted(seen)
    assert capsys.readouterr().err == ""


def test_a_usage_report_and_its_arrays_are_of_one_reading(run, capsys):
    stem, checkpoint = usage_stem(run.path, "test", 2), checkpoint_digest(run.checkpoint(2))

    def report(number: int) -> None:
        entry = {"step": 2, "checkpoint": checkpoint, "split": "test", "source": {"of": 1}, "memories": []}
        write_usage(stem, entry | {"warnings": [str(number)]}, {"reads": np.full(1000, number)})

    def read() -> tuple[int, int] | None:
        found = read_usage(stem, checkpoint, {"of": 1})
        run.usage_reports()
        return found and (int(found[0]["warnings"][0]), int(found[1]["reads"][0]))

    with meanwhile(report):
        seen = [each for each in reads(read) if each]
    assert {words - arrays for words, arrays in seen} == {0}
    assert capsys.readouterr().err == ""


def test_a_run_that_has_just_ended_was_not_killed(run, monkeypatch):
    with run.locked():
        run.write_facts(status="running")
        assert run.status() == "running"
    assert run.status() == "killed", "the process that held it has gone"

    def ended(lock: Path) -> bool:  # between the look at run.json and that at the lock
        RunDirectory(run.path).write_facts(status="finished")
        return abandoned(lock)

    monkeypatch.setattr("pkmlm.runs.directory.abandoned", ended)
    assert run.status() == "finished"


def test_what_a_killed_process_left_half_written_is_no_result(run, capsys):
    (run.path / "eval").mkdir()
    (run.path / "eval" / ".tmp-0a1b2c3d-test-step-2.json").write_text('{"step": 2, "che')
    assert run.evaluations() == []
    assert capsys.readouterr().err == ""
