"""Kernels: the reference against brute force, the fast against the reference, gradients by finite differences."""

import importlib
import itertools
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pkmlm
from pkmlm.errors import UserError
from pkmlm.kernels import backend, cpu, cpu_search, matmul, ops, reference
from pkmlm.kernels.jit import call, kernel, over_threads
from pkmlm.kernels.row_gradient import RowGradient
from tests import PATIENCE


@pytest.fixture(scope="module", autouse=True)
def each_kernel_has_one_type():
    """numba's cache may give a process the code for the types of another that compiles at the same time."""
    yield
    kernels = {
        name: of for module in (cpu, cpu_search) for name, of in vars(module).items() if hasattr(of, "signatures")
    }
    cached = {name: len(of.signatures) for name, of in kernels.items() if of.stats.cache_path}
    assert cached
    assert all(types <= 1 for types in cached.values()), cached


def scores(rows: int, n: int, ties: bool, dtype: torch.dtype, seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    if ties:
        return torch.randint(-2, 3, (rows, n), generator=random).to(dtype)
    return torch.randn(rows, n, generator=random, dtype=torch.float64).to(dtype)


@settings(deadline=None, max_examples=40)
@given(n=st.integers(1, 12), k=st.integers(1, 40), ties=st.booleans(), seed=st.integers(0, 9999))
def test_product_top_k_is_the_top_k_of_all_pairs_in_the_stated_order(n, k, ties, seed):
    k = min(k, n * n)
    s1, s2 = scores(5, n, ties, torch.float64, seed), scores(5, n, ties, torch.float64, seed + 1)
    sums, slots = reference.product_top_k(s1, s2, k)
    i, j = slots // n, slots % n
    assert torch.equal(sums, s1.gather(1, i) + s2.gather(1, j))
    for row in range(5):
        rank1 = {x: r for r, x in enumerate(sorted(range(n), key=lambda x: (-s1[row, x], x)))}
        rank2 = {x: r for r, x in enumerate(sorted(range(n), key=lambda x: (-s2[row, x], x)))}
        pairs = itertools.product(range(n), range(n))
        order = sorted(pairs, key=lambda p: (-(s1[row, p[0]] + s2[row, p[1]]), rank1[p[0]], rank2[p[1]]))
        assert list(zip(i[row].tolist(), j[row].tolist(), strict=True)) == order[:k]


def test_candidates_at_k_32_are_119_of_1024():
    assert len(reference.candidate_pairs(512, 32)[0]) == 119


@pytest.mark.parametrize("ties", [False, True])
def test_top_k_equals_its_reference(ties):
    for n in (1, 63, 64, 65, 300):
        x = scores(64, n, ties, torch.float32, 3)
        if n > 5:
            x[0, :3] = torch.tensor([0.0, -0.0, 0.0])  # equal scores of different bits
            x[1, 5] = float("-inf")
            x[2, 5] = float("inf")
        for k in {1, min(7, n), min(100, n), n}:
            found, slow = cpu.top_k(x, k), reference.top_k(x, k)
            assert all(map(torch.equal, found, slow))


def test_scores_that_are_no_numbers_come_first_and_many_equal_ones_take_no_longer():
    """A query of zeros, or of no numbers, against a million flat keys: to rank all that are equal would take hours."""
    x = torch.zeros(8, 1 << 19)
    x[1, -2:] = 1.0
    x[2:5] = float("nan")
    x[3, ::2] = -x[3, ::2]  # as inf - inf is, on some machines
    x[4, :100] = 1.0
    x[5] = torch.arange(float(1 << 19))
    x[5, 7] = float("inf") - float("inf")
    x[6].view(-1, 128)[:, :34] = 1.0  # in some of the lanes in which the best 32 are looked for
    x[7].view(-1, 128)[:, :64] = 9.0  # the highest
    for k in (1, 32, 150):
        assert torch.equal(cpu.top_k(x, k)[1], reference.top_k(x, k)[1])


@settings(deadline=None, max_examples=60)
@given(n=st.integers(1, 140), k=st.integers(1, 70), ties=st.booleans(), seed=st.integers(0, 9999))
def test_fast_product_top_k_equals_its_reference(n, k, ties, seed):
    k = min(k, n * n)
    s1, s2 = scores(9, n, ties, torch.float32, seed), scores(9, n, ties, torch.float32, seed + 1)
    assert all(map(torch.equal, cpu.product_top_k(s1, s2, k), reference.product_top_k(s1, s2, k)))


@pytest.mark.parametrize(("heads", "n", "k", "half"), [(1, 4, 4, 3), (4, 16, 16, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_product_keys_equal_brute_force_over_all_keys(monkeypatch, heads, n, k, half, dtype):
    monkeypatch.setattr(cpu_search, "CHUNK", 32 * n)  # sixteen tokens at a time
    torch.manual_seed(0)
    q, keys = torch.randn(50, heads, 2 * half).to(dtype), torch.randn(heads, 2, n, half).to(dtype)
    found, slots = ops.product_key_select(q, keys, k)
    for h in range(heads):
        whole = torch.cat([keys[h, 0].repeat_interleave(n, 0), keys[h, 1].repeat(n, 1)], 1)  # slot i * n + j
        best, index = (q[:, h] @ whole.T).topk(k)
        torch.testing.assert_close(found[:, h], best)
        assert torch.equal(slots[:, h], index)


@pytest.mark.parametrize(
    ("tokens", "heads", "n", "k", "half"), [(1, 1, 1, 1, 1), (9, 3, 5, 12, 7), (300, 4, 74, 32, 32)]
)
def test_gradients_of_scores_equal_their_definition(tokens, heads, n, k, half):
    torch.manual_seed(n)
    q, subkeys, grad = (
        torch.randn(tokens, heads, 2 * half),
        torch.randn(heads, 2, n, half),
        torch.randn(tokens, heads, k),
    )
    slots = torch.randint(n * n, (tokens, heads, k))  # a sub-key is in several pairs of a query
    grad[0] = 0
    wide = reference.score_gradients(q.double(), subkeys.double(), slots, grad.double())
    strided = grad.transpose(0, 1).contiguous().transpose(0, 1)
    for found, expected in zip(cpu.score_gradients(q, subkeys, slots, strided), wide, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


def test_gradients_of_product_keys_reach_queries_and_the_right_half():
    torch.manual_seed(1)
    q = torch.randn(3, 2, 6, dtype=torch.float64, requires_grad=True)
    keys = torch.randn(2, 2, 5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: ops.product_key_select(a, b, 4)[0], (q, keys))
    found, slots = ops.product_key_select(q, keys, 4)
    found.sum().backward()
    for half, of_half in ((0, slots // 5), (1, slots % 5)):
        for h in range(2):
            read = torch.zeros(5, dtype=torch.bool)
            read[of_half[:, h].flatten()] = True
            assert torch.equal(keys.grad[h, half].abs().sum(1) > 0, read)


@settings(deadline=None, max_examples=60)
@given(
    tokens=st.integers(0, 5),
    heads=st.integers(1, 4),
    n=st.integers(1, 140),
    half=st.integers(1, 9),
    k=st.integers(1, 40),
    ties=st.booleans(),
    seed=st.integers(0, 9999),
)
def test_a_search_of_few_queries_in_one_call_equals_the_others(tokens, heads, n, half, k, ties, seed):
    k = min(k, n * n)
    q = scores(tokens * heads, 2 * half, ties, torch.float32, seed).view(tokens, heads, 2 * half)
    keys = scores(heads * 2 * n, half, ties, torch.float32, seed + 1).view(heads, 2, n, half)
    with torch.no_grad():
        found, slots = ops.product_key_select(q, keys, k)
    for other in (reference.product_key_search(q, keys, k), ops.product_key_select(q, keys, k)):
        torch.testing.assert_close(found, other[0])
        assert not ties or torch.equal(slots, other[1]), "scores of whole numbers are exact"
        i, j = slots // n, slots % n
        scores1, scores2 = (
            torch.einsum("nhf,hkf->nhk", q.unflatten(-1, (2, half))[:, :, s], keys[:, s]) for s in (0, 1)
        )
        torch.testing.assert_close(scores1.gather(2, i) + scores2.gather(2, j), found)


@settings(deadline=None, max_examples=20)
@given(tokens=st.integers(1, 9), heads=st.integers(1, 8), k=st.integers(1, 40), seed=st.integers(0, 9999))
def test_a_softmax_of_few_scores_equals_torchs(tokens, heads, k, seed):
    sorted_ = 9 * scores(tokens * heads, k, False, torch.float32, seed).view(tokens, heads, k).sort(-1, True).values
    sorted_[0, 0, 0] = (float("inf"), float("nan"), 99.0)[seed % 3]
    with torch.no_grad():
        found = ops.softmax(sorted_)
    assert torch.allclose(found, sorted_.softmax(-1), rtol=1e-5, atol=1e-9, equal_nan=True)


def test_flat_keys_equal_brute_force_and_their_gradients(monkeypatch):
    monkeypatch.setitem(matmul.SCORES, "cpu", 20)  # several pieces
    torch.manual_seed(1)
    q = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    keys = torch.randn(2, 9, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: ops.flat_key_select(a, b, 3)[0], (q, keys))
    best, index = torch.einsum("nhd,hkd->nhk", q, keys).topk(3)
    found, slots = ops.flat_key_select(q, keys, 3)
    torch.testing.assert_close(found, best)
    assert torch.equal(slots, index)


@pytest.mark.parametrize("bits", [8, 4])
@settings(deadline=None, max_examples=30)
@given(
    rows=st.integers(1, 30),
    width=st.integers(1, 70),
    reads=st.integers(1, 20),
    ties=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 9999),
)
def test_quantized_entries_are_half_a_step_off_and_kernels_read_them(bits, rows, width, reads, ties, dtype, seed):
    random = torch.Generator().manual_seed(seed)
    size = 10.0 ** torch.randint(-30, 30, (rows, 1), generator=random)
    values = (scores(rows, width, ties, torch.float32, seed) * size).to(dtype)
    values[rows // 2] = 0
    table = reference.quantize(values, bits)
    entries, largest = reference.dequantize(table), values.float().abs().amax(1)
    step = largest[:, None] / (2 ** (bits - 1) - 1)
    assert ((entries - values.float()).abs() <= step / 2 * (1 + 1e-5)).all()
    at = values.float().abs().argmax(1, keepdim=True)
    assert torch.equal(entries.gather(1, at), values.float().gather(1, at)), "the largest entry is exact"
    assert torch.equal(reference.dequantize(reference.quantize(-values, bits)), -entries), "codes are symmetric"
    assert table.codes_KC.numel() == rows * (width if bits == 8 else (width + 1) // 2)

    table = reference.quantize(scores(rows, width, ties, torch.float32, seed), bits)
    entries = reference.dequantize(table)
    slots = torch.randint(rows, (6, reads), generator=random)
    weights, x = torch.randn(6, reads, generator=random), torch.randn(6, width, generator=random)
    close = {"rtol": 1e-5, "atol": 1e-4}
    for kernels in (reference, cpu):
        found = kernels.quantized_row_sum(table, slots, weights)
        torch.testing.assert_close(found, reference.weighted_row_sum(entries, slots, weights), **close)
        found = kernels.quantized_row_products(table, x, slots)
        torch.testing.assert_close(found, reference.row_products(entries, x, slots), **close)


def test_a_quantized_table_refuses_to_give_a_gradient():
    table = reference.quantize(torch.randn(4, 3), 8)
    slots, weights = torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2, requires_grad=True)
    with pytest.raises(ValueError, match="no gradient"):
        ops.quantized_row_sum(table, slots, weights)
    with pytest.raises(ValueError, match="no gradient"):
        ops.quantized_row_products(table, torch.ones(2, 3, requires_grad=True), slots)
    with torch.no_grad():
        assert ops.quantized_row_sum(table, slots, weights).shape == (2, 3)


class Reads(NamedTuple):
    values: torch.Tensor
    slots: torch.Tensor
    weights: torch.Tensor
    x: torch.Tensor


def random_reads(rows: int, tokens: int, reads: int, width: int, seed: int) -> Reads:
    random = torch.Generator().manual_seed(seed)
    slots = torch.randint(0, max(1, rows - 1), (tokens, reads), generator=random)  # the last row is never read
    return Reads(
        torch.randn(rows, width, generator=random),
        slots.clamp(max=max(0, rows // 2)),  # a hot row
        torch.randn(tokens, reads, generator=random),
        torch.randn(tokens, width, generator=random),
    )


SHAPES = [(1, 1, 1, 1), (5, 0, 3, 4), (9, 7, 8, 60), (50, 40, 13, 100), (5000, 300, 32, 768), (3, 400, 20, 17)]


@pytest.mark.parametrize("shape", SHAPES)
def test_row_kernels_equal_their_reference(shape):
    values, slots, weights, x = random_reads(*shape, seed=2)
    close = {"rtol": 1e-5, "atol": 5e-4}  # a slot of the last shape sums 2,700 reads
    out = cpu.weighted_row_sum(values, slots, weights)
    torch.testing.assert_close(out, reference.weighted_row_sum(values, slots, weights), **close)
    torch.testing.assert_close(cpu.row_products(values, x, slots), reference.row_products(values, x, slots), **close)
    fast, slow = cpu.sort_reads(slots, weights, len(values)), reference.sort_reads(slots, weights, len(values))
    assert all(map(torch.equal, fast, slow))
    sums = reference.segment_sum(x, slow)
    torch.testing.assert_close(cpu.segment_sum(x, fast), sums, **close)
    torch.testing.assert_close(cpu.squared_norm(x, fast), reference.squared_norm(x, slow), rtol=1e-5, atol=0)
    every = cpu.squared_norm(x, fast.every_row(len(values)))
    torch.testing.assert_close(every, cpu.squared_norm(x, fast), rtol=1e-12, atol=0)
    by_hand = torch.zeros_like(values)
    for t, j in itertools.product(range(min(50, len(slots))), range(slots.shape[1])):
        by_hand[slots[t, j]] += weights[t, j] * x[t]
    if len(slots) <= 50:
        torch.testing.assert_close(sums, by_hand[slow.rows_U], **close)


@pytest.mark.parametrize("rows", [1, 2, 1 << 15, (1 << 15) + 1, 1 << 20, (1 << 30) + 1, 1 << 40])
def test_reads_are_sorted_in_one_and_in_several_passes(rows):
    random = torch.Generator().manual_seed(4)
    for tokens, reads in ((700, 3), (67, 49)):
        slots = torch.randint(0, rows, (tokens, reads), generator=random)
        slots[::3] = slots[0]  # rows that many tokens read
        slots[1, 0] = rows - 1
        weights = torch.randn(tokens, reads, generator=random)
        fast, slow = cpu.sort_reads(slots, weights, rows), reference.sort_reads(slots, weights, rows)
        assert all(map(torch.equal, fast, slow))


@pytest.mark.parametrize("every_row", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_row_adam_kernel_equals_its_reference(shape, every_row):
    values, slots, weights, x = random_reads(*shape, seed=3)
    segments = reference.sort_reads(slots, weights, len(values))
    segments = segments.every_row(len(values)) if every_row else segments
    # Squares far from 0: near it, the division by their root magnifies what the order of a sum rounds away.
    tables = [values, torch.randn_like(values), 0.1 + torch.rand_like(values)]
    ours, theirs = ([table.clone() for table in tables] for _ in range(2))
    how = {"scale": 0.5, "step": 3, "lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.2}
    cpu.segment_row_adam_(*ours, x, segments, **how)
    reference.segment_row_adam_(*theirs, x, segments, **how)
    for fast, slow in zip(ours, theirs, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-5)
    if not every_row:
        unread = sorted(set(range(len(values))) - set(slots.flatten().tolist()))
        for fast, before in zip(ours, tables, strict=True):
            assert torch.equal(fast[unread], before[unread])


def test_kernels_give_the_same_bits_every_time_and_for_any_number_of_threads():
    values, slots, weights, x = random_reads(4096, 512, 64, 96, seed=4)
    scores1, scores2 = torch.randn(2, 2000, 100)
    q, subkeys, grad = torch.randn(500, 4, 32), torch.randn(4, 2, 50, 16), torch.randn(500, 4, 32)

    def everything() -> list[torch.Tensor]:
        segments = cpu.sort_reads(slots, weights, len(values))
        tables = [values.clone(), torch.zeros_like(values), torch.zeros_like(values)]
        how = {"scale": 0.5, "step": 3, "lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.2}
        cpu.segment_row_adam_(*tables, x, segments, **how)
        cpu.segment_row_adam_(*tables, x, segments.every_row(len(values)), **how)
        gradient = RowGradient(len(values))
        for _ in range(6):
            gradient.add(x, slots, weights)
        assert gradient.sums is not None
        sums = [cpu.weighted_row_sum(values, slots, weights), cpu.segment_sum(x, segments), gradient.dense()]
        products = [cpu.squared_norm(x, segments), cpu.row_products(values, x, slots)]
        found = cpu.product_key_search(q, subkeys, 32)
        gradients = cpu.score_gradients(q, subkeys, found[1], grad)
        return [*tables, *sums, *products, *found, *gradients, *cpu.product_top_k(scores1, scores2, 32)]

    threads = torch.get_num_threads()
    first = everything()
    try:
        for number in (1, 2, 7):
            torch.set_num_threads(number)
            assert all(torch.equal(a, b) for a, b in zip(everything(), first, strict=True)), number
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_the_weighted_row_sum(dtype):
    values, slots, weights, out = random_reads(6, 7, 4, 5, seed=5)
    slots[0] = 2  # one token reads a slot four times
    values, weights, out = (tensor.to(dtype).requires_grad_(i < 2) for i, tensor in enumerate((values, weights, out)))
    if dtype == torch.float64:
        assert torch.autograd.gradcheck(lambda v, w: ops.weighted_row_sum(v, slots, w), (values, weights))
    plain = torch.nn.functional.embedding_bag(slots, values, mode="sum", per_sample_weights=weights)
    expected = torch.autograd.grad(plain, (values, weights), out)
    found = torch.autograd.grad(ops.weighted_row_sum(values, slots, weights), (values, weights), out)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_row_gradient_adds_up_scales_and_forgets():
    values, slots, weights, x = random_reads(30, 20, 4, 6, seed=6)
    values.requires_grad_()
    gradient = RowGradient(30)
    assert not gradient
    for part in (slice(0, 8), slice(8, 20)):
        ops.weighted_row_sum(values, slots[part], weights[part], gradient).backward(x[part])
    assert values.grad is None
    whole = torch.zeros(30, 6).index_add_(0, slots.flatten(), (weights[..., None] * x[:, None]).flatten(0, 1))
    torch.testing.assert_close(gradient.dense(), whole, rtol=1e-5, atol=1e-5)
    gradient.scale *= -0.5
    torch.testing.assert_close(gradient.dense(), -whole / 2, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.norm().float(), whole.norm() / 2, rtol=1e-5, atol=1e-5)
    gradient.add(x[:1], slots[:1], weights[:1])
    assert not torch.allclose(gradient.dense(), -whole / 2)
    gradient.clear()
    assert not gradient
    assert gradient.scale == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_reads_that_outgrow_the_table_are_kept_as_sums_of_rows(dtype):
    """Of six passes never more than one, and no row that was not read; after the norm, passes may follow."""
    _, slots, weights, x = random_reads(30, 120, 4, 6, seed=8)
    slots[slots == 7] = 8
    weights, x = weights.to(dtype), x.to(dtype)
    reads = (weights.double()[..., None] * x.double()[:, None]).flatten(0, 1)
    gradient = RowGradient(30)
    for first in range(0, 120, 20):
        gradient.add(x[first : first + 20], slots[first : first + 20], weights[first : first + 20])
        assert [len(part) for part, _, _ in gradient.reads] == [20]
        if first in (60, 100):
            whole = torch.zeros(30, 6, dtype=torch.float64).index_add_(
                0, slots[: first + 20].flatten(), reads[: 4 * first + 80]
            )
            torch.testing.assert_close(gradient.dense().double(), whole, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(gradient.norm(), whole.norm(), rtol=1e-5, atol=0)
            assert gradient.joined()[1].rows_U.tolist() == slots[: first + 20].unique().tolist()
    gradient.clear()
    assert not gradient


def test_reads_are_kept_as_they_are_while_the_table_is_larger():
    """1,120 bytes a pass, 2,800 of sums: three passes are more. From then on one pass is kept beside the sums."""
    _, slots, weights, x = random_reads(100, 120, 4, 6, seed=9)
    gradient, kept = RowGradient(100), []
    for part in torch.arange(120).split(20):
        gradient.add(x[part], slots[part], weights[part])
        kept.append(len(gradient.reads))
    assert kept == [1, 2, 3, 1, 1, 1]


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_row_gradient_that_is_not_finite_has_such_a_norm(bad):
    _, slots, weights, x = random_reads(30, 20, 4, 6, seed=7)
    x[3, 2] = bad
    gradient = RowGradient(30)
    gradient.add(x, slots, weights)
    assert not torch.isfinite(gradient.norm())


def test_a_row_gradient_without_a_backward_pass_has_no_reads():
    for of in (RowGradient.fold, RowGradient.joined, RowGradient.norm, RowGradient.dense):
        with pytest.raises(ValueError, match="no reads"):
            of(RowGradient(30))


def test_what_a_thread_raises_is_raised():
    def kernel(first: int, stop: int) -> None:
        if first:
            raise MemoryError(f"{first} to {stop}")

    with pytest.raises(MemoryError, match="3 to 6"):
        over_threads(kernel, [0, 3, 6])


def answers_of_processes(folder, body, number=1, most_bytes=resource.RLIM_INFINITY):
    """What a kernel of one line answers to 4, in processes that call it first at the same time, with their cache in the
    folder and files of at most so many bytes."""
    (folder / "line.py").write_text(f"from pkmlm.kernels.jit import kernel\n@kernel\ndef line(x):\n    return {body}\n")
    fork = multiprocessing.get_context("fork")
    barrier, answers = fork.Barrier(number), fork.SimpleQueue()

    def work():
        sys.path.insert(0, str(folder))
        sys.dont_write_bytecode = True  # Python would take a file that was written again within a second for the same
        line = importlib.import_module("line").line
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
        barrier.wait(PATIENCE)
        answers.put(call(line, 4))

    processes = [fork.Process(target=work) for _ in range(number)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE)
    assert [process.exitcode for process in processes] == [0] * number
    return [answers.get() for _ in processes]


def test_processes_that_compile_at_the_same_time_and_later_ones_all_get_the_right_code(tmp_path):
    def cached():
        return {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.nb?")}

    assert answers_of_processes(tmp_path, "2 * x", number=4) == [8] * 4
    saved = cached()
    assert len(saved) == 2, "an index, and the code"
    assert answers_of_processes(tmp_path, "2 * x") == [8]
    assert cached() == saved, "nothing is compiled again"
    assert answers_of_processes(tmp_path, "3 + x") == [7]


def test_a_kernel_runs_although_its_code_cannot_be_saved(tmp_path):
    assert answers_of_processes(tmp_path, "2 * x", most_bytes=0) == [8]


def test_threads_compile_a_kernel_once():
    @kernel
    def shift(first, stop, out):
        for i in range(first, stop):
            out[i] = i + 1

    out = torch.zeros(400, dtype=torch.int64).numpy()
    over_threads(shift, [0, 100, 200, 300, 400], out)
    assert out.tolist() == list(range(1, 401))
    assert len(shift.signatures) == 1


def test_kernels_refuse_what_they_cannot_do():
    with pytest.raises(ValueError, match="cannot select 5 of 4 product keys"):
        ops.product_key_select(torch.zeros(3, 1, 4), torch.zeros(1, 2, 2, 2), 5)
    for q in (torch.zeros(3, 1, 6), torch.zeros(3, 2, 4), torch.zeros(99, 1, 2), torch.zeros(3, 1, 4).double()):
        with pytest.raises(ValueError, match="queries and sub-keys"):
            ops.product_key_select(q, torch.zeros(1, 2, 2, 2), 2)
    with pytest.raises(ValueError, match="cannot select 5 of 4 keys"):
        ops.flat_key_select(torch.zeros(3, 1, 4), torch.zeros(1, 4, 4), 5)
    values, slots, weights, x = random_reads(9, 7, 8, 60, seed=1)
    how = {"scale": 1.0, "step": 1, "lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    with pytest.raises(ValueError, match="contiguous"):
        cpu.segment_row_adam_(values.T.contiguous().T, values, values, x, cpu.sort_reads(slots, weights, 9), **how)


@pytest.mark.parametrize("tokens", [7, 70])
def test_queries_and_sub_keys_may_have_any_strides(tokens):
    q, keys = torch.randn(2, tokens, 40, requires_grad=True), torch.randn(2, 2, 5, 20)
    strided = keys.to(memory_format=torch.channels_last).requires_grad_()
    ops.product_key_select(q.transpose(0, 1), strided, 4)[0].sum().backward()
    again = q.detach().transpose(0, 1).contiguous().requires_grad_()
    ops.product_key_select(again, keys.requires_grad_(), 4)[0].sum().backward()
    assert torch.equal(q.grad.transpose(0, 1), again.grad)
    assert torch.equal(strided.grad, keys.grad)


@pytest.mark.slow
@pytest.mark.parametrize("home", [False, True])
def test_kernels_run_in_a_forked_child_and_where_the_package_cannot_be_written(tmp_path, home):
    program = """
import os, torch
from pkmlm.kernels import cpu
def work():
    slots, weights = torch.zeros(4096, 4, dtype=torch.int64), torch.ones(4096, 4)
    return cpu.weighted_row_sum(torch.ones(9, 64), slots, weights).numpy().sum()
torch.set_num_threads(2)
assert work() == 4096 * 64 * 4
pid = os.fork()
if pid == 0:
    os._exit(0 if work() == 4096 * 64 * 4 else 1)
assert os.waitpid(pid, 0)[1] == 0
"""
    copy = tmp_path / "lib" / "pkmlm"
    shutil.copytree(Path(pkmlm.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    # Files where the cache folders would be: no mode would stop a user who is root.
    (copy / "kernels" / "__pycache__").touch()
    (tmp_path / "home").mkdir() if home else (tmp_path / "home").touch()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "lib"), "HOME": str(tmp_path / "home")}
    environment.pop("XDG_CACHE_HOME", None)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert home == any(tmp_path.rglob("*.nbi"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_bucket_codes_are_exact_for_every_pattern(dtype):
    for bits in range(1, 17):
        codes = torch.arange(2**bits)
        signs = torch.where((codes[:, None] >> torch.arange(bits)) & 1 == 1, 1.0, -1.0).to(dtype)
        assert torch.equal(reference.bucket_codes(signs[:, None])[:, 0], codes)
    # Zeros count as positive.
    assert reference.bucket_codes(torch.tensor([[[0.0, -0.0, -1e-30, 1e-30]]])).item() == 0b1011


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_bucket_score_is_the_softmax_over_all_sign_patterns(temperature):
    torch.manual_seed(5)
    z = torch.randn(20, 3, 6, dtype=torch.float64)
    patterns = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=6)), dtype=torch.float64)
    chances = (z @ patterns.T / temperature).softmax(-1)
    chosen = (patterns == torch.where(z >= 0, 1.0, -1.0)[..., None, :]).all(-1)
    torch.testing.assert_close(reference.bucket_scores(z, temperature), chances[chosen].view(20, 3))


@settings(deadline=None, max_examples=40)
@given(
    tokens=st.integers(0, 9),
    tables=st.integers(1, 7),
    bits=st.integers(1, 16),
    scaled=st.booleans(),
    temperature=st.sampled_from([0.01, 0.5, 1.0, 3.0]),
    seed=st.integers(0, 9999),
)
def test_reads_of_buckets_equal_their_reference(tokens, tables, bits, scaled, temperature, seed):
    z = torch.randn(tokens, tables, bits, generator=torch.Generator().manual_seed(seed))
    if tokens:
        z[0, 0, 0] = -0.0
        z[-1, -1] = torch.where(z[-1, -1] > 0, 1e30, 0.0)
    rows, weights = reference.bucket_reads(z.double(), temperature, scaled=scaled)
    codes = reference.bucket_codes(z)
    assert torch.equal(rows, codes + torch.arange(tables) * 2**bits)
    for each in (z, z.clone().requires_grad_()):  # in one call, and with a graph
        found = ops.bucket_reads(each, temperature, scaled=scaled)
        assert torch.equal(found[0], rows)
        torch.testing.assert_close(found[1], weights.float(), rtol=1e-5, atol=1e-7)
        assert found[1].requires_grad == each.requires_grad


def test_a_table_in_bf16_is_read_with_weights_in_fp32():
    """In bf16 the weight, or the entry of x, would be 1, and what is left of it 0."""
    rows_KD, pair = torch.tensor([[1.0], [-1.0]], dtype=torch.bfloat16), torch.tensor([[1 + 2**-9, 1.0]])
    assert ops.weighted_row_sum(rows_KD, torch.tensor([[0, 1]]), pair).item() == 2**-9
    assert ops.row_products(rows_KD.T.contiguous(), pair, torch.tensor([[0]])).item() == 2**-9


def test_bucket_scores_and_their_gradients_stay_finite():
    z = torch.tensor([[[1e30, -1e30, 0.0]]], requires_grad=True)
    reference.bucket_scores(z, 0.01).sum().backward()
    assert torch.isfinite(z.grad).all()
    z = torch.randn(4, 2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: reference.bucket_scores(x, 0.7), z)


def test_what_triton_lacks_is_told_before_a_kernel_is_built(monkeypatch, tmp_path):
    """With a CUDA tensor, a missing compiler would be an error of Triton's from the middle of the first step."""
    for name in ("gcc", "mycc"):
        (tmp_path / name).touch(mode=0o755)
    header = tmp_path / "Python.h"
    header.touch()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    folders = {"posix_prefix": str(tmp_path), "posix_local": str(tmp_path / "local")}
    monkeypatch.setattr("sysconfig.get_path", lambda name, scheme: folders[scheme])
    monkeypatch.setattr("sysconfig.get_default_scheme", lambda: "posix_local")  # Ubuntu 22.04's own Python
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert backend.lacking_for_triton() == []
    (tmp_path / "gcc").unlink()
    assert [each.split(" (")[0] for each in backend.lacking_for_triton()] == ["C compiler"]
    monkeypatch.setenv("CC", "mycc")
    assert backend.lacking_for_triton() == []
    header.unlink()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"package triton and no Python\.h"):
        backend.triton_kernels.__wrapped__()
