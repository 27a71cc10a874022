"""The Triton kernels against their definitions: under Triton's interpreter, and on a GPU where there is one.

Triton decides once a process whether it interprets, so `test_under_the_interpreter` runs this file in a process of its
own. Compiling needs no GPU and is tested everywhere.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from pkmlm.bench import memory as bench
from pkmlm.kernels import backend, matmul, ops, reference
from pkmlm.kernels.row_gradient import RowGradient
from tests import PATIENCE

triton = pytest.importorskip("triton", reason="triton is not installed (the CUDA kernels need it)")
from triton.runtime.interpreter import GridExecutor  # noqa: E402

from pkmlm.kernels import cuda  # noqa: E402

INTERPRETED = triton.knobs.runtime.interpret
HALF = [torch.float16, torch.bfloat16]
PATTERNS = ["random", "zipf", "one", "distinct"]
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, **{half: {"rtol": 1e-2, "atol": 1e-2} for half in HALF}}


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_under_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


@pytest.fixture(scope="module")
def device() -> str:
    if not INTERPRETED and not torch.cuda.is_available():
        pytest.skip("no GPU here; test_under_the_interpreter runs it without")
    return "cpu" if INTERPRETED else "cuda"


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.setattr(cuda, "COLUMNS", 64)  # several blocks and many chunks at tiny shapes
    monkeypatch.setattr(cuda, "CHUNK", 4)
    monkeypatch.setattr(cuda, "SMALL_BYTES", 0)
    monkeypatch.setattr(cuda, "SEARCH_COLUMNS", 16)
    monkeypatch.setattr(cuda, "SEARCH_PART", 20)
    for kind in ("cpu", "cuda"):
        monkeypatch.setitem(matmul.SCORES, kind, 64)
    return cuda


def rounded(dtype: torch.dtype) -> dict[str, float]:
    """The tolerance for fp32 rounded to this: none, but the interpreter cuts off."""
    return {"rtol": 2**-7 if INTERPRETED and dtype == torch.bfloat16 else 0, "atol": 0}


def slots_of(pattern: str, tokens: int, r: int, rows: int) -> torch.Tensor:
    reads = tokens * r
    if pattern == "one":
        return torch.full((tokens, r), rows - 2)
    if pattern == "distinct":
        return torch.randperm(rows)[:reads].view(tokens, r)
    if pattern == "zipf":
        return torch.multinomial(1 / torch.arange(1.0, rows + 1) ** 1.5, reads, replacement=True).view(tokens, r)
    return torch.randint(0, rows, (tokens, r))


def inputs(pattern: str, width: int, dtype: torch.dtype, device: str, tokens: int = 6, r: int = 3, rows: int = 18):
    """Values, slots, weights and output gradients."""
    torch.manual_seed(width)
    values, grad = torch.randn(rows, width), torch.randn(tokens, width)
    slots, weights = slots_of(pattern, tokens, r, rows), torch.randn(tokens, r)
    return values.to(device, dtype), slots.to(device), weights.to(device), grad.to(device, dtype)


@pytest.mark.parametrize(
    ("width", "r", "dtype"),
    [*((*shape, torch.float32) for shape in [(1, 1), (64, 8), (130, 17)]), *((100, 5, dtype) for dtype in HALF)],
)
def test_weighted_row_sum_and_row_products(kernels, device, width, r, dtype):
    values, slots, weights, x = inputs("random", width, dtype, device, tokens=2, r=r)
    values[[row for row in range(18) if row not in slots]] = float("nan")  # what is not read has no effect
    slots, weights, x = (argument.t().contiguous().t() for argument in (slots, weights, x))  # the views that come
    out = kernels.weighted_row_sum(values, slots, weights)
    expected = reference.weighted_row_sum(values.double(), slots, weights.double())
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, **TOLERANCE[dtype])
    products = kernels.row_products(values, x, slots)
    expected = reference.row_products(values.double(), x.double(), slots)
    assert products.dtype == torch.float32  # of numbers in half precision, too
    torch.testing.assert_close(products.double(), expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("width", "r"), [(1, 1), (64, 8), (131, 17)])
def test_tables_in_8_and_4_bits(kernels, device, width, r, bits):
    values, slots, weights, x = inputs("random", width, torch.float32, device, tokens=2, r=r)
    values[slots[0, 0]] = 0
    table = reference.quantize(values, bits)
    table.scale_K[[row for row in range(18) if row not in slots]] = float("nan")  # what is not read has no effect
    exact = table._replace(scale_K=table.scale_K.double())
    slots, weights, x = (argument.t().contiguous().t() for argument in (slots, weights, x))
    out = kernels.quantized_row_sum(table, slots, weights)
    products = kernels.quantized_row_products(table, x, slots)
    assert out.dtype == products.dtype == torch.float32
    expected = reference.quantized_row_sum(exact, slots, weights.double())
    torch.testing.assert_close(out.double(), expected, **TOLERANCE[torch.float32])
    expected = reference.quantized_row_products(exact, x.double(), slots)
    torch.testing.assert_close(products.double(), expected, **TOLERANCE[torch.float32])


@pytest.mark.parametrize(
    ("n", "k", "dtype"),
    [
        *((*shape, torch.float32) for shape in [(1, 1), (3, 9), (21, 4), (40, 12), (70, 4)]),
        *((*shape, dtype) for shape in [(9, 3), (33, 2)] for dtype in HALF),
    ],
)
def test_searches(kernels, device, n, k, dtype):
    """Equal to the last bit, with ties, zeros of both signs, infinities and no numbers; column by column and in groups
    of columns, all at a time and in turn."""
    torch.manual_seed(n)
    scores1, scores2 = torch.randn(2, 6, n, device=device).to(dtype)
    scores1[:3], scores2[1:4] = scores1[:3].round(), scores2[1:4].round()
    scores1[3, ::3], scores1[3, 1::3] = 0.0, -0.0
    scores1[4, ::2], scores2[4, ::3] = float("inf"), float("-inf")
    scores1[5, n // 2], scores2[5, n // 2 :] = float("nan"), float("nan")
    pairs = kernels.product_top_k(scores1, scores2, k), reference.product_top_k(scores1, scores2, k)
    assert torch.equal(pairs[0][1], pairs[1][1])
    torch.testing.assert_close(pairs[0][0], pairs[1][0], **rounded(dtype), equal_nan=True)
    best, columns = kernels.top_k(scores1, min(n, k))
    expected, expected_columns = reference.top_k(scores1, min(n, k))
    assert torch.equal(columns, expected_columns)
    torch.testing.assert_close(best, expected, rtol=0, atol=0, equal_nan=True)


def test_top_k_of_a_long_row_whose_last_part_is_short(kernels, device):
    scores = torch.full((2, 45), -torch.inf, device=device)
    scores[0, ::7] = torch.randn(7, device=device).round(decimals=1)
    scores[1, 44] = 1.0  # and the others are as small as what fills the last part up
    found, expected = kernels.top_k(scores, 8), reference.top_k(scores, 8)
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[0], expected[0])


def test_columns_that_do_not_fit_beside_a_score_in_half_precision():
    given = []
    for n in (1 << 16, (1 << 16) + 1):
        kernel = {(): lambda scores, **sizes: given.append(scores.dtype)}
        cuda._launch_search(kernel, (), torch.zeros(1, n).half(), n=n, k=2)
    assert given == [torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_a_search_of_several_heads(kernels, device, dtype, monkeypatch):
    monkeypatch.setitem(matmul.SCORES, device, 2 * 36)  # of two tokens at a time
    torch.manual_seed(1)
    q, subkeys = torch.randn(5, 3, 10), torch.randn(3, 2, 6, 5)
    q, subkeys = (x.to(device, dtype).round() for x in (q, subkeys))  # sums of few whole numbers are exact
    found, expected = (each.product_key_search(q, subkeys, 9) for each in (kernels, reference))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_gradients_of_scores(kernels, device, dtype):
    torch.manual_seed(1)
    q, subkeys, grad = torch.randn(6, 3, 10), torch.randn(3, 2, 4, 5), torch.randn(6, 3, 7)
    q, subkeys, grad = (x.to(device, dtype) for x in (q, subkeys, grad))
    slots = torch.randint(16, (6, 3, 7), device=device)
    wide = reference.score_gradients(q.double(), subkeys.double(), slots, grad.double())
    for found, expected in zip(kernels.score_gradients(q, subkeys, slots, grad), wide, strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    ("tables", "bits", "temperature", "dtype"),
    [*((*shape, torch.float32) for shape in [(1, 1, 1.0), (3, 8, 0.5), (5, 10, 3.0), (2, 16, 0.01)])]
    + [(4, 3, 1.0, dtype) for dtype in HALF],
)
def test_reads_of_buckets(kernels, device, monkeypatch, tables, bits, temperature, dtype, scaled):
    """And their gradient, as the operation gives it; with zeros of both signs, infinities and no numbers."""
    monkeypatch.setattr(backend, "of", lambda x: kernels)
    monkeypatch.setattr(kernels, "PLACES", 32)  # several programs, of which the last is not full
    torch.manual_seed(bits)
    z, grad = torch.randn(11, tables, bits).to(device, dtype), torch.randn(tables, 11).to(device, dtype).t()
    z[0, :, ::2], z[0, :, 1::2], z[1, 0, 0], z[2, -1] = 0.0, -0.0, float("nan"), float("inf")
    z[3:5] *= 1e4  # of which fp16 has some
    z = z.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    rows, weights = ops.bucket_reads(z, temperature, scaled=scaled)
    expected_rows, expected = reference.bucket_reads(z.detach().double(), temperature, scaled=scaled)
    assert rows.dtype == torch.int64
    assert torch.equal(rows, expected_rows)
    assert all(map(torch.equal, kernels.bucket_reads(z[5:], temperature, scaled=scaled), (rows[5:], weights[5:])))
    (found,) = torch.autograd.grad(weights, z, grad)
    wanted = reference.bucket_gradient(z.double(), grad.double(), temperature, scaled=scaled)
    for each, exact in ((weights, expected), (found, wanted)):
        assert each.dtype == dtype
        torch.testing.assert_close(each, exact.to(dtype), **TOLERANCE[dtype], equal_nan=True)


def test_few_small_bags_are_summed_in_torch(kernels, device, monkeypatch):
    monkeypatch.setattr(kernels, "SMALL_BYTES", 1 << 20)
    monkeypatch.setattr(kernels, "_launch", None)
    values, slots, weights, _ = inputs("random", 12, torch.bfloat16, device)
    out = kernels.weighted_row_sum(values, slots, weights)
    assert out.dtype == torch.bfloat16
    expected = reference.weighted_row_sum(values.double(), slots, weights.double())
    torch.testing.assert_close(out.double(), expected, rtol=4e-3, atol=0)  # rounded once, at the end


def known(segments: reference.Segments) -> reference.Segments:
    """Segments without those that have no row."""
    real = segments.rows_U >= 0
    return segments._replace(rows_U=segments.rows_U[real], start_S=segments.start_S[: int(real.sum()) + 1])


@pytest.mark.parametrize("rows", [18, 1 << 15, (1 << 15) + 1, 1 << 31, (1 << 31) + 1])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_sort_reads(kernels, device, pattern, rows, monkeypatch):
    monkeypatch.setattr(kernels, "PLACES", 4)
    slots = slots_of(pattern, 6, 3, 18).to(device) + rows - 18  # the last rows there are
    none = torch.zeros(0, 3, dtype=torch.int64, device=device)
    for reads, every_row in ((slots, False), *(((slots, True), (none, True)) if rows < 1 << 31 else ())):
        weights = torch.randn(reads.shape, device=device)
        found = kernels.sort_reads(reads.t().contiguous().t(), weights, rows, every_row=every_row)
        assert len(found.rows_U) == (rows if every_row else min(rows, reads.numel()))
        assert (found.start_S[len(known(found).rows_U) :] == reads.numel()).all()
        for part, expected in zip(
            known(found), reference.sort_reads(reads, weights, rows, every_row=every_row), strict=True
        ):
            assert torch.equal(part, expected)
            assert part.dtype == expected.dtype


class Watched(TorchDispatchMode):
    """Notes the launches of a block: torch's operations, other than views and allocations, and Triton's kernels. Among
    them are those for which the host waits: their result has a shape that only the device knows, or goes to the host.
    """

    def __init__(self, monkeypatch):
        super().__init__()
        self.launches, self.waits = [], []
        owner, name = (GridExecutor, "__call__") if INTERPRETED else (triton.runtime.jit.JITFunction, "run")
        launch = getattr(owner, name)
        # The interpreter copies tensors in torch, within each call.
        hidden = _disable_current_modes()(launch)

        def noted(kernel, *arguments, **options):
            self.launches.append(getattr(kernel, "fn", kernel).__name__)
            return hidden(kernel, *arguments, **options)

        monkeypatch.setattr(owner, name, noted)

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name = function.overloadpacket.__name__
        view = any(result.alias_info and not result.alias_info.is_write for result in function._schema.returns)
        if not view and not name.startswith(("empty", "new_empty", "detach", "_unsafe_view", "_record_function")):
            self.launches.append(name)
        by_mask = name in ("index", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in arguments[1]
        )
        if by_mask or name in ("nonzero", "unique_consecutive", "_unique2", "masked_select", "_local_scalar_dense"):
            self.waits.append(name)
        return function(*arguments, **(options or {}))


def test_a_step_of_the_memory_has_no_more_launches_than_plain_torch(kernels, device, monkeypatch):
    """Nor does the host wait. At 5 us a launch, a hundred would take longer than the update of 262k slots.

    Torch's fused Adam and its embedding bag count once each, though they launch several kernels.
    """
    monkeypatch.setattr(backend, "of", lambda x: kernels)
    monkeypatch.setattr(matmul, "SCORES", {"cpu": 1 << 20, "cuda": 1 << 20})  # all scores at a time
    shape = bench.Shape(num_keys=4, dim=8, heads=2, topk=2, key_dim=4, tokens=4)
    launches = {}
    for name in ("pkmlm", "plain-fused"):
        one = bench.contender(name, shape, bench.product_key_layer(shape, torch.device(device)))
        x, grad = bench.inputs(shape, torch.device(device))
        one.backward(x, grad, update=True)
        with monkeypatch.context() as patched, Watched(patched) as watched:
            one.layer(x).backward(grad)
            for optimizer in one.optimizers:
                optimizer.step()
        assert watched.waits == []
        launches[name] = watched.launches
    assert sum(name.startswith("_row_adam") for name in launches["pkmlm"]) == 1
    assert len(launches["pkmlm"]) <= len(launches["plain-fused"]), launches["pkmlm"]


@pytest.mark.parametrize(
    ("pattern", "width", "dtype"),
    [*((pattern, 70, torch.float32) for pattern in PATTERNS), *(("random", 5, dtype) for dtype in HALF)],
)
def test_segment_sum_and_squared_norm(kernels, device, pattern, width, dtype):
    """Of gradients in half precision too the sums are fp32, as the weights are."""
    _, slots, weights, x = inputs(pattern, width, dtype, device)
    segments = kernels.sort_reads(slots, weights, 18, every_row=True)
    expected = reference.segment_sum(x.double(), segments._replace(weight_M=segments.weight_M.double()))
    found = kernels.segment_sum(x, segments)
    assert found.dtype == reference.segment_sum(x, segments).dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, **TOLERANCE[torch.float32])
    for scale in (1.0, 1e20):  # whose squares fp32 does not hold
        squared = kernels.squared_norm(x, segments._replace(weight_M=segments.weight_M * scale))
        torch.testing.assert_close(squared, (expected * scale).square().sum(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("reads", [1, 3, 4, 5, 8, 35, 45])
def test_a_long_row_at_every_place_among_the_chunks(kernels, device, reads):
    """Chunks of 4: a row with none, a part, one or many whole ones, with short rows before and after it."""
    for before in range(5):
        slots = torch.tensor([0] * before + [1] * reads + [2, 2], device=device)[:, None]
        x, weights = torch.randn(3, len(slots), device=device).t(), torch.ones(len(slots), 1, device=device)
        segments = kernels.sort_reads(slots, weights, 3)
        exact = known(segments)._replace(weight_M=segments.weight_M.double())
        sums, expected = torch.ones(3, 3, device=device), torch.ones(3, 3, device=device).double()
        read, marked = torch.zeros(2, 3, dtype=torch.bool, device=device)
        kernels.segment_add_(sums, x, segments, read)
        reference.segment_add_(expected, x.double(), exact, marked)
        torch.testing.assert_close(sums.double(), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(read, marked)


SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize(
    ("pattern", "width", "half", "rows"),
    [
        ("zipf", 70, None, "read"),
        ("random", 5, None, "chosen"),
        ("one", 7, torch.float16, "every"),
        ("zipf", 70, torch.bfloat16, "every"),
    ],
)
def test_three_updates_of_rows(kernels, device, pattern, width, half, rows, optimizer):
    """The host knows scale and step of the first; the device alone those of the others."""
    values, slots, weights, x = inputs(pattern, width, half or torch.float32, device)
    before = values.float()
    tables = [before.clone(), torch.zeros_like(before), torch.zeros_like(before)][: 3 if optimizer == "adam" else 1]
    expected = [table.double() for table in tables]
    copy = None if half is None else torch.full_like(before, 77, dtype=half)
    segments = kernels.sort_reads(slots, weights, 18, every_row=rows == "every")
    exact = known(segments)._replace(weight_M=segments.weight_M.double())
    if rows == "chosen":
        chosen = torch.arange(18, device=device) % 3 > 0
        segments, exact = kernels.only(segments, chosen), reference.only(exact, chosen)
    norms = kernels.squared_norm(x, segments), reference.squared_norm(x.double(), exact)
    torch.testing.assert_close(*norms, rtol=1e-5, atol=0)
    how = {key: SETTINGS[key] for key in (SETTINGS if optimizer == "adam" else ("lr", "weight_decay"))}
    for step in (1, 2, 3):
        x = -x.roll(step)
        known_to_host = {"scale": 0.5 if step < 3 else 0.25, **({"step": step} if optimizer == "adam" else {})}
        of_device = {name: torch.tensor(value, device=device) for name, value in known_to_host.items()}
        given = known_to_host if step == 1 else of_device
        ours, theirs = (getattr(module, f"segment_row_{optimizer}_") for module in (kernels, reference))
        for skip in (None,) if step == 1 else (1.0, 0.0):
            asked = None if skip is None else torch.tensor(skip, device=device)
            ours(*tables, x, segments, copy_KD=copy, skip=asked, **given, **how)
            theirs(*expected, x.double(), exact, skip=asked, **known_to_host, **how)
    for table, wanted in zip(tables, expected, strict=True):
        torch.testing.assert_close(table.double(), wanted, rtol=1e-5, atol=1e-6)
    updated = torch.zeros(18, dtype=torch.bool, device=device).index_fill_(0, exact.rows_U, True)
    assert torch.equal(tables[0][~updated], before[~updated])
    assert updated.any()
    if copy is not None:
        torch.testing.assert_close(copy[updated], tables[0][updated].to(half), **rounded(half))
        assert (copy[~updated] == 77).all()


@pytest.mark.parametrize(
    ("tokens", "kept", "dtype"),
    [(10, False, torch.float32), (11, True, torch.float32), (20, False, torch.bfloat16), (21, True, torch.bfloat16)],
)
def test_sums_of_many_reads_are_kept_from_the_norm_to_the_update(kernels, device, monkeypatch, tokens, kept, dtype):
    """Numbers in half precision are summed as they are. Norm and update are those of sums that are not kept."""
    monkeypatch.setattr(backend, "of", lambda x: kernels)
    values, slots, weights, x = inputs("random", 5, dtype, device, tokens=tokens, r=4, rows=4)
    slots[slots == 2] = 1
    summed, add = [], kernels.segment_add_
    monkeypatch.setattr(kernels, "segment_add_", lambda out, x, *more: summed.append(x.dtype) or add(out, x, *more))
    updated = []
    for ask in (False, True):
        gradient = RowGradient(4, every_row=dtype == torch.bfloat16)
        for part in (slice(0, 1), slice(1, tokens)):
            gradient.add(x[part], slots[part], weights[part])
        if ask:
            summed.clear()
            gradient.keep_sums()
            assert summed == [dtype] * kept
        tables = [values.float().clone(), *torch.ones(2, 4, 5, device=device)]
        kernels.segment_row_adam_(*tables, *gradient.joined(), scale=1.0, step=1, **SETTINGS)
        updated.append((*tables, gradient.dense(), gradient.norm()))
    for found, expected in zip(*updated, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_the_rates_of_adam_at_the_first_step_and_the_last(kernels, device):
    """A row of zero moments moves by the rate; fp32 would have three digits of 1 - 0.9999 and of 1 - 0.9999^2."""
    for step, betas in ((1, (0.9, 0.9999)), (2, (0.9, 0.9999)), (100_000, (0.9, 0.999)), (3, (0.0, 0.5))):
        tables = [torch.zeros(2, 4, device=device) for _ in range(3)]
        wide, x = [table.double() for table in tables], torch.ones(1, 4, device=device)
        segments = kernels.sort_reads(torch.ones(1, 1, dtype=torch.int64, device=device), torch.ones(1, 1), 2)
        how = {**SETTINGS, "betas": betas, "scale": 1.0, "step": step}
        kernels.segment_row_adam_(*tables, x, segments, **how)
        reference.segment_row_adam_(*wide, x.double(), known(segments), **how)
        torch.testing.assert_close(tables[0].double(), wide[0], rtol=5e-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operations_and_their_gradients_run_on_these_kernels(kernels, device, monkeypatch, dtype):
    torch.manual_seed(8)
    values, weights = torch.randn(20, 12, device=device), torch.rand(6, 4, device=device)
    slots, out = torch.randint(0, 20, (6, 4), device=device), torch.randn(6, 12, device=device)
    q, subkeys, keys = (torch.randn(shape, device=device) for shape in ((6, 2, 8), (2, 2, 5, 4), (2, 9, 8)))
    inputs = [x.to(dtype).requires_grad_() for x in (values, weights, q, subkeys, keys)]

    def results(module):
        monkeypatch.setattr(backend, "of", lambda x: module)
        values, weights, q, subkeys, keys = inputs
        left = RowGradient(20)
        scores = ops.product_key_select(q, subkeys, 3)[0], ops.flat_key_select(q, keys, 3)[0]
        sums = ops.weighted_row_sum(values, slots, weights), ops.weighted_row_sum(values, slots, weights, left)
        grads = torch.autograd.grad((*scores, *sums), inputs, [*map(torch.ones_like, scores), *[out.to(dtype)] * 2])
        unlearnt, _ = torch.no_grad()(ops.flat_key_select)(q, keys, 3)
        return *scores, *sums, *grads, left.dense(), left.norm(), unlearnt

    for found, expected in zip(results(kernels), results(reference), strict=True):
        assert found.dtype == expected.dtype
        close = {"rtol": 2e-2, "atol": 0.1} if dtype in HALF else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(found, expected, **close)


def test_no_tokens(kernels, device):
    values, slots, weights, x = inputs("random", 6, torch.float32, device, tokens=0)
    before = values.clone()
    assert kernels.weighted_row_sum(values, slots, weights).shape == (0, 6)
    assert kernels.row_products(values, x, slots).shape == (0, 3)
    table = reference.quantize(values, 4)
    assert kernels.quantized_row_sum(table, slots, weights).shape == (0, 6)
    assert kernels.quantized_row_products(table, x, slots).shape == (0, 3)
    for n in (9, 40):  # in one part and in several
        assert [part.shape for part in kernels.top_k(torch.zeros(0, n, device=device), 3)] == [(0, 3)] * 2
    segments = kernels.sort_reads(slots, weights, 18)
    assert [len(part) for part in segments] == [0, 1, 0, 0]
    kernels.segment_add_(values, x, segments)
    assert kernels.segment_sum(x, segments).shape == (0, 6)
    assert kernels.squared_norm(x, segments) == 0
    z = torch.zeros(0, 3, 4, device=device)
    assert [part.shape for part in kernels.bucket_reads(z, 1.0, scaled=True)] == [(0, 3)] * 2
    assert kernels.bucket_gradient(z, z[..., 0], 1.0, scaled=True).shape == z.shape
    kernels.segment_row_adam_(values, values, values, x, segments, scale=1, step=1, **SETTINGS)
    assert torch.equal(values, before)


def test_offsets_beyond_two_to_the_31(kernels, device):
    """Tables of 4 GB of which only the last rows are ever touched, so that they take no memory."""
    rows, width = (1 << 31) // 1024 + 2, 1024
    tables = [torch.empty(rows, width, dtype=torch.float16, device=device) for _ in range(3)]
    values, mean, square = tables
    last = torch.tensor([[rows - 1, rows - 2]], device=device)
    for table in tables:
        table[-2:] = torch.rand(2, width, device=device)
    weights = torch.tensor([[2.0, 3.0]], device=device)
    out = kernels.weighted_row_sum(values, last, weights)
    torch.testing.assert_close(out[0], 2 * values[-1] + 3 * values[-2])
    products = kernels.row_products(values, out, last)
    torch.testing.assert_close(products, (values[[-1, -2]].float() @ out[0].float())[None])
    segments = kernels.sort_reads(last, weights, rows)
    far = segments._replace(token_M=segments.token_M + rows - 1)  # as if the token were the last of as many
    torch.testing.assert_close(kernels.segment_sum(values, far), weights.T.flip(0) * values[-1])
    expected = [table[-2:].double() for table in tables]
    near = segments._replace(rows_U=torch.tensor([0, 1]), weight_M=segments.weight_M.double())
    reference.segment_row_adam_(*expected, out.double(), near, scale=0.5, step=1, **SETTINGS)
    kernels.segment_row_adam_(values, mean, square, out, segments, scale=0.5, step=1, **SETTINGS)
    for table, wanted in zip(tables, expected, strict=True):
        torch.testing.assert_close(table[-2:].double(), wanted, rtol=2e-3, atol=1e-5)


def test_the_same_bits_every_time(kernels, device):
    values, slots, weights, x = inputs("zipf", 40, torch.float32, device)

    def step():
        tables = values.clone(), torch.zeros_like(values), torch.zeros_like(values)
        segments = kernels.sort_reads(slots, weights, 18)
        kernels.segment_row_adam_(*tables, x, segments, scale=1.0, step=1, **SETTINGS)
        return *tables, kernels.squared_norm(x, segments), kernels.weighted_row_sum(values, slots, weights)

    first = step()
    for _ in range(100 if device == "cuda" else 2):
        assert all(torch.equal(*pair) for pair in zip(first, step(), strict=True))


def test_a_table_that_is_not_contiguous_is_refused(kernels, device):
    values, slots, weights, x = inputs("random", 6, torch.float32, device)
    for call in (
        lambda: kernels.weighted_row_sum(values.t().contiguous().t(), slots, weights),
        lambda: kernels.row_products(values[:, ::2], x, slots),
        lambda: kernels.quantized_row_sum(reference.Quantized(values.t(), values[0], 18), slots, weights),
        lambda: kernels.quantized_row_products(reference.Quantized(values.t(), values[0], 18), x, slots),
    ):
        with pytest.raises(ValueError, match="contiguous"):
            call()


class Driver:
    """Where Triton looks for the GPU to compile for; no kernel is loaded or run."""

    def get_current_target(self):
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return "none"

    def get_current_stream(self, device):
        return 0


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """The kernels that are called, each compiled for an H100 with the arguments of the call: [(name, result)]."""
    if INTERPRETED:
        pytest.skip("interpreted kernels are not compiled")
    results = []

    def compile_only(kernel, grid):
        return lambda *values, **options: results.append(
            (kernel.__name__, kernel.run(*values, grid=grid, warmup=True, **options))
        )

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.runtime.jit.KernelInterface, "__getitem__", compile_only)
    monkeypatch.setattr(cuda, "SMALL_BYTES", 0)
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    return results


def stack(result) -> int:
    """How many bytes a thread of the machine code keeps outside registers."""
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(result.asm["cubin"])
        tool = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        used = subprocess.run(tool, capture_output=True, text=True, check=True, timeout=PATIENCE).stdout
    return sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", used)))


@pytest.mark.parametrize(("width", "dtype"), [(768, torch.bfloat16), (1600, torch.float32), (100, torch.float16)])
def test_machine_code(compiled, width, dtype):
    values, slots, weights, x = inputs("random", width, dtype, "cpu", r=32)
    tables = [torch.zeros(18, width) for _ in range(3)]
    copy = None if dtype == torch.float32 else values
    cuda.weighted_row_sum(values, slots, weights)
    cuda.row_products(values, x, slots)
    segments = cuda.sort_reads(slots, weights, 18)
    cuda.segment_sum(x, segments)
    cuda.segment_add_(tables[0], x, segments, torch.zeros(18, dtype=torch.bool))
    cuda.squared_norm(x, segments)
    for step in (1, 2):
        cuda.segment_row_adam_(*tables, x, segments, scale=step, step=step, copy_KD=copy, **SETTINGS)
        cuda.segment_row_sgd_(tables[0], x, segments, scale=step, lr=step, weight_decay=0, copy_KD=copy)
    assert all(stack(result) <= 8 for _, result in compiled), "more spills than an address, once"
    code = {result.hash: (name, result.asm["ptx"]) for name, result in compiled}
    names = ["_adam_rates", "_mark_segments", "_row_adam", "_row_products", "_row_sgd", "_segment_add"]
    names += ["_segment_sum", "_squared_norms", "_sum_chunks", "_weighted_row_sum"]
    assert sorted(name for name, _ in code.values()) == names  # once each, for both steps
    for name, ptx in code.values():
        assert not re.search(r"\b(atom|red)\.", ptx), name
        lanes = 16 // dtype.itemsize if width * dtype.itemsize % 16 == 0 else 8 // dtype.itemsize
        if name in ("_adam_rates", "_mark_segments"):  # which move single numbers
            continue
        loads = re.findall(r"ld\.global[.\w:]*\.v(\d)\.b32", ptx)
        assert max(map(int, loads)) * 4 >= lanes * dtype.itemsize, f"{name} loads {loads}"
        if name in ("_weighted_row_sum", "_row_products"):
            assert "bar.sync" not in ptx, f"the warps of {name} wait for each other"
        if name == "_row_adam" and copy is not None:
            assert re.search(rf"cvt\.rn\.{'bf16' if dtype == torch.bfloat16 else 'f16'}", ptx), "not rounded to nearest"


def test_machine_code_of_updates_whose_factor_the_device_alone_knows(compiled):
    values, slots, weights, x = inputs("random", 512, torch.bfloat16, "cpu", r=32)
    tables = [torch.zeros(18, 512) for _ in range(3)]
    segments = cuda.sort_reads(slots, weights, 18)
    known = {"scale": torch.ones((), dtype=torch.float64), "skip": torch.zeros(()), "copy_KD": values}
    cuda.segment_row_adam_(*tables, x, segments, step=torch.ones((), dtype=torch.int64), **known, **SETTINGS)
    cuda.segment_row_sgd_(tables[0], x, segments, lr=1.0, weight_decay=0, **known)
    updates = {name: result for name, result in compiled if name in ("_adam_rates", "_row_adam", "_row_sgd")}
    assert len(updates) == 3
    for name, result in updates.items():
        assert stack(result) == 0, f"{name} spills"
        assert not re.search(r"\b(atom|red)\.", result.asm["ptx"]), name


@pytest.mark.parametrize("bits", [8, 4])
def test_machine_code_of_tables_in_8_and_4_bits(compiled, bits):
    values, slots, weights, x = inputs("random", 1536, torch.float32, "cpu", r=32)
    table = reference.quantize(values, bits)
    cuda.quantized_row_sum(table, slots, weights)
    cuda.quantized_row_products(table, x, slots)
    assert [name for name, _ in compiled] == ["_quantized_row_sum", "_quantized_row_products"]
    for name, result in compiled:
        assert stack(result) == 0, f"{name} spills"
        assert not re.search(r"ld\.global[.\w:]*\.b(8|16)\b", result.asm["ptx"]), f"{name} loads codes one by one"


def test_sizes_of_one_are_compiled(compiled):
    """Triton takes a 1 for a constant."""
    values, slots, weights, x = inputs("random", 8, torch.float32, "cpu", tokens=1, r=1)
    segments = cuda.sort_reads(slots, weights, 1)
    cuda.segment_row_adam_(values, values, values, x, segments, scale=1, step=1, **SETTINGS)
    cuda.score_gradients(x[:, None], values.view(1, 2, 18, 4), slots[..., None], weights[..., None])
    cuda.bucket_reads(x[:, None, :1], 1.0, scaled=True)
    cuda.bucket_gradient(x[:, None, :1], weights, 1.0, scaled=True)
    names = {"_mark_segments", "_split_slots", "_sum_chunks", "_row_adam", "_bucket_reads", "_bucket_gradient"}
    assert {name for name, _ in compiled} >= names


@pytest.mark.parametrize("bits", [8, 10])
def test_machine_code_of_buckets(compiled, bits):
    """One for all batches and temperatures."""
    for tokens, temperature in ((16, 1.0), (5, 2.0)):
        z = torch.randn(tokens, 5, bits)
        for scaled in (False, True):
            cuda.bucket_gradient(z, cuda.bucket_reads(z, temperature, scaled=scaled)[1], temperature, scaled=scaled)
    assert all(stack(result) == 0 for _, result in compiled), "spills"
    code = {result.hash: (name, result.asm["ptx"]) for name, result in compiled}
    assert sorted(name for name, _ in code.values()) == ["_bucket_gradient"] * 2 + ["_bucket_reads"] * 2
    for name, ptx in code.values():
        assert bits == 10 or re.search(r"ld\.global[.\w:]*\.v4\.b32", ptx), f"{name} loads less than 16 bytes"


def test_machine_code_of_searches(compiled, monkeypatch):
    """A warp a row, in registers: a spill, or barriers between sorting steps, would cost more than the search."""
    monkeypatch.setattr(torch, "empty", torch.zeros)  # what no kernel fills is read as columns
    cuda.product_top_k(*torch.randn(2, 2, 1024), 32)
    cuda.product_top_k(*torch.randn(2, 2, 512).half(), 32)
    cuda.top_k(torch.randn(2, 4096).bfloat16(), 256)
    assert [name for name, _ in compiled] == ["_product_rows", "_product_rows", "_top_k_rows"]
    for name, result in compiled:
        ptx = result.asm["ptx"]
        assert result.metadata.num_warps == 1
        assert stack(result) == 0, f"{name} spills"
        assert ptx.count("bar.sync") <= 1, f"the threads of {name} wait for each other"
