"""Warnings while a run trains: what deserves one, and what does not."""

import json
import math
import random

from pkmlm.data.corpus import Corpus, open_tokenizer
from pkmlm.device import select_device
from pkmlm.recipe.load import load_recipe
from pkmlm.recipe.schema import Log
from pkmlm.train.job import Job
from pkmlm.train.log import TrainingLog
from pkmlm.train.monitor import DEAD_FOR, FEWEST, TrainingMonitor
from pkmlm.train.out_of_memory import too_large_warning, what_to_lower


def train(loss):
    return {"event": "train", "step": 1, "loss": loss}


def valid(usage, uniform=1.0):
    return {
        "event": "valid",
        "step": 1,
        "loss": 2.0,
        "usage": [{"layer": 3, "name": "memory", "usage": usage, "kl": 1.0, "uniform": {"usage": uniform, "kl": 0.0}}],
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
    monitor = TrainingMonitor.of([valid(0.8)])
    (warning,) = monitor.warnings(valid(0.3))
    assert all(word in warning for word in ("layer 3 memory", "30.0%", "80.0%"))


def test_a_memory_that_was_never_used_is_told_once():
    monitor = TrainingMonitor()
    told = [monitor.warnings(valid(0.05, 0.9)) for _ in range(DEAD_FOR + 2)]
    assert [len(lines) for lines in told] == [0] * (DEAD_FOR - 1) + [1, 0, 0]
    monitor = TrainingMonitor()
    assert not any(monitor.warnings(valid(0.05, 0.1)) for _ in range(9))  # few reads: nothing could use more
    monitor = TrainingMonitor.of([valid(0.1, 0.9), *[valid(0.08, 0.9)] * (DEAD_FOR - 1)])
    (warning,) = monitor.warnings(valid(0.08, 0.9))
    assert all(word in warning for word in ("layer 3 memory", "8.0%", "90.0%"))


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


def test_the_key_to_lower_is_that_of_what_takes_most(write_recipe, tmp_path):
    small, large = {"weights": 9, "activations": 1}, {"weights": 1, "activations": 9}
    for kind, training, expected in (
        ("dense", large, ("train.micro_batch", 4, 2)),
        ("dense", small, ("model.layers", 2, 1)),
        ("product-key", large, ("train.micro_batch", 4, 2)),
        ("product-key", small, ("model.memory.num_keys", 16, 11)),
        ("hash", small, ("model.hash.bits", 4, 2)),
    ):
        assert what_to_lower(load_recipe(write_recipe(tmp_path, kind)), training, 1) == expected
    one = load_recipe(write_recipe(tmp_path, "dense"), ["train.micro_batch=1"])
    assert what_to_lower(one, large, 1)[0] == "model.layers"
    full = load_recipe(write_recipe(tmp_path, "product-key"), ["model.memory.topk=16"])  # of 16 keys, in the last layer
    assert what_to_lower(full, small, 1) == ("model.dim", 32, 16)
    flat = load_recipe(write_recipe(tmp_path, "hash"), ["model.layers=1", "model.heads=8", "model.hash.bits=1"])
    assert what_to_lower(flat, small, 1) == ("model.dim", 32, 16)


def test_what_is_to_be_lowered_is_lowered_to_what_a_recipe_may_hold(write_recipe, tmp_path):
    large, small = {"activations": 4, "weights": 3}, {"activations": 3, "weights": 4}
    sizes = ["model.context=8", "train.batch_tokens=288", "train.micro_batch=9"]
    dense = load_recipe(write_recipe(tmp_path, "dense"), sizes)  # 36 sequences: 9 of each of four ranks
    assert [what_to_lower(dense, large, ranks)[2] for ranks in (1, 4)] == [4, 3]
    for kind, least in (("product-key", 14), ("flat-key", 11)):
        keys = ["model.memory.num_keys=16", "model.memory.topk=14", f"model.memory.kind={kind}"]
        memory = load_recipe(write_recipe(tmp_path, "product-key"), keys)
        assert what_to_lower(memory, small, 1) == ("model.memory.num_keys", 16, least)
    early = load_recipe(write_recipe(tmp_path, "product-key"), ["model.memory.topk=16", "model.layers=3"])
    assert what_to_lower(early, small, 1) == ("model.layers", 3, 2), "the memory is in layer 2"
    for dim, bits, lower in ((35, 7, 5), (36, 6, 4), (64, 8, 4)):
        sizes = [f"model.dim={dim}", "model.heads=1", f"model.hash.bits={bits}"]
        hashed = load_recipe(write_recipe(tmp_path, "hash"), sizes)
        assert what_to_lower(hashed, small, 1) == ("model.hash.bits", bits, lower), "it divides the width"
    rotary = ["model.layers=1", "model.positions=rotary", "model.dim=48", "model.heads=6", "model.rotary_fraction=0.5"]
    assert what_to_lower(load_recipe(write_recipe(tmp_path, "dense"), rotary), small, 1) == ("model.dim", 48, 24)


def test_ranks_of_one_machine_share_its_memory(write_recipe, tmp_path, tokens, monkeypatch):
    recipe = load_recipe(write_recipe(tmp_path, "dense"))
    job, cpu = Job(recipe, Corpus(tokens, "train"), open_tokenizer(tokens)), select_device("fp32")
    assert too_large_warning(job, cpu, 2) == []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "9999999")
    (told,) = too_large_warning(job, cpu, 2)
    assert "MB are free for 9999999: lower model.layers from 2, to 1 say" in told
