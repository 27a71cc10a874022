"""Memories against their equations, and against the defects that other implementations were found to have."""

import copy
import inspect
import pydoc
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from pkmlm.measure.counters import UsageCounters
from pkmlm.memory.flat_key.layer import FlatKeyMemory
from pkmlm.memory.flat_key.spec import FlatKeySpec
from pkmlm.memory.hash.layer import HashLayer, MemoryBlock, score_rms
from pkmlm.memory.hash.spec import HashSpec
from pkmlm.memory.init import initialise
from pkmlm.memory.ngram.layer import NGramMemory
from pkmlm.memory.ngram.spec import NGramSpec
from pkmlm.memory.peer.layer import PEER
from pkmlm.memory.product_key.layer import ProductKeyMemory
from pkmlm.memory.product_key.spec import ProductKeySpec
from pkmlm.memory.query import QueryBatchNorm
from pkmlm.memory.table import Pool, Values
from pkmlm.memory.token.layer import TokenMemory
from pkmlm.memory.tokens import TokenIds

SIZES = {"num_keys": 6, "heads": 3, "topk": 5, "key_dim": 8}


def memory_of(kind=ProductKeyMemory, **changes):
    torch.manual_seed(1)
    return kind(10, **{**SIZES, **changes})


LAYERS = {
    "product-key": lambda: ProductKeyMemory(10, **SIZES),
    "flat-key": lambda: FlatKeyMemory(10, **SIZES, query="mlp"),
    "gated": lambda: ProductKeyMemory(10, **SIZES, gate="silu", value_dim=7, key_norm="rms"),
    "peer": lambda: PEER(10, **SIZES),
    "hash": lambda: HashLayer(12, 7, bits=4),
    "block": lambda: block_of(),
}


def block_of(**keys):
    return MemoryBlock(16, HashSpec(bits=4, **keys), share=1.0, layer=1, name="tables")


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("shape", [(24,), (2, 3, 4), (1, 1, 24)])
def test_a_token_may_lie_anywhere(name, shape):
    """In networks without sequences, or of images; 24 is also how many entries the norm of queries has."""
    layer = LAYERS[name]()
    x = torch.randn(2, 12, {"hash": 12, "block": 16}.get(name, 10))
    out = layer(x)
    torch.testing.assert_close(layer(x.view(*shape, -1)), out.view(*shape, -1))


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_made_by_hand_is_drawn_from_torchs_generator(name):
    torch.manual_seed(1)
    first, other = LAYERS[name](), LAYERS[name]()
    torch.manual_seed(1)
    again = LAYERS[name]()
    for path, tensor in first.state_dict().items():
        assert torch.equal(again.state_dict()[path], tensor), path
        spread = other.state_dict()[path].std()
        assert torch.equal(other.state_dict()[path], tensor) == (spread == 0), path  # biases and norms are constant
    for table in [module for module in first.modules() if isinstance(module, Values)]:
        assert float(table.weight_KD.detach().std()) == pytest.approx(table.std, rel=0.2)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_on_the_meta_device_draws_nothing_and_may_be_drawn_later(name):
    before = torch.get_rng_state()
    with torch.device("meta"):
        layer = LAYERS[name]()
    assert torch.equal(torch.get_rng_state(), before)
    layer.to_empty(device="cpu")
    for tensor in layer.state_dict().values():
        tensor.fill_(float("nan"))
    with torch.device("meta"):  # the default device is another than the layer's
        initialise(layer, 1)
    assert all(tensor.isfinite().all() for tensor in layer.state_dict().values())


@pytest.mark.parametrize(
    ("kind", "section"),
    [
        (ProductKeyMemory, ProductKeySpec()),
        (FlatKeyMemory, FlatKeySpec()),
        (HashLayer, HashSpec()),
        (NGramMemory, NGramSpec()),
    ],
)
def test_arguments_have_the_recipes_names_and_defaults_and_help_explains_each(kind, section):
    text = pydoc.render_doc(kind)
    for name, parameter in inspect.signature(kind).parameters.items():
        assert f" {name}: " in text, name
        if name in section.arguments:
            assert parameter.default == section.arguments[name], name


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_keys", 0), ("heads", "4"), ("topk", 7), ("key_dim", 15), ("query", "mpl"), ("query_norm", "bach")],
)
def test_memories_refuse_what_they_cannot_build(name, value):
    """A layer in somebody's own network has no recipe that was checked."""
    with pytest.raises(ValueError, match=rf"\A{name}: found {value!r} \(expected .*\)\Z"):
        memory_of(**{name: value})


@pytest.mark.parametrize("key", ["layers", "share_values", "topc"])
def test_keys_that_are_no_arguments_of_a_layer_are_refused(key):
    with pytest.raises(TypeError, match=key):
        memory_of(**{key: True})


def test_orders_may_be_a_list():
    assert NGramMemory(16, orders=[2, 3], heads=1, rows=11).spec.orders == (2, 3)


@pytest.mark.parametrize("momentum", [-0.1, 1.5])
def test_running_statistics_stay_between_their_last_and_the_new(momentum):
    with pytest.raises(ValueError, match="momentum: found"):
        memory_of(momentum=momentum)


@pytest.mark.parametrize(
    ("kind", "change"), [(ProductKeyMemory, {"num_keys": 3}), (ProductKeyMemory, {"value_dim": 4}), (PEER, {})]
)
def test_a_memory_refuses_a_pool_of_other_tables(kind, change):
    """Its slots would lie beyond the table, and be read."""
    keys = {"num_keys": 4, "heads": 2, "topk": 2, "key_dim": 4}
    pool = Pool(kind.new_tables(12, kind.spec_class(**{**keys, **change})), (1, 2))
    with pytest.raises(ValueError, match="pool: found tables"):
        ProductKeyMemory(12, **keys, pool=pool)


@pytest.mark.parametrize(("name", "value"), [("expert", "silu"), ("expert", ["gelu"]), ("gate", "gelu"), ("scores", 1)])
def test_peer_refuses_what_it_cannot_build(name, value):
    with pytest.raises(ValueError, match=f"{name}: found {re.escape(repr(value))}"):
        PEER(12, num_keys=4, heads=2, topk=2, key_dim=4, **{name: value})


@pytest.mark.parametrize("kind", [ProductKeyMemory, FlatKeyMemory, PEER])
@pytest.mark.parametrize("dim", [0, -3])
def test_memories_have_a_width(kind, dim):
    with pytest.raises(ValueError, match=f"dim: found {dim}"):
        kind(dim, num_keys=4, heads=2, topk=2, key_dim=4)


@pytest.mark.parametrize(("name", "value"), [("bits", 5), ("bits", 17), ("temperature", 0.0), ("score", "scale")])
def test_hash_layers_refuse_what_they_cannot_build(name, value):
    with pytest.raises(ValueError, match=name):
        HashLayer(12, 7, **{name: value})


def test_hash_layers_refuse_an_output_without_width():
    with pytest.raises(ValueError, match="width: found 0"):
        HashLayer(12, 0, bits=4)


READERS = {  # of the stream, and of the tokens
    **{name: (make, ()) for name, make in LAYERS.items() if name != "block"},
    "ngram": (lambda: NGramMemory(10, orders=(1, 2), heads=1, rows=31, row_dim=4), (3,)),
    "token": (lambda: TokenMemory(10, vocab_size=20, into="values", heads=2), (3,)),
}


def read(layer, x, tokens=()):
    """The layer's output for a stream, and for tokens if it reads these."""
    pasts = [TokenIds(20, [layer.spec.lookback])(torch.full(x.shape[:2], each), None, None) for each in tokens]
    return layer(x, *pasts)


@pytest.mark.parametrize("name", READERS)
def test_what_a_layer_cannot_take_is_told_with_its_name(name):
    make, tokens = READERS[name]
    layer = make()
    layer.tap.layer, layer.tap.name = 3, "facts"
    for x in (torch.zeros(2, 4, 2 * layer.dim), torch.zeros(2, 4, layer.dim - 1)):
        with pytest.raises(ValueError, match=rf"layer 3 facts: the input is .*{x.shape[-1]}.*{layer.dim}\)"):
            read(layer, x, tokens)
    x = torch.zeros(2, 4, layer.dim)
    works = nullcontext() if name in ("hash", "ngram") else None  # these take half precision
    with works or pytest.raises(ValueError, match=r"layer 3 facts: the input is in torch\.bfloat16"):
        read(layer, x.bfloat16(), tokens)
    with torch.autocast("cpu", torch.bfloat16):
        assert read(layer, x.bfloat16(), tokens).isfinite().all()
    with works or pytest.raises(ValueError, match=r"layer 3 facts: .* is in torch\.bfloat16 \(expected torch.float32"):
        read(layer.bfloat16(), x, tokens)


@pytest.mark.parametrize("name", READERS)
def test_a_layer_says_how_large_it_is(name):
    layer = READERS[name][0]()
    said = re.findall(r"=(\d+)", repr(layer).split("layer 1 ")[1].splitlines()[0])
    weights = sum(parameter.numel() for parameter in layer.parameters())
    assert [*map(int, said)] == [layer.tap.slots, layer.tap.heads, layer.reads // layer.tap.heads, weights]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", READERS)
def test_a_forward_that_checkpointing_repeats_counts_once(name, reentrant):
    make, tokens = READERS[name]
    one = make()
    other, x = copy.deepcopy(one), torch.randn(2, 12, one.dim)
    for layer, run in ((one, read), (other, partial(checkpoint, read, use_reentrant=reentrant))):
        with UsageCounters(layer) as reads, ThreadPoolExecutor(1) as another:  # as a backward pass on a GPU runs in one
            loss = run(layer, x.clone().requires_grad_(), tokens).square().sum()
            another.submit(loss.backward).result()
            run(layer, x.clone().requires_grad_(), tokens)  # counts again
        (layer.found,) = reads.memories()
    assert one.found.tokens == other.found.tokens == 48
    assert (one.found.counts_HK == other.found.counts_HK).all()
    for (path, tensor), again in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(tensor, again), path
    for parameter, again in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, again.grad)


def test_a_hash_layer_maps_a_batch_without_tokens():
    assert HashLayer(8, 7, bits=4)(torch.zeros(2, 0, 8)).shape == (2, 0, 7)


@pytest.mark.parametrize("query", ["linear", "mlp"])
@pytest.mark.parametrize("norm", ["batch", "layer", "rms", "none"])
def test_every_parameter_gets_a_gradient_with_every_query_network(norm, query):
    memory = memory_of(query_norm=norm, query=query)
    memory(torch.randn(4, 50, 10)).square().sum().backward()
    for name, parameter in memory.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_query_norms_normalise_what_they_say():
    x = torch.randn(200, 10) * 5 + 2
    for norm in ("batch", "layer", "rms"):
        q = memory_of(query_norm=norm).query(x)
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


@pytest.mark.parametrize("score", ["paper", "scaled"])
def test_a_hash_layer_computes_equation_13(score):
    layer = HashLayer(12, 7, bits=4, score=score, temperature=0.8).double()
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
    z = torch.randn(20000, bits, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    p = 1 / torch.prod(1 + torch.exp(-2 * z.abs() / temperature), -1)
    p = p * z.abs().sum(-1) if score == "scaled" else p
    assert score_rms(bits, temperature, score == "scaled") == pytest.approx(p.square().mean().sqrt().item(), rel=0.03)
    torch.manual_seed(1)
    layer = HashLayer(256, 512, bits=bits, score=score, temperature=temperature)
    out = layer(torch.randn(1, 500, 256, generator=torch.Generator().manual_seed(1)))
    assert out.std().item() == pytest.approx(0.02 * 16, rel=0.1)


def test_the_memory_block_is_two_layers_with_a_norm_between():
    for activation in ("none", "gelu"):
        block = block_of(activation=activation)
        x = torch.randn(2, 3, 16)
        h = block.first(x)
        assert h.shape[-1] == 6 * 4
        assert block.second.bits == 6
        h = torch.nn.functional.gelu(h) if activation == "gelu" else h
        torch.testing.assert_close(block(x), block.second(block.norm(h)))


@pytest.mark.parametrize(("kind", "training"), [("product-key", True), ("hash", False)])
def test_a_compiled_network_leaves_its_memory_as_it_is(kind, training):
    """A counter that is attached after the compilation sees the reads, too."""
    layer = memory_of() if kind == "product-key" else HashLayer(10, 10, bits=5)
    network = torch.nn.Sequential(torch.nn.Linear(10, 10), layer, torch.nn.Linear(10, 10)).train(training)
    compiled, x = torch.compile(network, backend="eager"), torch.randn(2, 7, 10)
    assert torch.equal(compiled(x), network(x))
    with UsageCounters(network) as reads:
        compiled(x)
    assert reads.memories()[0].tokens == 14


def test_gradients_reach_only_the_rows_read_and_the_input():
    layer = HashLayer(12, 7, bits=4)
    rows = []
    layer.tap.register_forward_hook(lambda tap, inputs, output: rows.append(output[0].flatten()))
    x = torch.randn(1, 2, 12, requires_grad=True)
    layer(x).sum().backward()
    touched = layer.values.weight_KD.grad.abs().sum(1).nonzero()[:, 0]
    assert sorted(touched.tolist()) == sorted(set(rows[0].tolist()))
    assert x.grad.abs().sum() > 0
