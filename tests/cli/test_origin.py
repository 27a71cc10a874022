"""A checkpoint stands for itself: it holds the recipe of its weights, and which validation was the best."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pkmlm.data.batches import Batches
from pkmlm.data.corpus import Corpus, open_tokenizer
from pkmlm.model.transformer import build_model
from pkmlm.recipe.load import load_recipe
from pkmlm.runs.directory import RunDirectory
from pkmlm.runs.record import read_progress
from pkmlm.signals import StopRequest
from pkmlm.train.job import Job
from pkmlm.train.log import TrainingLog
from pkmlm.train.loop import Outcome, Training
from pkmlm.train.step import TrainState
from tests.conftest import given, pkmlm, write_state


@pytest.fixture
def copy(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained("product-key"), tmp_path / "run"))


def reads(run: Path) -> list[tuple[object, ...]]:
    """Commands that load a run's weights."""
    return [
        ("eval", run, "--json", "-q"),
        ("usage-report", run, "-q", "--format", "json"),
        ("probe", run, "-q", "--json"),
        ("slots", run, "-q"),
        ("generate", run, "The", "-n", 2),
    ]


def test_records_of_a_run_may_change_or_go_and_no_number_does(copy, tmp_path, write_recipe):
    """What a command builds comes from the checkpoint, not from recipe.yaml and run.json."""

    def said() -> list[str]:
        return [pkmlm(*words).stdout for words in (*reads(copy), ("compare", copy))]

    def trained_from() -> bytes:
        pkmlm("train", write_recipe(tmp_path, "product-key"), "-o", tmp_path / "new", "-q", *given(*START))
        weights = (RunDirectory(tmp_path / "new").checkpoint(1) / "weights.safetensors").read_bytes()
        shutil.rmtree(tmp_path / "new")
        return weights

    START = [f"train.init_from={copy}", "train.steps=1"]
    before, weights = said(), trained_from()
    file = copy / "recipe.yaml"
    for old, new in (("topk: 4", "topk: 2"), ("ffn: gelu", "ffn: relu"), ("\n  lr: 0.003", "\n  lr: 0.002")):
        assert file.read_text().count(old) == 1
        file.write_text(file.read_text().replace(old, new))
    assert (said(), trained_from()) == (before, weights)
    file.unlink()
    facts = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps({**facts, "seed": 9, "tokenizer_sha256": "another"}))
    assert (said(), trained_from()) == (before, weights)
    pkmlm("train", write_recipe(tmp_path, "product-key"), "-o", copy, "-q", "-s", "train.steps=31")
    assert RunDirectory(copy).recipe().model.memories["pkm"].topk == 4


def test_another_recipe_than_the_checkpoints_is_refused_when_training_goes_on(copy, tmp_path, write_recipe):
    recipe = write_recipe(tmp_path, "product-key")
    done = pkmlm("train", recipe, "-o", copy, "-q", *given("train.steps=31", "model.memories.pkm.topk=2"), code=2)
    assert "model.memories.pkm.topk" in done.stderr
    assert RunDirectory(copy).steps() == [20, 30]


def test_results_of_weights_that_were_replaced_are_not_shown(copy, tmp_path, write_recipe):
    recipe, run = write_recipe(tmp_path, "product-key"), RunDirectory(copy)
    for name in ("eval", "usage"):  # what other tests have measured
        shutil.rmtree(copy / name, ignore_errors=True)
    for words in (("eval", copy, "--step", 30, "-q"), ("usage-report", copy, "--step", 30, "-q")):
        pkmlm(*words)
    (facts,) = json.loads(pkmlm("compare", copy, "--format", "json").stdout)["runs"]
    assert (facts["test_step"], facts["usage_step"]) == (30, 30)
    shutil.rmtree(run.checkpoint(30))
    (copy / "done").unlink()
    pkmlm("train", recipe, "-o", copy, "-q")
    assert run.steps()[-1] == 30
    (facts,) = json.loads(pkmlm("compare", copy, "--format", "json").stdout)["runs"]
    assert (facts["test_step"], facts["usage_step"]) == (None, None), "the same losses, but another process's weights"
    pkmlm("eval", copy, "-q")
    (facts,) = json.loads(pkmlm("compare", copy, "--format", "json").stdout)["runs"]
    assert facts["test_step"] == 30


def train_on(run: RunDirectory, changes: list[str], losses: Iterator[float | None], stop_at: int = 0) -> Outcome:
    """Train in this process; validations have these losses (None: a stop request cuts one short)."""
    recipe = load_recipe(run.path.with_suffix(".yaml"), changes)
    run.create(recipe)
    state = TrainState(recipe, build_model(recipe, 600), Batches.of(Corpus(recipe.data.dir, "train"), recipe), "fp32")

    def validate(request: StopRequest) -> dict[str, float] | None:
        if (loss := next(losses)) is None:
            request.exit_code = 75
            return None
        return {"loss": loss, "bits_per_byte": loss}

    request = StopRequest()
    request.agree = lambda code: code or (75 if stop_at and state.progress.step >= stop_at else 0)
    with TrainingLog(run.path, "x", recipe.train.steps, recipe.log, quiet=True) as log:
        job = Job(recipe, state.batches.corpus, open_tokenizer(recipe.data.dir))
        return Training(run, state, job, validate, log, request).train()


@pytest.fixture
def run(tmp_path, write_recipe) -> RunDirectory:
    write_recipe(tmp_path, "dense").rename(tmp_path / "run.yaml")
    return RunDirectory(tmp_path / "run")


def test_a_state_that_the_manifest_does_not_know_is_used_by_no_command(copy):
    """One digit of the seconds that `compare` shows; the best checkpoint is an older one, which is whole."""
    latest = RunDirectory(copy).checkpoint(30)
    state = json.loads((latest / "state.json").read_text())
    write_state(latest, state | {"seconds": 12.5})
    (copy / "best").write_text("step-00000020\n")
    pkmlm("compare", copy)
    file = latest / "state.json"
    file.write_text(file.read_text().replace("12.5", "12.6"))
    for words in (("compare", copy), ("eval", copy, "--step", "latest"), ("export", copy, "--step", "latest")):
        output = () if words[0] != "export" else ("-o", copy / "export")
        assert "step-00000030/state.json" in pkmlm(*words, *output, code=1).stderr
    best = pkmlm("eval", copy, "--split", "valid", "--step", "best", "--json")
    assert json.loads(best.stdout)["step"] == 20


CHANGES = ["train.steps=9", "eval.every=1", "eval.patience=3", "checkpoint.every=1", "checkpoint.keep=2"]


@pytest.mark.parametrize("harm", ["changed", "gone"])
def test_the_best_checkpoint_and_patience_do_not_follow_from_the_log(run, harm):
    assert train_on(run, CHANGES, iter([5.0, 4.0, 4.5]), stop_at=3).status == "stopped"
    log = run.metrics_file.read_text()
    assert '"loss": 4.0,' in log
    run.metrics_file.write_text(log.replace('"loss": 4.0,', '"loss": 9.0,') if harm == "changed" else "")
    outcome = train_on(run, CHANGES, iter([4.6, 4.7, 4.8]))
    assert (outcome.status, outcome.step) == ("patience", 5)
    assert (run.best(), run.steps()) == (2, [2, 4, 5])


def test_a_validation_that_was_cut_short_is_owed(run):
    """It is repeated, also where more steps are asked for meanwhile; and again, if its checkpoint is resumed again."""
    changes = ["eval.every=0", "checkpoint.every=100"]
    train_on(run, ["train.steps=2", *changes], iter([None]))
    assert read_progress(run.checkpoint(2)).validations.due
    assert train_on(run, ["train.steps=2", *changes], iter([4.0])).status == "finished"
    assert run.best() == 2
    run.cut_metrics(2, validated=False)
    train_on(run, ["train.steps=3", *changes], iter([4.0, 5.0]))
    assert (run.best(), read_progress(run.checkpoint(3)).validations.best_loss) == (2, 4.0)
    assert [line["step"] for line in run.metrics() if line["event"] == "valid"] == [2, 3]


def test_a_checkpoint_that_is_validated_when_it_turns_out_to_be_the_last_may_be_the_best(run):
    changes = ["eval.every=2", "checkpoint.every=100"]
    train_on(run, ["train.steps=9", *changes], iter([5.0]), stop_at=3)
    assert run.best() == 2
    train_on(run, ["train.steps=3", *changes], iter([4.0]))
    assert run.best() == 3
