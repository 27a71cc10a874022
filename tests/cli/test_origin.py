"""A checkpoint belongs to one run and to one recipe, and knows itself which validation was the best."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pkmlm.data.batches import Batches
from pkmlm.data.corpus import Corpus
from pkmlm.errors import UserError
from pkmlm.model.transformer import build_model
from pkmlm.recipe.load import load_recipe
from pkmlm.runs.checkpoint import read_progress
from pkmlm.runs.directory import RunDirectory
from pkmlm.signals import StopRequest
from pkmlm.train.log import TrainingLog
from pkmlm.train.loop import Outcome, Training
from pkmlm.train.step import TrainState
from tests.conftest import pkmlm, without_state, write_state

NEW = ("run", "recipe", "validations")  # keys of a state that checkpoints of earlier versions lack


@pytest.fixture
def copy(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained("product-key"), tmp_path / "run"))


def reads(run: Path, recipe: Path, folder: Path) -> list[tuple[object, ...]]:
    """The commands that load a run's weights."""
    return [
        ("eval", run, "--json", "-q"),
        ("usage-report", run, "-q"),
        ("slots", run, "-q"),
        ("generate", run, "The", "-n", 2),
        ("export", run, "-o", folder / "export"),
        ("train", recipe, "-o", folder / "new", "-s", f"train.init_from={run}", "-s", "train.steps=1", "-q"),
        ("train", recipe, "-o", run, "-s", "train.steps=31", "-q"),
    ]


@pytest.mark.parametrize(
    ("before", "after", "key"),
    [
        ("topk: 4", "topk: 2", "model.memory.topk"),
        ("activation: gelu", "activation: relu", "model.activation"),
        ("lr: 0.003", "lr: 0.002", "optim.lr"),
    ],
)
def test_a_recipe_that_is_not_that_of_the_weights_is_refused(copy, tmp_path, write_recipe, before, after, key):
    """Of the same shapes, so that the weights would fit, and give other numbers."""
    pkmlm("usage-report", copy, "-q")  # is kept: of the recipe that the weights have
    file = copy / "recipe.yaml"
    assert file.read_text().count(before) == 1
    file.write_text(file.read_text().replace(before, after))
    value = after.split()[1]
    for words in reads(copy, write_recipe(tmp_path, "product-key"), tmp_path):
        changed = ["-s", f"{key}={value}"] if copy in words and words[0] == "train" else []
        said = pkmlm(*words, *changed, code=1).stderr
        assert said.startswith("error: "), words
        assert key in said, words
    assert not (tmp_path / "new").exists()
    assert not (tmp_path / "export").exists()
    assert RunDirectory(copy).steps() == [20, 30]


def test_what_was_changed_by_hand_is_named_with_what_to_do(copy, tmp_path, write_recipe):
    """The recipe and the id of a run; the weights stay, and with the file set back all is as before."""
    recipe, run = write_recipe(tmp_path, "product-key"), RunDirectory(copy)
    for file, before, after in (
        (run.recipe_file, "topk: 4", "topk: 2"),
        (copy / "run.json", f'"id": "{run.facts()["id"]}"', '"id": "another"'),
    ):
        text = file.read_text()
        assert text.count(before) == 1
        file.write_text(text.replace(before, after))
        said = pkmlm("train", recipe, "-o", copy, "-q", "-s", "train.steps=31", code=1).stderr
        assert re.match(rf"error: {re.escape(str(file))} .*\nhint: .*set .*back", said)
        assert before.split()[1].strip('"') in said
        file.write_text(text)
    pkmlm("train", recipe, "-o", copy, "-q", "-s", "train.steps=31")


def test_a_checkpoint_of_another_run_is_refused(tmp_path, write_recipe):
    """Of the same recipe, but for a key that may change within a run."""
    recipe, runs = write_recipe(tmp_path, "product-key"), [tmp_path / "one", tmp_path / "other"]
    for run, micro_batch in zip(runs, (4, 2), strict=True):
        pkmlm("train", recipe, "-o", run, "-q", "-s", "train.steps=1", "-s", f"train.micro_batch={micro_batch}")
    shutil.rmtree(runs[0] / "checkpoints")
    shutil.copytree(runs[1] / "checkpoints", runs[0] / "checkpoints")
    for words in reads(runs[0], recipe, tmp_path):
        said = pkmlm(*words, code=1).stderr
        assert said.startswith("error: "), words
        assert "step-00000001 is a checkpoint of another run" in said, words
    (runs[0] / "run.json").write_text("{}")
    assert "run.json was changed after training: it has no id" in pkmlm("eval", runs[0], "-q", code=1).stderr
    (runs[0] / "run.json").unlink()  # only a record: nothing is known then
    pkmlm("eval", runs[0], "-q")


def test_what_an_earlier_version_did_not_note_is_unknown(copy, trained, tmp_path, write_recipe):
    for path in (copy / "checkpoints").iterdir():
        without_state(path, *NEW)
    facts = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps({key: value for key, value in facts.items() if key != "id"}))
    for words in reads(copy, write_recipe(tmp_path, "product-key"), tmp_path):
        pkmlm(*words)
    ours, theirs = (RunDirectory(run) for run in (copy, trained("product-key")))
    assert read_progress(ours.checkpoint(31)).run == ours.facts()["id"]
    history, before = (read_progress(run.checkpoint(run.steps()[-1])).validations for run in (ours, theirs))
    assert (before.step, history.step) == (30, 31)
    assert (history.best_step, history.best_loss) in ((31, history.best_loss), (before.best_step, before.best_loss))


def train_on(run: RunDirectory, changes: list[str], losses: Iterator[float | None], stop_at: int = 0) -> Outcome:
    """Train in this process; validations have these losses (None: a stop request cuts one short)."""
    recipe = load_recipe(run.path.with_suffix(".yaml"), changes)
    run.create(recipe)
    state = TrainState(recipe, build_model(recipe, 600), Batches.of(Corpus(recipe.data.dir, "train"), recipe), "fp32")

    def validate(request: StopRequest) -> dict[str, float] | None:
        if (loss := next(losses)) is None:
            request.exit_code = 75
            return None
        return {"loss": loss}

    request = StopRequest()
    request.agree = lambda code: code or (75 if stop_at and state.progress.step >= stop_at else 0)
    with TrainingLog(run.path, "x", recipe.train.steps, recipe.log, quiet=True) as log:
        return Training(run, state, state.batches.corpus.hashes, validate, log, request).train()


@pytest.fixture
def run(tmp_path, write_recipe) -> RunDirectory:
    write_recipe(tmp_path, "dense").rename(tmp_path / "run.yaml")
    return RunDirectory(tmp_path / "run")


def test_a_state_that_the_manifest_does_not_know_is_used_by_no_command(copy):
    """One digit of the seconds that `compare` shows; the best checkpoint is an older one, which is whole."""
    latest = RunDirectory(copy).checkpoint(30)
    state = json.loads((latest / "state.json").read_text())
    write_state(latest, state | {"seconds": 12.5, "validations": state["validations"] | {"best_step": 20}})
    (copy / "best").write_text("step-00000020\n")
    best = ("eval", copy, "--split", "valid", "--step", "best", "--json")
    assert "state.json" not in pkmlm("compare", copy).stderr + pkmlm(*best).stderr
    file = latest / "state.json"
    file.write_text(file.read_text().replace("12.5", "12.6"))
    for words in (("compare", copy), ("eval", copy, "--step", "latest"), ("export", copy, "--step", "latest")):
        output = () if words[0] != "export" else ("-o", copy / "export")
        assert re.match(r"error: \S*step-00000030/state.json: sha256", pkmlm(*words, *output, code=1).stderr)
    warned = pkmlm(*best)
    assert json.loads(warned.stdout)["step"] == 20
    assert re.match(r"warning: \S*step-00000030/state.json: sha256", warned.stderr)


CHANGES = ["train.steps=9", "eval.every=1", "eval.patience=3", "checkpoint.every=1", "checkpoint.keep=2"]


@pytest.mark.parametrize("harm", ["changed", "gone"])
def test_the_best_checkpoint_and_patience_do_not_follow_from_the_log(run, harm):
    assert train_on(run, CHANGES, iter([5.0, 4.0, 4.5]), stop_at=3).status == "stopped"
    log = run.metrics_file.read_text()
    assert '"loss": 4.0}' in log
    run.metrics_file.write_text(log.replace('"loss": 4.0}', '"loss": 9.0}') if harm == "changed" else "")
    outcome = train_on(run, CHANGES, iter([4.6, 4.7, 4.8]))
    assert (outcome.status, outcome.step) == ("patience", 5)
    assert (run.best(), run.steps()) == (2, [2, 4, 5])


def test_checkpoints_of_an_earlier_version_leave_it_to_the_log(run):
    train_on(run, CHANGES, iter([5.0, 4.0, 4.5]), stop_at=3)
    for step in run.steps():
        without_state(run.checkpoint(step), *NEW)
    outcome = train_on(run, CHANGES, iter([4.6, 4.7, 4.8]))
    assert (outcome.status, outcome.step, run.best()) == ("patience", 5, 2)


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
    (run.path / "best").write_text("step-00000003\n")
    with pytest.raises(UserError, match="best validation was at step 2"):
        run.best()
    train_on(run, ["train.steps=3", *changes], iter([4.0]))
    assert run.best() == 3


def test_a_pointer_to_another_checkpoint_than_the_best_is_refused(run):
    train_on(run, [*CHANGES, "checkpoint.keep=9"], iter([5.0, 4.0, 4.5, 4.6, 4.7]))
    assert run.best() == 2
    for step in (3, 5):
        (run.path / "best").write_text(f"step-{step:08d}\n")
        with pytest.raises(UserError, match="best validation was at step 2") as told:
            run.resolve("best")
        assert told.value.exit_code == 1
    (run.path / "best").unlink()
    assert run.best() == 2
