"""Attention without a softmax against its definitions, written out token by token; and what whole models make of it."""

import math
from dataclasses import replace

import pytest
import torch
from lm_eval.api.instance import Instance
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from pkmlm.errors import UserError
from pkmlm.evaluate.lm_eval import PkmLM
from pkmlm.evaluate.load import load_run
from pkmlm.memory.hash.spec import HashSpec
from pkmlm.memory.init import initialise, orthogonal_rows
from pkmlm.memory.product_key.spec import ProductKeySpec
from pkmlm.model import efficient_attention
from pkmlm.model.attention import AttentionLayout, KVCache, positions_of, repeat_heads, rotate, rotation
from pkmlm.model.efficient_attention import CosFormer, Linformer, Performer
from pkmlm.model.transformer import Transformer, build_model
from pkmlm.recipe.constraints import check_recipe
from pkmlm.recipe.schema import AttentionOptions, Train
from tests.conftest import model_2019, recipe_2019

CONTEXT, WIDTH = 150, 6


def kind_of(name: str) -> nn.Module:
    kind = {
        "linformer": lambda: Linformer(8, 3, dropout=0.0),
        "cosformer": lambda: CosFormer(CONTEXT),
        "performer": lambda: Performer(WIDTH, 10),
    }[name]()
    initialise(kind, 1)
    return kind.double()


KINDS = ("linformer", "cosformer", "performer")


def drawn(batch: int, heads: int, length: int, width: int = WIDTH, seed: int = 0, size: float = 1.0) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [size * torch.randn(batch, heads, length, width, dtype=torch.float64, generator=random) for _ in range(3)]


def cosformer_weights(kind: CosFormer, q_Te: Tensor, k_Te: Tensor) -> Tensor:
    place_T = torch.arange(len(q_Te), dtype=q_Te.dtype)
    cosine_TT = torch.cos(math.pi / 2 * (place_T[:, None] - place_T) / kind.context)
    return q_Te.clamp(min=0) @ k_Te.clamp(min=0).T * cosine_TT


def performer_weights(kind: Performer, q_Te: Tensor, k_Te: Tensor) -> Tensor:
    """Products of features, to each of which 1e-6 of the largest of its vector is added."""

    def features(x_e: Tensor) -> Tensor:
        x_e = x_e / len(x_e) ** 0.25
        found_M = torch.exp(kind.directions_Me @ x_e - x_e @ x_e / 2)
        return found_M + 1e-6 * found_M.max()

    return torch.stack([features(q_e) for q_e in q_Te]) @ torch.stack([features(k_e) for k_e in k_Te]).T


def linear_by_definition(kind: nn.Module, q_Te: Tensor, k_Te: Tensor, v_Te: Tensor) -> Tensor:
    weights_of = cosformer_weights if isinstance(kind, CosFormer) else performer_weights
    floor = 1e-6 if isinstance(kind, CosFormer) else 0.0
    weights_TT = weights_of(kind, q_Te, k_Te).tril()
    return weights_TT @ v_Te / weights_TT.sum(1, keepdim=True).clamp(min=floor)


def linformer_by_definition(kind: Linformer, q_Te: Tensor, k_Te: Tensor, v_Te: Tensor) -> Tensor:
    out, size = [], kind.block
    for i in range(len(q_Te)):
        keys, values = [], []
        for start in range(0, i // size * size, size):
            keys.append(kind.key_map_rc @ k_Te[start : start + size])
            values.append(kind.value_map_rc @ v_Te[start : start + size])
        own = slice(i // size * size, i + 1)
        keys, values = torch.cat([*keys, k_Te[own]]), torch.cat([*values, v_Te[own]])
        out.append((keys @ q_Te[i] / q_Te.shape[1] ** 0.5).softmax(0) @ values)
    return torch.stack(out)


def by_definition(kind: nn.Module, q_BhTe: Tensor, k_BhTe: Tensor, v_BhTe: Tensor) -> Tensor:
    alone = linformer_by_definition if isinstance(kind, Linformer) else linear_by_definition
    rows = zip(*(x.flatten(0, 1) for x in (q_BhTe, k_BhTe, v_BhTe)), strict=True)
    return torch.stack([alone(kind, *row) for row in rows]).view_as(v_BhTe)


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_computes_its_definition(name, monkeypatch):
    kind, shapes = kind_of(name), [(1, 1, 1), (2, 3, 7), (1, 1, 8), (2, 3, 9), (1, 1, 16), (2, 3, 27)]
    for chunk, (batch, heads, length) in [(64, (1, 1, 133)), *((8, shape) for shape in shapes)]:
        monkeypatch.setattr(efficient_attention, "CHUNK", chunk)
        inputs = drawn(batch, heads, length)
        torch.testing.assert_close(kind(*inputs), by_definition(kind, *inputs), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", KINDS)
def test_gradients_are_those_of_the_function(name, monkeypatch):
    monkeypatch.setattr(efficient_attention, "CHUNK", 4)
    kind = kind_of(name)
    parameters = [p.detach().clone().requires_grad_() for p in kind.parameters()]

    def function(*inputs: Tensor) -> Tensor:
        named = dict(zip(dict(kind.named_parameters()), inputs[3:], strict=True))
        return torch.func.functional_call(kind, named, inputs[:3])

    inputs = [x.requires_grad_() for x in drawn(1, 1, 9, seed=3)]
    assert torch.autograd.gradcheck(function, (*inputs, *parameters), eps=1e-7, atol=1e-6)


@pytest.mark.parametrize("size", [0.01, 4.0, 12.0])
@pytest.mark.parametrize("name", ["cosformer", "performer"])
def test_small_and_large_numbers_in_fp32(name, size, monkeypatch):
    """Features of the Performer range over exp(+-100) here; none of it may overflow or vanish."""
    monkeypatch.setattr(efficient_attention, "CHUNK", 8)
    kind, inputs = kind_of(name), drawn(1, 2, 27, seed=5, size=size)
    inputs[1][:, :, 5:9] *= 3  # sizes that rise, and fall again
    expected = by_definition(kind, *inputs)
    found = kind.float()(*(x.float() for x in inputs))
    torch.testing.assert_close(found.double(), expected, rtol=2e-3, atol=2e-3 * size)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(kind(*(x.float() for x in inputs)), found)
    half = kind(*(x.bfloat16() for x in inputs))
    assert half.dtype == torch.bfloat16
    assert half.isfinite().all()


def test_a_query_that_meets_no_key_gives_zero():
    kind = CosFormer(8)
    q, k, v = (torch.full((1, 1, 3, 2), value, requires_grad=True) for value in (-1.0, 1.0, 1.0))
    out = kind(q, k, v)
    assert torch.equal(out, torch.zeros_like(out))
    out.sum().backward()
    assert q.grad.isfinite().all()


def test_random_features_have_the_mean_of_the_softmax_weights():
    kind = Performer(8, 1 << 15)
    initialise(kind, 2)
    q, k, v = drawn(1, 2, 12, width=8, seed=1)
    q, k = (1.2 * x / x.norm(dim=-1, keepdim=True) for x in (q, k))  # longer ones need more features
    (q_M, q_size), (k_M, k_size) = kind.double()._features(q), kind._features(k)
    found = q_M @ k_M.transpose(-1, -2) / (1 << 15) * (q_size[..., None] + k_size[..., None, :]).exp()
    torch.testing.assert_close(found, (q @ k.transpose(-1, -2) / 8**0.5).exp(), rtol=0.05, atol=0)
    expected = scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(kind(q, k, v), expected, rtol=0, atol=0.02)


def test_directions_are_orthogonal_and_each_is_standard_normal():
    draws = torch.stack([orthogonal_rows(7, 3, torch.Generator().manual_seed(seed)) for seed in range(3000)])
    for block in (draws[:, :3], draws[:, 3:6]):
        products = block @ block.transpose(1, 2)
        assert (products - torch.diag_embed(products.diagonal(dim1=1, dim2=2))).abs().max() < 1e-12
    units = draws / draws.norm(dim=2, keepdim=True)
    assert (units[:, 0] * units[:, 3]).sum(1).mean().abs() < 0.05  # blocks are independent
    assert draws.norm(dim=2).std(0) == pytest.approx(torch.full((7,), 0.673).numpy(), abs=0.05)  # of a chi with 3
    for row in draws.unbind(1):
        assert (row.T @ row / len(row) - torch.eye(3)).abs().max() < 0.12
        assert row.mean(0).abs().max() < 0.08
        assert (row > 0).double().mean(0) == pytest.approx(torch.full((3,), 0.5).numpy(), abs=0.05)


def test_a_sequence_of_one_block_is_softmax_attention():
    kind, inputs = kind_of("linformer"), drawn(2, 2, 8)
    expected = scaled_dot_product_attention(*inputs, is_causal=True)
    torch.testing.assert_close(kind(*inputs), expected)


def test_dropout_of_linformer_acts_in_training_alone():
    kind = Linformer(4, 2, dropout=0.5)
    initialise(kind, 1)
    inputs = [x.float() for x in drawn(1, 1, 10)]
    assert not torch.equal(kind(*inputs), kind(*inputs))
    kind.eval()
    assert torch.equal(kind(*inputs), kind(*inputs))


OPTIONS = AttentionOptions(features=9, block=16, rank=3)
SHAPE = {"dim": 16, "layers": 2, "heads": 2, "context": 70, "attention_options": OPTIONS}
TRAIN = Train(batch_tokens=140, micro_batch=2)
PKM = ProductKeySpec(layers=("2",), num_keys=8, heads=2, topk=4, key_dim=8)
BODIES = {
    "learned": {},
    "rotary": {"positions": "rotary", "rotary_fraction": 0.5, "residual": "parallel"},
    "hash": {"memories": {"tables": HashSpec(bits=4)}, "positions": "rotary"},
    "memory": {"memories": {"pkm": PKM}},
}


def model_of(name: str, body: str) -> Transformer:
    model = model_2019(attention=name, **SHAPE, **BODIES[body])
    built = build_model(check_recipe(recipe_2019(model=model, train=TRAIN)), 50).eval()
    with torch.no_grad():
        for path, parameter in built.named_parameters():
            if "attention.qkv" in path:
                parameter.mul_(3)  # a new model attends to all alike
    return built


TOKENS = torch.randint(0, 50, (2, 70), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("name", "body"),
    [*((name, "rotary") for name in KINDS), ("linformer", "hash"), ("cosformer", "memory"), ("performer", "learned")],
)
def test_no_output_of_a_model_depends_on_a_later_token(name, body, monkeypatch):
    """The gradient to later inputs is exactly zero, other later tokens change no bit, and fewer change nothing."""
    monkeypatch.setattr(efficient_attention, "CHUNK", 16)
    model, tokens = model_of(name, body), TOKENS
    inputs: list[Tensor] = []
    handle = model.embedding.register_forward_hook(lambda module, _, out: inputs.append(out))
    logits = model(tokens)
    handle.remove()
    for place in (0, 15, 16, 17, 40, 64, 69):
        (gradient,) = torch.autograd.grad(logits[:, place].square().sum(), inputs, retain_graph=True)
        assert (gradient[:, place + 1 :] == 0).all()
        assert (gradient[:, place] != 0).any()
        assert place < 2 or (gradient[:, : place - 1] != 0).any(-1).all()  # it sees all earlier ones
    for place in (15, 16, 40):
        changed = tokens.clone()
        changed[:, place + 1 :] = (changed[:, place + 1 :] + 7) % 50
        assert torch.equal(model(changed)[:, : place + 1], logits[:, : place + 1])
        torch.testing.assert_close(model(tokens[:, : place + 1]), logits[:, : place + 1])


@pytest.mark.parametrize("name", KINDS)
def test_queries_and_keys_are_rotated_first_and_there_is_no_cache(name):
    model = model_of(name, "rotary").double()
    attention, x_BTD = model.blocks[0].attention, torch.randn(1, 20, 16, dtype=torch.float64)
    turn = rotation(torch.arange(20), model.rotary_width, model.rotary_base)
    q_BhTe, k_BhTe, v_BhTe = attention.qkv(x_BTD).view(1, 20, 3, 2, 8).permute(2, 0, 3, 1, 4)
    mixed_BhTe = attention.efficient(rotate(q_BhTe, turn), rotate(k_BhTe, turn), v_BhTe)
    expected = attention.out(mixed_BhTe.transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x_BTD, turn, None), expected)
    assert (attention(x_BTD, None, None) - expected).abs().max() > 1e-3
    with pytest.raises(ValueError, match="cache"):
        model(TOKENS, KVCache(SHAPE["context"]))


def test_what_a_gpu_is_given_is_the_same_attention(tmp_path):
    """A mask that is added, and keys and values that are repeated for the heads that share them."""
    mask = (torch.rand(2, 9, 9, generator=torch.Generator().manual_seed(1)) < 0.4) | torch.eye(9, dtype=torch.bool)
    layout = AttentionLayout(None, mask)
    q, _, _ = drawn(2, 6, 9)
    k, v, _ = drawn(2, 2, 9, seed=1)
    added = layout.as_added(torch.float64)
    expected = scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], enable_gqa=True)
    repeated = (repeat_heads(x, 6) for x in (k, v))
    found = scaled_dot_product_attention(q, *repeated, attn_mask=added.mask_BTT[:, None])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    assert torch.equal(positions_of(added), mask.sum(-1) - 1), "not counted from what is added"
    with torch.autocast("cpu", torch.bfloat16):
        assert layout.as_added(torch.float32).mask_BTT.dtype == torch.bfloat16, "that of queries"
    model = build_model(recipe_2019(), 40).double().eval()
    tokens = torch.randint(40, (2, 9), generator=torch.Generator().manual_seed(2))
    positions = torch.arange(9).expand(2, 9)
    hidden = [model.hidden(tokens, layout=each._replace(positions_BT=positions)) for each in (layout, added)]
    torch.testing.assert_close(*hidden, rtol=0, atol=1e-12)


def test_tasks_score_each_choice_by_itself(trained):
    name = "cosformer"
    run = load_run(trained("dense"))
    recipe = replace(run.recipe, model=model_2019(attention=name, **SHAPE), train=TRAIN)
    model = build_model(recipe, run.tokenizer.size).eval()
    run = replace(run, recipe=recipe, model=model)
    pairs = [("The old house stood", choice) for choice in (" on a hill", " on a rock", " alone", " on a hill")]
    asked = [Instance("loglikelihood", {}, pair, 0, ("mine", place, 1)) for place, pair in enumerate(pairs)]
    for (value, _), (context, choice) in zip(PkmLM(run).loglikelihood(asked), pairs, strict=True):
        ids, before = run.tokenizer.encode(context + choice), len(run.tokenizer.encode(context))
        log_p = model(torch.tensor([ids[:-1]]))[0].detach().double().log_softmax(-1)
        assert value == pytest.approx(sum(float(log_p[i - 1, ids[i]]) for i in range(before, len(ids))), abs=1e-4)
    with pytest.raises(UserError, match=f"{name} attention cannot generate"):
        PkmLM(run).generate_until([Instance("generate_until", {}, ("The", {}), 0, ("mine", 0, 1))])
