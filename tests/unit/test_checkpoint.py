"""Checkpoints: whole, checked, and refused when they are not what they say."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pkmlm.data.corpus import Corpus
from pkmlm.data.tokenizer import Tokenizer
from pkmlm.distributed import ProcessGroups
from pkmlm.errors import UserError
from pkmlm.evaluate.load import load_run
from pkmlm.model.transformer import build_model
from pkmlm.recipe.load import load_recipe
from pkmlm.runs.directory import RunDirectory
from pkmlm.runs.files import write_json
from pkmlm.train import checkpoint
from pkmlm.train.checkpoint import Progress
from pkmlm.train.integrity import verify
from pkmlm.train.job import Job
from pkmlm.train.optim import parameter_groups


@pytest.fixture
def run(tmp_path: Path, trained) -> RunDirectory:
    shutil.copytree(trained("product-key"), tmp_path / "run")
    return RunDirectory(tmp_path / "run")


def state_of(run: RunDirectory):
    recipe = load_recipe(run.recipe_file)
    model = build_model(recipe, 600)
    return model, parameter_groups(model, recipe)


def test_what_is_saved_is_what_is_loaded(run):
    model, groups = state_of(run)
    progress = checkpoint.load(run.checkpoint(30), model, groups)
    assert progress.step == 30
    progress.step = 31
    checkpoint.save(run, model, groups, progress)
    again, groups_again = state_of(run)
    assert checkpoint.load(run.checkpoint(31), again, groups_again) == progress
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    first, second = checkpoint.optimizer_state(groups), checkpoint.optimizer_state(groups_again)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    for name in checkpoint.FILES[:2]:
        assert (run.checkpoint(30) / name).read_bytes() == (run.checkpoint(31) / name).read_bytes()


@pytest.mark.parametrize("kind", ["dense", "product-key", "flat-key", "hash"])
def test_a_model_that_is_resumed_is_not_drawn_and_every_number_of_it_is_read(trained, kind):
    run = RunDirectory(trained(kind))
    recipe = run.recipe()
    job = Job(recipe, Corpus(recipe.data.dir, "train"), Tokenizer.load(run.tokenizer_file))
    torch.use_deterministic_algorithms(True)  # what has storage, and nothing more, is NaN
    try:
        model = build_model(recipe, job.vocab_size, "cpu", ProcessGroups(), init_weights=False)
    finally:
        torch.use_deterministic_algorithms(False)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert all(tensor.isnan().all() for tensor in tensors.values())
    checkpoint.load(run.checkpoint(30), model, parameter_groups(model, recipe))
    stored = load_file(run.checkpoint(30) / "weights.safetensors")
    assert tensors.keys() == stored.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor.detach(), stored[name]), name


WHOLE = {"step": 3, "tokens": 60, "skips": 0, "scaler": None, "seconds": 1.5, "data": {"train": "ab"}}


def test_a_state_is_read_back_with_and_without_a_scaler():
    assert checkpoint.progress_of(WHOLE, Path("x")) == Progress(3, 60, 0, None, 1.5, {"train": "ab"})
    scaled = WHOLE | {"scaler": {"scale": 2.0}}
    assert checkpoint.progress_of(scaled, Path("x")) == Progress(3, 60, 0, {"scale": 2.0}, 1.5, {"train": "ab"})


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([], r"it is '\[\]'"),
        ({key: value for key, value in WHOLE.items() if key != "skips"}, "it has no skips"),
        ({key: value for key, value in WHOLE.items() if key != "data"}, "it has no data"),
        (WHOLE | {"step": "3"}, "step is '3'"),
        (WHOLE | {"tokens": True}, "tokens is 'True'"),
        (WHOLE | {"scaler": {"scale": "big"}}, "scaler.scale is 'big'"),
        (WHOLE | {"data": {"train": 5}}, "data.train is '5'"),
    ],
)
def test_a_strange_state_is_refused(state, message):
    with pytest.raises(UserError, match=f"state.json is not the state of a run: {message}") as told:
        checkpoint.progress_of(state, Path("state.json"))
    assert told.value.exit_code == 1


@pytest.mark.parametrize("name", [*checkpoint.FILES, "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "grow"])
def test_damage_is_named(run, name, damage):
    path = run.checkpoint(30) / name
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
    elif damage == "truncate":
        del data[-2:]
    else:
        data += b"x"
    path.unlink() if damage == "delete" else path.write_bytes(data)
    if name == "manifest.json" and damage == "flip":
        path.write_text(json.dumps({"version": 7, "files": {}}))
    model, groups = state_of(run)
    with pytest.raises(UserError, match=name if damage != "flip" or name != "manifest.json" else "version 7"):
        checkpoint.load(run.checkpoint(30), model, groups)


def test_hashes_are_told_up_to_where_they_differ(run):
    manifest = run.checkpoint(30) / "manifest.json"
    whole = json.loads(manifest.read_text())
    right = whole["files"]["state.json"]["sha256"]
    for place, told in ((0, 12), (11, 12), (12, 13), (40, 41), (63, 64)):
        wrong = right[:place] + ("1" if right[place] == "0" else "0") + right[place + 1 :]
        whole["files"]["state.json"]["sha256"] = wrong
        write_json(manifest, whole)
        with pytest.raises(UserError, match=rf"state.json: sha256 {right[:told]} \(expected {wrong[:told]}\)\Z"):
            verify(run.checkpoint(30))


def test_evaluation_checks_what_it_reads_and_no_moments(run):
    for name, noticed in (("optimizer.safetensors", False), ("weights.safetensors", True), ("state.json", True)):
        path = run.checkpoint(30) / name
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        with pytest.raises(UserError, match=f"{name}: sha256") if noticed else nullcontext():
            assert load_run(run.path).step == 30
        with pytest.raises(UserError, match=f"{name}: sha256"):
            verify(run.checkpoint(30))
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


def test_weights_of_another_shape_are_refused_before_anything_is_copied(run):
    recipe = load_recipe(run.recipe_file, ["model.memory.num_keys=17"])
    model = build_model(recipe, 600)
    before = model.embedding.weight.clone()
    with pytest.raises(UserError, match=r"subkeys_H2nf has shape \[2, 2, 16, 8\] \(expected \[2, 2, 17, 8\]\)"):
        checkpoint.load_weights(run.checkpoint(30), model)
    assert torch.equal(model.embedding.weight, before)
    dense = build_model(load_recipe(run.recipe_file, ["model.memory.kind=none"]), 600)
    with pytest.raises(UserError, match=r"is not in the model|is missing"):
        checkpoint.load_weights(run.checkpoint(30), dense)


def test_nothing_is_saved_from_weights_that_are_not_finite(run):
    model, groups = state_of(run)
    model.norm.weight.data[0] = float("nan")
    with pytest.raises(UserError, match=r"norm.weight is not finite"):
        checkpoint.save(run, model, groups, Progress(step=99))
    assert 99 not in run.steps()


def test_pruning_keeps_the_newest_and_the_best(run):
    model, groups = state_of(run)
    for step in (40, 50, 60):
        checkpoint.save(run, model, groups, Progress(step=step))
    run.point("best", 40)
    checkpoint.prune(run, 2)
    assert run.steps() == [40, 50, 60]
    checkpoint.save(run, model, groups, Progress(step=70))
    checkpoint.prune(run, 2)
    assert run.steps() == [40, 60, 70]


def test_a_half_written_checkpoint_is_never_seen(run):
    (run.checkpoints / ".tmp-0a1b2c3d-step-00000040").mkdir()
    (run.checkpoints / ".tmp-0a1b2c3d-step-00000040" / "weights.safetensors").write_bytes(b"half")
    assert run.steps() == [20, 30]
    run.clean()
    assert not list(run.checkpoints.glob(".tmp*"))
