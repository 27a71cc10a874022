"""Products of fp32 matrices by oneDNN: the same numbers as torch's own, where they are chosen, and nowhere else."""

from collections import Counter

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from pkmlm.data.batches import Batches
from pkmlm.kernels import matmul, ops
from pkmlm.memory.registry import SPECS
from pkmlm.model.transformer import build_model
from pkmlm.recipe.schema import Train
from pkmlm.train.step import TrainState, train_step
from tests.conftest import model_2019, optim_2019, recipe_2019
from tests.golden.test_curves import Stream

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
ONEDNN, MATRIX_PRODUCTS = "mkldnn._linear_pointwise.default", {"aten.mm.default", "aten.addmm.default"}


class Calls(TorchDispatchMode):
    """Which products run, by name, with the multiplications of each call."""

    def __init__(self):
        super().__init__()
        self.work: dict[str, list[int]] = {ONEDNN: [], **{name: [] for name in MATRIX_PRODUCTS}}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if str(func) in self.work:
            left = args[1] if str(func) == "aten.addmm.default" else args[0]
            self.work[str(func)].append(out.numel() * left.shape[-1])
        return out


@pytest.fixture
def narrow(monkeypatch):
    monkeypatch.setattr(matmul, "PREFER_ONEDNN", True)


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


# Around the least work; odd and even; a map that widens and one that narrows; a head.
SHAPES = [(64, 128, 128), (1, 1024, 1024), (129, 100, 101), (8, 16, 16), (256, 512, 64), (40, 64, 5000)]


@needs_onednn
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("bias", "strided"), [(True, False), (False, True)])
def test_linear_and_its_gradients(narrow, shape, bias, strided):
    rows, inner, outer = shape
    torch.manual_seed(rows)
    exact = [drawn(rows, inner), drawn(outer, inner), *([drawn(outer)] if bias else [])]
    grad = drawn(rows, outer)

    def results(dtype, linear):
        x, *rest = [each.to(dtype).requires_grad_() for each in exact]
        given = torch.stack([x, x], 1)[:, 1] if strided else x.view(1, rows, inner)
        with Calls() as calls:
            out = linear(given, *rest).reshape(rows, outer)
            out.backward(grad.to(dtype))
        return calls.work, [out, x.grad, *(each.grad for each in rest)]

    work, found = results(torch.float32, matmul.linear)
    _, expected = results(torch.float64, functional.linear)
    large = [chunk for i in range(9) if (chunk := rows & 1 << i) * inner * outer >= matmul.ONEDNN_WORK]
    calls_of = {chunk: 2 + (chunk >= matmul.ONEDNN_WIDTH) for chunk in large}  # a narrow one's gradient is torch's
    assert Counter(work[ONEDNN]) == {chunk * inner * outer: calls for chunk, calls in calls_of.items()}
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        assert one.shape == other.shape
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=2e-6 * float(other.detach().abs().max()))


@needs_onednn
def test_the_same_bits_wherever_the_numbers_lie_in_memory(narrow):
    torch.manual_seed(1)
    x, y = torch.randn(200, 96), torch.randn(300, 96)
    first = matmul.matmul_nt(x, y)
    for offset in (1, 16, 33):
        moved = [torch.empty(each.numel() + offset)[offset:].view_as(each).copy_(each) for each in (x, y)]
        assert torch.equal(matmul.matmul_nt(*moved), first)


@needs_onednn
def test_the_second_matrix_is_whole_or_a_whole_one_transposed(narrow):
    """oneDNN takes up to a thousand times as long for others."""
    given = []

    class Seconds(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if str(func) == ONEDNN:
                given.append(args[1])
            return func(*args, **(kwargs or {}))

    weight = torch.randn(256, 256, requires_grad=True)
    for x in (torch.randn(256, 3, 256)[:, -1], torch.randn(256, 512)[:, :256], torch.randn(256, 512)[:, ::2]):
        x = x.detach().requires_grad_()
        with Seconds():
            matmul.linear(x, weight).sum().backward()
        torch.testing.assert_close(weight.grad, x.detach().sum(0).expand(256, 256), atol=1e-3, rtol=0)
        weight.grad = None
    assert len(given) == 9
    assert all(each.is_contiguous() or each.t().is_contiguous() for each in given)


def test_a_bias_with_a_stride_and_a_vector(narrow):
    x, weight, bias = torch.randn(2048), torch.randn(1024, 2048), torch.randn(1024, 2)[:, 1]
    torch.testing.assert_close(matmul.linear(x, weight, bias), functional.linear(x, weight, bias), atol=1e-3, rtol=0)


@needs_onednn
def test_narrow_maps_are_left_to_torch(narrow):
    for rows, inner, outer in [(4096, 128, 16), (4096, 16, 128), (1 << 18, 2, 2)]:
        with Calls() as calls:
            matmul.matmul_nt(torch.randn(rows, inner), torch.randn(outer, inner))
        assert not calls.work[ONEDNN]


@needs_onednn
@pytest.mark.parametrize("training", [False, True])
def test_batches_of_ever_new_sizes_take_few_shapes(narrow, training):
    weight, bias, rows_of_calls = torch.randn(256, 64, requires_grad=training), torch.randn(256), set()
    for rows in (*range(1, 400, 13), 5000):
        x = torch.randn(rows, 64, requires_grad=training)
        with torch.set_grad_enabled(training), Calls() as calls:
            out = matmul.linear(x, weight, bias)
            if training:
                out.sum().backward()
        torch.testing.assert_close(out, functional.linear(x, weight, bias), atol=1e-4, rtol=0)
        if training:
            torch.testing.assert_close(x.grad, weight.detach().sum(0).expand_as(x), atol=1e-4, rtol=0)
            torch.testing.assert_close(weight.grad, x.detach().sum(0).expand_as(weight), atol=1e-3, rtol=0)
            weight.grad = None
        rows_of_calls |= {work // (64 * 256) for work in calls.work[ONEDNN]}
        assert sum(calls.work[ONEDNN]) > (1 + 2 * training) * (rows * 64 * 256 - matmul.ONEDNN_WORK)
    assert rows_of_calls == {64, 128, 256, 512, 4096}


@needs_onednn
@pytest.mark.parametrize(("select", "keys"), [(ops.flat_key_select, (512, 64)), (ops.product_key_select, (2, 512, 32))])
def test_so_do_searches(narrow, select, keys):
    shapes = set()
    for tokens in range(60, 400, 19):
        with Calls() as calls:
            slots = select(torch.randn(tokens, 1, 64), torch.randn(1, *keys), 4)[1]
        shapes |= {work // (512 * keys[-1]) for work in calls.work[ONEDNN]}
        assert slots.shape == (tokens, 1, 4)
    assert shapes
    assert shapes <= {32, 64, 128, 256}


@needs_onednn
def test_only_what_needs_a_gradient_is_computed(narrow):
    x, weight = torch.randn(64, 128), torch.randn(256, 128, requires_grad=True)
    with Calls() as calls:
        matmul.linear(x, weight).sum().backward()
    assert x.grad is None
    assert weight.grad is not None
    assert calls.work[ONEDNN] == 2 * [64 * 128 * 256]


@needs_onednn
@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float64, False), (torch.bfloat16, False), (torch.float32, True)]
)
def test_other_precisions_are_left_to_torch(narrow, dtype, autocast):
    x, weight = torch.randn(64, 128, dtype=dtype), torch.randn(256, 128, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), Calls() as calls:
        out = matmul.linear(x, weight)
        assert torch.equal(out, functional.linear(x, weight))
    assert not calls.work[ONEDNN]
    assert out.dtype == (torch.bfloat16 if autocast else dtype)


@pytest.mark.parametrize(
    ("cpu", "narrow"),
    [
        ({"cpu_name": "AMD EPYC", "avx512_f": True}, True),
        ({"cpu_name": "AMD Ryzen 5 3600", "avx512_f": False}, False),
        ({"cpu_name": "Intel(R) Xeon(R)", "avx512_f": True}, False),
        ({}, False),
    ],
)
@needs_onednn
def test_which_cpus_are_meant(monkeypatch, cpu, narrow):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: cpu)
    assert matmul.prefers_onednn() is narrow


@needs_onednn
@pytest.mark.parametrize("kind", ["product-key", "flat-key"])
def test_every_large_product_of_a_training_step(narrow, kind):
    memory = SPECS[kind](layers=("2",), num_keys=64, heads=2, topk=4, key_dim=64)
    model = model_2019(dim=64, layers=2, heads=2, context=64, memories={"pkm": memory})
    recipe = recipe_2019(model=model, optim=optim_2019(), train=Train(steps=1, batch_tokens=512, micro_batch=8))
    batches = Batches(Stream(), 64, recipe.sequences, 0)
    state = TrainState(recipe, build_model(recipe, 400), batches, "fp32")
    with Calls() as calls:
        train_step(state, 1)
    assert 512 * 64 * 400 in calls.work[ONEDNN]
    assert max(work for name in MATRIX_PRODUCTS for work in [0, *calls.work[name]]) < matmul.ONEDNN_WORK
