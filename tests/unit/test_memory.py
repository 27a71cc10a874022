"""Memories against their equations, and against the defects that other implementations were found to have."""

from dataclasses import replace

import pytest
import torch

from pkmlm.analysis.counters import UsageCounters
from pkmlm.model.init import initialise
from pkmlm.model.memory.hash_layer import HashLayer, MemoryBlock, score_rms
from pkmlm.model.memory.key_memory import FlatKeyMemory, ProductKeyMemory
from pkmlm.model.memory.query import Query, QueryBatchNorm
from pkmlm.recipe.schema import Hash, Memory

MEMORY = Memory(kind="product-key", layers=("1",), num_keys=6, heads=3, topk=5, key_dim=8)


def memory_of(spec: Memory = MEMORY, dim: int = 10):
    kind = {"product-key": ProductKeyMemory, "flat-key": FlatKeyMemory}[spec.kind]
    memory = kind(dim, spec, 1, momentum=0.1)
    initialise(memory, 1)
    return memory


@pytest.mark.parametrize("kind", ["product-key", "flat-key"])
def test_a_memory_computes_equations_1_to_4(kind):
    memory = memory_of(replace(MEMORY, kind=kind, query_norm="none")).double()
    x = torch.randn(2, 4, 10, dtype=torch.float64)
    out = memory(x)
    n, values = 6, memory.values.weight_KD
    for b, t in [(0, 0), (1, 3)]:
        expected = torch.zeros(10, dtype=torch.float64)
        q = (memory.query.map(x[b, t])).view(3, 8)
        for h in range(3):
            if kind == "product-key":
                half1, half2 = memory.subkeys_H2nf[h]
                all_scores = torch.stack([q[h, :4] @ half1[s // n] + q[h, 4:] @ half2[s % n] for s in range(n * n)])
            else:
                all_scores = memory.keys_HKq[h] @ q[h]
            best, slots = all_scores.topk(5)
            expected += best.softmax(-1) @ values[slots]
        torch.testing.assert_close(out[b, t], expected)


def test_layers_refuse_what_they_cannot_build():
    """A layer in somebody's own network has no recipe that was checked."""
    for changed in ({"kind": "flat-key"}, {"key_dim": 15}):
        with pytest.raises(ValueError, match="found"):
            ProductKeyMemory(10, replace(MEMORY, **changed), 1, momentum=0.1)
    with pytest.raises(ValueError, match=r"12 .* 8 bits"):
        HashLayer(12, 7, 8, Hash(), 1, "qkv")


@pytest.mark.parametrize("query", ["linear", "mlp"])
@pytest.mark.parametrize("norm", ["batch", "layer", "rms", "none"])
def test_every_parameter_gets_a_gradient_with_every_query_network(norm, query):
    memory = memory_of(replace(MEMORY, query_norm=norm, query=query))
    torch.manual_seed(0)
    memory(torch.randn(4, 50, 10)).square().sum().backward()
    for name, parameter in memory.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_query_norms_normalise_what_they_say():
    x = torch.randn(200, 10) * 5 + 2
    for norm in ("batch", "layer", "rms"):
        query = Query(10, replace(MEMORY, query_norm=norm), momentum=0.1)
        initialise(query, 1)
        q = query(x)
        if norm == "batch":
            torch.testing.assert_close(q.mean(0), torch.zeros(3, 8), atol=1e-4, rtol=0)
            torch.testing.assert_close(q.std(0, correction=0), torch.ones(3, 8), atol=1e-3, rtol=0)
        else:
            torch.testing.assert_close(q.square().mean(-1), torch.ones(200, 3), atol=1e-3, rtol=0)
        if norm == "layer":
            torch.testing.assert_close(q.mean(-1), torch.zeros(200, 3), atol=1e-4, rtol=0)


def test_batch_norm_is_torchs():
    ours, torchs = QueryBatchNorm(7, momentum=0.1), torch.nn.BatchNorm1d(7)
    initialise(ours, 1)
    for seed in range(3):
        x = torch.randn(20, 7, generator=torch.Generator().manual_seed(seed)) * 2 + 1
        torch.testing.assert_close(ours(x), torchs(x))
    torch.testing.assert_close(ours.running_mean, torchs.running_mean)
    torch.testing.assert_close(ours.running_var, torchs.running_var)
    torch.testing.assert_close(ours.eval()(x), torchs.eval()(x))


def test_usage_weights_are_those_after_the_softmax():
    memory, seen = memory_of(), []
    memory.tap.register_forward_hook(lambda tap, inputs, output: seen.append(output))
    memory(torch.randn(2, 5, 10))
    slots, weights = seen[0]
    assert slots.shape == weights.shape == (10, 3, 5)
    torch.testing.assert_close(weights.sum(-1), torch.ones(10, 3))
    assert int(slots.max()) < 36


def hash_layer(bits: int, spec: Hash, dim: int = 12, width: int = 7) -> HashLayer:
    layer = HashLayer(dim, width, bits, spec, 1, "qkv")
    initialise(layer, 1)
    return layer


@pytest.mark.parametrize("score", ["paper", "scaled"])
def test_a_hash_layer_computes_equation_13(score):
    layer = hash_layer(4, Hash(bits=4, score=score, temperature=0.8)).double()
    x = torch.randn(1, 6, 12, dtype=torch.float64)
    out = layer(x)
    tables = layer.values.weight_KD.view(3, 16, 7)
    for t in range(6):
        expected = torch.zeros(7, dtype=torch.float64)
        for k, z in enumerate(x[0, t].view(3, 4)):
            bucket = sum(int(z[i] >= 0) << i for i in range(4))
            p = 1 / torch.prod(1 + torch.exp(-2 * z.abs() / 0.8))
            expected += (p * z.abs().sum() if score == "scaled" else p) * tables[k, bucket]
        torch.testing.assert_close(out[0, t], expected)


@pytest.mark.parametrize("score", ["paper", "scaled"])
@pytest.mark.parametrize(("bits", "temperature"), [(1, 1.0), (4, 0.5), (8, 1.0), (8, 2.0)])
def test_hash_layers_start_at_the_size_of_a_linear_map(score, bits, temperature):
    spec = Hash(bits=bits, score=score, temperature=temperature)
    z = torch.randn(20000, bits, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    p = 1 / torch.prod(1 + torch.exp(-2 * z.abs() / temperature), -1)
    p = p * z.abs().sum(-1) if score == "scaled" else p
    assert score_rms(bits, temperature, score == "scaled") == pytest.approx(p.square().mean().sqrt().item(), rel=0.03)
    layer = hash_layer(bits, spec, dim=256, width=64)
    out = layer(torch.randn(1, 500, 256, generator=torch.Generator().manual_seed(1)))
    assert out.std().item() == pytest.approx(0.02 * 16, rel=0.1)


def test_the_memory_block_is_two_layers_with_a_norm_between():
    for activation in ("none", "gelu"):
        block = MemoryBlock(16, Hash(bits=4, extra_bits=2, activation=activation), 1, share=1.0)
        initialise(block, 1)
        x = torch.randn(2, 3, 16)
        h = block.first(x)
        assert h.shape[-1] == 6 * 4
        assert block.second.bits == 6
        h = torch.nn.functional.gelu(h) if activation == "gelu" else h
        torch.testing.assert_close(block(x), block.second(block.norm(h)))


@pytest.mark.parametrize(("kind", "training"), [("product-key", True), ("hash", False)])
def test_a_compiled_network_leaves_its_memory_as_it_is(kind, training):
    """A counter that is attached after the compilation sees the reads, too."""
    layer = memory_of() if kind == "product-key" else hash_layer(5, Hash(bits=5), dim=10, width=10)
    network = torch.nn.Sequential(torch.nn.Linear(10, 10), layer, torch.nn.Linear(10, 10)).train(training)
    compiled, x = torch.compile(network, backend="eager"), torch.randn(2, 7, 10)
    assert torch.equal(compiled(x), network(x))
    with UsageCounters(network) as reads:
        compiled(x)
    assert reads.memories()[0].tokens == 14


def test_gradients_reach_only_the_rows_read_and_the_input():
    layer = hash_layer(4, Hash(bits=4))
    rows = []
    layer.tap.register_forward_hook(lambda tap, inputs, output: rows.append(output[0].flatten()))
    x = torch.randn(1, 2, 12, requires_grad=True)
    layer(x).sum().backward()
    touched = layer.values.weight_KD.grad.abs().sum(1).nonzero()[:, 0]
    assert sorted(touched.tolist()) == sorted(set(rows[0].tolist()))
    assert x.grad.abs().sum() > 0
