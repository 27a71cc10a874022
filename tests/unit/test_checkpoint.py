"""Checkpoints: whole, checked, and refused when they are not what they say."""

import os
import shutil
import stat
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pkmlm.data.corpus import Corpus
from pkmlm.data.tokenizer import Tokenizer
from pkmlm.distributed import ProcessGroups, World
from pkmlm.errors import UserError
from pkmlm.evaluate.load import load_run
from pkmlm.files import Damaged, writing_folder
from pkmlm.model.memory.values import table_ranks
from pkmlm.model.transformer import build_model
from pkmlm.recipe.load import load_recipe
from pkmlm.runs import checkpoint
from pkmlm.runs.checkpoint import Progress, load_tensors, part_name, parts_of, verify, write_tensors
from pkmlm.runs.directory import RunDirectory
from pkmlm.train.job import Job
from pkmlm.train.optim import optimizer_state, parameter_groups
from tests.conftest import write_state


@pytest.fixture
def run(tmp_path: Path, trained) -> RunDirectory:
    shutil.copytree(trained("product-key"), tmp_path / "run")
    return RunDirectory(tmp_path / "run")


def state_of(run: RunDirectory):
    """The tensors of a model and its optimizers, drawn."""
    recipe = load_recipe(run.recipe_file)
    model = build_model(recipe, 600)
    return model.state_dict(), optimizer_state(parameter_groups(model, recipe)), table_ranks(model)


def test_what_is_saved_is_what_is_loaded(run):
    tensors, again = state_of(run), state_of(run)
    progress = checkpoint.load(run.checkpoint(30), *tensors)
    assert progress.step == 30
    progress.step = 31
    checkpoint.save(run, progress, *tensors)
    assert checkpoint.load(run.checkpoint(31), *again) == progress
    for stored, read in zip(tensors[:2], again[:2], strict=True):
        assert stored.keys() == read.keys()
        assert all(torch.equal(stored[name], read[name]) for name in stored)
    for name in (checkpoint.WEIGHTS, checkpoint.OPTIMIZER):
        assert (run.checkpoint(30) / name).read_bytes() == (run.checkpoint(31) / name).read_bytes()


@pytest.mark.parametrize("kind", ["product-key", "hash"])
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
    groups = parameter_groups(model, recipe)
    checkpoint.load(run.checkpoint(30), model.state_dict(), optimizer_state(groups), table_ranks(model))
    stored = load_file(run.checkpoint(30) / "weights.safetensors")
    assert tensors.keys() == stored.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor.detach(), stored[name]), name


WHOLE = {"step": 3, "tokens": 60, "skips": 0, "scaler": None, "seconds": 1.5, "data": {"train": "ab"}}


def test_a_state_is_read_back_with_and_without_a_scaler(tmp_path):
    for scaler in (None, {"scale": 2.0}):
        write_state(tmp_path / "step-00000003", WHOLE | {"scaler": scaler})
        assert checkpoint.read_progress(tmp_path / "step-00000003") == Progress(3, 60, 0, scaler, 1.5, {"train": "ab"})


@pytest.mark.parametrize(
    ("state", "key"),
    [
        ({key: value for key, value in WHOLE.items() if key != "skips"}, "skips"),
        (WHOLE | {"tokens": True}, "tokens"),
        (WHOLE | {"scaler": {"scale": "big"}}, "scaler.scale"),
    ],
)
def test_a_strange_state_is_refused(tmp_path, state, key):
    write_state(tmp_path / "step-00000003", state)
    with pytest.raises(UserError, match=f"state.json .*{key}") as told:
        checkpoint.read_progress(tmp_path / "step-00000003")
    assert told.value.exit_code == 1


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *(("manifest.json", how) for how in ("truncate", "delete", "grow")),
        ("weights.safetensors", "delete"),
        ("weights.safetensors", "grow"),
    ],
)
def test_damage_is_named(run, name, damage):
    path = run.checkpoint(30) / name
    data = bytearray(path.read_bytes())
    if damage == "truncate":
        del data[-2:]
    else:
        data += b"x"
    path.unlink() if damage == "delete" else path.write_bytes(data)
    with pytest.raises(Damaged, match=name):
        checkpoint.load(run.checkpoint(30), *state_of(run))


def test_training_goes_back_only_where_there_is_an_earlier_checkpoint(run):
    for step in run.steps():
        (run.checkpoint(step) / "weights.safetensors").write_bytes(b"")
    hints = []
    for step in run.steps():
        with pytest.raises(Damaged) as told:
            verify(run.checkpoint(step))
        hints.append("goes back" in told.value.hint)
    assert hints == [False, *[True] * (len(hints) - 1)]
    assert len(hints) > 1


def test_evaluation_checks_what_it_reads_and_no_moments(run):
    for name, noticed in (("optimizer.safetensors", False), ("weights.safetensors", True), ("state.json", True)):
        path = run.checkpoint(30) / name
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        with pytest.raises(UserError, match=f"{name}: sha256") if noticed else nullcontext():
            assert load_run(run.path, "latest").step == 30
        with pytest.raises(UserError, match=f"{name}: sha256"):
            verify(run.checkpoint(30))
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


def test_weights_of_another_shape_are_refused_before_anything_is_copied(run):
    shape = r"subkeys_H2nf has shape \[2, 2, 16, 8\]"
    for change, told in (("num_keys=17", shape), ("kind=none", "ffn.down.bias is missing")):
        model = build_model(load_recipe(run.recipe_file, [f"model.memory.{change}"]), 600)
        before = model.embedding.weight.clone()
        with pytest.raises(UserError, match=told):
            checkpoint.load_weights(run.checkpoint(30), model.state_dict(), table_ranks(model))
        assert torch.equal(model.embedding.weight, before)


def test_nothing_is_saved_from_weights_that_are_not_finite(run):
    tensors = state_of(run)
    tensors[0]["norm.weight"][0] = float("nan")
    with pytest.raises(UserError, match=r"norm.weight is not finite") as told:
        checkpoint.save(run, Progress(step=99), *tensors)
    assert told.value.exit_code == 3
    assert 99 not in run.steps()


def test_pruning_keeps_the_newest_and_the_best(run):
    tensors = state_of(run)
    for step in (40, 50, 60):
        checkpoint.save(run, Progress(step=step), *tensors)
    checkpoint.prune(run, 2, 40)
    assert run.steps() == [40, 50, 60]
    checkpoint.save(run, Progress(step=70), *tensors)
    checkpoint.prune(run, 2, 40)
    assert run.steps() == [40, 60, 70]


def test_a_half_written_checkpoint_is_never_seen(run):
    (run.checkpoints / ".tmp-0a1b2c3d-step-00000040").mkdir()
    assert run.steps() == [20, 30]
    run.clean()
    assert not list(run.checkpoints.glob(".tmp*"))


TABLE = torch.arange(7 * 12.0).view(7, 12)


def write_parts(folder: Path, parts: int) -> Path:
    """A file with a table in so many parts (1: within it) and another tensor."""
    path = folder / "weights.safetensors"
    table = {} if parts > 1 else {"table": TABLE}
    write_tensors(path, {"bias": torch.ones(3), **table})
    for part, columns in enumerate(TABLE.chunk(parts, 1) if parts > 1 else []):
        write_tensors(folder / part_name(path.name, part, parts), {"table": columns.contiguous()})
    return path


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 4, 6])
def test_any_ranks_read_their_columns_of_any_parts(tmp_path, parts, size):
    path = write_parts(tmp_path, parts)
    assert len(parts_of(path)) == (parts if parts > 1 else 0)
    for rank in range(size):
        held = {"table": torch.zeros(7, 12 // size), "bias": torch.zeros(3)}
        load_tensors(path, held, {"table": World(rank, size)})
        assert torch.equal(held["table"], TABLE.chunk(size, 1)[rank])
        assert torch.equal(held["bias"], torch.ones(3))


@pytest.mark.parametrize(("parts", "size"), [(1, 1), (1, 2), (2, 3), (3, 1)])
def test_some_tensors_are_read_from_files_that_hold_others(tmp_path, parts, size):
    path = write_parts(tmp_path, parts)
    for rank in range(size):
        held = torch.zeros(7, 12 // size)
        tensors = {"table": held, "own": torch.zeros(1)}
        assert load_tensors(path, tensors, {"table": World(rank, size)}, strict=False) == ({"own"}, {"bias"})
        assert torch.equal(held, TABLE.chunk(size, 1)[rank])
    load_tensors(path, {"bias": (bias := torch.zeros(3))}, {}, strict=False)
    assert torch.equal(bias, torch.ones(3))
    for wrong, what in ((torch.zeros(4), "has shape"), (torch.zeros(3, dtype=torch.int64), "is F32")):
        with pytest.raises(UserError, match=f"tensor bias {what}"):
            load_tensors(path, {"table": (held := torch.zeros(7, 12)), "bias": wrong}, {"table": World()}, strict=False)
        assert not held.any()
    with pytest.raises(UserError, match="tensor table is not in the model" if parts == 1 else "tensor table"):
        load_tensors(path, {"bias": bias}, {})


def test_a_missing_part_and_one_of_another_shape_are_named_before_anything_is_copied(tmp_path):
    path = write_parts(tmp_path, 3)
    held = {"table": torch.zeros(7, 12), "bias": torch.zeros(3)}
    part = tmp_path / "weights-2-of-3.safetensors"
    write_tensors(part, {"table": torch.zeros(7, 5)})
    with pytest.raises(
        UserError, match=r"weights-2-of-3.safetensors: tensor table has shape \[7, 5\] \(expected \[7, 4\]\)"
    ):
        load_tensors(path, held, {"table": World()})
    part.unlink()
    with pytest.raises(UserError, match=r"weights-2-of-3\.safetensors"):
        load_tensors(path, held, {"table": World()})
    assert not held["bias"].any()


def test_files_of_tensors_have_the_permissions_of_new_ones(tmp_path, monkeypatch):
    mask = os.umask(0o027)
    try:
        with monkeypatch.context() as during, writing_folder(tmp_path / "new") as folder:
            during.delattr(os, "umask")  # the whole process's: another thread's files would have other permissions
            write_parts(folder, 1)
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "new/weights.safetensors").stat().st_mode) == 0o640
