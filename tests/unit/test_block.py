"""The block of 2026 against a plain one; documents that do not see each other; Muon."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from pkmlm.device import is_native_on_cpu
from pkmlm.model.attention import Documents, KVCache
from pkmlm.model.transformer import Transformer, build_model, matrices_of
from pkmlm.recipe.load import load_recipe
from pkmlm.train.compile_and_recompute import recompute_activations
from pkmlm.train.muon import Muon
from pkmlm.train.optim import parameter_groups

WIDTH, LAYERS, HEADS, VOCAB, CONTEXT = 24, 2, 4, 50, 32
MODERN = f"""name: modern
model:
  dim: {WIDTH}
  layers: {LAYERS}
  heads: {HEADS}
  context: {CONTEXT}
  norm: rms
  ffn: swiglu
  ffn_dim: 40
  positions: rotary
  qk_norm: true
  bias: none
  tie_embeddings: false
  document_mask: false
  init: small
train: {{batch_tokens: 64, micro_batch: 2}}
"""


def recipe_of(folder, *overrides):
    path = folder / "modern.yaml"
    path.write_text(MODERN)
    return load_recipe(path, overrides)


def random_model(folder, *overrides) -> Transformer:
    """A model in fp64 whose every weight is random: gains, too, and what starts at zero."""
    model = build_model(recipe_of(folder, *overrides), VOCAB).double()
    random = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
        parameter.data.add_(noise, alpha=0.3 if parameter.ndim == 1 else 0.1)
    return model.eval()


def part_of(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): each for name, each in weights.items() if name.startswith(prefix)}


def rms(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain


def turned(x: Tensor, base: float) -> Tensor:
    """Entry i of the first half and entry i of the second are a pair, rotated by position / base^(2 i / width), in
    fp32.
    """
    out, width = x.clone(), x.shape[-1]
    frequencies = base ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
    for position in range(x.shape[-2]):
        for i, frequency in enumerate(frequencies):
            cos, sin = (position * frequency).cos().double(), (position * frequency).sin().double()
            a, b = x[..., position, i], x[..., position, i + width // 2]
            out[..., position, i] = a * cos - b * sin
            out[..., position, i + width // 2] = b * cos + a * sin
    return out


def plain(weights: dict[str, Tensor], tokens: Tensor, heads: int, value_heads: int, width: int, base: float) -> Tensor:
    """Logits (T, V) of one sequence, by equations that follow from the keys alone."""
    x = weights["embedding.weight"][tokens]
    for layer in range(LAYERS):
        w = part_of(weights, f"blocks.{layer}.")
        h = rms(x, w["attention_norm.weight"]) @ w["attention.qkv.weight"].T + w.get("attention.qkv.bias", 0)
        q, k, v = (
            part.unflatten(-1, (-1, width)).transpose(0, 1)
            for part in h.split([heads * width, value_heads * width, value_heads * width], -1)
        )
        if "attention.query_norm.weight" in w:
            q, k = rms(q, w["attention.query_norm.weight"]), rms(k, w["attention.key_norm.weight"])
        q, k = turned(q, base), turned(k, base)
        mixed = []
        for head in range(heads):
            group = head // (heads // value_heads)
            scores = q[head] @ k[group].T / math.sqrt(width)
            hidden = torch.ones_like(scores).triu(1).bool()
            mixed.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v[group])
        x = x + torch.cat(mixed, -1) @ w["attention.out.weight"].T
        h = rms(x, w["norm.weight"])
        gate, up = (h @ w["parts.ffn.up.weight"].T).chunk(2, -1)
        x = x + (silu(gate) * up) @ w["parts.ffn.down.weight"].T
    return rms(x, weights["norm.weight"]) @ weights["untied_head.weight"].T


@pytest.mark.parametrize(
    ("overrides", "value_heads", "width", "base"),
    [
        ([], 4, 6, 1e4),
        (["model.kv_heads=2", "model.qk_norm=false", "model.rotary_base=500"], 2, 6, 500.0),
        (["model.kv_heads=1", "model.head_dim=10", "model.bias=qkv"], 1, 10, 1e4),
    ],
)
def test_the_block_is_that_of_its_equations(tmp_path, overrides, value_heads, width, base):
    model = random_model(tmp_path, *overrides)
    tokens = torch.randint(VOCAB, (CONTEXT,), generator=torch.Generator().manual_seed(2))
    weights = {name: each.detach().clone().requires_grad_() for name, each in model.named_parameters()}
    expected = plain(weights, tokens, HEADS, value_heads, width, base)
    torch.testing.assert_close(model(tokens[None])[0], expected, rtol=0, atol=1e-12)
    direction = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    (expected * direction).sum().backward()
    (model(tokens[None])[0] * direction).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=0, atol=1e-11, msg=name)


MEMORIES = (
    "model.memories={n: {kind: ngram, layers: all, rows: 251, row_dim: 8, heads: 2}, "
    "p: {kind: product-key, layers: 2, num_keys: 16, topk: 4, key_dim: 16, query_norm: rms}}"
)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model.positions=learned"],
        ["model.smear=true", "model.kv_heads=2"],
        [MEMORIES],
        ["model.residual=parallel", MEMORIES],
    ],
)
def test_documents_of_a_sequence_do_not_see_each_other(tmp_path, overrides):
    model = random_model(tmp_path, "model.document_mask=true", *overrides)
    random = torch.Generator().manual_seed(4)
    documents = [
        torch.cat([torch.zeros(1, dtype=int), torch.randint(1, VOCAB, (n,), generator=random)]) for n in (9, 13)
    ]
    packed = torch.cat(documents)[None]
    expected = torch.cat([model(document[None])[0] for document in documents])
    torch.testing.assert_close(model(packed)[0], expected, rtol=0, atol=1e-12)
    seeing = random_model(tmp_path, *overrides)
    assert (seeing(packed)[0, 10:] - expected[10:]).abs().max() > 1e-3

    cache = KVCache(CONTEXT)
    pieces = [model(packed[:, start:stop], cache)[0] for start, stop in ((0, 7), (7, 8), (8, 12), (12, 24))]
    torch.testing.assert_close(torch.cat(pieces), expected, rtol=0, atol=1e-12)

    loss = model(packed)[0, :10].square().sum()
    loss.backward()
    own = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    model(documents[0][None])[0].square().sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(own[name], parameter.grad, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize(("context", "edges"), [(96, 0.05), (320, 0.05), (320, 0.005)])
@pytest.mark.parametrize(
    "overrides",
    [
        ["model.kv_heads=2"],
        ["model.positions=learned", "train.recompute=true"],
        ["model.smear=true", "model.kv_heads=1", MEMORIES],
    ],
)
def test_documents_that_begin_anywhere_do_not_see_each_other(tmp_path, context, edges, overrides, monkeypatch):
    """With a mask; or long ones by themselves."""
    apart = []

    class Noted(Documents):
        def __init__(self, positions_BT):
            apart.append(positions_BT)
            super().__init__(positions_BT)

    monkeypatch.setattr("pkmlm.model.attention.Documents", Noted)
    sizes = [f"model.context={context}", f"train.batch_tokens={2 * context}"]
    model = random_model(tmp_path, "model.document_mask=true", *sizes, *overrides).train()
    if "train.recompute=true" in overrides:
        for block in model.blocks:
            recompute_activations(block)
    random = torch.Generator().manual_seed(6)
    packed = torch.randint(1, VOCAB, (3, context), generator=random)
    packed[:2][torch.rand(2, context, generator=random) < edges] = 0  # the third sequence is of one document
    packed[0, 40:42], packed[1, -1] = 0, 0  # documents of one token
    direction = torch.randn(3, context, VOCAB, dtype=torch.float64, generator=random)
    together = model(packed)
    assert bool(apart) == (edges == 0.005)
    (together * direction).sum().backward()
    gradients = {name: each.grad.clone() for name, each in model.named_parameters()}
    model.zero_grad()
    for row in range(3):
        starts = [0, *(packed[row, 1:] == 0).nonzero()[:, 0] + 1, context]
        for start, stop in pairwise(starts):
            alone = model(packed[row : row + 1, start:stop])[0]
            torch.testing.assert_close(together[row, start:stop], alone, rtol=0, atol=1e-12)
            (alone * direction[row, start:stop]).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-10, msg=name)


def test_smear_adds_a_part_of_the_token_before(tmp_path):
    model = random_model(tmp_path, "model.smear=true")
    tokens = torch.tensor([[0, 5, 7, 0, 9]])
    embedded = model.embedding(tokens)
    gate = torch.sigmoid(embedded[..., :16] @ model.smear.gate.weight[0])[..., None]
    before = torch.zeros_like(embedded)
    before[:, 1], before[:, 2], before[:, 4] = embedded[:, 0], embedded[:, 1], embedded[:, 3]  # none before a document
    expected = embedded + model.smear.scale_1 * gate * before
    (first, *_) = model.states(tokens)
    torch.testing.assert_close(first, expected, rtol=0, atol=1e-12)
    fresh = build_model(recipe_of(tmp_path, "model.smear=true"), VOCAB)
    assert torch.equal(next(fresh.states(tokens)), fresh.embedding(tokens))


def test_zero_out_starts_as_the_head_of_the_embedding(tmp_path):
    model = build_model(recipe_of(tmp_path, "model.init=zero-out"), VOCAB)
    tokens = torch.arange(20)[None]
    torch.testing.assert_close(model.hidden(tokens), model.norm(model.embedding(tokens)), rtol=0, atol=0)


def test_muon_trains_the_matrices_of_attention_and_the_ffn_as_torch_does(tmp_path):
    recipe = recipe_of(tmp_path, "optim.muon.lr=0.03", "train.steps=20", MEMORIES)
    model, twin = (build_model(recipe, VOCAB) for _ in range(2))
    groups = parameter_groups(model, recipe)
    assert [group.name for group in groups] == ["dense", "muon", "n", "p"]
    names = matrices_of(model)
    assert [*groups[1].parameters] == names
    assert names == [
        *(f"blocks.0.{name}.weight" for name in ("attention.qkv", "attention.out", "parts.ffn.up", "parts.ffn.down")),
        *(f"blocks.1.{name}.weight" for name in ("attention.qkv", "attention.out")),  # its FFN is a memory
    ]
    everything = [name for group in groups for name in group.parameters]
    assert sorted(everything) == sorted(name for name, _ in model.named_parameters())

    settings = {"lr": 0.03, "weight_decay": 0.0, "momentum": 0.95}
    matrices = [twin.get_parameter(name) for name in names]
    muon = (
        torch.optim.Muon(matrices, **settings) if is_native_on_cpu("bf16") else Muon(matrices, dtype=None, **settings)
    )
    random = torch.Generator().manual_seed(5)
    for step in range(1, 21):
        for group in muon.param_groups:
            group["lr"] = groups[1].schedule.lr_at(step)
        for name in names:
            gradient = torch.randn(model.get_parameter(name).shape, generator=random)
            model.get_parameter(name).grad, twin.get_parameter(name).grad = gradient.clone(), gradient.clone()
        groups[1].step(step)
        muon.step()
    for name in names:
        assert torch.equal(model.get_parameter(name), twin.get_parameter(name)), name


def test_muon_in_fp32_is_torchs_up_to_the_rounding_of_bf16():
    """Against torch's own, and in fp64 against its equations, written with the powers of the polynomial."""
    random = torch.Generator().manual_seed(5)
    shapes = [(8, 8), (24, 8), (8, 24), (3, 40)]
    ours, theirs, exact = ([torch.nn.Parameter(torch.zeros(shape)) for shape in shapes] for _ in range(3))
    exact = [torch.nn.Parameter(each.double()) for each in exact]
    settings = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
    optimizers = [Muon(each, dtype=None, **settings) for each in (ours, exact)]
    optimizers.append(torch.optim.Muon(theirs, adjust_lr_fn="original", **settings))
    weights = [each.detach().clone() for each in exact]
    momenta = [torch.zeros_like(each) for each in exact]
    for _ in range(5):
        for number, (a, b, c) in enumerate(zip(ours, theirs, exact, strict=True)):
            gradient = torch.randn(a.shape, generator=random)
            a.grad, b.grad, c.grad = gradient, gradient.clone(), gradient.double()
            momenta[number] = 0.9 * momenta[number] + 0.1 * c.grad
            x = 0.1 * c.grad + 0.9 * momenta[number]
            x = x / torch.linalg.matrix_norm(x)
            for _ in range(5):
                x = 3.4445 * x - 4.775 * x @ x.T @ x + 2.0315 * x @ x.T @ x @ x.T @ x
            rate = 0.02 * max(1, a.shape[0] / a.shape[1]) ** 0.5
            weights[number] = weights[number] * (1 - 0.02 * 0.1) - rate * x
        for optimizer in optimizers:
            optimizer.step()
    for a, b, c, by_hand in zip(ours, theirs, exact, weights, strict=True):
        torch.testing.assert_close(c, by_hand, rtol=0, atol=1e-13, check_dtype=True)
        torch.testing.assert_close(a.double(), by_hand, rtol=0, atol=1e-6)
        torch.testing.assert_close(b.double(), by_hand, rtol=0, atol=3e-3)


def test_muon_in_bf16_has_torchs_bits_and_can_be_skipped():
    random = torch.Generator().manual_seed(6)
    shapes = [(8, 8), (24, 8), (8, 24), (3, 40)]
    ours, theirs = ([torch.nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in range(2))
    settings = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
    muon = Muon(ours, dtype=torch.bfloat16, **settings)
    torchs = torch.optim.Muon(theirs, adjust_lr_fn="original", **settings)
    for step in range(4):
        for a, b in zip(ours, theirs, strict=True):
            gradient = torch.randn(a.shape, generator=random)
            a.grad, b.grad = gradient, gradient.clone()
        muon.step()
        torchs.step()
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b), step
            assert torch.equal(muon.state[a]["momentum_buffer"], torchs.state[b]["momentum_buffer"]), step
    before = [(a.detach().clone(), muon.state[a]["momentum_buffer"].clone()) for a in ours]
    for a in ours:
        a.grad[0, 0] = float("nan")
    muon.found_inf = torch.ones(())
    muon.step()
    for a, (weights, momentum) in zip(ours, before, strict=True):
        assert torch.equal(a, weights)
        assert torch.equal(muon.state[a]["momentum_buffer"], momentum)
    for a, b in zip(ours, theirs, strict=True):
        a.grad, b.grad = torch.ones_like(a), torch.ones_like(b)
    muon.found_inf = torch.zeros(())
    muon.step()
    torchs.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
