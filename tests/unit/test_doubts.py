"""What a recipe says and hardly means."""

from pathlib import Path

import pytest

from pkmlm.recipe.doubts import idle_keys
from pkmlm.recipe.dump import dump_recipe
from pkmlm.recipe.load import load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
DENSE = "model: {dim: 64, heads: 4, context: 32}\ntrain: {batch_tokens: 512}\n"
MEMORY = DENSE.replace("32}", "32, memory: {kind: product-key, layers: 2, num_keys: 64}}")


def idle(folder: Path, text: str, *overrides: str) -> list[str]:
    (folder / "dense.yaml").write_text(DENSE)
    (folder / "memory.yaml").write_text(MEMORY)
    (folder / "asked.yaml").write_text(text)
    asked = folder / "asked.yaml"
    return idle_keys(load_recipe(asked, overrides), asked, overrides)


@pytest.mark.parametrize(
    ("override", "cause"),
    [
        ("model.memory.num_keys=64", "model.memory.kind is none"),
        ("optim.keys.lr_scale=0.1", "model.memory.kind is none"),
        ("optim.values={lr: 1e-2}", "model.memory.kind is none"),
        ("eval.recalibrate=4", "model.memory.kind is none"),
        ("model.hash.bits=4", "model.projections is dense"),
        ("optim.tables.clip=0", "model.projections is dense"),
        ("model.rotary_fraction=0.5", "model.positions is learned"),
        ("model.attention_options.rank=8", "model.attention is softmax"),
        ("optim.final_lr=0", "optim.schedule is inverse-sqrt"),
    ],
)
def test_a_key_that_does_nothing_is_told_with_what_makes_it_idle(tmp_path: Path, override: str, cause: str) -> None:
    (told,) = idle(tmp_path, DENSE, override)
    assert told.startswith(override.partition("=")[0])
    assert told.endswith(f": without effect, as {cause}")


def test_keys_that_do_something_are_not_told(tmp_path: Path) -> None:
    assert idle(tmp_path, DENSE, "optim.lr=1e-2", "model.ffn_dim=128") == []
    assert idle(tmp_path, DENSE, "optim.schedule=cosine", "optim.final_lr=0") == []
    assert idle(tmp_path, MEMORY, "optim.values.schedule=cosine", "optim.final_lr=0") == []
    assert idle(tmp_path, MEMORY, "optim.values.lr=1e-2", "model.memory.topk=8", "eval.recalibrate=2") == []
    assert idle(tmp_path, DENSE, "model.projections=hash", "model.hash.bits=4", "optim.tables.clip=0") == []
    (told,) = idle(tmp_path, MEMORY, "model.memory.query_norm=layer", "eval.recalibrate=2")
    assert "eval.recalibrate: without effect, as model.memory.query_norm is layer" in told
    everywhere = ("model.memory.layers=[1,2]", "model.layers=2", "model.memory.kind=product-key")
    (told,) = idle(tmp_path, MEMORY, *everywhere, "model.ffn_dim=8", "model.activation=relu")
    assert told == "model.ffn_dim, model.activation: without effect, as model.memory.layers is [1, 2]"
    assert idle(tmp_path, MEMORY, "model.memory.layers=1+", "model.ffn_dim=8") == []
    (told,) = idle(tmp_path, DENSE, "eval.every=0", "eval.patience=2")
    assert told == "eval.patience: without effect, as eval.every is 0"
    (told,) = idle(tmp_path, DENSE, "model.projections=hash", "model.ffn_dim=128", "model.bias=false")
    assert told == "model.ffn_dim, model.bias: without effect, as model.projections is hash"


def test_a_schedule_of_what_the_model_has_not_uses_no_final_rate(tmp_path: Path) -> None:
    told = idle(tmp_path, DENSE, "optim.tables.schedule=linear", "optim.final_lr=0")
    assert sorted(line.partition(":")[0] for line in told) == ["optim.final_lr", "optim.tables.schedule"]


def test_a_memory_without_a_kind_is_told(tmp_path: Path) -> None:
    without = MEMORY.replace("kind: product-key, ", "")
    told = ["model.memory.layers, model.memory.num_keys: without effect, as model.memory.kind is none"]
    assert idle(tmp_path, without) == told
    assert idle(tmp_path, without, "model.memory.kind=product-key") == []
    assert idle(tmp_path, "base: dense.yaml\nmodel: {memory: {layers: 2, num_keys: 64}}\n") == told


def test_a_memory_that_is_taken_away_is_meant(tmp_path: Path) -> None:
    twin = "base: memory.yaml\nmodel: {memory: {kind: none}}\n"
    assert idle(tmp_path, twin) == idle(tmp_path, MEMORY, "model.memory.kind=none") == []
    assert idle(tmp_path, MEMORY, "model.memory.topk=8", "model.memory.kind=none") == []  # as grids have it
    assert idle(tmp_path, dump_recipe(load_recipe(tmp_path / "dense.yaml"))) == []  # every key stands in such a file
    assert len(idle(tmp_path, twin, "model.memory.topk=8")) == 1
    assert len(idle(tmp_path, MEMORY, "model.memory.kind=none", "model.memory.topk=8")) == 1


def test_nothing_in_a_recipe_of_the_repository_is_idle() -> None:
    files = [path for path in RECIPES.rglob("*.yaml") if path.parent.name != "grids"]
    assert [told for path in files for told in idle_keys(load_recipe(path), path)] == []
