"""Memory+ and PEER against brute force over all slots, in float64: outputs and every gradient.

The references share nothing with the package but the names of the weights: they score every slot of the memory, and let
autograd find all gradients.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pkmlm.cost import cost_of
from pkmlm.device import autocast
from pkmlm.memory import table as table_module
from pkmlm.memory.init import initialise
from pkmlm.memory.key_memory import KeyMemory
from pkmlm.memory.key_spec import KeySpec
from pkmlm.memory.product_key.layer import ProductKeyMemory
from pkmlm.memory.registry import SPECS
from pkmlm.memory.table import tables_of
from pkmlm.model.transformer import build_model
from pkmlm.recipe.schema import Recipe, Train
from pkmlm.train.optim import parameter_groups
from tests.conftest import model_2019, recipe_2019

D, HEADS, N, TOPK, Q = 12, 3, 5, 4, 8
KINDS = ["product-key", "flat-key", "peer"]
ALL = {"gate": "silu", "value_dim": 7, "key_norm": "rms"}
CASES = [
    *itertools.product(KINDS, [{}, {"gate": "silu"}, {"value_dim": 7}, {"key_norm": "rms"}], ["softmax"]),
    *itertools.product(KINDS, [ALL], ["softmax", "relu", "none"]),
    ("peer", {"expert": "relu"}, "softmax"),
]


def spec_of(kind: str = "product-key", **keys: object) -> KeySpec:
    sizes = {"layers": ("1",), "num_keys": N, "heads": HEADS, "topk": TOPK, "key_dim": Q, "query_norm": "none"}
    return SPECS[kind](**{**sizes, **keys})


def memory_of(spec: KeySpec) -> KeyMemory:
    """A memory in float64, none of whose weights has a value that a mistake could give too."""
    memory = spec.layer(D, **spec.arguments)
    initialise(memory, 1)
    random = torch.Generator().manual_seed(2)
    for parameter in memory.parameters():
        parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=random) * (parameter.ndim == 1))
    return memory.double()


def rms(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * gain


def scores_of_all_slots(w: dict[str, Tensor], spec: KeySpec, x: Tensor) -> Tensor:
    """(tokens, heads, slots)."""
    q = (x @ w["query.map.weight"].T + w["query.map.bias"]).view(-1, HEADS, Q)
    if spec.kind == "flat-key":
        keys = w["keys_HKq"]
        if spec.key_norm == "rms":
            q, keys = rms(q, w["key_norm.query_gain_f"]), rms(keys, w["key_norm.key_gain_f"])
        return torch.einsum("thq,hsq->ths", q, keys)
    scores = []
    for i, j in itertools.product(range(N), range(N)):  # slot i * n + j
        score = 0
        for half, number in ((0, i), (1, j)):
            part, key = q[..., half * Q // 2 : (half + 1) * Q // 2], w["subkeys_H2nf"][:, half, number]
            if spec.key_norm == "rms":
                part, key = rms(part, w["key_norm.query_gain_f"]), rms(key, w["key_norm.key_gain_f"])
            score = score + (part * key).sum(-1)
        scores.append(score)
    return torch.stack(scores, -1)


def weights_of_all_slots(w: dict[str, Tensor], spec: KeySpec, x: Tensor) -> Tensor:
    """(tokens, heads, slots): 0 for those that a head does not read."""
    scores = scores_of_all_slots(w, spec, x)
    kept = scores >= scores.topk(TOPK).values[..., -1:]
    assert (kept.sum(-1) == TOPK).all()
    if spec.scores == "softmax":
        return scores.masked_fill(~kept, -torch.inf).softmax(-1)
    return (scores.clamp(min=0) if spec.scores == "relu" else scores) * kept


def reference(w: dict[str, Tensor], spec: KeySpec, x: Tensor) -> Tensor:
    weights = weights_of_all_slots(w, spec, x)
    if spec.kind == "peer":
        z = (x @ w["inputs.weight_KD"].T)[:, None]
        weights = weights * (z.clamp(min=0) if spec.expert == "relu" else z * torch.special.ndtr(z))
    y = torch.einsum("ths,sv->tv", weights, w["values.weight_KD"])
    if spec.gate == "silu":
        z = x @ w["gate.weight"].T + w["gate.bias"]
        y = y * z / (1 + torch.exp(-z))
    if spec.gate == "silu" or spec.value_dim not in (None, D):
        y = y @ w["output.weight"].T + w["output.bias"]
    return y


def gradients(loss: Tensor, of: dict[str, Tensor]) -> dict[str, Tensor]:
    found = torch.autograd.grad(loss, list(of.values()), allow_unused=True)
    return dict(zip(of, found, strict=True))


@pytest.mark.parametrize(("kind", "keys", "scores"), CASES, ids=str)
def test_outputs_and_gradients_are_those_of_brute_force(kind, keys, scores):
    spec = spec_of(kind, scores=scores, **keys)
    memory = memory_of(spec)
    x = torch.randn(2, 9, D, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    out = memory(x)
    weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in memory.named_parameters()}
    again = x.detach().clone().requires_grad_()
    expected = reference(weights, spec, again.flatten(0, 1)).view_as(x)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
    direction = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    found = gradients((out * direction).sum(), {"x": x, **dict(memory.named_parameters())})
    wanted = gradients((expected * direction).sum(), {"x": again, **weights})
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        assert grad is not None, name
        assert grad.abs().sum() > 0, name
        torch.testing.assert_close(found[name], grad, rtol=0, atol=1e-10, msg=name)


def test_the_reference_by_hand():
    """One head, one read, two sub-keys a half: slot 2 (i = 1, j = 0) scores 2 + 3 and is the only one read."""
    sizes = {"num_keys": 2, "heads": 1, "topk": 1, "key_dim": 2, "value_dim": 1}
    memory = ProductKeyMemory(2, **sizes, query_norm="none", gate="silu", scores="none").double()
    given = {
        "query.map.weight": [[1.0, 0.0], [0.0, 1.0]],
        "query.map.bias": [0.0, 0.0],
        "subkeys_H2nf": [[[[1.0], [2.0]], [[3.0], [-1.0]]]],
        "values.weight_KD": [[10.0], [20.0], [30.0], [40.0]],
        "gate.weight": [[1.0, 1.0]],
        "gate.bias": [-2.0],
        "output.weight": [[1.0], [2.0]],
        "output.bias": [0.5, 0.25],
    }
    memory.load_state_dict({name: torch.tensor(value, dtype=torch.float64) for name, value in given.items()})
    out = memory(torch.ones(1, 1, 2, dtype=torch.float64))  # silu(1 + 1 - 2) = 0: only the bias gets through
    assert out.flatten().tolist() == [0.5, 0.25]
    out = memory(torch.tensor([[[1.0, 3.0]]], dtype=torch.float64))  # slot 2: 2 * 1 + 3 * 3 = 11; silu(2)
    m = 11 * 30 * 2 / (1 + torch.exp(torch.tensor(-2.0, dtype=torch.float64)))
    torch.testing.assert_close(out.flatten(), torch.stack([m + 0.5, 2 * m + 0.25]))


@pytest.mark.parametrize(("scores", "weight"), [("softmax", 1.0), ("relu", 0.0), ("none", -2.0)])
def test_the_weight_of_a_negative_score(scores, weight):
    """One slot, whose two sub-keys are opposite to the query."""
    memory = ProductKeyMemory(2, num_keys=1, heads=1, topk=1, key_dim=2, query_norm="none", scores=scores).double()
    given = {
        "query.map.weight": [[1.0, 0.0], [0.0, 1.0]],
        "query.map.bias": [0.0, 0.0],
        "subkeys_H2nf": [[[[-1.0]], [[-1.0]]]],
        "values.weight_KD": [[3.0, 5.0]],
    }
    memory.load_state_dict({name: torch.tensor(value, dtype=torch.float64) for name, value in given.items()})
    assert memory(torch.ones(1, 1, 2, dtype=torch.float64)).flatten().tolist() == [3 * weight, 5 * weight]


def start(**keys) -> Tensor:
    """What a memory of 128 reads starts with, for inputs of unit size, times the root of the width."""
    width = 256
    memory = ProductKeyMemory(width, num_keys=64, heads=4, topk=32, key_dim=128, query_norm="rms", **keys)
    initialise(memory, 5)
    x = torch.randn(1, 400, width, generator=torch.Generator().manual_seed(6))
    return memory(x).square().mean().sqrt().item() * width**0.5


@pytest.mark.parametrize("value_dim", [None, 96])
def test_a_gated_memory_starts_at_its_size(value_dim):
    assert start(gate="silu", value_dim=value_dim, key_norm="rms") == pytest.approx(0.21, rel=0.1)
    assert start(value_dim=value_dim, key_norm="rms") == pytest.approx(0.356, rel=0.1)


@pytest.mark.parametrize("scores", ["relu", "none"])
def test_a_memory_without_a_softmax_starts_at_a_like_size(scores):
    assert start(scores=scores, key_norm="rms") == pytest.approx(0.39, rel=0.1)
    assert start(scores=scores) == pytest.approx(0.78, rel=0.1)


def test_gains_of_the_key_norm_start_where_scores_are_small():
    memory = memory_of(spec_of(key_norm="rms"))
    initialise(memory, 1)
    for gain in (memory.key_norm.query_gain_f, memory.key_norm.key_gain_f):
        torch.testing.assert_close(gain, torch.full_like(gain, (Q / 2) ** -0.4))
    before = memory(x := torch.ones(1, 1, D, dtype=torch.float64))
    memory.subkeys_H2nf.data.mul_(7)  # the norm takes the size out
    torch.testing.assert_close(memory(x), before, rtol=1e-4, atol=0)


def test_biases_are_drawn():
    memory = memory_of(spec_of(gate="silu"))
    initialise(memory, 1)
    for map_ in (memory.gate, memory.output):
        assert map_.bias.eq(0).all()
        assert map_.weight.std().item() == pytest.approx(D**-0.5, rel=0.2)


def pool_of(kind: str, **keys: object) -> Recipe:
    spec = spec_of(kind, **{"layers": ("1", "3+"), "share_values": True, **keys})
    model = model_2019(dim=D, layers=3, heads=2, context=8, memories={"plus": spec})
    return recipe_2019(model=model, train=Train(batch_tokens=32, micro_batch=2))


def tokens(seed: int = 0) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(30, (3, 9), generator=torch.Generator().manual_seed(seed))
    return drawn[:, :-1], drawn[:, 1:]


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_of_a_pool_is_the_sum_of_those_of_two_tables(kind):
    keys = {"gate": "silu", "key_norm": "rms"}
    pooled = build_model(pool_of(kind, **keys), 30).double()
    own = build_model(pool_of(kind, **keys, share_values=False), 30).double()
    paths = {
        name: [name] if "pools" not in name else [name.replace("pools", f"blocks.{layer}.parts") for layer in (0, 2)]
        for name in pooled.state_dict()
    }
    own.load_state_dict({path: tensor for name, tensor in pooled.state_dict().items() for path in paths[name]})
    for model in (pooled, own):
        model.loss(*tokens()).backward()
    grads = {name: parameter.grad for name, parameter in own.named_parameters()}
    for name, parameter in pooled.named_parameters():
        expected = [grads[path] for path in paths[name]]
        torch.testing.assert_close(parameter.grad, sum(expected), rtol=0, atol=1e-12, msg=name)
        assert all(grad.abs().sum() > 0 for grad in expected), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_pool_trains_as_a_dense_table_would(kind):
    """What row Adam is given, of several micro-batches, is the dense gradient; layers' reads are in one place."""
    recipe = pool_of(kind)
    rows, dense = build_model(recipe, 30).double(), build_model(recipe, 30).double()
    (group,) = [group for group in parameter_groups(rows, recipe) if group.name == "plus"]
    assert set(group.parameters) == {name for name, _ in rows.named_parameters() if name.startswith("pools.")}
    for seed in range(2):
        for model in (rows, dense):
            model.loss(*tokens(seed)).backward()
    for name, table in tables_of(rows).items():
        torch.testing.assert_close(table.gradient.dense(), dense.get_parameter(name).grad, rtol=0, atol=1e-12, msg=name)
        assert table.weight_KD.grad is None


def test_a_pool_is_stored_and_counted_once_and_models_share_nothing():
    for kind in KINDS:
        recipe = pool_of(kind, value_dim=7, gate="silu")
        first, second = build_model(recipe, 30), build_model(recipe, 30)
        names = [name for name in first.state_dict() if ".weight_KD" in name]
        tables = ["inputs", "values"] if kind == "peer" else ["values"]
        assert names == [f"pools.memory_plus.{table}.weight_KD" for table in tables]
        assert not {p.data_ptr() for p in first.parameters()} & {p.data_ptr() for p in second.parameters()}
        reading = [block.parts["memory_plus"].values for block in first.blocks if "memory_plus" in block.parts]
        assert [table is first.pools["memory_plus"].values for table in reading] == [True, True]
        cost = cost_of(recipe, 30)
        assert cost.memory == sum(first.get_parameter(name).numel() for name in names)
        assert cost.dense + cost.memory == sum(parameter.numel() for parameter in first.parameters())
        assert cost.gather_bytes_per_token == 2 * 2 * HEADS * TOPK * (7 + (D if kind == "peer" else 0))


def test_one_layer_has_no_pool():
    model = build_model(pool_of("product-key", layers=("2",)), 30)
    assert not model.pools
    assert "blocks.1.parts.memory_plus.values.weight_KD" in model.state_dict()


def test_two_memories_have_two_pools():
    recipe = pool_of("product-key")
    plus = recipe.model.memories["plus"]
    memories = {"plus": plus, "other": replace(plus, layers=("2", "3"), num_keys=4)}
    model = build_model(replace(recipe, model=replace(recipe.model, memories=memories)), 30)
    parts = model.blocks[2].parts
    for name, rows in (("memory_plus", 25), ("memory_other", 16)):
        assert parts[name].values is model.pools[name].values
        assert parts[name].values.weight_KD.shape == (rows, D)


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_reads_copies_of_all_tables(monkeypatch, kind):
    """As on a GPU, where alone forwards read copies: near the numbers in fp32, with gradients in fp32."""
    recipe = pool_of(kind, gate="silu", key_norm="rms")
    found = []
    for half in (False, True):
        monkeypatch.setattr(table_module, "HALF_ON", ("cpu",) if half else ())
        model = build_model(recipe, 30)
        parameter_groups(model, recipe)
        with autocast(torch.device("cpu"), "bf16"):
            loss = model.loss(*tokens())
        loss.backward()
        assert all((table.copy_KD is not None) is half for table in tables_of(model).values())
        found.append((loss, [table.gradient.dense() for table in tables_of(model).values()]))
    (loss, gradients_), (near, nearly) = found
    assert near.item() == pytest.approx(loss.item(), rel=1e-3)
    for gradient, other in zip(gradients_, nearly, strict=True):
        assert other.dtype == torch.float32
        assert (gradient - other).norm() < 0.1 * gradient.norm()
