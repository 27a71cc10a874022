"""Checkpoints: whole, checked, and refused when they are not what they say."""

import json
import os
import shutil
import stat
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from pkmlm.data.corpus import Corpus
from pkmlm.data.tokenizer import Tokenizer
from pkmlm.distributed import ProcessGroups, World
from pkmlm.errors import UserError
from pkmlm.evaluate.load import load_run
from pkmlm.files import Damaged, entry_of, temporary_name, writing_folder
from pkmlm.memory.table import table_ranks
from pkmlm.model.transformer import build_model
from pkmlm.recipe.load import load_recipe
from pkmlm.runs import checkpoint, saving
from pkmlm.runs.checkpoint import load_tensors, part_name, parts_of, verify, write_tensors
from pkmlm.runs.directory import RunDirectory
from pkmlm.runs.record import Progress, read_progress
from pkmlm.runs.saving import Saver
from pkmlm.train.job import Job
from pkmlm.train.optim import optimizer_state, parameter_groups
from tests import PATIENCE
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


def save(run: RunDirectory, progress: Progress, tensors, drift=None) -> list[float]:
    """Save a checkpoint, and wait until it stands; returns the seconds waited that were told for it."""
    told: list[float] = []
    with Saver(run, run.recipe(), ProcessGroups(), print) as saver:
        saver.save(progress, *tensors, drift or {}, told.append)
        saver.wait()
    return told


def test_what_is_saved_is_what_is_loaded(run):
    tensors, again = state_of(run), state_of(run)
    progress = checkpoint.load(run.checkpoint(30), *tensors)
    assert progress.step == 30
    progress.step = 31
    save(run, progress, tensors)
    verify(run.checkpoint(31))
    assert checkpoint.load(run.checkpoint(31), *again) == progress
    assert run.recipe_of(31) == run.recipe_of(30)
    for stored, read in zip(tensors[:2], again[:2], strict=True):
        assert stored.keys() == read.keys()
        assert all(torch.equal(stored[name], read[name]) for name in stored)
    for name in (checkpoint.WEIGHTS, checkpoint.OPTIMIZER):
        assert (run.checkpoint(30) / name).read_bytes() == (run.checkpoint(31) / name).read_bytes()


@pytest.mark.parametrize("kind", ["product-key", "hash", "mixed"])
def test_a_model_that_is_resumed_is_not_drawn_and_every_number_of_it_is_read(trained, kind):
    run = RunDirectory(trained(kind))
    recipe = run.recipe()
    job = Job(recipe, Corpus(recipe.data.dir, "train"), Tokenizer.load(run.tokenizer_file))
    torch.use_deterministic_algorithms(True)  # what has storage, and nothing more, is NaN, or the largest integer
    try:
        model = build_model(recipe, job.vocab_size, "cpu", ProcessGroups(), init_weights=False)
    finally:
        torch.use_deterministic_algorithms(False)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert all((tensor.isnan() | (tensor == 2**63 - 1)).all() for tensor in tensors.values())
    groups = parameter_groups(model, recipe)
    checkpoint.load(run.checkpoint(30), model.state_dict(), optimizer_state(groups), table_ranks(model))
    stored = load_file(run.checkpoint(30) / "weights.safetensors")
    assert tensors.keys() == stored.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor.detach(), stored[name]), name


@pytest.mark.parametrize(
    ("change", "key"),
    [({"skips": None}, "skips"), ({"tokens": True}, "tokens"), ({"validations": {"worse": "no"}}, "validations.worse")],
)
def test_a_strange_state_is_refused(run, change, key):
    state = json.loads((run.checkpoint(30) / "state.json").read_text())
    write_state(run.checkpoint(30), state | change)
    with pytest.raises(UserError, match=f"state.json .*{key}") as told:
        read_progress(run.checkpoint(30))
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
        verify(run.checkpoint(30))


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
    for change, told in ((".num_keys=17", shape), ("=null", "ffn.down.bias is missing")):
        model = build_model(load_recipe(run.recipe_file, [f"model.memories.pkm{change}"]), 600)
        before = model.embedding.weight.clone()
        with pytest.raises(UserError, match=told):
            checkpoint.load_weights(run.checkpoint(30), model.state_dict(), table_ranks(model))
        assert torch.equal(model.embedding.weight, before)


def test_a_save_holds_the_tensors_of_its_moment_while_training_goes_on(run):
    tensors = state_of(run)
    weight, committed = tensors[0]["embedding.weight"], []
    before = weight.clone()
    with Saver(run, run.recipe(), ProcessGroups(), print) as saver:
        saver.save(Progress(step=31), *tensors, {"since": torch.tensor(30)}, committed.append)
        weight.zero_()
        saver.save(Progress(step=32), *tensors, {}, committed.append)  # waits for the one before
        assert len(committed) == 1 or saver.thread is not None
    assert run.steps()[-2:] == [31, 32]
    assert len(committed) == 2
    assert torch.equal(load_file(run.checkpoint(31) / "weights.safetensors")["embedding.weight"], before)
    assert not load_file(run.checkpoint(32) / "weights.safetensors")["embedding.weight"].any()
    assert checkpoint.load_drift(run.checkpoint(31)) == {"since": torch.tensor(30)}
    assert checkpoint.load_drift(run.checkpoint(32)) == {}


def test_the_wait_for_the_checkpoint_before_counts_as_waited(run, monkeypatch):
    now, waits, write, wait, told = [0.0], threading.Event(), Saver._write, Saver.wait, []

    def slow(saver, step, *given):
        if step == 31:
            assert waits.wait(PATIENCE)
            now[0] += 7.0
        write(saver, step, *given)

    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(Saver, "_write", slow)
    tensors = state_of(run)
    with Saver(run, run.recipe(), ProcessGroups(), print) as saver:
        saver.save(Progress(step=31), *tensors, {}, told.append)
        monkeypatch.setattr(Saver, "wait", lambda saver: waits.set() or wait(saver))
        saver.save(Progress(step=32), *tensors, {}, told.append)
    assert told == [0.0, 7.0]


def test_a_save_without_room_for_a_copy_stands_before_training_goes_on(run, monkeypatch):
    monkeypatch.setattr(saving, "free_bytes", lambda device: 0)
    tensors, lines, told = state_of(run), [], []
    with Saver(run, run.recipe(), ProcessGroups(), lines.append) as saver:
        saver.save(Progress(step=31), *tensors, {}, told.append)
        assert run.steps()[-1] == 31
        assert saver.thread is None
    assert len(told) == len(lines) == 1
    verify(run.checkpoint(31))


@pytest.mark.parametrize(("missing", "beside"), [(0, 1), (1, 1), (0, 2), (1, 2)])
def test_a_copy_leaves_the_memory_that_a_step_needs(run, monkeypatch, missing, beside):
    """Of all ranks of the machine: here, of this one and another that holds 500 bytes."""
    tensors, lines = state_of(run), []
    held = sum(tensor.nbytes for part in tensors[:2] for tensor in part.values())
    free = held + 1000 + saving.SPARE + (500 if beside == 2 else 0) - missing
    monkeypatch.setattr(saving, "free_bytes", lambda device: free)
    monkeypatch.setattr(saving, "ranks_of_machine", lambda: beside)
    others = [500, 10**12]  # the last is another machine's
    monkeypatch.setattr(World, "gather_objects", lambda _, mine: [mine, *(others if isinstance(mine, int) else [])])
    with Saver(run, run.recipe(), ProcessGroups(), lines.append, step_bytes=1000) as saver:
        saver.save(Progress(step=31), *tensors, {}, lambda seconds: None)
    assert len(lines) == missing


def test_nothing_is_saved_from_weights_that_are_not_finite(run):
    tensors = state_of(run)
    tensors[0]["norm.weight"][0] = float("nan")
    with pytest.raises(UserError, match=r"norm.weight is not finite") as told:
        save(run, Progress(step=99), tensors)
    assert told.value.exit_code == 3
    assert 99 not in run.steps()
    assert not list(run.checkpoints.glob(".tmp*"))


def test_a_failed_write_is_told_after_the_next_step_and_keeps_what_stood(run):
    tensors, before, recipe = state_of(run), run.steps(), run.recipe()
    (run.checkpoint(31)).mkdir()
    (run.checkpoint(31) / "another.txt").touch()  # the folder cannot be given its name
    with Saver(run, recipe, ProcessGroups(), print) as saver:
        saver.save(Progress(step=31), *tensors, {}, print)
        while saver.thread is not None and saver.thread.is_alive():
            saver.check()
        with pytest.raises(UserError, match="step-00000031"):
            saver.check()
    shutil.rmtree(run.checkpoint(31))
    assert run.steps() == before
    assert not list(run.checkpoints.glob(".tmp*"))
    save(run, Progress(step=31), tensors)
    verify(run.checkpoint(31))


def test_pruning_keeps_the_newest_and_the_best(run):
    tensors = state_of(run)
    for step in (40, 50, 60):
        save(run, Progress(step=step), tensors)
    checkpoint.prune(run, 2, 40)
    assert run.steps() == [40, 50, 60]
    save(run, Progress(step=70), tensors)
    checkpoint.prune(run, 2, 40)
    assert run.steps() == [40, 60, 70]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.bool])
def test_tensors_are_written_as_the_library_reads_them(tmp_path, dtype):
    tensors = {
        "odd": (torch.arange(21).view(3, 7) % 2).to(dtype),
        "turned": torch.arange(12).view(3, 4).to(dtype).T,
        "number": torch.tensor(1).to(dtype),
        "none": torch.zeros(0, 5).to(dtype),
        "beside": torch.rand(5),
    }
    entry = write_tensors(tmp_path / "t.safetensors", tensors, {"format": "pt"})
    assert entry == entry_of(tmp_path / "t.safetensors")
    found = load_file(tmp_path / "t.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert all(found[name].dtype == tensors[name].dtype for name in tensors)


def test_a_half_written_checkpoint_is_never_seen(run):
    (run.checkpoints / ".tmp-0a1b2c3d-step-00000040").mkdir()
    assert run.steps() == [20, 30]
    run.clean()
    assert not list(run.checkpoints.glob(".tmp*"))


def test_what_a_usage_report_is_writing_stays_when_training_cleans_up(run):
    usage = run.path / "usage"
    usage.mkdir(exist_ok=True)
    temporary_name(usage / "test-step-30.npz").touch()
    run.clean()
    assert list(usage.glob(".tmp*"))


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


def test_files_of_tensors_have_the_permissions_of_new_ones(tmp_path):
    mask = os.umask(0o027)
    try:
        with writing_folder(tmp_path / "new") as folder:
            write_parts(folder, 1)
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "new/weights.safetensors").stat().st_mode) == 0o640
