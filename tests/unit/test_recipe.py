"""Recipes: reading, inheriting, overriding, checking, writing back, warnings, and the schema for editors."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from pkmlm.errors import UserError
from pkmlm.memory.flat_key.spec import FlatKeySpec
from pkmlm.memory.product_key.spec import ProductKeySpec
from pkmlm.memory.registry import SPECS
from pkmlm.memory.spec import SpecError
from pkmlm.recipe.constraints import check_recipe
from pkmlm.recipe.load import bind, load_recipe
from pkmlm.recipe.nodes import parse
from pkmlm.recipe.other_names import OTHER_NAMES
from pkmlm.recipe.schema import (
    Data,
    Eval,
    Model,
    Optim,
    Recipe,
    Train,
    differences,
    dump_recipe,
    flatten,
    json_schema,
    key_names,
    list_keys,
)
from pkmlm.recipe.warnings import padding_warning, random_weights_warning, warmup_warnings

RECIPES = Path(__file__).parents[2] / "recipes"
RECIPE_FILES = sorted(path for path in RECIPES.rglob("*.yaml") if path.parent.name != "grids")

GOOD = """\
name: small
model:
  dim: 256
  context: 128
  document_mask: false
  memories: {pkm: {kind: product-key, layers: [5], num_keys: 128, key_dim: 128}}
optim: {lr: 3e-4, schedule: inverse-sqrt}
train: {batch_tokens: 4096}
"""


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "r.yaml"
    path.write_text(GOOD)
    return path


def error_of(path: Path, *overrides: str) -> UserError:
    with pytest.raises(UserError) as caught:
        load_recipe(path, overrides)
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 700
    assert caught.value.exit_code == 2
    return caught.value


def error_of_text(tmp_path: Path, text: str | bytes) -> str:
    path = tmp_path / "bad.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return error_of(path).message.removeprefix(str(path))


def test_the_presets_are_the_papers() -> None:
    two = load_recipe(RECIPES / "pkm/16-layers.yaml")
    assert two.model.memory_places() == {6: {"pkm": ("ffn",)}, 12: {"pkm": ("ffn",)}}
    values = two.optim.filled(two.model.memories["pkm"])
    assert (two.model.dim, two.model.heads, two.optim.lr, values.lr) == (1024, 16, 2.5e-4, 1e-3)
    tiny, pythia = (load_recipe(RECIPES / name) for name in ("memoryformer/tiny.yaml", "pythia/70m.yaml"))
    tables = tiny.model.memories["tables"]
    assert tiny.optim.filled(tables).lr == 3 * pythia.optim.lr
    assert pythia.train.batch_tokens == 1024 * 2048
    assert tiny.model.dim // tables.bits == 64
    assert tiny.model.rotary_width == 16


def test_numbers_are_read_by_the_type_of_their_key(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file, ["optim.eps=1e-9", "optim.clip=.5", "train.steps=1_000", "name=no"])
    assert (recipe.optim.lr, recipe.optim.eps, recipe.optim.clip, recipe.train.steps) == (
        3e-4,
        1e-9,
        0.5,
        1000,
    )
    assert recipe.name == "no"
    assert type(load_recipe(recipe_file, ["optim.clip=2"]).optim.clip) is float


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ": empty"),
        ("- a\n", ":1:1: found a list of 1"),
        ("name: a\nname: b\n", ":2:1: name is given twice"),
        ("model:\n  dim: 64\n  dim: 32\n", ":3:3: dim is given twice: first at"),
        ("model:\n\tdim: 3", ":2:1: "),
        ("model: &a {dim: 5}\n", ":1:8: anchors"),
        ("model: !!map {}", ":1:8: tags"),
        ("<<: {a: 1}\n", ":1:1: merge keys"),
        ("name: a\n---\nname: b\n", ":2:1: expected a single document in the stream, but found another document"),
        ('name: "\\UFFFFFFFF"', ":1:10: an escape"),
        (b"name: a\0b", ":1:8: the character U+0000"),
        (b"ok: 1\nname: a\xffb", ":2:8: byte 13 is not UTF-8"),
        ("[" * 5000, ":1:13: nested deeper"),
        ("model: {dim: " + "9" * 5000 + "}", "40 digits"),
        ("name: [a", ":1:9: expected"),
        ("a: b: c", ":1:5: mapping values"),
        ("x" * (1 << 19), " has more than"),
        ("\n\nmodel:\n  dims: 5", ":4:3: unknown key model.dims (did you mean model.dim?)"),
        ("lr-: 4", ":1:1: unknown key lr- (did you mean optim.lr or optim.muon.lr?)"),
        ("model: {memory: {kind: hash}}", ":1:9: unknown key model.memory (did you mean model.memories or "),
        ("model.dim: 5", ":1:1: model.dim: found a key with dots"),
        ("model: {lr: 3}", "unknown key model.lr (did you mean optim.lr or optim.muon.lr?)"),
        ("train: {steps: 0755}", ":1:9: train.steps: found 0755"),
        ("train: {steps: 1.0}", "train.steps: found 1.0"),
        ("train: {steps: '5'}", 'train.steps: found the text "5" (expected a whole number)'),
        ("optim: {lr: nan}", "optim.lr: found nan"),
        ("optim: {lr: 1e999}", "optim.lr: found 1e999"),
        ("optim: {betas: [0.9]}", "optim.betas: found a list of 1"),
        ("model: {bias: no}", "model.bias: found no"),
        ("model: 5", ":1:1: model: found 5 (expected keys such as"),
        ('train: {steps: "a\\nb"}', 'train.steps: found the text "a\\nb" (expected'),
        ("name: null", "name: found null"),
        ("name: ../../x", "name: found '../../x'"),
        ('eval: {sample: "\\ud800"}', "eval.sample: the text holds a character that no file can hold"),
        ("parallel: {memory: 2}", "parallel.memory: 2 ranks, but the model has no table to divide (expected 1)"),
        (
            "model: {dim: 64, memories: {a: {kind: peer, layers: 2, value_dim: 30}}}\nparallel: {memory: 4}",
            "parallel.memory: 4 ranks cannot divide tables of 30 and 64 columns (expected a divisor of 2)",
        ),
        ("optim: {schedule: relative}", "optim.schedule: found relative"),
        ("base: nowhere.yaml", ":1:1: base: cannot read "),
        ("base: bad.yaml", ":1:1: base: "),
        ("base: " + "a" * 6000, ":1:1: base: cannot read "),
        ("title: a grid\naxes: {}\n", " is a grid (expected a recipe)"),
    ],
)
def test_what_is_no_recipe_is_refused_in_one_line(tmp_path: Path, text: str | bytes, expected: str) -> None:
    assert expected in error_of_text(tmp_path, text)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("optim.optimizer", "optim.matrices"),
        ("optim.muon_lr", "optim.muon.lr"),
        ("optim.muon.learning_rate", "optim.muon.lr"),
        ("optim.learning_rate", "optim.lr"),
        ("optim.beta2", "optim.betas"),
        ("optim.min_lr", "optim.final_lr"),
        ("optim.max_grad_norm", "optim.clip"),
        ("model.n_layers", "model.layers"),
        ("model.num_hidden_layers", "model.layers"),
        ("model.hidden_size", "model.dim"),
        ("model.embed_dim", "model.dim"),
        ("model.num_attention_heads", "model.heads"),
        ("model.ffn_hidden", "model.ffn_dim"),
        ("model.max_position_embeddings", "model.context"),
        ("model.block_size", "model.context"),
        ("model.activation", "model.ffn"),
        ("model.memory.kind", "model.memories"),
        ("model.ngram", "model.memories"),
        ("train.lr", "optim.lr"),
        ("train.batch_size", "train.batch_tokens"),
        ("train.warmup_steps", "optim.warmup_steps"),
        ("train.save_every", "checkpoint.every"),
        ("eval.steps", "eval.every"),
        ("data.path", "data.dir"),
        ("steps", "train.steps"),
        ("optimizer.lr", "optim"),
        ("model.memories.pkm.lr", "model.memories.pkm.optim.lr"),
        ("model.memories.pkm.k", "model.memories.pkm.topk"),
        ("model.memories.pkm.optim.learning_rate", "model.memories.pkm.optim.lr"),
    ],
)
def test_a_key_by_its_name_elsewhere_leads_to_the_key_of_today(recipe_file: Path, typed: str, meant: str) -> None:
    hint = error_of(recipe_file, f"{typed}=1").message.partition("did you mean ")[2]
    assert re.split(r" or |\?", hint)[0] == meant


def test_every_other_name_leads_to_a_key_that_there_is(recipe_file: Path) -> None:
    keys = [*key_names(Recipe), *key_names(ProductKeySpec, "model.memories.pkm.")]
    for end, names in OTHER_NAMES.items():
        (*_, key) = [key for key in keys if f".{key}".endswith(f".{end}")]
        section = key.rpartition(".")[0]
        for name in names.split():
            said = error_of(recipe_file, f"{section}.{name}=1").message
            assert any(each in said for each in keys if f".{each}".endswith(f".{end}")), said


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.heads=7", "model.heads: 7 heads do not divide model.dim 256"),
        ("model.memories.pkm.topk=129", "model.memories.pkm.topk: found 129"),
        ("model.memories.pkm.key_dim=129", "model.memories.pkm.key_dim: found 129"),
        ("model.memories.pkm.layers=7", "model.memories.pkm.layers: found layer 7 (expected layers from 1 to 6)"),
        ("model.memories.pkm.layers=five", "model.memories.pkm.layers: found 'five'"),
        ("model.memories.pkm.layers=[5, 5+]", "model.memories.pkm.layers: layer 5 is named twice"),
        (
            "model.memories.pkm.layers=[]",
            "model.memories.pkm.layers: found no layer (expected layers from 1 to 6, such as [5])",
        ),
        ("model.memories.pkm.layers=auto:999999999", "found auto:999999999"),
        ("model.memories.pkm.num_keys=70000", "model.memories.pkm.num_keys: asks for 1.3e+12 parameters"),
        ("model.vocab_size=99999999999", "model.vocab_size: found 99999999999"),
        ("train.batch_tokens=4000", "(expected a multiple of 128)"),
        ("train.micro_batch=5", "do not fall into micro-batches of 5 (expected a divisor of 32)"),
        ("train.seed=9223372036854775808", "train.seed: found 9223372036854775808"),
        ("optim.warmup_steps=0", "optim.warmup_steps: found 0 with the inverse-sqrt schedule"),
        ("model.memories.pkm.optim.schedule=inverse-sqrt", "model.memories.pkm.optim.warmup_steps: found 0 with"),
        ("optim.betas=[0.9, 1]", "optim.betas: found 1"),
        ("model.memories.pkm.topc=3", "unknown key model.memories.pkm.topc (did you mean model.memories.pkm.topk?)"),
        ("model.memories.pkn=null", "model.memories.pkn: found null, but there is no such memory to drop"),
        ("no-equals", "not of the form key=value"),
        ("data.dir=[]", "data.dir: found"),
        ("data.dir=[a, null]", "data.dir: found"),
        ("data.dir=[a, {b: c}]", "data.dir: found"),
        ("data.dir={a: b}", "data.dir: found"),
        ("model.memories.pkm.layers=[5", "expected ',' or ']'"),
    ],
)
def test_what_cannot_hold_is_refused_with_the_override_and_the_key(
    recipe_file: Path, override: str, expected: str
) -> None:
    message = error_of(recipe_file, override).message
    assert message.startswith(f"-s {override}:")
    assert expected in message


def memories_error(tmp_path: Path, memories: str) -> str:
    """The error of a model of six layers with these memories, without the place."""
    message = error_of_text(tmp_path, f"model: {{dim: 64, memories: {{{memories}}}}}")
    return message.partition("model.memories")[2]


KINDS = ", ".join(SPECS)
KEYED, TABLES, NGRAMS = "kind: product-key, layers: 2", "kind: hash", "kind: ngram, layers: 2"


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        ("layers: 2", f": found no kind (expected kind: {KINDS})"),
        ("kind: product_key", f".kind: found product_key (expected {KINDS})"),
        ("kind: [hash]", f".kind: found a list of 1 (expected {KINDS})"),
        (f"{KEYED}, top-k: 4", ".top-k (did you mean model.memories.m.topk?)"),
        (f"{KEYED}, bits: 4", ".bits"),
        (f"{KEYED}, expert: relu", ".expert"),
        (f"{TABLES}, topk: 4", ".topk"),
        (f"{TABLES}, bit: 4", ".bit (did you mean model.memories.m.bits?)"),
        (f"{TABLES}, optim: {{keys: {{lr_scale: 1}}}}", ".optim.keys"),
        (f"{NGRAMS}, order: [2]", ".order (did you mean model.memories.m.orders?)"),
        (f"{KEYED}, optim: {{lrs: 1}}", ".optim.lrs (did you mean model.memories.m.optim.lr?)"),
        (f"{KEYED}, optim: {{lr: 1e-3, lr_scale: 3}}", ".optim.lr_scale: found 3 beside lr 0.001 (expected one of"),
        (f"{KEYED}, optim: {{times: [4]}}", ".optim.times: found a list of 1 (expected a list of 2)"),
        (f"{KEYED}, optim: {{betas: [0.9, 1]}}", ".optim.betas: found 1.0 (expected less than 1)"),
        (f"{KEYED}, optim: {{schedule: relative, times: [0, 0]}}", ".optim.times: found [0, 0]"),
        (f"{KEYED}, optim: {{lr: nan}}", ".optim.lr: found nan (expected a number)"),
        (f"{KEYED}, topk: 1e3", ".topk: found 1e3 (expected a whole number)"),
        (f"{KEYED}, value_dim: 0", ".value_dim: found 0 (expected 1 or more)"),
        (f"{KEYED}, num_keys: 8", ".topk: found 32 (expected at most 8, the keys to choose from)"),
        (f"{KEYED}, key_dim: 15", ".key_dim: found 15 (expected an even width"),
        (f"{KEYED}, layers: null", ".layers: found null (expected a list)"),
        (f"{KEYED}, layers: all+", ".layers: found 'all+'"),
        ("kind: peer, layers: 2, key_dim: 15", ".key_dim: found 15 (expected an even width"),
        (f"{TABLES}, bits: 7", ".bits: 7 bits do not divide the width 64"),
        (f"{TABLES}, bits: 16", ".extra_bits: 16 + 2 bits make tables of 2^18 rows"),
        (f"{TABLES}, parts: [qkv, qkv]", ".parts: found ['qkv', 'qkv'] (expected qkv, ffn, or both, each once)"),
        (f"{TABLES}, parts: [out]", ".parts: found 'out' (expected qkv or ffn)"),
        (f"{TABLES}, layers: 2+", ".layers: found a layer with +"),
        (f"{NGRAMS}, layers: [1, 2+]", ".layers: found a layer with +"),
        (f"{NGRAMS}, layers: auto:2+", ".layers: found a layer with +"),
        ("kind: token, layers: 2+", ".layers: found a layer with +"),
        ("kind: token, layers: 2, rows: 7", ".rows"),
        (f"{NGRAMS}, orders: [2, 2]", ".orders: found [2, 2] (expected one order or more, each once)"),
        (f"{NGRAMS}, orders: []", ".orders: found []"),
        (f"{NGRAMS}, rows: 65536", ".rows: found 65536 (expected a prime, such as 65537, or 1)"),
        (f"{NGRAMS}, rows: 0", ".rows: found 0 (expected 1 or more)"),
        (f"{NGRAMS}, rows: 1073741827", ".rows: 16 tables of 1073741827 rows (expected at most 2^31 rows"),
        (f"{NGRAMS}, fusion: add, row_dim: 24", ".row_dim: found 24, but fusion add adds rows (expected null, or 64)"),
    ],
)
def test_a_memory_has_the_keys_of_its_kind_and_they_fit(tmp_path: Path, memory: str, expected: str) -> None:
    memory = memory.replace("layers: 2, layers", "layers")  # given once
    assert memories_error(tmp_path, f"m: {{{memory}}}").startswith(f".m{expected}")


@pytest.mark.parametrize("name", ["dense", "all", "1a", "a b", "a.b", "", "\u00e9", "a" * 41, r"a\nb"])
def test_a_memory_has_a_name_that_files_and_reports_can_have(tmp_path: Path, name: str) -> None:
    assert ": found this name" in memories_error(tmp_path, f'"{name}": {{kind: hash}}')


@pytest.mark.parametrize(
    ("memories", "expected"),
    [
        ("a: {kind: hash}, b: {kind: flat-key, layers: 3}", "the FFN of layer 3"),
        ("a: {kind: peer, layers: [4, 3]}, b: {kind: flat-key, layers: 3}", "the FFN of layer 3"),
        ("a: {kind: hash, parts: qkv}, b: {kind: hash, layers: 2}", "the maps to queries, keys and values of layer 2"),
    ],
)
def test_two_memories_cannot_have_one_place(tmp_path: Path, memories: str, expected: str) -> None:
    expected = f".b.layers: takes the place of {expected}, and so does model.memories.a (expected one of the two there)"
    assert memories_error(tmp_path, memories) == expected


def test_a_layer_may_have_several_memories(recipe_file: Path) -> None:
    beside = ["hashed={kind: hash, parts: qkv}", "flat={kind: flat-key, layers: [5+, 6+]}"]
    grams = [f"{name}={{kind: ngram, layers: 5}}" for name in ("near", "far")]
    places = load_recipe(recipe_file, [f"model.memories.{memory}" for memory in beside + grams]).model.memory_places()
    assert list(places) == [1, 2, 3, 4, 5, 6]
    assert places[6] == {"hashed": ("qkv",), "flat": ("beside",)}
    assert places[5] == {"pkm": ("ffn",), **places[6], "near": ("before",), "far": ("before",)}


def test_null_is_no_memory(tmp_path: Path, recipe_file: Path) -> None:
    tables = "model.memories.tables={kind: hash, parts: qkv}"
    assert [*load_recipe(recipe_file, [tables]).model.memories] == ["pkm", "tables"]
    for overrides, left in (
        (["model.memories=null"], []),
        ([tables, "model.memories=null"], []),
        ([tables, "model.memories.pkm=null"], ["tables"]),
        ([tables, "model.memories.tables=null"], ["pkm"]),
        (["model.memories=null", tables], ["tables"]),
    ):
        recipe = load_recipe(recipe_file, overrides)
        assert [*recipe.model.memories] == left
        recipe_file.with_name("dumped.yaml").write_text(dump_recipe(recipe))
        assert load_recipe(recipe_file.with_name("dumped.yaml")) == recipe
    error_of(recipe_file, "model.memories.pkm=null", "model.memories.pkm.topk=8")  # it has no kind any more


def test_a_base_and_its_heir_merge_memories_by_name(recipe_file: Path) -> None:
    heir = recipe_file.with_name("heir.yaml")
    pkm = load_recipe(recipe_file).model.memories["pkm"]
    for memories, expected in (
        ("{pkm: {topk: 8, optim: {lr: 1e-2}}}", replace(pkm, topk=8, optim=replace(pkm.optim, lr=1e-2))),
        ("{pkm: {kind: flat-key}}", FlatKeySpec(layers=("5",), num_keys=128, key_dim=128)),
        ("{pkm: }", pkm),
        ("{pkm: null, tables: {kind: hash}}", None),
    ):
        heir.write_text(f"base: r.yaml\nmodel: {{memories: {memories}}}\n")
        assert load_recipe(heir).model.memories.get("pkm") == expected, memories


def test_a_rotary_width_is_even_and_whole(recipe_file: Path) -> None:
    rotary = "model.positions=rotary"
    for share in ("1.0", "0.25", "0.0625"):
        load_recipe(recipe_file, [rotary, f"model.rotary_fraction={share}"])
    for wrong in ("model.rotary_fraction=0.3", "model.rotary_fraction=0.01", "model.heads=256"):
        assert "model.rotary_fraction: " in error_of(recipe_file, rotary, wrong).message
    third = Model(dim=48, heads=8, positions="rotary", rotary_fraction=2 / 6)
    assert check_recipe(Recipe(model=third)).model.rotary_width == 2


def test_attention_has_sizes_that_can_be(recipe_file: Path) -> None:
    linformer, options = "model.attention=linformer", "model.attention_options"
    load_recipe(recipe_file, [linformer, f"{options}.block=127", f"{options}.rank=127"])
    load_recipe(recipe_file, [f"{options}.block=128", f"{options}.rank=999"])  # softmax: unused
    for overrides, start in (
        ([linformer, f"{options}.block=128"], f"-s {options}.block=128: {options}.block"),
        ([linformer, "model.context=64"], f"-s model.context=64: {options}.block"),  # the block is a default
        ([linformer, f"{options}.rank=65"], f"-s {options}.rank=65: {options}.rank"),
        (["model.attention=performer", f"{options}.features=2000000000"], f"-s {options}.features=2000000000: "),
        (["model.attention=cosformer", "eval.sample=It"], "-s eval.sample=It: eval.sample"),
        (["model.attention=cosformer", "model.document_mask=true"], "-s model.document_mask=true: model.document_mask"),
        (["model.attention=linear"], "-s model.attention=linear: model.attention"),
    ):
        assert error_of(recipe_file, *overrides).message.startswith(start)


def test_memory_layers_as_the_paper_spreads_them() -> None:
    def layers(total: int, *names: str) -> dict[int, tuple[str, ...]]:
        return ProductKeySpec(layers=names).layer_places(total)

    assert layers(16, "auto:2") == {6: ("ffn",), 12: ("ffn",)}
    assert list(layers(12, "auto:3")) == [3, 6, 9]
    assert layers(12, "auto:1+") == {6: ("beside",)}
    assert list(layers(4, "auto:2")) == [2, 4], "a step that ends at the last layer"
    assert list(layers(6, "auto:4")) == [1, 3, 4, 6], "the paper's step would end at 8"
    for total in range(1, 40):
        assert list(layers(total, "all")) == list(range(1, total + 1))
        for number in range(1, total + 1):
            found = list(layers(total, f"auto:{number}"))
            assert len(found) == number
            assert 1 <= found[0] <= found[-1] <= total
    assert list(layers(6, "5+", "2").items()) == [(2, ("ffn",)), (5, ("beside",))]
    with pytest.raises(SpecError, match="from 1 to 6"):
        layers(6, "7")


def test_a_dense_twin_is_named_as_one(recipe_file: Path) -> None:
    """Wherever its memories are dropped, one by one or together, unless it has a name of its own."""
    heir = recipe_file.with_name("heir.yaml")

    def name(own: str, *overrides: str) -> str:
        heir.write_text(f"base: {recipe_file.name}\n{own}\n")
        return load_recipe(heir, overrides).name

    drop, dropped = "model.memories=null", "model: {memories: null}"
    memories = [f"model.memories.{each}=null" for each in load_recipe(recipe_file).model.memories]
    assert name("") == "small"
    assert [name("", drop), name("", *memories), name(dropped)] == ["small-dense"] * 3
    assert [name("", drop, "name=mine"), name("", "name=mine", drop), name(f"name: mine\n{dropped}")] == ["mine"] * 3
    assert name("name: mine", drop) == "mine-dense"
    assert name(dropped, "optim.lr=1e-3", drop) == "small-dense", "its base has no memory to drop"
    assert name(f"name: {'n' * 100}", drop) == "n" * 94 + "-dense"
    heir.write_text("name: plain\nmodel: {dim: 32}\n")
    assert load_recipe(heir, [drop]).name == "plain"


def test_overrides_come_last_and_the_last_wins(recipe_file: Path) -> None:
    recipe = load_recipe(
        recipe_file, ["optim.lr=1", "optim.lr=2", "model.memories.pkm.layers=[2, 4+]", "data.dir=null"]
    )
    assert recipe.optim.lr == 2
    assert recipe.model.memories["pkm"].layers == ("2", "4+")
    assert recipe.data.dir is None
    assert load_recipe(recipe_file, ["eval.sample=Hello: world # 1"]).eval.sample == "Hello: world # 1"
    assert load_recipe(recipe_file, ['data.dir="null"']).data.dir == "null"
    assert load_recipe(recipe_file, ["model.memories.pkm={topk: 8, heads: 2}"]).model.memories["pkm"].topk == 8


def test_tokens_are_in_one_folder_or_several(recipe_file: Path) -> None:
    for override, dir, folders in (
        ("data.dir=null", None, ()),
        ("data.dir=a b", "a b", ("a b",)),
        ("data.dir=[a]", ("a",), ("a",)),
        ('data.dir=[a b, "null", 7]', ("a b", "null", "7"), ("a b", "null", "7")),
    ):
        recipe = load_recipe(recipe_file, [override])
        assert (recipe.data.dir, recipe.data.folders) == (dir, folders)
        recipe_file.with_name("dumped.yaml").write_text(dump_recipe(recipe))
        assert load_recipe(recipe_file.with_name("dumped.yaml")) == recipe


def test_a_base_is_read_first_and_errors_name_the_file_at_fault(tmp_path: Path, recipe_file: Path) -> None:
    (tmp_path / "sub").mkdir()
    child = tmp_path / "sub/child.yaml"
    child.write_text("base: ../r.yaml\nmodel: {dim: 128}\n")
    recipe = load_recipe(child)
    assert recipe.model == replace(load_recipe(recipe_file).model, dim=128)
    assert recipe.name == "small"
    child.write_text("base: ../r.yaml\nmodel:\n  memories: {}\n")
    assert error_of(child).message.startswith(f"{child}:3:3: memories: found {{}} (expected null")
    with pytest.raises(UserError, match="expected null"):
        load_recipe(recipe_file, ["model.memories.pkm={}"])
    assert load_recipe(recipe_file, ["model.memories=null", "model.memories={}"]).model.memories == {}
    child.write_text("base: ../r.yaml\nmodel:\n  memories:\n  #  pkm: null\n")
    assert load_recipe(child).model == load_recipe(recipe_file).model  # a section without keys changes nothing
    recipe_file.write_text(GOOD + "log: {every: x}\n")
    assert f"/{recipe_file.name}:9:7: log.every: found x" in error_of(child).message
    recipe_file.write_text(GOOD + "base: sub/child.yaml\n")
    assert "inherits from itself" in error_of(child).message
    recipe_file.write_text(GOOD)
    child.write_text("base: ../r.yaml\nmodel: {heads: 3}\n")
    assert error_of(child).message.startswith(f"{child}:2:9: model.heads: 3 heads do not divide")
    child.write_text("base: ../r.yaml\nmodel: {dim: 36}\n")  # the heads are a default: the place is that of dim
    assert error_of(child).message.startswith(f"{child}:2:9: model.heads: 8 heads do not divide")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "rr.yaml" in error_of(tmp_path / "rr.yaml").message
    assert "is not a file" in error_of(tmp_path).message
    loop = tmp_path / "loop.yaml"
    loop.symlink_to(loop)
    assert "loop.yaml" in error_of(loop).message


def test_a_byte_order_mark_and_crlf_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "windows.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert load_recipe(path).name == "small"


class Yaml12Loader(yaml.SafeLoader):
    """Reads `3e-4` as a number, as the YAML 1.2 of editors does."""


Yaml12Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+"), list("-+0123456789")
)


def test_the_schema_of_editors_is_the_one_that_recipes_name() -> None:
    committed = json.loads((RECIPES / "schema.json").read_text())
    assert committed == json_schema(), "pkmlm recipe schema > recipes/schema.json"
    for path in RECIPE_FILES:
        named = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", path.read_text().splitlines()[0])
        assert named, path
        assert (path.parent / named[1]).resolve() == RECIPES / "schema.json"


SCHEMA = Draft202012Validator(json_schema())


@pytest.mark.parametrize("path", RECIPE_FILES, ids=lambda p: str(p.relative_to(RECIPES)))
def test_every_recipe_of_the_repository_fits_the_schema_of_editors(path: Path) -> None:
    SCHEMA.validate(yaml.load(path.read_text(), Yaml12Loader))
    recipe = load_recipe(path)
    SCHEMA.validate(yaml.safe_load(dump_recipe(recipe)))
    assert recipe.name != "unnamed"


KEYED_JSON = {"kind": "product-key"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"modle": {}},
        {"model": {"dim": 0}},
        {"model": {"dim": "x"}},
        {"model": {"activation": "silu"}},
        {"model": {"memories": {"pkm": {"layers": ["5-"], **KEYED_JSON}}}},
        {"model": {"memories": {"pkm": {"bits": 8, **KEYED_JSON}}}},
        {"model": {"memories": {"pkm": {"kind": "hash", "topk": 8}}}},
        {"model": {"memories": {"pkm": {"kind": "hash", "optim": {"keys": {}}}}}},
        {"model": {"memories": {"pkm": {"kind": "hush"}}}},
        {"model": {"memories": {"pkm": {"topk": 0, **KEYED_JSON}}}},
        {"model": {"memories": {"pkm": {"optim": {"betas": [0.9, 1]}, **KEYED_JSON}}}},
        {"model": {"memories": {"pkm": 5}}},
        {"optim": {"betas": [0.9]}},
        {"train": {"seed": 2**63}},
    ],
)
def test_the_schema_of_editors_refuses_what_a_recipe_refuses(tmp_path: Path, wrong: dict[str, object]) -> None:
    assert not SCHEMA.is_valid(wrong)
    (tmp_path / "wrong.yaml").write_text(json.dumps(wrong))
    error_of(tmp_path / "wrong.yaml")


def test_the_schema_of_editors_has_the_help_and_default_of_every_key() -> None:
    schema = json_schema()
    SCHEMA.check_schema(schema)
    kinds = schema["$defs"]["Model"]["properties"]["memories"]["additionalProperties"]["anyOf"]
    by_kind = {f"<{kind}>": section for kind, section in zip(SPECS, kinds, strict=False)}
    keys = list_keys()
    assert {part for key in keys for part in key.name.split(".") if part[0] == "<"} == set(by_kind)
    for key in keys:
        section = schema
        for part in key.name.split("."):
            section = by_kind.get(part) or section["properties"][part]
            if "$ref" in section:
                section = schema["$defs"][section["$ref"].rpartition("/")[2]]
        assert section["description"] == key.help
        assert section["default"] == yaml.safe_load(key.default), key


def test_a_recipe_made_in_python_is_validated_too() -> None:
    for wrong in ({"steps": 0}, {"steps": "5"}, {"precision": "fp8"}, {"seed": 1.0}):
        with pytest.raises(ValidationError):
            Train(**wrong)
        with pytest.raises(ValidationError):
            replace(Train(), **wrong)


numbers = st.floats(min_value=1e-300, max_value=1e30)
texts = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"))


@settings(max_examples=50, deadline=None)
@given(
    text=st.none() | texts,
    folder=texts.filter(lambda name: not name.startswith("~")),  # a home folder, which `load_recipe` finds
    decay=numbers,
    beta=st.floats(0, 1, exclude_max=True),
    tie=st.booleans(),
)
def test_what_is_written_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, text: str | None, folder: str, decay: float, beta: float, tie: bool
) -> None:
    recipe = Recipe(
        data=Data(dir=folder),
        model=Model(tie_embeddings=tie, memories={"flat": FlatKeySpec(layers=("1", "3+"))}),
        optim=Optim(weight_decay=decay, betas=(beta, 0.1)),
        eval=Eval(sample=text),
    )
    path = tmp_path_factory.getbasetemp() / "written.yaml"
    path.write_text(dump_recipe(recipe), encoding="utf-8", newline="\n")
    assert load_recipe(path) == recipe
    other = yaml.safe_load(dump_recipe(recipe))  # and for other readers of YAML
    optim = other["optim"]
    assert (optim["weight_decay"], optim["betas"], other["eval"]["sample"]) == (decay, [beta, 0.1], text)


@pytest.mark.parametrize("word", ["no", "null", "True", "on", "1e3", "0x1F", "~", "12", "a: b", "- a", "", " x"])
def test_words_that_yaml_could_misread_are_quoted(tmp_path: Path, word: str) -> None:
    recipe = Recipe(eval=Eval(sample=word))
    (tmp_path / "r.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "r.yaml") == recipe
    assert yaml.safe_load(dump_recipe(recipe))["eval"]["sample"] == word


def test_keys_and_flatten_agree_with_the_schema() -> None:
    memories = {kind: spec(layers=("all",)) for kind, spec in SPECS.items()}
    flat = flatten(Recipe(model=Model(memories={f"<{kind}>": memory for kind, memory in memories.items()})))
    listed = list_keys()
    assert [key.name for key in listed] == list(flat)
    assert flat["model.memories.<flat-key>.topk"] == 32
    assert all(key.help and key.type for key in listed)
    by_name = {key.name: key for key in listed}
    assert by_name["optim.lr"].default == "0.003"
    assert by_name["model.memories.<hash>.parts"].type == "list of qkv | ffn"
    assert by_name["eval.patience"].type == "int or null"
    numeric = [name for name, value in flat.items() if isinstance(value, float)]
    for name in numeric:  # no number goes unchecked
        path = RECIPES / "pkm/ablation.yaml"
        for kind in SPECS:
            name = name.replace(f"<{kind}>", kind)
        added = [f"model.memories.{kind}={{kind: {kind}, layers: 3}}" for kind in SPECS if f".{kind}." in name]
        load_recipe(path, ["model.memories=null", *added])
        for bad in ("-1", "1e301" if name.endswith("fraction") else "-1e-9"):
            with pytest.raises(UserError, match=re.escape(name)):
                load_recipe(path, ["model.memories=null", *added, f"{name}={bad}"])


def test_a_key_that_is_unknown_is_looked_for_in_its_own_tree() -> None:
    with pytest.raises(UserError, match=r"g.yaml:1:1: unknown key bits") as caught:
        bind(parse("bits: 3", "g.yaml"), Train, "", {})
    assert caught.value.message.endswith("unknown key bits")
    assert caught.value.hint.startswith("keys of the file: steps, epochs, batch_tokens, ")


def test_to_train_the_values_of_a_random_model_is_warned_of(recipe_file: Path) -> None:
    def told(*overrides: str) -> list[str]:
        return random_weights_warning(load_recipe(recipe_file, overrides))

    assert told() == told("train.only=values", "train.init_from=run") == []
    assert "train.init_from" in told("train.only=values")[0]
    background = ("finetune.slots=tfidf", "finetune.background=b.npz")
    assert "finetune.background" in told(*background)[0]
    assert told(*background, "train.init_from=run") == []


def test_statistics_of_padding_are_warned_of(recipe_file: Path) -> None:
    keys = ["model.memories.pkm={kind: product-key, layers: 2, num_keys: 8, topk: 4, key_dim: 16, query_norm: batch}"]
    assert not padding_warning(load_recipe(recipe_file, keys))
    (text,) = padding_warning(load_recipe(recipe_file, [*keys, "data.pack=false"]))
    assert text.startswith("model.memories.pkm.query_norm: ")
    assert not padding_warning(
        load_recipe(recipe_file, [*keys, "data.pack=false", "model.memories.pkm.query_norm=rms"])
    )


def test_a_decay_that_leaves_no_step_at_the_peak_is_warned_of(recipe_file: Path) -> None:
    steps = ["optim.warmup_steps=10", "train.steps=100"]

    def told(decay: int) -> list[str]:
        return warmup_warnings(load_recipe(recipe_file, [*steps, f"optim.decay_steps={decay}"]))

    assert told(0) == told(90) == []
    late = ["optim.warmup_steps=200", "model.memories.pkm.optim.warmup_steps=null", "train.only=values"]
    (text,) = warmup_warnings(load_recipe(recipe_file, [*steps, *late]))  # of `optim`, which itself trains nothing
    assert text.startswith("optim.warmup_steps: 200 for 100 steps")
    for decay in (91, 500):
        (text,) = told(decay)
        assert text.startswith(f"optim.decay_steps: {decay} for 100 steps")


def test_a_memory_that_one_recipe_lacks_is_one_difference(recipe_file: Path) -> None:
    with_memory, without = load_recipe(recipe_file), load_recipe(recipe_file, ["model.memories=null", "name=small"])
    assert with_memory.name == "small"
    assert differences(with_memory, without) == {"model.memories.pkm": ("present", "absent")}
    assert differences(without, with_memory) == {"model.memories.pkm": ("absent", "present")}


def test_a_micro_batch_that_fits_is_named(recipe_file: Path) -> None:
    error = error_of(recipe_file, "train.batch_tokens=1536", "train.micro_batch=8")  # 12 sequences
    assert error.hint.endswith("train.micro_batch=4")


def test_batches_of_many_lengths_are_not_compiled(recipe_file: Path) -> None:
    load_recipe(recipe_file, ["train.compile=true"])
    assert "train.compile: data.pack: false" in error_of(recipe_file, "train.compile=true", "data.pack=false").message


def test_a_home_folder_is_found(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    recipe = load_recipe(recipe_file, ["data.dir=~/tokens", "train.init_from=~/run", "finetune.background=~/news"])
    found = recipe.data.dir, recipe.train.init_from, recipe.finetune.background
    assert found == ("/home/me/tokens", "/home/me/run", "/home/me/news")
    assert load_recipe(recipe_file, ["data.dir=[~/one, two]"]).data.dir == ("/home/me/one", "two")
    monkeypatch.setenv("HOME", str(recipe_file.parent))
    heir = recipe_file.with_name("heir.yaml")
    heir.write_text(f"base: ~/{recipe_file.name}\n")
    assert load_recipe(heir).model == load_recipe(recipe_file).model


def test_what_is_not_in_the_working_directory_may_be_next_to_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "recipes/kept").mkdir(parents=True)
    (tmp_path / "recipes/kept.npz").touch()
    keys = "data: {dir: kept}\ntrain: {init_from: kept}\nfinetune: {background: kept.npz}\n"
    (tmp_path / "recipes/my.yaml").write_text(keys)
    beside = str(tmp_path / "recipes/kept")
    for overrides, found in (([], beside), (["data.dir=kept", "train.init_from=kept"], "kept")):
        recipe = load_recipe(tmp_path / "recipes/my.yaml", overrides)
        assert (recipe.data.dir, recipe.train.init_from) == (found, found)
        assert recipe.finetune.background == f"{beside}.npz"


def test_a_deep_override_is_refused_in_one_line(recipe_file: Path) -> None:
    deep = f"model.memories.{'a.' * 3000}b=1"
    assert "key=value" in error_of(recipe_file, deep, deep).message


def test_a_folder_with_the_name_of_a_recipe_is_no_base(tmp_path: Path) -> None:
    """Such as the one that `make demo` leaves."""
    (tmp_path / "demo").mkdir()
    heir = tmp_path / "heir.yaml"
    heir.write_text("base: demo\n")
    assert load_recipe(heir).model == load_recipe(RECIPES / "demo.yaml").model


def test_groups_of_parameters_that_a_model_freezes_are_not_checked(recipe_file: Path) -> None:
    load_recipe(recipe_file, ["train.only=values", "optim.warmup_steps=0"])
    error_of(recipe_file, "train.only=values", "model.memories.pkm.optim.schedule=inverse-sqrt")


def test_a_memory_learns_as_it_says_or_as_its_kind_or_as_the_rest(recipe_file: Path) -> None:
    optim = Optim(lr=2e-3, betas=(0.5, 0.6), eps=1e-3, schedule="linear", warmup_steps=7, final_lr=0.3)
    peaks = {kind: optim.filled(spec()).lr for kind, spec in SPECS.items()}
    known = {"product-key": 1e-3, "flat-key": 1e-3, "peer": 1e-3, "hash": 6e-3, "ngram": 1e-2, "token": 1e-2}
    assert peaks | known == peaks
    recipe = load_recipe(recipe_file, ["model.memories.pkm.optim={lr_scale: 4, schedule: null, warmup_steps: null}"])
    found = optim.filled(recipe.model.memories["pkm"])
    assert (found.lr, found.betas, found.eps) == (8e-3, (0.9, 0.999), 1e-3)
    assert (found.schedule, found.warmup_steps, found.final_lr) == ("linear", 7, 0.3)
