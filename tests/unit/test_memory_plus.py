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
from pkmlm.memory.flat_key.layer import FlatKeyMemory
from pkmlm.memory.init import initialise
from pkmlm.memory.key_memory import KeyMemory
from pkmlm.memory.peer.layer import PEER
from pkmlm.memory.product_key.layer import ProductKeyMemory
from pkmlm.memory.table import tables_of
from pkmlm.model.transformer import Transformer, build_model
from pkmlm.recipe.schema import Memory, Model, Recipe, Train
from pkmlm.train.optim import parameter_groups

D, HEADS, N, TOPK, Q = 12, 3, 5, 4, 8
MEMORY = Memory(kind="product-key", layers=("1",), num_keys=N, heads=HEADS, topk=TOPK, key_dim=Q, query_norm="none")
KINDS = {"product-key": ProductKeyMemory, "flat-key": FlatKeyMemory, "peer": PEER}
ALL = {"gate": "silu", "value_dim": 7, "key_norm": "rms"}
CASES = [
    *itertools.product(KINDS, [{}, {"gate": "silu"}, {"value_dim": 7}, {"key_norm": "rms"}], ["softmax"]),
    *itertools.product(KINDS, [ALL], ["softmax", "relu", "none"]),
    ("peer", {"expert": "relu"}, "softmax"),
]


def memory_of(spec: Memory, dim: int = D) -> KeyMemory:
    """A memory in float64, none of whose weights has a value that a mistake could give too."""
    memory = KINDS[spec.kind](dim, **spec.arguments)
    initialise(memory, 1)
    random = torch.Generator().manual_seed(2)
    for parameter in memory.parameters():
        parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=random) * (parameter.ndim == 1))
    return memory.double()


def rms(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * gain


def scores_of_all_slots(w: dict[str, Tensor], spec: Memory, x: Tensor) -> Tensor:
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


def weights_of_all_slots(w: dict[str, Tensor], spec: Memory, x: Tensor) -> Tensor:
    """(tokens, heads, slots): 0 for those that a head does not read."""
    scores = scores_of_all_slots(w, spec, x)
    kept = scores >= scores.topk(TOPK).values[..., -1:]
    assert (kept.sum(-1) == TOPK).all()
    if spec.scores == "softmax":
        return scores.masked_fill(~kept, -torch.inf).softmax(-1)
    return (scores.clamp(min=0) if spec.scores == "relu" else scores) * kept


def reference(w: dict[str, Tensor], spec: Memory, x: Tensor) -> Tensor:
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
    spec = replace(MEMORY, kind=kind, scores=scores, **keys)
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
    spec = Memory(kind="product-key", layers=("1",), num_keys=2, heads=1, topk=1, key_dim=2, query_norm="none")
    spec = replace(spec, gate="silu", value_dim=1, scores="none")
    memory = ProductKeyMemory(2, **spec.arguments).double()
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
    spec = Memory(kind="product-key", layers=("1",), num_keys=64, heads=4, topk=32, key_dim=128, query_norm="rms")
    memory = ProductKeyMemory(width, **replace(spec, **keys).arguments)
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
    memory = memory_of(replace(MEMORY, key_norm="rms"))
    initialise(memory, 1)
    for gain in (memory.key_norm.query_gain_f, memory.key_norm.key_gain_f):
        torch.testing.assert_close(gain, torch.full_like(gain, (Q / 2) ** -0.4))
    before = memory(x := torch.ones(1, 1, D, dtype=torch.float64))
    memory.subkeys_H2nf.data.mul_(7)  # the norm takes the size out
    torch.testing.assert_close(memory(x), before, rtol=1e-4, atol=0)


def test_biases_are_drawn():
    memory = memory_of(replace(MEMORY, gate="silu"))
    initialise(memory, 1)
    for map_ in (memory.gate, memory.output):
        assert map_.bias.eq(0).all()
        assert map_.weight.std().item() == pytest.approx(D**-0.5, rel=0.2)


POOLED = replace(MEMORY, layers=("1", "3+"), share_values=True)
KINDS_OF_POOL = ["product-key", "flat-key", "peer"]


def recipe_of(memory: Memory) -> Recipe:
    model = Model(dim=D, layers=3, heads=2, context=8, memory=memory)
    return Recipe(model=model, train=Train(batch_tokens=32, micro_batch=2))


def tokens(seed: int = 0) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(30, (3, 9), generator=torch.Generator().manual_seed(seed))
    return drawn[:, :-1], drawn[:, 1:]


def with_own_tables(pooled: Transformer, spec: Memory) -> Transformer:
    """The same model, each of whose memories has a copy of the pool."""
    own = build_model(recipe_of(replace(spec, share_values=False)), 30).double()
    state = pooled.state_dict()
    for layer in (0, 2):
        for name in list(pooled.pool.state_dict()):
            state[f"blocks.{layer}.parts.memory.{name}"] = state[f"pool.{name}"]
    own.load_state_dict({name: tensor for name, tensor in state.items() if not name.startswith("pool.")})
    return own


@pytest.mark.parametrize("kind", KINDS_OF_POOL)
def test_the_gradient_of_a_pool_is_the_sum_of_those_of_two_tables(kind):
    spec = replace(POOLED, kind=kind, gate="silu", key_norm="rms")
    pooled = build_model(recipe_of(spec), 30).double()
    own = with_own_tables(pooled, spec)
    for model in (pooled, own):
        model.loss(*tokens()).backward()
    grads = {name: parameter.grad for name, parameter in own.named_parameters()}
    for name, parameter in pooled.named_parameters():
        table = name.removeprefix("pool.")
        expected = (
            [grads[f"blocks.{layer}.parts.memory.{table}"] for layer in (0, 2)] if table != name else [grads[name]]
        )
        torch.testing.assert_close(parameter.grad, sum(expected), rtol=0, atol=1e-12, msg=name)
        assert all(grad.abs().sum() > 0 for grad in expected), name


@pytest.mark.parametrize("kind", KINDS_OF_POOL)
def test_a_pool_trains_as_a_dense_table_would(kind):
    """What row Adam is given, of several micro-batches, is the dense gradient; layers' reads are in one place."""
    recipe = recipe_of(replace(POOLED, kind=kind))
    rows, dense = build_model(recipe, 30).double(), build_model(recipe, 30).double()
    (group,) = [group for group in parameter_groups(rows, recipe) if group.name == "values"]
    assert set(group.parameters) == {name for name, _ in rows.named_parameters() if name.startswith("pool.")}
    for seed in range(2):
        for model in (rows, dense):
            model.loss(*tokens(seed)).backward()
    for name, table in tables_of(rows).items():
        torch.testing.assert_close(table.gradient.dense(), dense.get_parameter(name).grad, rtol=0, atol=1e-12, msg=name)
        assert table.weight_KD.grad is None


def test_a_pool_is_stored_and_counted_once_and_models_share_nothing():
    for kind in KINDS_OF_POOL:
        recipe = recipe_of(replace(POOLED, kind=kind, value_dim=7, gate="silu"))
        first, second = build_model(recipe, 30), build_model(recipe, 30)
        names = [name for name in first.state_dict() if ".weight_KD" in name]
        assert names == [
            f"pool.{table}.weight_KD" for table in (["inputs", "values"] if kind == "peer" else ["values"])
        ]
        assert not {p.data_ptr() for p in first.parameters()} & {p.data_ptr() for p in second.parameters()}
        reading = [block.parts["memory"].values for block in first.blocks if "memory" in block.parts]
        assert [table is first.pool.values for table in reading] == [True, True]
        cost = cost_of(recipe, 30)
        tables = sum(parameter.numel() for name, parameter in first.named_parameters() if name in names)
        assert cost.memory == tables
        assert cost.dense + cost.memory == sum(parameter.numel() for parameter in first.parameters())
        assert cost.gather_bytes_per_token == 2 * 2 * HEADS * TOPK * sum(recipe.model.table_widths)


def test_one_memory_has_no_pool():
    model = build_model(recipe_of(replace(POOLED, layers=("2",))), 30)
    assert model.pool is None
    assert "blocks.1.parts.memory.values.weight_KD" in model.state_dict()


@pytest.mark.parametrize("kind", KINDS_OF_POOL)
def test_half_precision_reads_copies_of_all_tables(monkeypatch, kind):
    """As on a GPU, where alone forwards read copies: near the numbers in fp32, with gradients in fp32."""
    recipe = recipe_of(replace(POOLED, kind=kind, gate="silu", key_norm="rms"))
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
