"""`train.compile` changes no result beyond rounding, and only while the model trains."""

import copy
import shutil
from dataclasses import replace

import pytest
import torch

from pkmlm.bench.models import RandomBatches, random_tokens
from pkmlm.errors import UserError
from pkmlm.kernels import matmul
from pkmlm.model.transformer import build_model
from pkmlm.recipe.constraints import check_recipe
from pkmlm.recipe.schema import Memory, Model, Recipe, Train
from pkmlm.train.compile_and_recompute import compile_dense_parts
from pkmlm.train.step import TrainState, train_step


def recipe_of(layers: int, memory: Memory, *, compiled: bool) -> Recipe:
    train = Train(batch_tokens=64, micro_batch=2, compile=compiled)
    return Recipe(model=Model(dim=32, layers=layers, heads=2, context=16, dropout=0.1, memory=memory), train=train)


def state_of(recipe: Recipe) -> TrainState:
    model = build_model(recipe, 50)
    return TrainState(recipe, model, RandomBatches(recipe, 50), "fp32")


compiles = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="there is no C++ compiler")


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow  # the compiler takes most of half a minute
@compiles
def test_compiling_changes_no_loss_beyond_rounding(monkeypatch):
    if torch.backends.mkldnn.is_available():  # products as on a CPU that leaves them to oneDNN
        monkeypatch.setattr(matmul, "PREFER_ONEDNN", True)
        monkeypatch.setattr(matmul, "ONEDNN_WORK", 1)
    plain, compiled = (state_of(recipe_of(1, Memory(), compiled=choice)) for choice in (False, True))
    before, counted = [train_step(plain, step).loss for step in (1, 2, 3)], graphs()
    assert [train_step(compiled, step).loss for step in (1, 2, 3)] == pytest.approx(before, abs=1e-5)
    assert graphs() == counted + 1

    again = state_of(recipe_of(1, Memory(), compiled=True))  # as a resumed run goes on
    again.model.load_state_dict(compiled.model.state_dict())
    for group, saved in zip(again.param_groups, compiled.param_groups, strict=True):
        group.optimizer.load_state_dict(copy.deepcopy(saved.optimizer.state_dict()))
    assert [train_step(again, step).loss for step in (4, 5)] == [train_step(compiled, step).loss for step in (4, 5)]

    plain.model.load_state_dict(compiled.model.state_dict())
    ids = random_tokens(50, 3, 11)
    assert torch.equal(compiled.model.eval()(ids), plain.model.eval()(ids))
    assert graphs() == counted + 1


@compiles
def test_memories_stay_outside():
    memory = Memory("product-key", ("2", "3+"), 8, 2, 4, 16)
    model = build_model(recipe_of(3, memory, compiled=False), 50)
    names = [name for name, _ in model.named_parameters()]
    compile_dense_parts(model)
    replaced = {name for name, module in model.named_modules() if "forward" in vars(module)}
    assert replaced == {"blocks.0", "blocks.1.attention", "blocks.2.attention", "blocks.2.parts.ffn"}
    assert names == [name for name, _ in model.named_parameters()]


def test_without_a_compiler_training_does_not_begin(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no working C++ compiler was found\nand much more")

    monkeypatch.setattr(torch, "compile", fail)
    with pytest.raises(UserError, match=r"train\.compile: .*C\+\+ compiler was found$") as error:
        state_of(recipe_of(1, Memory(), compiled=True))
    assert error.value.exit_code == 1


def test_hash_tables_leave_nothing_to_compile():
    recipe = recipe_of(2, Memory(), compiled=True)
    with pytest.raises(UserError, match=r"train\.compile: hash tables leave nothing dense to compile"):
        check_recipe(replace(recipe, model=replace(recipe.model, projections="hash")))
