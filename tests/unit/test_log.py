"""The training log: events, lines, sinks."""

import json
import sys

import pytest

from pkmlm.errors import UserError
from pkmlm.recipe.schema import Log
from pkmlm.runtime.log import TrainingLog, duration


def test_events_and_lines_go_to_files_and_the_screen(tmp_path, capsys):
    with TrainingLog(tmp_path, "x", 40, Log(every=20)) as log:
        for step in range(1, 41):
            log.event("train", step, loss=1 / step)
            log.progressed(step, 1 / step, 1000.0, "")
        log.say("a line with [bold] and \x1b[31m in it")
        log.sync()
    events = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert events == [{"event": "train", "step": step, "loss": 1 / step} for step in range(1, 41)]
    shown = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[0] for line in shown[:2]] == ["step 20/40", "step 40/40"]
    assert shown[2] == "a line with [bold] and \\x1b[31m in it"
    assert len((tmp_path / "train.log").read_text().splitlines()) == 3


def test_numbers_that_are_not_finite_are_a_mistake_of_ours(tmp_path):
    with TrainingLog(tmp_path, "x", 4, Log(), quiet=True) as log, pytest.raises(ValueError, match="JSON"):
        log.event("train", 1, loss=float("nan"))


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_sink_whose_package_is_missing_is_told(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    settings = Log(tensorboard=name == "tensorboard", wandb="project" if name == "wandb" else None)
    with (
        pytest.raises(UserError, match=f"log.{name} needs the package {name}"),
        TrainingLog(tmp_path, "x", 4, settings),
    ):
        pass


def test_tensorboard_gets_every_number(tmp_path):
    pytest.importorskip("tensorboard", reason="an extra: pip install 'pkmlm[sinks]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with TrainingLog(tmp_path, "x", 4, Log(tensorboard=True), quiet=True) as log:
        log.event("train", 3, loss=1.5, note="text")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(scalar.step, scalar.value) for scalar in events.Scalars("train/loss")] == [(3, 1.5)]


def test_durations():
    assert [duration(seconds) for seconds in (0.4, 59.4, 61, 3600, 7620)] == ["0s", "59s", "1m01s", "1h00m", "2h07m"]
