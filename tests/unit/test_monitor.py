"""Warnings while a run trains: what deserves one, and what does not."""

import json
import math
import random

import pytest

from pkmlm.data.corpus import Corpus, open_tokenizer
from pkmlm.device import select_device
from pkmlm.recipe.load import load_recipe
from pkmlm.recipe.schema import Log, flatten, scalar_text
from pkmlm.train.job import Job
from pkmlm.train.log import TrainingLog
from pkmlm.train.monitor import DEAD_FOR, FEWEST, TrainingMonitor
from pkmlm.train.out_of_memory import key_to_lower, too_large_warning


def train(loss):
    return {"event": "train", "step": 1, "loss": loss}


def valid(usage, uniform=1.0):
    return {
        "event": "valid",
        "step": 1,
        "loss": 2.0,
        "usage": [
            {
                "memory": "pkm",
                "layer": 3,
                "kind": "product-key",
                "usage": usage,
                "kl": 1.0,
                "uniform": {"usage": uniform, "kl": 0.0},
            }
        ],
    }


def test_a_loss_that_falls_with_noise_gives_no_warning():
    draw = random.Random(1)
    monitor = TrainingMonitor()
    for step in range(3000):
        assert not monitor.warnings(train(4 + 5 * math.exp(-step / 200) + draw.gauss(0, 0.1)))
    assert not monitor.warnings(train(None))  # a skipped step
    assert not monitor.warnings(valid(1.0) | {"usage": None})  # as metrics.jsonl may have it


def test_a_spike_is_told_once():
    monitor = TrainingMonitor.of([train(4 + 0.01 * (step % 5)) for step in range(FEWEST)])
    (warning,) = monitor.warnings(train(6.0))
    assert "6.000" in warning
    assert "4.020" in warning
    assert not monitor.warnings(train(6.1))
    assert not monitor.warnings(train(4.0))
    assert monitor.warnings(train(7.0))
    assert not TrainingMonitor.of([train(4.0)] * (FEWEST - 1)).warnings(train(9.0))  # too early to say
    for loss, told in ((4.3, False), (4.5, True)):  # without noise, a tenth
        assert bool(TrainingMonitor.of([train(4.0)] * FEWEST).warnings(train(loss))) == told


def test_a_memory_that_goes_out_of_use_is_told_at_each_halving():
    monitor = TrainingMonitor()
    told = [bool(monitor.warnings(valid(usage))) for usage in (0.5, 0.8, 0.41, 0.39, 0.3, 0.19, 0.18)]
    assert told == [False, False, False, True, False, True, False]


def test_a_shared_table_is_told_by_its_name():
    monitor = TrainingMonitor()
    for usage in (0.5, 0.1):
        event = valid(usage)
        event["usage"][0] |= {"layer": None}
        told = monitor.warnings(event)
    assert told[0].startswith("pkm is used less")


def test_a_validation_on_fewer_tokens_is_no_collapse():
    monitor = TrainingMonitor()
    told = [bool(monitor.warnings(valid(usage) | {"tokens": tokens})) for usage, tokens in ((0.8, 900), (0.3, 90))]
    assert told == [False, False]
    assert monitor.warnings(valid(0.1) | {"tokens": 90})


def test_a_memory_that_was_never_used_is_told_once():
    monitor = TrainingMonitor()
    told = [monitor.warnings(valid(0.05, 0.9)) for _ in range(DEAD_FOR + 2)]
    assert [len(lines) for lines in told] == [0] * (DEAD_FOR - 1) + [1, 0, 0]
    monitor = TrainingMonitor()
    assert not any(monitor.warnings(valid(0.05, 0.1)) for _ in range(9))  # few reads: nothing could use more


def test_a_resumed_run_gets_the_same_warnings():
    events = [train(4 + 0.01 * (step % 5)) for step in range(60)] + [valid(0.8), valid(0.5), train(9.0), valid(0.3)]
    straight = TrainingMonitor()
    told = [straight.warnings(event) for event in events]
    assert sum(map(len, told)) == 2
    for cut in range(len(events)):
        resumed = TrainingMonitor.of(events[:cut])
        assert [resumed.warnings(event) for event in events[cut:]] == told[cut:]


def test_a_warning_is_an_event_and_a_line_even_when_quiet(tmp_path, capsys):
    monitor = TrainingMonitor.of([train(4.0 + step % 2 / 100) for step in range(30)])
    with TrainingLog(tmp_path, "x", 40, Log(), quiet=True, monitor=monitor) as log:
        log.event("train", 31, loss=4.0)
        log.event("train", 32, loss=8.0)
    events = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(event["event"], event["step"]) for event in events] == [("train", 31), ("train", 32), ("warn", 32)]
    assert capsys.readouterr().err.startswith("warning: step 32: loss spike: 8.000")
    assert "warning: step 32: loss spike" in (tmp_path / "train.log").read_text()


@pytest.mark.parametrize(
    ("kind", "change", "large", "small"),
    [
        ("dense", "name=x", "train.micro_batch", "model.dim"),
        ("dense", "train.micro_batch=1", "model.dim", "model.dim"),
        ("product-key", "name=x", "train.micro_batch", "model.memories.pkm.num_keys"),
        ("hash", "name=x", "train.micro_batch", "model.memories.tables.bits"),
    ],
)
def test_the_key_to_lower_is_that_of_what_takes_most(write_recipe, tmp_path, kind, change, large, small):
    recipe = load_recipe(write_recipe(tmp_path, kind), [change])
    assert key_to_lower(recipe, 600, {"weights": 1, "activations": 9})[0] == large
    key, value = key_to_lower(recipe, 600, {"weights": 9, "activations": 1})
    assert (key, value) == (small, scalar_text(flatten(recipe)[small]))


def test_ranks_of_one_machine_share_its_memory(write_recipe, tmp_path, tokens, monkeypatch):
    recipe = load_recipe(write_recipe(tmp_path, "dense"))
    job, cpu = Job(recipe, Corpus(tokens, "train"), open_tokenizer(tokens)), select_device("fp32")
    assert too_large_warning(job, cpu, 2) == []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "9999999")
    (told,) = too_large_warning(job, cpu, 2)
    assert "for 9999999 ranks: lower model.dim" in told
