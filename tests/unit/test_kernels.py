"""Kernels: the reference against brute force, the fast against the reference, gradients by finite differences."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pkmlm.kernels import ops, reference


def scores(rows: int, n: int, ties: bool, dtype: torch.dtype, seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    if ties:
        return torch.randint(-2, 3, (rows, n), generator=random).to(dtype)
    return torch.randn(rows, n, generator=random, dtype=torch.float64).to(dtype)


@settings(deadline=None, max_examples=60)
@given(n=st.integers(1, 12), k=st.integers(1, 40), ties=st.booleans(), seed=st.integers(0, 9999))
def test_product_top_k_is_the_top_k_of_all_pairs_in_the_stated_order(n, k, ties, seed):
    k = min(k, n * n)
    s1, s2 = scores(5, n, ties, torch.float64, seed), scores(5, n, ties, torch.float64, seed + 1)
    i, j = reference.product_top_k(s1, s2, k)
    for row in range(5):
        rank1 = {x: r for r, x in enumerate(sorted(range(n), key=lambda x: (-s1[row, x], x)))}
        rank2 = {x: r for r, x in enumerate(sorted(range(n), key=lambda x: (-s2[row, x], x)))}
        pairs = itertools.product(range(n), range(n))
        order = sorted(pairs, key=lambda p: (-(s1[row, p[0]] + s2[row, p[1]]), rank1[p[0]], rank2[p[1]]))
        assert list(zip(i[row].tolist(), j[row].tolist(), strict=True)) == order[:k]


def test_candidates_at_k_32_are_119_of_1024():
    assert len(reference.candidate_pairs(512, 32)[0]) == 119


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("ties", [False, True])
def test_top_k_equals_its_reference_in_every_dtype(dtype, ties):
    x = scores(64, 100, ties, dtype, 3)
    x[0, :3] = torch.tensor([0.0, -0.0, 0.0])  # equal scores of different bits
    x[1, 5] = float("-inf")
    for k in (1, 7, 100):
        fast, slow = ops.top_k(x, k), reference.top_k(x, k)
        assert torch.equal(fast[0], slow[0])
        assert torch.equal(fast[1], slow[1])


@settings(deadline=None, max_examples=30)
@given(n=st.integers(1, 40), k=st.integers(1, 32), ties=st.booleans(), seed=st.integers(0, 9999))
def test_fast_product_top_k_equals_its_reference(n, k, ties, seed):
    k = min(k, n * n)
    s1, s2 = scores(9, n, ties, torch.float32, seed), scores(9, n, ties, torch.float32, seed + 1)
    fast, slow = ops.product_top_k(s1, s2, k), reference.product_top_k(s1, s2, k)
    assert torch.equal(fast[0], slow[0])
    assert torch.equal(fast[1], slow[1])


@pytest.mark.parametrize(("heads", "n", "k", "half"), [(1, 4, 4, 3), (2, 9, 5, 2), (4, 16, 16, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_product_keys_equal_brute_force_over_all_keys(heads, n, k, half, dtype):
    torch.manual_seed(0)
    q, keys = torch.randn(7, heads, 2 * half).to(dtype), torch.randn(heads, 2, n, half).to(dtype)
    found, slots = ops.product_key_select(q, keys, k)
    for h in range(heads):
        whole = torch.cat([keys[h, 0].repeat_interleave(n, 0), keys[h, 1].repeat(n, 1)], 1)  # slot i * n + j
        best, index = (q[:, h] @ whole.T).topk(k)
        torch.testing.assert_close(found[:, h], best)
        assert torch.equal(slots[:, h], index)


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


def test_flat_keys_equal_brute_force_and_their_gradients(monkeypatch):
    monkeypatch.setattr(ops, "ENTRIES", 20)  # several pieces
    torch.manual_seed(1)
    q = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    keys = torch.randn(2, 9, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: ops.flat_key_select(a, b, 3)[0], (q, keys))
    best, index = torch.einsum("nhd,hkd->nhk", q, keys).topk(3)
    found, slots = ops.flat_key_select(q, keys, 3)
    torch.testing.assert_close(found, best)
    assert torch.equal(slots, index)


@pytest.mark.parametrize("width", [1, 60, 100, 768])
def test_weighted_row_sum_equals_its_reference(width):
    torch.manual_seed(2)
    values, weights = torch.randn(50, width), torch.randn(17, 6)
    slots = torch.randint(0, 50, (17, 6))
    fast = ops.weighted_row_sum(values, slots, weights, compact=True)
    torch.testing.assert_close(fast, reference.weighted_row_sum(values, slots, weights), rtol=1e-5, atol=1e-5)


def test_gradients_of_the_weighted_row_sum(monkeypatch):
    monkeypatch.setattr(ops, "ENTRIES", 40)  # several pieces
    torch.manual_seed(3)
    values = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    slots = torch.randint(0, 5, (7, 4))  # slot 5 is never read
    slots[0] = 2  # one token reads a slot four times
    assert torch.autograd.gradcheck(lambda v, w: ops.weighted_row_sum(v, slots, w, compact=False), (values, weights))
    out = torch.randn(7, 5, dtype=torch.float64)
    (dense,) = torch.autograd.grad(ops.weighted_row_sum(values, slots, weights, compact=False), values, out)
    (compact,) = torch.autograd.grad(ops.weighted_row_sum(values, slots, weights, compact=True), values, out)
    assert compact.is_sparse
    assert compact.is_coalesced()
    assert compact.indices()[0].tolist() == sorted(set(slots.flatten().tolist()))
    torch.testing.assert_close(compact.to_dense(), dense)
    rows, grads = reference.row_gradients(out, slots, weights.detach())
    assert torch.equal(rows, compact.indices()[0])
    torch.testing.assert_close(grads, compact.values())


def test_backward_gives_the_same_bits_every_time():
    torch.manual_seed(4)
    values = torch.randn(4096, 64, requires_grad=True)
    weights, slots = torch.rand(512, 64, requires_grad=True), torch.randint(0, 4096, (512, 64))
    out = torch.randn(512, 64)

    def gradients():
        result = ops.weighted_row_sum(values, slots, weights, compact=True)
        return torch.autograd.grad(result, (values, weights), out)

    first = gradients()
    for _ in range(10):
        again = gradients()
        assert torch.equal(again[0].values(), first[0].values())
        assert torch.equal(again[1], first[1])


@pytest.mark.parametrize("bits", range(1, 17))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_bucket_codes_are_exact_for_every_pattern(bits, dtype):
    codes = torch.arange(2**bits)
    signs = torch.where((codes[:, None] >> torch.arange(bits)) & 1 == 1, 1.0, -1.0).to(dtype)
    assert torch.equal(ops.bucket_codes(signs[:, None])[:, 0], codes)


def test_zero_and_minus_zero_count_as_positive():
    assert ops.bucket_codes(torch.tensor([[[0.0, -0.0, -1e-30, 1e-30]]])).item() == 0b1011


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_bucket_score_is_the_softmax_over_all_sign_patterns(temperature):
    torch.manual_seed(5)
    z = torch.randn(20, 3, 6, dtype=torch.float64)
    patterns = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=6)), dtype=torch.float64)
    chances = (z @ patterns.T / temperature).softmax(-1)
    chosen = (patterns == torch.where(z >= 0, 1.0, -1.0)[..., None, :]).all(-1)
    torch.testing.assert_close(ops.bucket_scores(z, temperature), chances[chosen].view(20, 3))
    torch.testing.assert_close(ops.bucket_scores(z, temperature), reference.bucket_scores(z, temperature))


def test_bucket_scores_and_their_gradients_stay_finite():
    z = torch.tensor([[[1e30, -1e30, 0.0]]], requires_grad=True)
    ops.bucket_scores(z, 0.01).sum().backward()
    assert torch.isfinite(z.grad).all()
    z = torch.randn(4, 2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: ops.bucket_scores(x, 0.7), z)
