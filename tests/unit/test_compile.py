"""`train.compile` changes no result beyond rounding, and only while the model trains."""

import copy
import shutil

import pytest
import torch

from pkmlm.bench.models import RandomBatches, random_tokens
from pkmlm.errors import UserError
from pkmlm.kernels import matmul
from pkmlm.memory.hash.spec import HashSpec
from pkmlm.memory.ngram.spec import NGramSpec
from pkmlm.memory.product_key.spec import ProductKeySpec
from pkmlm.memory.spec import Spec
from pkmlm.model.transformer import build_model
from pkmlm.recipe.schema import Recipe, Train
from pkmlm.train.compile_and_recompute import compile_dense_parts
from pkmlm.train.step import TrainState, train_step
from tests.conftest import model_2019, recipe_2019


def recipe_of(layers: int, *, compiled: bool, **memories: Spec) -> Recipe:
    train = Train(batch_tokens=64, micro_batch=2, compile=compiled)
    return recipe_2019(
        model=model_2019(dim=32, layers=layers, heads=2, context=16, dropout=0.1, memories=memories), train=train
    )


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
    plain, compiled = (state_of(recipe_of(1, compiled=choice)) for choice in (False, True))
    before, counted = [train_step(plain, step).loss for step in (1, 2, 3)], graphs()
    assert [train_step(compiled, step).loss for step in (1, 2, 3)] == pytest.approx(before, abs=1e-5)
    assert graphs() == counted + 1

    again = state_of(recipe_of(1, compiled=True))  # as a resumed run goes on
    again.model.load_state_dict(compiled.model.state_dict())
    for group, saved in zip(again.param_groups, compiled.param_groups, strict=True):
        group.optimizer.load_state_dict(copy.deepcopy(saved.optimizer.state_dict()))
    assert [train_step(again, step).loss for step in (4, 5)] == [train_step(compiled, step).loss for step in (4, 5)]

    plain.model.load_state_dict(compiled.model.state_dict())
    ids = random_tokens(50, 3, 11)
    assert torch.equal(compiled.model.eval()(ids), plain.model.eval()(ids))
    assert graphs() == counted + 1


@pytest.mark.slow
@compiles
def test_documents_of_other_lengths_are_not_compiled_anew():
    model = model_2019(dim=16, layers=1, heads=2, context=300, positions="rotary", document_mask=True)
    plain, compiled = (build_model(recipe_2019(model=model), 50).train() for _ in range(2))
    compile_dense_parts(compiled)
    counted = []
    for index in range(4):
        ids = random_tokens(50, 2, 301, index).clamp(min=1)
        ids[0, 40 + 50 * index] = 0  # begins a document
        losses = [each.loss(ids[:, :-1], ids[:, 1:]) for each in (plain, compiled)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
        counted.append(graphs())
    assert counted == counted[:1] * 4
    for expected, found in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-2)


@compiles
def test_memories_stay_outside():
    pkm = ProductKeySpec(layers=("2", "3+"), num_keys=8, heads=2, topk=4, key_dim=16)
    tables, ngrams = HashSpec(layers=("4",), bits=4), NGramSpec(layers=("5",), heads=1, rows=31, row_dim=4)
    model = build_model(recipe_of(5, compiled=False, pkm=pkm, tables=tables, ngrams=ngrams), 50)
    names = [name for name, _ in model.named_parameters()]
    compile_dense_parts(model)
    replaced = {name for name, module in model.named_modules() if "forward" in vars(module)}
    inner = {f"blocks.{block}.attention" for block in (1, 2, 3, 4)} | {f"blocks.{block}.parts.ffn" for block in (2, 4)}
    assert replaced == {"blocks.0"} | inner
    assert names == [name for name, _ in model.named_parameters()]


def test_without_a_compiler_training_does_not_begin(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no working C++ compiler was found\nand much more")

    monkeypatch.setattr(torch, "compile", fail)
    with pytest.raises(UserError, match=r"train\.compile: .*C\+\+ compiler was found") as error:
        state_of(recipe_of(1, compiled=True))
    assert error.value.message.endswith("compiler was found")
    assert error.value.exit_code == 1
