"""The exported model code computes what our model computes, for every model that a recipe can describe."""

import ast
import importlib
import random
import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file, save_model
from torch.nn.functional import cross_entropy
from transformers import DynamicCache

from pkmlm.data.tokenizer import Tokenizer
from pkmlm.errors import UserError
from pkmlm.evaluate.generate import Sampling, generate
from pkmlm.export import plain_pkmlm
from pkmlm.export.bundle import MODEL as MODEL_CODE
from pkmlm.export.bundle import bundle
from pkmlm.export.config import Origin
from pkmlm.export.folder import read_export, write_export
from pkmlm.kernels import reference
from pkmlm.kernels.reference import dequantize, quantize
from pkmlm.memory.base import memories
from pkmlm.memory.flat_key.spec import FlatKeySpec
from pkmlm.memory.hash.spec import HashSpec
from pkmlm.memory.ngram.spec import NGramSpec
from pkmlm.memory.peer.spec import PEERSpec
from pkmlm.memory.product_key.spec import ProductKeySpec
from pkmlm.memory.registry import SPECS
from pkmlm.memory.spec import Spec
from pkmlm.memory.table import tables_of
from pkmlm.memory.token.spec import TokenSpec
from pkmlm.model.transformer import Transformer, build_model, kept_in_fp32
from pkmlm.recipe.constraints import check_recipe
from pkmlm.recipe.schema import Model, Recipe, Train

CPU = torch.device("cpu")
REFUSED = {("Model.attention", kind) for kind in ("linformer", "cosformer", "performer")}
# What is drawn for each key that is not a choice of words or yes and no, or not all of whose choices are exported; keys
# that are not here have their defaults.
DRAWN: dict[str, list[Any]] = {
    "model.attention": ["softmax"],
    "model.vocab_size": [600, 607],
    "model.dim": [24],
    "model.layers": [3],
    "model.heads": [2, 3],
    "model.context": [20],
    "model.kv_heads": [None, 1],
    "model.head_dim": [None, 8],
    "model.rotary_fraction": [0.5, 1.0],
    "model.rotary_base": [100.0, 1e4],
    "model.ffn_dim": [None, 40],
    "model.dropout": [0.1],
    "num_keys": [5, 8],
    "topk": [1, 5],
    "key_dim": [8],
    "value_dim": [None, 20, 24],
    "layers": [("1", "3"), ("all",)],
    "ngram.layers": [("1", "3"), ("2",), ("all",)],
    "ngram.orders": [(2,), (1, 3), (2, 3)],
    "ngram.rows": [1, 31],
    "row_dim": [24],
    "heads": [1, 3],
    "hash.layers": [("all",), ("2",)],
    "hash.parts": [("qkv", "ffn"), ("ffn",), ("qkv",)],
    "bits": [2, 4],
    "extra_bits": [0, 2],
    "temperature": [0.5, 1.0],
}
IN_PLACE, BESIDE = [("2",), ("1+", "3"), ("auto:1+",), ("auto:2",)], [("2+",), ("1+", "3+")]
TOGETHER = [  # kinds of memories in one model
    *([kind] for kind in SPECS),
    ["product-key", "ngram"],
    ["hash", "ngram", "peer"],
    ["ngram", "ngram", "product-key", "product-key"],
    ["flat-key", "hash"],
    ["peer", "ngram", "token", "token"],
]


class Draws:
    """Draws values for keys; no choice comes again before all others came."""

    def __init__(self, seed: int):
        self.random, self.decks = random.Random(seed), {}

    def value(self, key: str, choices: list[Any]) -> Any:
        if not self.decks.get(key):
            self.decks[key] = self.random.sample(choices, len(choices))
        return self.decks[key].pop()

    def values(self, section: type, prefix: str, given: tuple[str, ...]) -> dict[str, Any]:
        """A value for every key that has choices, except those that are given."""
        found = {}
        for field in fields(section):
            hint = get_type_hints(section)[field.name]
            choices = DRAWN.get(f"{prefix}.{field.name}") or DRAWN.get(field.name) or every_choice(hint)
            if choices and field.name not in given:
                found[field.name] = self.value(whole_name(section, field.name), choices)
        return found

    def model(self, kinds: list[str]) -> Model:
        memories = {}
        for number, kind in enumerate(kinds):
            values = self.values(SPECS[kind], kind, ("kind",))
            if SPECS[kind]().places(beside=False) == ("ffn",):  # unless that is taken
                taken = "hash" in kinds or any(kind == other for other in kinds[:number])
                values["layers"] = self.value(f"layers {taken}", BESIDE if taken else IN_PLACE)
                values["start"] = values["start"] if taken else "drawn"
            if kind == "hash":
                values |= {"start": "drawn", "gate": "none"}
            memories[f"m{number}-{kind}"] = SPECS[kind](kind=kind, **values)
        values = self.values(Model, "model", ("memories",))
        if {"hash", "token"} & {*kinds}:  # they give values of dim
            values |= {"kv_heads": None, "head_dim": None}
        return Model(memories=memories, **values)


def whole_name(section: type, key: str) -> str:
    """A key and the class that has it first: kinds of memories have some in common."""
    return next(
        f"{each.__name__}.{key}" for each in reversed(section.__mro__) if key in vars(each).get("__annotations__", {})
    )


def every_choice(hint: Any) -> list[Any]:
    return list(get_args(hint)) if get_origin(hint) is Literal else [True, False] if hint is bool else []


def in_force(model: Model) -> set[tuple[str, Any]]:
    """The keys of `model` that the model depends on, with their values."""
    found = set()
    for section in (model, *model.memories.values()):
        for field in fields(section):
            value = getattr(section, field.name)
            alone = field.name == "share_values" and len(section.layer_places(model.layers)) < 2
            unused = alone or (field.name == "conv" and section.fusion == "add")
            if field.name not in ("memories", "optim") and not unused:
                found.add((whole_name(type(section), field.name), value))
    return found


def recipe_of(model: Model) -> Recipe:
    return check_recipe(Recipe(model=model, train=Train(batch_tokens=model.context * 2, micro_batch=2)))


def unlike_new(model: Transformer, seed: int = 0) -> Transformer:
    """The model with no number left at a value that a mistake could give too: zero biases, unit norms."""
    random_ = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            noise = torch.rand(tensor.shape, generator=random_)
            tensor.mul_(0.5 + noise).add_(0.1 * (noise - 0.3) if tensor.ndim == 1 else 0)
            if ".before." in name and tensor.ndim == 2:  # rows and convolutions start at 0, or too small to tell
                tensor.add_(0.5 * (noise - 0.5))
            elif not tensor.any():
                tensor.add_(0.2 * (noise - 0.5))
        if name.endswith("ids_V"):
            tensor.div_(2, rounding_mode="floor").add_(1)[2] = 0
        if name in ("embedding.weight", "untied_head.weight"):
            tensor.mul_(5)  # logits of a trained model's size
        if name.endswith("running_var"):
            tensor.mul_(0.02)  # not far above epsilon
    return model.eval()


@pytest.fixture(scope="module")
def tokenizer(tokens: Path) -> Tokenizer:
    return Tokenizer.load(tokens / "tokenizer.model")


@pytest.fixture(scope="module")
def code(tmp_path_factory) -> ModuleType:
    """The model's code, imported from the files of an export."""
    folder = tmp_path_factory.mktemp("code") / "code_of_an_export"
    folder.mkdir()
    for name, text in bundle(*MODEL_CODE).items():
        (folder / name).write_text(text)
    sys.path.insert(0, str(folder.parent))
    try:
        return importlib.import_module(f"{folder.name}.modeling_pkmlm")
    finally:
        sys.path.remove(str(folder.parent))


@pytest.fixture(scope="module")
def exported(code, tokenizer):
    """A function that writes a model and loads it with the code of the export."""

    def write(path: Path, model: Transformer, recipe: Recipe, **how: Any) -> Any:
        write_export(path, model, recipe, tokenizer, Origin("tiny", 30, 7680), "a card", **how)
        return code.PkmlmForCausalLM.from_pretrained(path, dtype="auto")  # transformers 4 widens otherwise

    return write


def test_logits_of_random_recipes(tmp_path, exported):
    draws = Draws(0)
    seen = {pair for model in KINDS.values() for pair in in_force(model)}  # whose logits are compared below
    for seed, kinds in enumerate(TOGETHER):
        recipe = recipe_of(draws.model(kinds))
        seen |= in_force(recipe.model)
        ours = unlike_new(build_model(recipe, recipe.model.vocab_size), seed)
        theirs = exported(tmp_path / str(seed), ours, recipe)
        ids_BT = torch.randint(600, (2, 20), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            expected, found = ours(ids_BT), theirs(ids_BT).logits
        assert expected.std() > 0.2
        assert (found - expected).abs().max() <= 1e-5, recipe.model
        back = read_export(tmp_path / str(seed), CPU)
        assert back.recipe == recipe
        with torch.no_grad():
            assert torch.equal(back.model(ids_BT), expected)
    for section in (Model, *SPECS.values()):
        for field in fields(section):
            choices = every_choice(get_type_hints(section)[field.name])
            assert {(whole_name(section, field.name), choice) for choice in choices} <= {*seen, *REFUSED}


def test_positions_of_another_shape_are_refused(tmp_path, exported):
    recipe = recipe_of(MODEL)
    model = exported(tmp_path / "export", unlike_new(build_model(recipe, 600)), recipe)
    ids_BT = torch.randint(600, (2, 20))
    for positions in (torch.arange(20).expand(3, 2, 20), torch.arange(19)[None], torch.arange(20)):
        with pytest.raises(ValueError, match="position_ids"):
            model(ids_BT, position_ids=positions)


KEYS: dict[str, Any] = {"num_keys": 8, "heads": 2, "topk": 4, "key_dim": 8}
PRODUCT_KEY = ProductKeySpec(layers=("2",), **KEYS)
MODEL = Model(vocab_size=600, dim=16, layers=2, heads=2, context=24)
PLUS = ProductKeySpec(
    layers=("1", "2+"), share_values=True, gate="silu", value_dim=12, key_norm="rms", query_norm="none", **KEYS
)
GRAMS = NGramSpec(layers=("2", "1"), orders=(2, 3), heads=2, rows=31, row_dim=4)
LITE = NGramSpec(layers=("1", "2"), orders=(2,), heads=1, rows=101, row_dim=16, fusion="add")


def with_memories(**memories: Spec) -> Model:
    return replace(MODEL, memories=memories)


KINDS = {
    "dense": replace(MODEL, document_mask=False, qk_norm=False, tie_embeddings=True),
    "dense of 2019": replace(MODEL, positions="learned", norm="layer", ffn="gelu", bias="all", document_mask=False),
    "grouped": replace(MODEL, kv_heads=1, head_dim=12, smear=True, positions="learned"),
    "product-key": with_memories(pkm=PRODUCT_KEY),
    "flat-key": replace(with_memories(flat=FlatKeySpec(layers=("2+",), **KEYS)), residual="parallel"),
    "token": with_memories(tokens=TokenSpec(layers=("1",)), into=TokenSpec(layers=("all",), into="values")),
    "mixture": with_memories(
        plus=PLUS,
        half=HashSpec(layers=("2",), bits=4),
        grams=GRAMS,
        lite=replace(LITE, layers=("1",), canonical=False),
        tokens=TokenSpec(layers=("1",), into="values"),
    ),
    "shared experts": with_memories(
        experts=PEERSpec(layers=("1", "2"), share_values=True, **KEYS),
        qkv=HashSpec(bits=4, parts=("qkv",)),
        grams=replace(GRAMS, canonical=False),
    ),
}


@pytest.fixture(scope="module", params=KINDS)
def pair(request, exported, tmp_path_factory) -> tuple[Transformer, Any, Path]:
    """A model, its export as `transformers` loads it, and the folder."""
    recipe = recipe_of(KINDS[request.param])
    ours, folder = (
        unlike_new(build_model(recipe, 600)),
        tmp_path_factory.mktemp("export") / request.param.replace(" ", "-"),
    )
    theirs = exported(folder, ours, recipe)
    theirs.generation_config.eos_token_id = None  # texts of one length
    return ours, theirs, folder


IDS_BT = torch.randint(3, 600, (3, 14), generator=torch.Generator().manual_seed(5))
IDS_BT[1, 6] = IDS_BT[2, 2] = 2  # begins a document


@torch.no_grad()
def test_padding_on_the_left_changes_nothing(pair):
    ours, theirs, _ = pair
    padded_BT, mask_BT = torch.zeros(3, 20, dtype=torch.int64), torch.zeros(3, 20, dtype=torch.int64)
    for row, length in enumerate((14, 3, 9)):
        padded_BT[row, -length:], mask_BT[row, -length:] = IDS_BT[row, :length], 1
    found_BTV = theirs(padded_BT, attention_mask=mask_BT).logits
    assert found_BTV.isfinite().all()
    for row, length in enumerate((14, 3, 9)):
        expected_TV = ours(IDS_BT[row : row + 1, :length])[0]
        assert (found_BTV[row, -length:] - expected_TV).abs().max() < 1e-5


@torch.no_grad()
def test_a_cache_read_in_pieces_gives_the_same(pair):
    _, theirs, _ = pair
    whole_BTV, cache, pieces = theirs(IDS_BT).logits, None, []
    for start, stop in ((0, 5), (5, 6), (6, 10), (10, 14)):
        found = theirs(IDS_BT[:, start:stop], past_key_values=cache, use_cache=True)
        cache = found.past_key_values
        pieces.append(found.logits)
    assert (torch.cat(pieces, 1) - whole_BTV).abs().max() < 1e-5


@torch.no_grad()
def test_a_cache_that_is_reordered_and_cropped_goes_on_with_the_texts_that_it_then_holds(pair):
    """As beams are, which take over what the cache keeps of another."""
    _, theirs, _ = pair
    cache = theirs(IDS_BT[:, :10], use_cache=True).past_key_values
    order = torch.tensor([2, 2, 0])
    cache.reorder_cache(order)
    cache.crop(-1)
    whole_BT = torch.cat([IDS_BT[order, :9], IDS_BT[:, 9:]], 1)
    found_BTV = theirs(IDS_BT[:, 9:], past_key_values=cache, use_cache=True).logits
    assert (found_BTV - theirs(whole_BT).logits[:, 9:]).abs().max() < 2e-5


def test_greedy_texts_are_ours_alone_and_in_a_batch(pair):
    ours, theirs, _ = pair
    prompts = [[2, *IDS_BT[0, :7].tolist()], [2, *IDS_BT[2, :3].tolist()]]
    greedy = [list(generate(ours, prompt, Sampling(temperature=0), 12, 600)) for prompt in prompts]
    for cache in ({}, {"use_cache": False}, {"cache_implementation": "static"}):
        how = {**cache, "max_new_tokens": 12, "do_sample": False}
        for prompt, expected in zip(prompts, greedy, strict=True):
            assert theirs.generate(torch.tensor([prompt]), **how)[0, len(prompt) :].tolist() == expected
        batch = torch.tensor([prompts[0], [0] * 4 + prompts[1]])
        mask = torch.tensor([[1] * 8, [0] * 4 + [1] * 4])
        assert theirs.generate(batch, attention_mask=mask, **how)[:, 8:].tolist() == greedy


@torch.no_grad()
def test_beams_reorder_the_cache(pair):
    _, theirs, _ = pair
    how = {"num_beams": 4, "max_new_tokens": 8, "do_sample": False, "output_scores": True}
    found = theirs.generate(IDS_BT[:, :6], return_dict_in_generate=True, **how)
    assert torch.equal(found.sequences, theirs.generate(IDS_BT[:, :6], use_cache=False, **how))
    log_p_BTV = theirs(found.sequences[:, :-1]).logits.log_softmax(-1)
    sums_B = log_p_BTV[:, 5:].gather(2, found.sequences[:, 6:, None]).sum((1, 2))
    assert found.sequences_scores == pytest.approx(sums_B / 8, abs=1e-5)


def test_labels_give_the_loss_and_every_weight_a_gradient(pair):
    ours, theirs, _ = pair
    labels_BT = IDS_BT.masked_fill(torch.arange(14) < 4, -100)
    found = theirs(IDS_BT, labels=labels_BT)
    expected = cross_entropy(ours(IDS_BT)[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten())
    assert found.loss.item() == pytest.approx(expected.item(), abs=1e-5)
    theirs.zero_grad()
    ours.zero_grad()
    found.loss.backward()
    expected.backward()
    mine = {name: parameter.grad for name, parameter in ours.named_parameters()}
    for name, parameter in theirs.named_parameters():
        grad = mine[name.removeprefix("model.").replace("lm_head", "untied_head")]
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_training_keeps_the_statistics_of_queries(pair):
    _, theirs, _ = pair
    expected, before = theirs(IDS_BT).logits, {name: each.clone() for name, each in theirs.state_dict().items()}
    try:
        assert torch.equal(theirs.train()(IDS_BT).logits, expected)
    finally:
        theirs.eval()
    assert all(torch.equal(each, before[name]) for name, each in theirs.state_dict().items())


@torch.no_grad()
def test_parts_of_the_output(pair):
    _, theirs, folder = pair
    whole = theirs(IDS_BT, output_hidden_states=True)
    torch.testing.assert_close(theirs(IDS_BT, logits_to_keep=2).logits, whole.logits[:, -2:])  # a smaller product
    assert len(whole.hidden_states) == 3
    assert torch.equal(whole.hidden_states[-1], theirs.model(IDS_BT).last_hidden_state)
    assert torch.equal(theirs(IDS_BT, return_dict=False)[0], whole.logits)
    embedded = theirs.get_input_embeddings()(IDS_BT)
    if theirs.model.reads_tokens:  # for memories whose rows depend on the tokens themselves
        with pytest.raises(ValueError, match="give input_ids"):
            theirs(inputs_embeds=embedded)
    else:  # row 0 is one document
        torch.testing.assert_close(theirs(inputs_embeds=embedded).logits[0], whole.logits[0])
        how = {"max_new_tokens": 4, "do_sample": False}
        found = theirs.generate(inputs_embeds=embedded[:1], **how)
        assert torch.equal(found, theirs.generate(IDS_BT[:1], **how)[:, 14:])
    assert torch.equal(type(theirs.model).from_pretrained(folder)(IDS_BT)[0], whole.hidden_states[-1])


@torch.no_grad()
@pytest.mark.parametrize(("tied", "bits"), [(True, None), (False, None), (False, 4)])
def test_rows_are_added_to_the_embedding_and_the_head(tmp_path, exported, tokenizer, tied, bits):
    recipe = recipe_of(replace(KINDS["mixture"], tie_embeddings=tied))
    theirs = exported(tmp_path / "export", unlike_new(build_model(recipe, 600)), recipe, table_bits=bits)
    before = theirs(IDS_BT).logits
    theirs.resize_token_embeddings(610, mean_resizing=False)
    assert (theirs.lm_head.weight is theirs.model.embedding.weight) == tied
    assert theirs.model.embedding.weight.shape == (610, 16)
    torch.testing.assert_close(theirs(IDS_BT).logits[..., :600], before)
    ids = torch.tensor([[1, 605, 7, 609]])
    grown = theirs(ids).logits
    theirs.save_pretrained(tmp_path / "grown")
    (tmp_path / "grown/tokenizer.model").write_bytes(tokenizer.model_bytes)
    assert torch.equal(type(theirs).from_pretrained(tmp_path / "grown")(ids).logits, grown)
    torch.testing.assert_close(read_export(tmp_path / "grown", CPU).model(ids), grown)
    whole = theirs.model
    whole.resize_token_embeddings(620, mean_resizing=False)
    assert whole.get_input_embeddings() is whole.embedding
    assert whole.embedding.weight.shape == (620, 16)


def test_no_position_sees_nothing(code):
    """Not even padding, whatever it is: some kernels give NaN for a row that sees no key."""
    seen_BTS = code.seen_by(torch.tensor([[0, 0, 0, 0, 1], [0, 1, 1, 1, 1]]), None, torch.tensor([[2, 3, 4]]))
    assert seen_BTS.int().tolist() == [
        [[0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 1]],
        [[0, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 1, 1, 1, 1]],
    ]


@torch.no_grad()
def test_documents_in_a_row_see_nothing_of_each_other(pair):
    """As with the models of transformers, positions that start again are the edges; a row may exceed the context."""
    ours, theirs, _ = pair
    parts = [IDS_BT[:, :9], IDS_BT[:, 9:], IDS_BT[:, :14]]
    positions_1T = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
    for position_ids in (positions_1T, positions_1T.expand(3, -1)):
        found_BTV = theirs(torch.cat(parts, 1), position_ids=position_ids).logits
        for part, found in zip(parts, found_BTV.split([9, 5, 14], 1), strict=True):
            assert (found - ours(part)).abs().max() < 1e-5
    with pytest.raises(ValueError, match="without a cache"):
        theirs(torch.cat(parts, 1), position_ids=positions_1T, use_cache=True)
    whole = theirs(IDS_BT).logits
    assert torch.equal(theirs(IDS_BT, position_ids=torch.arange(14)[None]).logits, whole)


@torch.no_grad()
def test_documents_in_a_row_with_padding_see_nothing_of_each_other(pair, code):
    """On the left, on the right, and between two; of other places in each row."""
    ours, theirs, _ = pair
    spans = [(0, 0, 5), (0, 7, 11), (0, 11, 14), (1, 3, 9), (1, 9, 13), (2, 0, 3), (2, 3, 10)]
    mask_BT, position_BT = torch.zeros_like(IDS_BT), torch.ones_like(IDS_BT)
    for row, start, stop in spans:
        mask_BT[row, start:stop], position_BT[row, start:stop] = 1, torch.arange(stop - start)
    inputs = {"attention_mask": mask_BT, "position_ids": position_BT}
    found_BTV = theirs(IDS_BT * mask_BT, **inputs).logits
    for row, start, stop in spans:
        alone_1TV = ours(IDS_BT[row : row + 1, start:stop])
        torch.testing.assert_close(found_BTV[row : row + 1, start:stop], alone_1TV, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="without a cache"):
        theirs(IDS_BT * mask_BT, **inputs, use_cache=True)
    kept = {code.CACHE: theirs(IDS_BT[:, :4], use_cache=True)[code.CACHE]}
    with pytest.raises(ValueError, match="without a cache"):
        theirs(IDS_BT[:, 4:8], position_ids=torch.tensor([[4, 5, 0, 1]]), **kept)


@torch.no_grad()
@pytest.mark.parametrize("block", [0, 1])
def test_a_cache_that_holds_half_of_an_interrupted_call_is_refused(pair, code, block):
    _, theirs, _ = pair
    expected = theirs(IDS_BT[:, :9]).logits[:, -1]
    kept = {code.CACHE: theirs(IDS_BT[:, :8], use_cache=True)[code.CACHE]}

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = theirs.model.blocks[block].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        theirs(IDS_BT[:, 10:12], **kept)
    hook.remove()
    left_something = block or theirs.model.token_ids
    with pytest.raises(ValueError, match="interrupted") if left_something else nullcontext():
        found = theirs(IDS_BT[:, 8:9], **kept).logits[:, -1]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_documents_of_long_sequences_are_ours(tmp_path, exported):
    """With a cache they are told apart by a mask, without one they are read one at a time."""
    recipe = recipe_of(replace(MODEL, context=300, kv_heads=1, smear=True))
    ours = unlike_new(build_model(recipe, 600), 1)
    theirs = exported(tmp_path, ours, recipe)
    ids_BT = torch.randint(1, 600, (2, 300), generator=torch.Generator().manual_seed(1))
    ids_BT[0, [9, 170]] = ids_BT[1, 40] = int((ours.token_ids["plain"].ids_V == 0).nonzero())
    with torch.no_grad():
        expected = [
            torch.cat([ours(ids_T[None])[0] for ids_T in row_T.tensor_split(edges)])
            for row_T, edges in zip(ids_BT, ((9, 170), (40,)), strict=True)
        ]
        for cached in (False, True):
            assert (theirs(ids_BT, use_cache=cached).logits - torch.stack(expected)).abs().max() < 1e-5
    theirs.train()(ids_BT, labels=ids_BT, use_cache=False).loss.backward()
    assert theirs.model.embedding.weight.grad.abs().sum() > 0


def test_more_than_the_context_is_refused(pair):
    _, theirs, _ = pair
    with pytest.raises(ValueError, match="25 positions do not fit the context of 24"):
        theirs(torch.ones(1, 25, dtype=torch.int64))


@torch.no_grad()
def test_what_transformers_saves_again_is_read(pair, tokenizer, tmp_path):
    ours, theirs, _ = pair
    assert not hasattr(theirs.config, "attention_options")  # of attention that no export has
    theirs.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(tokenizer.model_bytes)
    assert torch.equal(type(theirs).from_pretrained(tmp_path)(IDS_BT).logits, theirs(IDS_BT).logits)
    back = read_export(tmp_path, CPU)
    assert torch.equal(back.model(IDS_BT), ours(IDS_BT))
    assert back.origin == Origin("tiny", 30, 7680)


def cloned(model: Any) -> dict[str, torch.Tensor]:
    """A state dict as gathering leaves it: without shared tensors."""
    return {name: x.clone() for name, x in model.state_dict().items()}


# How people save a model again; the last is read only if the embedding is the head.
WAYS: dict[str, Callable[[Any, Path], Any]] = {
    "gathered": lambda model, path: model.save_pretrained(path, state_dict=cloned(model)),
    "in shards": lambda model, path: model.save_pretrained(path, state_dict=cloned(model), max_shard_size="20KB"),
    "a variant": lambda model, path: model.save_pretrained(path, variant="fp32"),
    "in shards of a variant": lambda model, path: model.save_pretrained(path, variant="fp32", max_shard_size="20KB"),
    "by safetensors": lambda model, path: save_model(model, path / "model.safetensors"),
    "wrapped": lambda model, path: save_file(
        {f"module._orig_mod.{name}": x for name, x in cloned(model).items()}, path / "model.safetensors"
    ),
    "of double width": lambda model, path: save_file(
        {name: x.double() if x.is_floating_point() else x for name, x in cloned(model).items()},
        path / "model.safetensors",
    ),
    "without the head": lambda model, path: model.model.save_pretrained(path),
}


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_whatever_way_a_model_is_saved_again_it_is_read(kind, exported, tokenizer, tmp_path):
    recipe = recipe_of(KINDS[kind])
    ours = unlike_new(build_model(recipe, 600))
    theirs = exported(tmp_path / "export", ours, recipe)
    expected = ours(IDS_BT)
    for way, save in WAYS.items():
        path = tmp_path / way
        path.mkdir()
        theirs.config.save_pretrained(path)
        save(theirs, path)
        (path / "tokenizer.model").write_bytes(tokenizer.model_bytes)
        if way == "without the head" and not recipe.model.tie_embeddings:
            with pytest.raises(UserError, match=r"lm_head\.weight is missing"):
                read_export(path, CPU)
        else:
            assert torch.equal(read_export(path, CPU).model(IDS_BT), expected), way
    save_file(cloned(theirs), tmp_path / "in shards" / "model.safetensors")
    with pytest.raises(UserError, match="may be of different models"):
        read_export(tmp_path / "in shards", CPU)


@torch.no_grad()
def test_a_head_that_is_not_the_embedding_it_is_said_to_be_is_told(exported, tokenizer, tmp_path):
    recipe = recipe_of(KINDS["dense"])
    theirs = exported(tmp_path, unlike_new(build_model(recipe, 600)), recipe)
    (tmp_path / "manifest.json").unlink()
    state = cloned(theirs)
    for head in (state["lm_head.weight"] + 1, torch.zeros(7, 16)):
        save_file({**state, "lm_head.weight": head}, tmp_path / "model.safetensors")
        with pytest.raises(UserError, match=r"lm_head\.weight is not model\.embedding\.weight"):
            read_export(tmp_path, CPU)
    save_file({**state, "pkmlm.memory.gate": torch.zeros(())}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"pkmlm\.memory\.gate is not in the model") as told:
        read_export(tmp_path, CPU)
    assert "attached" in told.value.hint


@pytest.mark.parametrize("kind", ["dense", "token", "mixture"])
def test_gradient_checkpointing_changes_no_gradient(kind, exported, tmp_path):
    recipe = recipe_of(replace(KINDS[kind], dropout=0.3))  # whose draws must be the same again
    theirs = exported(tmp_path / "export", unlike_new(build_model(recipe, 600)), recipe).train()
    calls: list[int] = []
    theirs.model.blocks[0].attention.register_forward_hook(lambda *_: calls.append(1))

    def gradients() -> dict[str, torch.Tensor]:
        calls.clear()
        theirs.zero_grad()
        torch.manual_seed(3)
        theirs(IDS_BT, labels=IDS_BT).loss.backward()
        return {name: each.grad.clone() for name, each in theirs.named_parameters()}

    expected = gradients()
    assert len(calls) == 1
    for reentrant in (False, True):
        theirs.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        found = gradients()
        assert len(calls) == 2  # in the backward pass again
        assert all(torch.equal(found[name], grad) for name, grad in expected.items())
    with pytest.raises(ValueError, match="cache"):
        theirs(IDS_BT, past_key_values=DynamicCache())
    theirs.generation_config.eos_token_id = None
    assert theirs.generate(IDS_BT[:1], max_new_tokens=3).shape == (1, 17)  # in training mode, with a cache


@torch.no_grad()
def test_narrower_weights_keep_queries_and_keys(pair, exported, tmp_path):
    ours, theirs, folder = pair
    recipe, half = read_export(folder, CPU).recipe, torch.bfloat16
    narrow = exported(tmp_path / "narrow", ours, recipe, dtype="bf16")
    with safe_open(tmp_path / "narrow" / "model.safetensors", "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, tensor in narrow.state_dict().items():
        if not tensor.is_floating_point():
            assert torch.equal(tensor, theirs.state_dict()[name])
            continue
        kept = (".memory_" in name and not name.endswith("weight_KD")) or ".attention.query_" in name or ".key_" in name
        assert tensor.dtype == (torch.float32 if kept else half), name
        assert name == "lm_head.weight" or stored[name].dtype == tensor.dtype
    assert narrow.dtype == half
    found = narrow(IDS_BT).logits.float()
    assert found.isfinite().all()
    assert (found - theirs(IDS_BT).logits).abs().mean() < 0.2 * theirs(IDS_BT).logits.std()
    back = read_export(tmp_path / "narrow", CPU).model
    assert {parameter.dtype for parameter in back.parameters()} == {torch.float32}
    assert torch.equal(back.embedding.weight, ours.embedding.weight.to(half).float())


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "bits"), [("product-key", 8), *((kind, 4) for kind, model in KINDS.items() if model.memories)], ids=str
)
def test_tables_in_few_bits_are_read_alike(kind, bits, exported, tmp_path):
    """By our code and by the folder's, as the same model with the rounded entries in fp32 tables."""
    recipe = recipe_of(KINDS[kind])
    ours = unlike_new(build_model(recipe, 600))
    theirs = exported(tmp_path / "export", ours, recipe, table_bits=bits)
    for name, table in tables_of(ours).items():
        table.weight_KD.copy_(dequantize(quantize(table.weight_KD, bits)))
        assert f"model.{name}" not in theirs.state_dict()
    expected = ours(IDS_BT)
    theirs.save_pretrained(tmp_path / "again")
    shutil.copy(tmp_path / "export/tokenizer.model", tmp_path / "again")
    for folder in (tmp_path / "export", tmp_path / "again"):
        back = read_export(folder, CPU).model
        assert all(table.weight_KD is None for table in tables_of(back).values())
        assert (back(IDS_BT) - expected).abs().max() < 2e-5
        assert (type(theirs).from_pretrained(folder)(IDS_BT).logits - expected).abs().max() < 2e-5
    for memory, whole in zip(memories(back), memories(ours), strict=True):
        rows = torch.tensor([0, memory.tap.slots - 1])
        assert torch.equal(memory.values.rows(rows), whole.values.rows(rows))
    narrow = exported(tmp_path / "narrow", ours, recipe, table_bits=bits, dtype="bf16")
    assert (narrow(IDS_BT).logits.float() - expected).abs().mean() < 0.2 * expected.std()
    scales = {name: each for name, each in narrow.state_dict().items() if name.endswith("scale_K")}
    assert {each.dtype for each in scales.values()} == {torch.float32}


@torch.no_grad()
@pytest.mark.parametrize("query_norm", ["batch", "layer", "rms", "none"])
def test_casts_and_autocast_of_a_loaded_model(tmp_path, exported, query_norm):
    pkm = replace(PRODUCT_KEY, query_norm=query_norm, query="mlp")
    recipe = recipe_of(with_memories(pkm=pkm, grams=GRAMS, tables=HashSpec(layers=("1",), bits=4)))
    theirs = exported(tmp_path / "whole", unlike_new(build_model(recipe, 600)), recipe)
    expected = theirs(IDS_BT).logits
    with torch.autocast("cpu", torch.bfloat16):
        assert (theirs(IDS_BT).logits.float() - expected).abs().mean() < 0.1 * expected.std()
    before = {name: theirs.state_dict()[name].clone() for name in kept_in_fp32(theirs)}
    assert (theirs.bfloat16()(IDS_BT).logits.float() - expected).abs().mean() < 0.1 * expected.std()
    assert before
    half = type(theirs)._from_config(theirs.config, dtype=torch.bfloat16).to("cpu")
    assert half(IDS_BT).logits.dtype == torch.bfloat16
    for name, tensor in before.items():
        assert torch.equal(theirs.state_dict()[name], tensor), f"{name} was rounded on the way"


def test_a_new_model_has_no_number_left_to_chance(pair):
    _, theirs, _ = pair
    torch.use_deterministic_algorithms(True)  # what is not filled in is NaN
    try:
        new = type(theirs)(type(theirs.config)(**theirs.config.to_dict()))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(tensor.isfinite().all() for tensor in new.state_dict().values())
    assert new(IDS_BT).logits.std() > 0


def test_rows_that_are_no_pieces_are_never_generated(tmp_path, exported):
    recipe = recipe_of(replace(MODEL, vocab_size=640, tie_embeddings=False))
    ours = unlike_new(build_model(recipe, 640))
    with torch.no_grad():
        ours.untied_head.weight[600:] *= 50
    theirs = exported(tmp_path / "more", ours, recipe)
    theirs.generation_config.eos_token_id = None
    found = theirs.generate(IDS_BT[:1, :4], max_new_tokens=10)[0, 4:].tolist()
    assert found == list(generate(ours, IDS_BT[0, :4].tolist(), Sampling(temperature=0), 10, 600))


def test_plain_kernels_equal_their_reference():
    random_ = torch.Generator().manual_seed(3)
    for n in (1, 5, 40):
        whole_Rn = torch.randint(-2, 3, (20, n), generator=random_).float()  # many ties
        for scores_Rn in (whole_Rn, whole_Rn * -0.0, torch.randn(20, n, generator=random_)):
            for k in {1, min(3, n), n}:
                assert all(map(torch.equal, plain_pkmlm.top_k(scores_Rn, k), reference.top_k(scores_Rn, k)))
    q_NHd, keys = torch.randn(7, 3, 8, generator=random_), torch.randn(3, 2, 6, 4, generator=random_)
    for found, slow in zip(*(m.product_key_search(q_NHd, keys, 9) for m in (plain_pkmlm, reference)), strict=True):
        torch.testing.assert_close(found, slow)
    values_KD, x_ND = torch.randn(30, 5, generator=random_), torch.randn(11, 5, generator=random_)
    slots_Nr = torch.randint(30, (11, 4), generator=random_)
    weights_Nr = torch.randn(11, 4, generator=random_)
    half_KD = values_KD.bfloat16()
    for table_KD, read_KD in ((values_KD, values_KD), (half_KD, half_KD.float())):
        found = plain_pkmlm.weighted_row_sum(table_KD, slots_Nr, weights_Nr)
        torch.testing.assert_close(found, reference.weighted_row_sum(read_KD, slots_Nr, weights_Nr))
        found = plain_pkmlm.row_products(table_KD, x_ND, slots_Nr)
        torch.testing.assert_close(found, reference.row_products(read_KD, x_ND, slots_Nr))
    for every_row in (False, True):
        segments = reference.sort_reads(slots_Nr, weights_Nr, 30, every_row=every_row)
        torch.testing.assert_close(
            plain_pkmlm.segment_sum(x_ND, segments), reference.segment_sum(x_ND, segments), rtol=1e-5, atol=1e-6
        )


def test_no_more_rows_exist_at_a_time_than_are_allowed(monkeypatch):
    monkeypatch.setattr(plain_pkmlm, "ENTRIES", 2 * 4 * 5)
    table, taken = quantize(torch.randn(30, 5), 8), []
    slots_Nr, weights_Nr = torch.randint(30, (11, 4)), torch.randn(11, 4)
    monkeypatch.setattr(plain_pkmlm, "dequantize", lambda part: taken.append(part) or dequantize(part))
    found = plain_pkmlm.quantized_row_sum(table, slots_Nr, weights_Nr)
    assert {len(part.codes_KC) for part in taken} == {8, 4}
    torch.testing.assert_close(found, reference.quantized_row_sum(table, slots_Nr, weights_Nr))


def test_the_code_stands_alone():
    """Nothing but torch, numpy, transformers, the standard library, and each other."""
    code = bundle(*MODEL_CODE)
    for file, text in code.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1
                assert {f"{node.module or alias.name}.py" for alias in node.names} <= code.keys()
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module]
                for module in names:
                    known = {"torch", "numpy", "transformers", *sys.stdlib_module_names}
                    assert module.split(".")[0] in known, f"{file} imports {module}"


def test_transformers_finds_all_of_the_code(tmp_path):
    from transformers.dynamic_module_utils import get_relative_import_files

    code = bundle(*MODEL_CODE)
    for name, text in code.items():
        (tmp_path / name).write_text(text)
    found = get_relative_import_files(tmp_path / "modeling_pkmlm.py")
    assert {Path(file).name for file in found} == code.keys() - {"modeling_pkmlm.py"}
