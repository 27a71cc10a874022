"""`pkmlm train` as its users meet it: to the end, stopped and resumed, refused, diverged."""

import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from pkmlm.data.batches import Batches
from pkmlm.data.corpus import Corpus, open_tokenizer
from pkmlm.distributed import World
from pkmlm.evaluate.load import load_run
from pkmlm.model.transformer import build_model
from pkmlm.recipe.load import load_recipe
from pkmlm.recipe.schema import Recipe
from pkmlm.runs import saving
from pkmlm.runs.directory import RunDirectory
from pkmlm.runs.results import read_metrics
from pkmlm.runs.saving import Saver
from pkmlm.signals import StopRequest
from pkmlm.train.dry_run import dry_run
from pkmlm.train.job import Job, open_job
from pkmlm.train.log import TrainingLog
from pkmlm.train.loop import Outcome, Training
from pkmlm.train.out_of_memory import rank_bytes
from pkmlm.train.step import TrainState
from tests import PATIENCE
from tests.conftest import after_step, given, pkmlm


def losses(run: Path) -> list[tuple[int, str]]:
    """Every logged loss, to the bit."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["event"], line["loss"].hex()) for line in lines if "loss" in line]


def tensors(run: Path, step: int, name: str) -> dict[str, bytes]:
    return {k: v.tobytes() for k, v in load_file(run / f"checkpoints/step-{step:08d}/{name}.safetensors").items()}


@pytest.mark.parametrize(
    ("kind", "memories"),
    [("dense", []), ("product-key", ["pkm"]), ("hash", ["tables"]), ("mixed", ["ngrams", "pkm", "tables"])],
)
def test_a_run_directory_holds_what_the_design_says(trained, kind, memories):
    run = trained(kind)
    names = ("recipe.yaml", "run.json", "train.log", "metrics.jsonl", "tokenizer.model", "best", "latest", "done")
    assert all((run / name).is_file() for name in names)
    facts = json.loads((run / "run.json").read_text())
    assert (facts["status"], facts["exit_code"], facts["step"]) == ("finished", 0, 30)
    provenance = {"argv", "versions", "commit", "source_sha256", "precision_reason"}
    assert provenance | {"device", "cpu", "precision", "ranks"} <= facts.keys()
    assert (run / "latest").read_text() == "step-00000030\n"
    assert sorted(p.name for p in (run / "checkpoints").iterdir())[-1] == "step-00000030"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["event"] == "train"]
    assert [line["step"] for line in train] == list(range(1, 31))
    assert {"loss", "lr", "grad_norm", "tokens", "tokens_per_second"} <= train[0].keys()
    assert [line["lr"] for line in train[:5]] == pytest.approx([3e-3 * step / 5 for step in range(1, 6)])  # the warm-up
    assert sum(256 / line["tokens_per_second"] for line in train) == pytest.approx(facts["seconds"], rel=0.01)
    for measure in ("lr", "grad_norm"):
        assert sorted(key for key in train[0] if key.startswith(f"{measure}_")) == [f"{measure}_{n}" for n in memories]
    assert 29 * 256 < train[-1]["tokens"] <= 30 * 256  # the corpus's last piece is short
    assert train[-1]["loss"] < train[0]["loss"] - 0.5
    assert [line["step"] for line in lines if line["event"] == "valid"] == [15, 30]


@pytest.mark.parametrize(
    "extra",
    [
        ["dense", "model.dropout=0.2"],
        ["memory-plus", "model.memories.plus.optim.schedule=relative", "train.micro_batch=2"],
        ["peer"],
        ["mixed", "train.precision=fp16"],
        ["modern", "train.precision=fp16"],
    ],
)
def test_stopped_and_resumed_is_the_same_run_to_the_bit(tmp_path, write_recipe, trained, monkeypatch, extra):
    """Stopped between two checkpoints."""
    kind, *changes = extra
    straight, run, recipe = tmp_path / "straight", tmp_path / "run", write_recipe(tmp_path, kind)
    arguments = ["train", recipe, *given(*changes)]
    if changes:
        pkmlm(*arguments, "-o", straight)
    else:
        straight = trained(kind)
    after_step(monkeypatch, 3, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    pkmlm(*arguments, "-o", run, code=75)
    pkmlm(*arguments, "-o", run)
    assert "resuming at step 3" in (run / "train.log").read_text()
    assert losses(run) == losses(straight)
    for name in ("weights", "optimizer"):
        assert tensors(run, 30, name) == tensors(straight, 30, name)
    states = [json.loads((r / "checkpoints/step-00000030/state.json").read_text()) for r in (run, straight)]
    assert states[0]["scaler"] == states[1]["scaler"]
    steps = [line for line in RunDirectory(run).metrics() if line["event"] == "train"]
    assert sum(256 / line["tokens_per_second"] for line in steps) == pytest.approx(states[0]["seconds"], rel=0.01)
    assert (run / "best").read_text() == (straight / "best").read_text()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_signals_save_and_stop(tmp_path, write_recipe, monkeypatch, number, code):
    run, recipe = tmp_path / "run", write_recipe(tmp_path, "dense")
    after_step(monkeypatch, 2, lambda _: os.kill(os.getpid(), number))
    said = pkmlm("train", recipe, "-o", run, code=code).stderr
    assert "step 2" in said
    facts = json.loads((run / "run.json").read_text())
    assert (facts["status"], facts["exit_code"], facts["step"]) == ("stopped", code, 2)
    assert (run / "latest").read_text() == "step-00000002\n"
    assert not (run / "done").exists()


def test_a_finished_run_says_so_and_more_steps_train_longer(tmp_path, write_recipe):
    recipe, run = write_recipe(tmp_path, "dense"), tmp_path / "run"
    pkmlm("train", recipe, "-o", run, "-s", "train.steps=4")
    assert "already complete at step 4" in pkmlm("train", recipe, "-o", run, "-s", "train.steps=4").stdout
    assert json.loads((run / "run.json").read_text())["status"] == "finished"
    pkmlm("train", recipe, "-o", run, "-s", "train.steps=6")
    assert [step for step, event, _ in losses(run) if event == "train"] == [1, 2, 3, 4, 5, 6]


def test_epochs_are_as_many_steps_as_they_take_and_more_of_them_train_longer(tmp_path, write_recipe, tokens):
    pieces = -(-Corpus(tokens, "train").tokens // 32)
    words = ["train", write_recipe(tmp_path, "dense"), "-o", tmp_path / "run", "-q", *given("train.batch_tokens=16384")]
    pkmlm(*words, *given("train.epochs=1"))
    assert len(losses(tmp_path / "run")) >= (first := -(-pieces // 512))
    assert (tmp_path / "run/latest").read_text() == f"step-{first:08d}\n"
    assert "train.epochs was 1 and is now 2" in pkmlm(*words, *given("train.epochs=2")).stderr
    assert (tmp_path / "run/latest").read_text() == f"step-{-(-2 * pieces // 512):08d}\n"


def test_a_kill_just_before_a_finished_run_goes_on_leaves_it_unfinished(tmp_path, write_recipe, monkeypatch):
    """The recipe already says more steps then; the run has not taken them."""
    run, longer = tmp_path / "run", ["train", write_recipe(tmp_path, "dense"), "-o", tmp_path / "run", "-s"]
    pkmlm(*longer, "train.steps=2")

    def kill(_: RunDirectory) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as killed:
        killed.setattr(RunDirectory, "clean", kill)
        pkmlm(*longer, "train.steps=3", code=130)
    pkmlm(*longer, "train.steps=3")
    assert [step for step, event, _ in losses(run) if event == "train"] == [1, 2, 3]


def test_a_run_that_was_killed_before_its_first_checkpoint_has_one_log(tmp_path, write_recipe):
    recipe, run = write_recipe(tmp_path, "dense"), tmp_path / "run"
    command = ("train", recipe, "-o", run, "-s", "train.steps=3")  # fewer than its warm-up
    pkmlm(*command)
    events = [(line["event"], line["step"]) for line in read_metrics(run / "metrics.jsonl")]
    assert events[0] == ("warn", 0)
    shutil.rmtree(run / "checkpoints")
    for name in ("latest", "best", "done", "run.json"):
        (run / name).unlink(missing_ok=True)
    pkmlm(*command)
    assert [(line["event"], line["step"]) for line in read_metrics(run / "metrics.jsonl")] == events


def test_resume_rules(tmp_path, write_recipe, trained):
    recipe, done, bare = write_recipe(tmp_path, "dense"), trained("dense"), tmp_path / "bare"
    assert "--resume must" in pkmlm("train", recipe, "-o", tmp_path / "x", "--resume", "must", code=2).stderr
    assert not (tmp_path / "x").exists()
    assert "--resume never" in pkmlm("train", recipe, "-o", done, "--resume", "never", code=2).stderr
    changes = ["-s", "optim.lr=1e-3", "-s", "log.every=3", "-s", "model.memories.tables={kind: hash, layers: 1}"]
    said = pkmlm("train", recipe, "-o", done, *changes, code=2).stderr
    for change in ("model.memories.tables was absent and is now present", "optim.lr was 0.003 and is now 0.001"):
        assert change in said
    assert "log.every" not in said
    shutil.copytree(done, bare)
    shutil.rmtree(bare / "checkpoints")
    assert "checkpoints are gone" in pkmlm("train", recipe, "-o", bare, code=2).stderr
    (bare / "done").unlink()  # as if it had been stopped
    assert "checkpoints are gone" in pkmlm("train", recipe, "-o", bare, code=2).stderr
    assert (bare / "metrics.jsonl").read_bytes() == (done / "metrics.jsonl").read_bytes()


def test_a_rate_that_is_changed_on_purpose_is_recorded(tmp_path, write_recipe):
    run = tmp_path / "run"
    words = ["train", write_recipe(tmp_path, "product-key"), "-o", run, "-q", *given("optim.schedule=constant")]
    pkmlm(*words, *given("train.steps=10"))
    rates = {"optim.lr": "0.003 and is now 0.001", "model.memories.pkm.optim.lr": "0.004 and is now 0.002"}
    changed = [*words, *given("optim.lr=1e-3", "model.memories.pkm.optim.lr=2e-3", "train.steps=12")]
    allow = [word for key in rates for word in ("--allow-change", key)]
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    said = pkmlm(*changed, code=2).stderr
    assert all(f"{key} was {change}" in said for key, change in rates.items())
    assert all(f"--allow-change {key}" in said for key in rates)
    said = pkmlm(*changed, *allow[:2], code=2).stderr
    assert ("optim.lr was 0.003" in said, "pkm.optim.lr was 0.004" in said) == (False, True)
    said = pkmlm(*changed, *allow, *given("optim.matrices=muon"), code=2).stderr
    assert "--allow-change" not in said, "the moments would be another optimizer's"
    for key in ("optim.matrices", "model.memories.pkm.optim.optimizer", "train.seed", "model.norm", "optim.lrr", "lr"):
        for dry in ([], ["--dry-run"]):
            said = pkmlm(*changed, "--allow-change", key, *dry, code=2).stderr
            assert f"--allow-change: found {key} (expected " in said
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    pkmlm(*changed, *allow, "--dry-run")
    said = pkmlm(*changed, *allow).stderr
    changes = [f"{key} was {change}" for key, change in rates.items()]
    assert all(change in said for change in changes), "it is warned of, as other changes of numbers are"
    lr = {line["step"]: line["lr"] for line in RunDirectory(run).metrics() if line["event"] == "train"}
    assert (lr[10], lr[11], lr[12]) == (0.003, 0.001, 0.001)
    assert RunDirectory(run).recipe().optim.lr == 0.001
    said = pkmlm(*changed[:-1], "train.steps=13").stderr
    warned = [line["text"] for line in RunDirectory(run).metrics() if (line["event"], line["step"]) == ("warn", 10)]
    assert all(any(change in text for text in warned) for change in changes)
    assert not any(change in said for change in changes), "it is the run's own from then on"


def test_training_does_not_wait_for_the_disk_where_a_best_checkpoint_is_due(tmp_path, write_recipe, monkeypatch):
    """Validation has begun to save it; its write ends only when training has taken the next step."""
    went_on, write, in_time = threading.Event(), Saver._write, []

    def slow(saver, step, *given):
        in_time.append(went_on.wait(PATIENCE))
        write(saver, step, *given)

    monkeypatch.setattr(Saver, "_write", slow)
    after_step(monkeypatch, 3, lambda state: went_on.set())
    every = given("train.steps=4", "eval.every=2", "checkpoint.every=2")
    pkmlm("train", write_recipe(tmp_path, "dense"), "-o", tmp_path / "run", *every)
    assert in_time == [True, True]
    assert RunDirectory(tmp_path / "run").steps() == [2, 4]


@pytest.mark.parametrize("missing", [0, 1])
def test_a_step_has_its_memory_beside_the_copy_of_a_checkpoint(tmp_path, write_recipe, tokens, monkeypatch, missing):
    recipe = write_recipe(tmp_path, "dense")
    keys = ["train.steps=2", "eval.every=0", "optim.warmup_steps=0"]
    parts = rank_bytes(Job(load_recipe(recipe, keys), Corpus(tokens, "train"), open_tokenizer([tokens])), "fp32")
    asked, holds = [], Saver._holds_copy

    def just_enough(saver, tensors):
        copy = sum(tensor.nbytes for own in tensors.values() for tensor in own.values())
        needs = copy + saving.SPARE + sum(parts[name] for name in ("gradients", "activations", "logits", "search"))
        monkeypatch.setattr(saving, "free_bytes", lambda device: needs - missing)
        asked.append(holds(saver, tensors))
        return asked[-1]

    monkeypatch.setattr(Saver, "_holds_copy", just_enough)
    pkmlm("train", recipe, "-o", tmp_path / "run", "-q", *given(*keys))
    assert set(asked) == {not missing}


def test_divergence_exits_3_and_keeps_the_last_checkpoint(tmp_path, write_recipe):
    run, recipe = tmp_path / "run", write_recipe(tmp_path, "dense")
    explode = ["-s", "optim.weight_decay=1e30", "-s", "optim.clip=0", "-s", "checkpoint.every=1"]
    said = pkmlm("train", recipe, "-o", run, *explode, code=3).stderr
    assert said.count("error: training diverged at step") == 1
    assert "hint: " in said
    facts = json.loads((run / "run.json").read_text())
    assert (facts["status"], facts["exit_code"]) == ("diverged", 3)
    assert f"error: {facts['message']}\n" in said


@pytest.mark.parametrize("diverges", [False, True])
def test_steps_that_are_queued_are_logged_as_others(tmp_path, write_recipe, monkeypatch, diverges):
    """As on a GPU, where the host does not wait: each line is there, in its place, and no checkpoint of steps that
    diverged. Muon is left out, whose sums round in another way then."""
    recipe = write_recipe(tmp_path, "product-key")
    saved, save = [], Saver.save
    monkeypatch.setattr(Saver, "save", lambda *given: saved.append(given[1].step) or save(*given))
    if diverges:  # in the step after which a checkpoint is due
        after_step(monkeypatch, 19, lambda state: state.model.norm.weight.data.fill_(float("nan")))
    for name in ("waiting", "going-on"):
        if name == "going-on":
            make = TrainState.__init__

            def goes_on(state, *arguments, make=make):
                make(state, *arguments)
                state.waits = False

            monkeypatch.setattr(TrainState, "__init__", goes_on)
        pkmlm("train", recipe, "-o", tmp_path / name, code=3 if diverges else 0)
    waited, went_on = (
        [{key: x for key, x in line.items() if "second" not in key} for line in RunDirectory(tmp_path / name).metrics()]
        for name in ("waiting", "going-on")
    )
    assert [line for line in went_on if line["event"] != "save"] == [line for line in waited if line["event"] != "save"]
    assert [line["step"] for line in went_on if line["event"] == "train"] == list(range(1, 20 if diverges else 31))
    assert saved[: len(saved) // 2] == saved[len(saved) // 2 :] == ([10, 15] if diverges else [10, 15, 20, 30])
    facts = [RunDirectory(tmp_path / name).facts() for name in ("waiting", "going-on")]
    assert facts[0]["message"] == facts[1]["message"]


def test_a_model_that_cannot_be_measured_has_diverged(tmp_path, write_recipe, monkeypatch):
    after_step(monkeypatch, 2, lambda state: state.model.norm.weight.data.fill_(3e38))
    run, recipe = tmp_path / "run", write_recipe(tmp_path, "dense")
    said = pkmlm("train", recipe, "-o", run, "-s", "eval.every=1", code=3).stderr
    assert "error: training diverged at step 2: " in said
    assert "valid" in said
    assert json.loads((run / "run.json").read_text())["status"] == "diverged"
    assert RunDirectory(run).steps() == [1]


def test_patience_stops_early(tmp_path, write_recipe):
    run, recipe = tmp_path / "run", write_recipe(tmp_path, "dense")
    worse = ["-s", "optim.lr=3", "-s", "eval.every=1", "-s", "eval.patience=2", "-s", "eval.tokens=50"]
    pkmlm("train", recipe, "-o", run, *worse)
    facts = json.loads((run / "run.json").read_text())
    assert (facts["status"], facts["exit_code"]) == ("patience", 0)
    assert 2 < facts["step"] < 30
    assert (run / "done").exists()
    told = pkmlm("train", recipe, "-o", run, *worse, "-s", "train.steps=60").stdout
    assert "already complete" not in told, "the same patience is at an end again at once, but nobody can know before"
    told = pkmlm("train", recipe, "-o", run, *worse, "-s", "train.steps=60").stdout
    assert "already complete" in told
    assert "train.steps" not in told


def test_the_best_is_sought_anew_where_validations_score_another_text(tmp_path, write_recipe):
    run, recipe = tmp_path / "run", write_recipe(tmp_path, "dense")
    train = ["train", recipe, "-o", run, "-s", "eval.every=2", "-s", "optim.lr=3"]  # which makes it worse and worse
    for steps, tokens in ((4, 40), (8, 60)):
        pkmlm(*train, "-s", f"train.steps={steps}", "-s", f"eval.tokens={tokens}")
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        losses = {line["step"]: line["loss"] for line in lines if line["event"] == "valid" and line["tokens"] == tokens}
        best = RunDirectory(run).best()
        assert best == min(losses, key=losses.__getitem__)
        compared = json.loads(pkmlm("compare", run, "--format", "json").stdout)["runs"][0]
        assert (compared["valid_step"], compared["valid_loss"]) == (best, losses[best])


def trained_in(run: RunDirectory, recipe: Recipe, validate: Callable, stop: StopRequest) -> Outcome:
    """Train in this process, with another validation."""
    state = TrainState(recipe, build_model(recipe, 600), Batches.of(Corpus(recipe.data.dir, "train"), recipe), "fp32")
    with TrainingLog(run.path, "x", recipe.train.steps, recipe.log, quiet=True) as log:
        job = Job(recipe, state.batches.corpus, open_tokenizer(recipe.data.dir))
        return Training(run, state, job, lambda request: validate(request, state.model), log, stop).train()


def test_a_validation_cut_short_is_repeated(tmp_path, write_recipe):
    """The loop is stopped from within a validation; resumed, the run is the one that was not stopped."""
    recipe, outcomes = load_recipe(write_recipe(tmp_path, "dense"), ["train.steps=4", "eval.every=2"]), []
    for name, cuts in (("straight", 0), ("cut", 2)):
        run = RunDirectory(tmp_path / name)
        run.create(recipe)
        for call in range(cuts + 1):

            def validate(request, model, cut=call < cuts):
                if cut:
                    request.exit_code = 75
                    return None
                return dict.fromkeys(("loss", "bits_per_byte"), float(model.norm.weight.detach().sum()))

            outcomes.append(trained_in(run, recipe, validate, StopRequest()))
    assert [(outcome.status, outcome.step) for outcome in outcomes] == [
        ("finished", 4),
        ("stopped", 2),
        ("stopped", 2),
        ("finished", 4),
    ]
    assert losses(tmp_path / "cut") == losses(tmp_path / "straight")


def test_what_is_measured_with_is_what_is_saved(tmp_path, write_recipe):
    """Stopped after two steps without a validation, and resumed with one step, the run is validated where it is."""
    path, run = write_recipe(tmp_path, "product-key"), RunDirectory(tmp_path / "run")
    answers, measured = iter([0, 75]), {}

    def validate(request, model):
        measured.update({name: tensor.clone() for name, tensor in model.state_dict().items()})
        return {"loss": 1.0, "bits_per_byte": 1.0}

    for steps, agree in ((4, lambda _: next(answers)), (1, int)):
        recipe = load_recipe(path, [f"train.steps={steps}", "eval.every=0"])
        run.create(recipe)
        outcome = trained_in(run, recipe, validate, StopRequest(agree))
    assert (outcome.status, outcome.step, run.best()) == ("finished", 2, 2)
    saved = tensors(run.path, 2, "weights")
    running = [name for name in saved if "running" in name]
    assert running
    assert all(saved[name] == measured[name].numpy().tobytes() for name in running)


def test_a_best_checkpoint_that_is_gone_is_not_pointed_at(tmp_path, write_recipe):
    """Training goes back to before it, and will save its step again, perhaps without a validation."""
    run, validations = RunDirectory(tmp_path / "run"), iter([5.0, 5.5, 4.9])
    recipe = load_recipe(
        write_recipe(tmp_path, "dense"), ["train.steps=6", "eval.every=2", "checkpoint={every: 2, keep: 2}"]
    )
    run.create(recipe)

    trained_in(run, recipe, lambda *_: dict.fromkeys(("loss", "bits_per_byte"), next(validations)), StopRequest())
    assert (run.steps(), run.best()) == ([4, 6], 6)
    shutil.rmtree(run.checkpoint(6))
    run.cut_metrics(4)
    trained_in(run, recipe, lambda *_: None, StopRequest(lambda _: 75))  # restored, and stopped at once
    assert not (run.path / "best").exists()


def test_a_memory_is_added_to_a_trained_model(tmp_path, write_recipe, trained):
    """It starts where the dense model was, says so once, and its checkpoints are those of any run."""
    run, recipe = tmp_path / "run", write_recipe(tmp_path, "product-key")
    train = [
        "train",
        recipe,
        "-o",
        run,
        "-s",
        f"train.init_from={trained('dense')}",
        "-s",
        "model.memories.pkm.layers=2+",
    ]
    warned = f"new here, not in {trained('dense')}: pkm (layer 2)"
    assert pkmlm(*train, "-s", "train.steps=1").stderr.count(warned) == 1
    first = float.fromhex(losses(run)[0][2])
    last = float.fromhex(losses(trained("dense"))[-2][2])
    assert first < last + 0.5 < float.fromhex(losses(trained("dense"))[0][2])
    pkmlm(*train, "-s", "train.steps=2")
    assert "resuming at step 1" in (run / "train.log").read_text()
    assert (run / "train.log").read_text().count(warned) == 1


def test_a_resume_needs_no_run_to_start_from(tmp_path, write_recipe, trained):
    run, train = tmp_path / "run", ["train", write_recipe(tmp_path, "dense"), "-o", tmp_path / "run", "-s"]
    pkmlm(*train, "train.steps=1", "-s", f"train.init_from={trained('dense')}")
    said = pkmlm(*train, "train.steps=2", "-s", "train.init_from=/nowhere").stderr
    assert 'and is now "/nowhere" (ignored' in said
    assert "resuming at step 1" in said
    assert RunDirectory(run).recipe().train.init_from == str(trained("dense")), "what it did start from"


def test_a_run_that_cannot_begin_leaves_nothing(tmp_path, write_recipe):
    run, recipe = tmp_path / "run", write_recipe(tmp_path, "dense")
    for more in (["-o", run], ["--dry-run"]):
        said = pkmlm("train", recipe, *more, "-s", "train.init_from=/nowhere", code=2).stderr
        assert "train.init_from" in said
    assert not run.exists()


def test_resume_is_of_a_run_directory(tmp_path, write_recipe):
    said = pkmlm("train", write_recipe(tmp_path, "dense"), "--dry-run", "--resume", "must", code=2).stderr
    assert "--resume must is given without a run directory" in said


def test_a_text_that_is_read_more_than_twenty_times_is_warned_of(tmp_path, write_recipe, tokens):
    recipe = str(write_recipe(tmp_path, "dense"))
    most = 20 * -(-Corpus(tokens, "train").tokens // 32) // 8
    assert not open_job(recipe, [f"train.steps={most}"], 1).warnings[1:]
    assert "20 times" in open_job(recipe, [f"train.steps={most + 1}"], 1).warnings[-1]


def test_a_dry_run_writes_nothing(tmp_path, write_recipe):
    recipe = write_recipe(tmp_path, "product-key")
    said = pkmlm("train", recipe, "-s", "train.micro_batch=8", "--dry-run", "-o", tmp_path / "run").stdout
    assert "first step   loss 6." in said
    assert "8,192 in memory" in said
    assert "8 sequences of 32 tokens, in 1 micro-batch of 8\n" in said
    assert not (tmp_path / "run").exists()


def test_a_dry_run_refuses_a_folder_that_the_run_would(tmp_path, write_recipe, trained):
    dry = ["train", write_recipe(tmp_path, "dense"), "--dry-run", "-o"]
    said = pkmlm(*dry, trained("dense"), "-s", "optim.lr=1e-3", code=2).stderr
    assert "optim.lr was 0.003 and is now 0.001" in said
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/run.json").write_text("{}")
    assert "run.json" in pkmlm(*dry, tmp_path / "mine", code=2).stderr
    pkmlm(*dry, trained("dense"))


def test_tokens_without_a_valid_split_are_warned_of(tmp_path, novels, write_recipe, trained):
    kept = trained("dense") / "tokenizer.model"
    pkmlm("tokenize", novels / "train.txt", "--tokenizer", kept, "-o", tmp_path / "tokens", "-q")
    run = ["train", write_recipe(tmp_path, "product-key"), "-o", tmp_path / "run", "-q", "-s", "train.steps=6"]
    said = pkmlm(*run, "-s", f"data.dir={tmp_path / 'tokens'}", "-s", "eval.patience=2").stderr
    assert re.match("warning: step 0: .*no valid split", said)


def test_a_dry_run_is_in_the_precision_that_auto_is(tmp_path, write_recipe, monkeypatch, capsys):
    """It is fp16 on old GPUs alone."""
    recipe, said = str(write_recipe(tmp_path, "dense")), []
    for precision in ("fp32", "bf16"):
        monkeypatch.setattr("pkmlm.device.resolve_precision", lambda *_, chosen=precision: (chosen, "auto"))
        dry_run(open_job(recipe, [], 1), None, World())
        said.append(re.search(r"memory .*", capsys.readouterr().out)[0])
    assert said[0] != said[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.dir=null", "data.dir is not set"),
        ("data.dir=/nowhere", "/nowhere"),
        ("data.dir=/moved", "-s data.dir=DIR"),
        ("model.vocab_size=100", "model.vocab_size"),
    ],
)
def test_mistakes_are_told_in_one_line(tmp_path, write_recipe, change, message):
    done = pkmlm("train", write_recipe(tmp_path, "dense"), "-o", tmp_path / "run", "-s", change, code=2)
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.strip().splitlines()) <= 2
    assert not (tmp_path / "run").exists()


def test_checkpoints_are_read_while_training_saves_and_prunes_and_a_kill_is_noticed(tmp_path, write_recipe, ranks):
    """The newest one is soon gone; whoever has begun to read it looks for the next."""
    run, settings = tmp_path / "run", ["train.steps=20000", "eval.every=0", "checkpoint.every=1", "checkpoint.keep=2"]
    words = ["train", str(write_recipe(tmp_path, "dense")), "-o", str(run), "-q"]
    words += given(*settings)
    training = ranks.start(1, "command", words=words)
    try:
        deadline = time.monotonic() + PATIENCE
        while not (run.exists() and len(RunDirectory(run).steps()) >= 2) and time.monotonic() < deadline:
            time.sleep(0.05)
        seen = []
        while len(set(seen)) < 4 and time.monotonic() < deadline:
            seen.append(load_run(run, "latest").step)
        assert RunDirectory(run).status() == "running"
    finally:
        training.signal(signal.SIGKILL)
        training.end()
    assert seen == sorted(seen)
    assert len(set(seen)) > 3, "others appear and go meanwhile"
    assert re.search(r" killed$", pkmlm("compare", run).stdout, re.MULTILINE)
    (run / ".lock").write_text("process 7 on another.machine")
    assert RunDirectory(run).status() == "running", "nothing is known of another machine's processes"


@pytest.mark.parametrize("name", ["config.json", "attached.json"])
def test_a_folder_that_commands_would_take_for_another_thing_is_refused(name, write_recipe, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / name).write_text("{}")
    assert name in pkmlm("train", write_recipe(tmp_path, "dense"), "-o", tmp_path / "taken", code=2).stderr
    assert [path.name for path in (tmp_path / "taken").iterdir()] == [name]
