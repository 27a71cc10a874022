"""The transformer: initial values, causality, cache, and what its keys mean."""

from dataclasses import replace

import pytest
import torch

from pkmlm.memory.flat_key.spec import FlatKeySpec
from pkmlm.memory.hash.spec import HashSpec
from pkmlm.memory.init import initialise
from pkmlm.memory.ngram.spec import NGramSpec
from pkmlm.memory.product_key.spec import ProductKeySpec
from pkmlm.memory.spec import Spec
from pkmlm.memory.token.spec import TokenSpec
from pkmlm.model.attention import KVCache, rotate, rotation
from pkmlm.model.transformer import build_model, streams
from pkmlm.recipe.schema import AttentionOptions, Model, Recipe, Train
from tests.conftest import model_2019, recipe_2019


def with_memories(**memories: Spec) -> Model:
    return model_2019(dim=16, layers=3, heads=2, context=12, memories=memories)


MODEL = with_memories()
KEYS = {"layers": ("2",), "num_keys": 8, "heads": 2, "topk": 4, "key_dim": 8}
KINDS = {
    "dense": MODEL,
    "rotary": replace(MODEL, positions="rotary", rotary_fraction=0.5, tie_embeddings=False, residual="parallel"),
    "product-key": with_memories(pkm=ProductKeySpec(**KEYS)),
    "beside": with_memories(pkm=ProductKeySpec(**{**KEYS, "layers": ("2+", "3")})),
    "flat-key": with_memories(flat=FlatKeySpec(**KEYS)),
    "hash": with_memories(tables=HashSpec(bits=4)),
    "mixed": with_memories(
        maps=HashSpec(bits=4, parts=("qkv",)),
        pkm=ProductKeySpec(**KEYS),
        ffns=HashSpec(bits=4, parts=("ffn",), layers=("1", "3")),
        flat=FlatKeySpec(**{**KEYS, "layers": ("1+", "2+")}),
        words=NGramSpec(layers=("1", "2"), orders=(1,), heads=1, rows=31, row_dim=4, conv=False),
        ngrams=NGramSpec(layers=("2",), heads=2, rows=31, row_dim=4, conv=False, canonical=False),
        tokens=TokenSpec(layers=("3",), into="values"),
    ),
}
OPTIONS = AttentionOptions(features=6, block=4, rank=2)
EFFICIENT = {
    "linformer": replace(MODEL, attention="linformer", attention_options=OPTIONS),
    "cosformer": replace(KINDS["rotary"], attention="cosformer"),
    "performer": replace(KINDS["mixed"], attention="performer", attention_options=OPTIONS),
}


TOKENS = torch.randint(0, 50, (8, 12), generator=torch.Generator().manual_seed(0))


def recipe_of(model: Model, seed: int = 1) -> Recipe:
    return recipe_2019(model=model, train=Train(batch_tokens=model.context * 4, micro_batch=2, seed=seed))


@pytest.fixture(params=[*KINDS, *EFFICIENT])
def recipe(request) -> Recipe:
    return recipe_of((KINDS | EFFICIENT)[request.param])


def test_a_model_from_the_meta_device_holds_the_same_numbers(recipe):
    direct = build_model(recipe, 50)
    later = build_model(recipe, 50, "meta").to_empty(device="cpu")
    for tensor in (*later.parameters(), *later.buffers()):
        tensor.data.fill_(7)
    initialise(later, recipe.train.seed, streams(later))
    for (name, a), b in zip(direct.state_dict().items(), later.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_a_model_without_storage_draws_no_embedding(monkeypatch):
    """To draw on the meta device, torch loads its compiler, which takes half a second."""
    monkeypatch.setattr(torch.nn.init, "normal_", None)
    assert build_model(recipe_of(MODEL), 50, "meta").embedding.weight.is_meta


def test_initial_values_depend_on_the_seed_and_not_on_the_global_generator(recipe):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = build_model(recipe, 50).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    second = build_model(recipe, 50).state_dict()
    other = build_model(replace(recipe, train=replace(recipe.train, seed=2)), 50).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["embedding.weight"], other["embedding.weight"])


def test_two_models_in_one_process_share_nothing(recipe):
    first, second = build_model(recipe, 50), build_model(recipe, 50)
    storages = {tensor.data_ptr() for tensor in first.state_dict().values()}
    assert storages.isdisjoint(tensor.data_ptr() for tensor in second.state_dict().values())


def test_no_output_depends_on_a_later_token(recipe):
    model, changed = build_model(recipe, 50).eval(), TOKENS.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 50
    before, after = model(TOKENS), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7], after[:, 7])


@pytest.mark.parametrize("kind", KINDS)
def test_the_cache_gives_what_one_forward_gives(kind):
    model = build_model(recipe_of(KINDS[kind]), 50).eval().double()
    cache = KVCache(model.context)
    pieces = [model(TOKENS[:, start:stop], cache) for start, stop in [(0, 5), (5, 6), (6, 9), (9, 12)]]
    torch.testing.assert_close(torch.cat(pieces, 1), model(TOKENS))
    with pytest.raises(ValueError, match="13 positions"):
        model(TOKENS[:, :1], cache)


def test_the_first_loss_is_that_of_guessing_and_every_parameter_gets_a_finite_gradient(recipe):
    model = build_model(recipe, 50)
    loss = torch.nn.functional.cross_entropy(model(TOKENS)[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
    assert loss.item() == pytest.approx(3.912 + 0.4 / 2, abs=0.15)  # log 50, and half the variance of the logits
    loss.backward()
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        assert torch.isfinite(gradient).all(), name
        assert gradient.abs().sum() > 0, name


def test_parallel_blocks_read_the_same_input():
    model = build_model(recipe_of(KINDS["rotary"]), 50).double()
    block, x = model.blocks[0], torch.randn(1, 4, 16, dtype=torch.float64)
    ffn = block.parts["ffn"]
    expected = x + block.attention(block.attention_norm(x), None, None) + ffn(block.norm(x))
    torch.testing.assert_close(block(x, None, None), expected)


def test_hash_blocks_keep_the_raw_residual_in_sequence():
    block = build_model(recipe_of(KINDS["hash"]), 50).double().blocks[0]
    x = torch.randn(1, 4, 16, dtype=torch.float64)
    z = x + block.attention(block.attention_norm(x), None, None)
    torch.testing.assert_close(block(x, None, None), z + block.parts["memory_tables"](block.norm(z)))
    assert block.attention.out is None


def test_a_memory_stands_in_place_of_or_beside_the_ffn():
    blocks = build_model(recipe_of(KINDS["beside"]), 50).blocks
    assert [list(block.parts) for block in blocks] == [["ffn"], ["ffn", "memory_pkm"], ["memory_pkm"]]


def test_a_block_adds_up_what_its_memories_say():
    model = build_model(recipe_of(KINDS["mixed"]), 50).eval()
    block, x = model.blocks[1], torch.randn(8, 12, 16)
    pasts = {ids: find(TOKENS, None, None) for ids, find in model.token_ids.items()}
    found = block(x, None, None, None, pasts)
    for name, ids in (("words", "canonical"), ("ngrams", "plain")):
        x = x + block.before[f"memory_{name}"](x, pasts[ids])
    x = x + block.attention(block.attention_norm(x), None, None)
    h = block.norm(x)
    torch.testing.assert_close(found, x + block.parts["memory_pkm"](h) + block.parts["memory_flat"](h))
    assert [*block.parts] == ["memory_pkm", "memory_flat"]
    assert block.attention.out is None
    with pytest.raises(ValueError, match="pasts"):
        block(x, None, None)


def test_names_of_memories_change_no_number():
    """Random streams are those of places, so that a model has the same start under any names."""
    model = KINDS["mixed"]
    renamed = replace(model, memories={f"half{number}": each for number, each in enumerate(model.memories.values())})
    one, other = (build_model(recipe_of(each), 50).state_dict() for each in (model, renamed))
    for (name, a), (new, b) in zip(one.items(), other.items(), strict=True):
        assert torch.equal(a, b), (name, new)
    tables = [tensor for name, tensor in one.items() if name.endswith("values.weight_KD") and tensor.shape == (64, 16)]
    assert len(tables) == 3
    assert not torch.equal(tables[0], tables[1]), "of memories of one place"


def test_rotary_scores_depend_on_the_distance_alone():
    q, k = torch.randn(1, 1, 1, 8).double(), torch.randn(1, 1, 1, 8).double()
    at = [rotation(torch.tensor([place]), 6, 1e4) for place in (0, 3, 40, 43)]
    near = (rotate(q, at[1]) * rotate(k, at[0])).sum()
    far = (rotate(q, at[3]) * rotate(k, at[2])).sum()
    torch.testing.assert_close(near, far, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(near, (rotate(q, at[2]) * rotate(k, at[0])).sum())


def test_dropout_acts_in_training_alone():
    model = build_model(recipe_of(replace(MODEL, dropout=0.5)), 50)
    assert not torch.equal(model(TOKENS), model(TOKENS))
    model.eval()
    assert torch.equal(model(TOKENS), model(TOKENS))


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_half_precision_forwards_stay_close_to_fp32(recipe, precision):
    model = build_model(recipe, 50).eval()
    with torch.autocast("cpu", dtype=precision):
        half = model(TOKENS)
    assert (half.float() - model(TOKENS)).abs().median() < 0.02
