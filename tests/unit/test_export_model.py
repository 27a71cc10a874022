"""The exported model code computes what our model computes, for every model that a recipe can describe."""

import ast
import random
import shutil
import sys
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from safetensors import safe_open
from torch.nn.functional import cross_entropy

from pkmlm import export
from pkmlm.data.tokenizer import Tokenizer
from pkmlm.errors import UserError
from pkmlm.evaluate.generate import Sampling, generate
from pkmlm.export.config import CODE, Origin
from pkmlm.export.configuration_pkmlm import PkmlmConfig
from pkmlm.export.folder import read_export, write_export
from pkmlm.export.modeling_pkmlm import PkmlmForCausalLM, PkmlmModel, visible
from pkmlm.kernels.reference import dequantize, quantize
from pkmlm.memory.base import memories
from pkmlm.memory.table import tables_of
from pkmlm.model.transformer import Transformer, build_model
from pkmlm.recipe.constraints import check_recipe, memory_layers
from pkmlm.recipe.schema import AttentionOptions, Hash, Memory, Model, NGram, Recipe, Train, flatten

CPU = torch.device("cpu")
REFUSED = {("model.attention", kind) for kind in ("linformer", "cosformer", "performer")}
# What is drawn for each key of `model` that is not a choice of words or yes and no, or not all of whose choices are
# exported.
DRAWN: dict[str, list[Any]] = {
    "attention": ["softmax"],
    "attention_options.features": [256],
    "attention_options.block": [64],
    "attention_options.rank": [16],
    "vocab_size": [600, 607],
    "dim": [24],
    "layers": [3],
    "heads": [2, 3],
    "context": [20],
    "rotary_fraction": [0.5, 1.0],
    "ffn_dim": [None, 40],
    "dropout": [0.1],
    "memory.layers": [("2",), ("1+", "3"), ("auto:1+",), ("auto:2",)],
    "memory.num_keys": [5, 8],
    "memory.heads": [1, 3],
    "memory.topk": [1, 5],
    "memory.key_dim": [8],
    "memory.value_dim": [None, 20, 24],
    "ngram.layers": [(), (1, 3), (2,)],
    "ngram.orders": [(2,), (1, 3), (2, 3)],
    "ngram.heads": [1, 2],
    "ngram.rows": [1, 31],
    "ngram.row_dim": [24],
    "hash.bits": [2, 4],
    "hash.extra_bits": [0, 2],
    "hash.temperature": [0.5, 1.0],
}


NO_MEMORY = ("model.memory.kind", "none")


def drawn(kind: Any, random_: random.Random, decks: dict[str, list[Any]], prefix: str = "") -> Any:
    """A section of `model` with a value drawn for every key; no choice comes again before all others came."""
    values = {}
    for field in fields(kind):
        hint, name = get_type_hints(kind)[field.name], f"{prefix}{field.name}"
        if is_dataclass(hint):
            values[field.name] = drawn(hint, random_, decks, f"{name}.")
            continue
        if not decks.get(name):
            choices = DRAWN.get(name) or (get_args(hint) if get_origin(hint) is Literal else [True, False])
            decks[name] = random_.sample(choices, len(choices))
        values[field.name] = decks[name].pop()
    return kind(**values)


def in_force(recipe: Recipe) -> list[tuple[str, Any]]:
    """The keys of `model` that the model depends on, with their values."""
    model = recipe.model
    unused: tuple[str, ...] = ("model.memory.",) if model.memory.kind == "none" else ()
    unused += () if model.ngram.layers else ("model.ngram.",)
    unused += ("model.ngram.conv",) if model.ngram.fusion == "add" else ()
    unused += ("model.memory.expert",) if model.memory.kind != "peer" else ()
    unused += ("model.memory.share_values",) if len(memory_layers(model)) < 2 else ()
    unused += ("model.hash.",) if model.projections == "dense" else ("model.ffn_dim", "model.activation", "model.bias")
    return [pair for pair in flatten(recipe).items() if not pair[0].startswith(unused)]


def recipe_of(model: Model) -> Recipe:
    return check_recipe(Recipe(model=model, train=Train(batch_tokens=model.context * 2, micro_batch=2)))


def unlike_new(model: Transformer, seed: int = 0) -> Transformer:
    """The model with no number left at a value that a mistake could give too: zero biases, unit norms."""
    random_ = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            noise = torch.rand(tensor.shape, generator=random_)
            tensor.mul_(0.5 + noise).add_(0.1 * (noise - 0.3) if tensor.ndim == 1 else 0)
            if "ngram" in name and tensor.ndim == 2:  # rows and convolutions start at 0, or too small to tell
                tensor.add_(0.5 * (noise - 0.5))
        if name.endswith("canonical_V"):
            tensor.div_(2, rounding_mode="floor").add_(1)[2] = 0
        if name in ("embedding.weight", "untied_head.weight"):
            tensor.mul_(5)  # logits of a trained model's size
        if name.endswith("running_var"):
            tensor.mul_(0.02)  # not far above epsilon
    return model.eval()


@pytest.fixture(scope="module")
def tokenizer(tokens: Path) -> Tokenizer:
    return Tokenizer.load(tokens / "tokenizer.model")


def exported(path: Path, model: Transformer, recipe: Recipe, tokenizer: Tokenizer, **how: Any) -> PkmlmForCausalLM:
    write_export(path, model, recipe, tokenizer, Origin("tiny", 30, 7680), "a card", **how)
    return PkmlmForCausalLM.from_pretrained(path, dtype="auto")  # transformers 4 widens otherwise


def test_logits_of_random_recipes(tmp_path, tokenizer):
    random_, decks = random.Random(0), {}
    seen = {pair for model in KINDS.values() for pair in in_force(recipe_of(model))}  # whose logits are compared below
    for seed in range(10):
        recipe = recipe_of(drawn(Model, random_, decks))
        seen |= set(in_force(recipe))
        ours = unlike_new(build_model(recipe, recipe.model.vocab_size), seed)
        theirs = exported(tmp_path / str(seed), ours, recipe, tokenizer)
        ids_BT = torch.randint(600, (2, 20), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            expected, found = ours(ids_BT), theirs(ids_BT).logits
        assert expected.std() > 0.2
        assert (found - expected).abs().max() <= 1e-5, recipe.model
        back = read_export(tmp_path / str(seed), CPU)
        assert replace(back.recipe, model=recipe.model) == recipe
        with torch.no_grad():
            assert torch.equal(back.model(ids_BT), expected)
    for kind, prefix in ((Model, "model."), (Memory, "model.memory."), (Hash, "model.hash.")):
        for name, hint in get_type_hints(kind).items():
            every = get_args(hint) if get_origin(hint) is Literal else [True, False] if hint is bool else []
            assert {(prefix + name, choice) for choice in every} <= {*seen, NO_MEMORY, *REFUSED}


@pytest.mark.parametrize("attention", [kind for _, kind in sorted(REFUSED)])
def test_other_attention_than_softmax_is_not_exported(attention, tmp_path, tokenizer):
    recipe = recipe_of(replace(MODEL, attention=attention, attention_options=AttentionOptions(block=8, rank=2)))
    with pytest.raises(UserError, match=attention) as caught:
        exported(tmp_path / "export", build_model(recipe, 600), recipe, tokenizer)
    assert caught.value.exit_code == 2
    assert not list(tmp_path.iterdir())


MEMORY = Memory(kind="product-key", layers=("2",), num_keys=8, heads=2, topk=4, key_dim=8)
MODEL = Model(vocab_size=600, dim=16, layers=2, heads=2, context=24, hash=Hash(bits=4))
KINDS = {
    "dense": replace(MODEL, positions="rotary", tie_embeddings=False),
    "product-key": replace(MODEL, memory=MEMORY),
    "flat-key": replace(MODEL, memory=replace(MEMORY, kind="flat-key", layers=("2+",)), residual="parallel"),
    "memory-plus": replace(
        MODEL,
        memory=replace(
            MEMORY, layers=("1", "2+"), share_values=True, gate="silu", value_dim=12, key_norm="rms", query_norm="none"
        ),
    ),
    "peer": replace(MODEL, memory=replace(MEMORY, kind="peer", key_norm="rms")),
    "ngram": replace(MODEL, ngram=NGram(layers=(2, 1), orders=(2, 3), heads=2, rows=31, row_dim=4)),
    "ngram-lite": replace(
        MODEL, ngram=NGram(layers=(1, 2), orders=(2,), heads=1, rows=101, row_dim=16, fusion="add"), memory=MEMORY
    ),
    "hash": replace(MODEL, projections="hash"),
}


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tokenizer, tmp_path_factory) -> tuple[Transformer, PkmlmForCausalLM, Path]:
    """A model, its export as `transformers` loads it, and the folder."""
    recipe = recipe_of(KINDS[request.param])
    ours, folder = unlike_new(build_model(recipe, 600)), tmp_path_factory.mktemp("export") / request.param
    theirs = exported(folder, ours, recipe, tokenizer)
    theirs.generation_config.eos_token_id = None  # texts of one length
    return ours, theirs, folder


IDS_BT = torch.randint(2, 600, (3, 14), generator=torch.Generator().manual_seed(5))


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
    assert (found_BTV - theirs(whole_BT).logits[:, 9:]).abs().max() < 1e-5


def test_greedy_texts_are_ours_alone_and_in_a_batch(pair):
    ours, theirs, _ = pair
    prompts = [[1, *IDS_BT[0, :7].tolist()], [1, *IDS_BT[1, :2].tolist()]]
    greedy = [list(generate(ours, prompt, Sampling(temperature=0), 12, 600)) for prompt in prompts]
    for cache in ({}, {"use_cache": False}, {"cache_implementation": "static"}):
        how = {**cache, "max_new_tokens": 12, "do_sample": False}
        for prompt, expected in zip(prompts, greedy, strict=True):
            assert theirs.generate(torch.tensor([prompt]), **how)[0, len(prompt) :].tolist() == expected
        batch = torch.tensor([prompts[0], [0] * 5 + prompts[1]])
        mask = torch.tensor([[1] * 8, [0] * 5 + [1] * 3])
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
def test_parts_of_the_output(pair):
    _, theirs, folder = pair
    whole = theirs(IDS_BT, output_hidden_states=True)
    torch.testing.assert_close(theirs(IDS_BT, logits_to_keep=2).logits, whole.logits[:, -2:])  # a smaller product
    assert len(whole.hidden_states) == 3
    assert torch.equal(whole.hidden_states[-1], theirs.model(IDS_BT).last_hidden_state)
    assert torch.equal(theirs(IDS_BT, return_dict=False)[0], whole.logits)
    embedded = theirs.get_input_embeddings()(IDS_BT)
    if theirs.config.ngram["layers"]:  # whose rows depend on the tokens themselves
        with pytest.raises(ValueError, match="give input_ids"):
            theirs(inputs_embeds=embedded)
    else:
        assert torch.equal(theirs(inputs_embeds=embedded).logits, whole.logits)
    assert torch.equal(PkmlmModel.from_pretrained(folder)(IDS_BT)[0], whole.hidden_states[-1])


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
def test_rows_are_added_to_the_embedding_and_the_head(tmp_path, tokenizer, tied):
    recipe = recipe_of(replace(KINDS["ngram"], tie_embeddings=tied))
    theirs = exported(tmp_path / "export", unlike_new(build_model(recipe, 600)), recipe, tokenizer)
    before = theirs(IDS_BT).logits
    theirs.resize_token_embeddings(610, mean_resizing=False)
    assert (theirs.lm_head.weight is theirs.model.embedding.weight) == tied
    assert theirs.model.embedding.weight.shape == (610, 16)
    torch.testing.assert_close(theirs(IDS_BT).logits[..., :600], before)
    ids = torch.tensor([[1, 605, 7, 609]])
    grown = theirs(ids).logits
    theirs.save_pretrained(tmp_path / "grown")
    (tmp_path / "grown/tokenizer.model").write_bytes(tokenizer.model_bytes)
    assert torch.equal(PkmlmForCausalLM.from_pretrained(tmp_path / "grown")(ids).logits, grown)
    torch.testing.assert_close(read_export(tmp_path / "grown", CPU).model(ids), grown)
    whole = theirs.model
    whole.resize_token_embeddings(620, mean_resizing=False)
    assert whole.get_input_embeddings() is whole.embedding
    assert whole.embedding.weight.shape == (620, 16)


def test_no_position_sees_nothing():
    """Not even padding, whatever it is: some kernels give NaN for a row that sees no key."""
    seen_B1TS = visible(3, 2, 5, torch.tensor([[0, 0, 0, 0, 1], [0, 1, 1, 1, 1]]), CPU)
    assert seen_B1TS.int().tolist() == [
        [[[0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 1]]],
        [[[0, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 1, 1, 1, 1]]],
    ]


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
    assert torch.equal(PkmlmForCausalLM.from_pretrained(tmp_path)(IDS_BT).logits, theirs(IDS_BT).logits)
    back = read_export(tmp_path, CPU)
    assert torch.equal(back.model(IDS_BT), ours(IDS_BT))
    assert back.origin == Origin("tiny", 30, 7680)


@torch.no_grad()
def test_narrower_weights_keep_queries_and_keys(pair, tokenizer, tmp_path):
    ours, theirs, folder = pair
    recipe, half = read_export(folder, CPU).recipe, torch.bfloat16
    narrow = exported(tmp_path / "narrow", ours, recipe, tokenizer, dtype="bf16")
    with safe_open(tmp_path / "narrow" / "model.safetensors", "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, tensor in narrow.state_dict().items():
        if not tensor.is_floating_point():
            assert torch.equal(tensor, theirs.state_dict()[name])
            continue
        kept = ".memory." in name and not any(part in name for part in (".values.", ".inputs.", ".gate.", ".output."))
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
    ("kind", "bits"), [("product-key", 8), *((kind, 4) for kind in KINDS if kind != "dense")], ids=str
)
def test_tables_in_few_bits_are_read_alike(kind, bits, tokenizer, tmp_path):
    """By our code and by the folder's, as the same model with the rounded entries in fp32 tables."""
    recipe = recipe_of(KINDS[kind])
    ours = unlike_new(build_model(recipe, 600))
    theirs = exported(tmp_path / "export", ours, recipe, tokenizer, table_bits=bits)
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
        assert (PkmlmForCausalLM.from_pretrained(folder)(IDS_BT).logits - expected).abs().max() < 2e-5
    for memory, whole in zip(memories(back), memories(ours), strict=True):
        rows = torch.tensor([0, memory.tap.slots - 1])
        assert torch.equal(memory.values.rows(rows), whole.values.rows(rows))
    narrow = exported(tmp_path / "narrow", ours, recipe, tokenizer, table_bits=bits, dtype="bf16")
    assert (narrow(IDS_BT).logits.float() - expected).abs().mean() < 0.2 * expected.std()
    scales = {name: each for name, each in narrow.state_dict().items() if name.endswith("scale_K")}
    assert {each.dtype for each in scales.values()} == {torch.float32}


@torch.no_grad()
@pytest.mark.parametrize("query_norm", ["batch", "layer", "rms", "none"])
def test_casts_and_autocast_of_a_loaded_model(tmp_path, tokenizer, query_norm):
    recipe = recipe_of(replace(MODEL, memory=replace(MEMORY, query_norm=query_norm, query="mlp")))
    theirs = exported(tmp_path / "whole", unlike_new(build_model(recipe, 600)), recipe, tokenizer)
    expected = theirs(IDS_BT).logits
    with torch.autocast("cpu", torch.bfloat16):
        assert (theirs(IDS_BT).logits.float() - expected).abs().mean() < 0.1 * expected.std()
    assert (theirs.bfloat16()(IDS_BT).logits.float() - expected).abs().mean() < 0.1 * expected.std()


def test_a_new_model_has_no_number_left_to_chance(pair):
    _, theirs, _ = pair
    torch.use_deterministic_algorithms(True)  # what is not filled in is NaN
    try:
        new = PkmlmForCausalLM(PkmlmConfig(**theirs.config.to_dict()))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(tensor.isfinite().all() for tensor in new.state_dict().values())
    assert new(IDS_BT).logits.std() > 0


def test_rows_that_are_no_pieces_are_never_generated(tmp_path, tokenizer):
    recipe = recipe_of(replace(MODEL, vocab_size=640, tie_embeddings=False))
    ours = unlike_new(build_model(recipe, 640))
    with torch.no_grad():
        ours.untied_head.weight[600:] *= 50
    theirs = exported(tmp_path / "more", ours, recipe, tokenizer)
    theirs.generation_config.eos_token_id = None
    found = theirs.generate(IDS_BT[:1, :4], max_new_tokens=10)[0, 4:].tolist()
    assert found == list(generate(ours, IDS_BT[0, :4].tolist(), Sampling(temperature=0), 10, 600))


def test_the_defaults_are_those_of_recipes():
    ours, theirs = Model(), PkmlmConfig()
    for field in fields(Model):
        if field.name == "attention_options":  # of attention that no export has
            continue
        mine, its = getattr(ours, field.name), getattr(theirs, field.name)
        if is_dataclass(mine):
            mine = {name.name: getattr(mine, name.name) for name in fields(mine)}
            its = {key: tuple(value) if isinstance(value, list) else value for key, value in its.items()}
        assert field.name == "vocab_size" or mine == its, field.name


@pytest.mark.parametrize("name", CODE)
def test_the_code_stands_alone(name):
    """Nothing but torch, transformers, sentencepiece, the standard library, and each other."""
    for node in ast.walk(ast.parse((Path(export.__file__).parent / name).read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1
            assert f"{node.module}.py" in CODE
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module]
            for module in names:
                top = module.split(".")[0]
                assert top in {"torch", "transformers", "sentencepiece", *sys.stdlib_module_names}, module
