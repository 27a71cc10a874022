"""The loss in pieces: torch's cross-entropy of all logits, with its gradients, and never all logits."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from pkmlm.model import loss as loss_module
from pkmlm.model.loss import summed_loss

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 3e-2}


@pytest.fixture(params=[1, 7, 64, 512])
def at_a_time(request, monkeypatch):
    """Tokens of a piece: alone, with a remainder, without one, all."""
    monkeypatch.setattr(loss_module, "LEAST_TOKENS", request.param)
    monkeypatch.setattr(loss_module, "LOGITS", {"cpu": 1})
    return request.param


def drawn(tokens=128, dim=24, vocab=301):
    torch.manual_seed(tokens + vocab)
    h, weight = torch.randn(tokens, dim, dtype=torch.float64), torch.randn(vocab, dim, dtype=torch.float64)
    targets = torch.randint(0, vocab, (tokens,))
    targets[::5] = -100
    targets[1] = -1
    return h, weight, targets


def plain(h, weight, targets):
    return cross_entropy(h @ weight.T, targets.where(targets >= 0, -100), reduction="sum")


def with_gradients(loss, h, weight, targets, scale=0.37):
    h, weight = h.clone().requires_grad_(), weight.clone().requires_grad_()
    out = loss(h, weight, targets)
    (scale * out).backward()
    return out, h.grad, weight.grad


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_against_all_logits(at_a_time, dtype):
    h, weight, targets = drawn()
    expected = with_gradients(plain, h, weight, targets)
    kept = dtype if dtype == torch.float64 else torch.float32  # weights of half precision are copies of fp32 ones
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        found = with_gradients(summed_loss, h.to(kept), weight.to(kept), targets)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == kept
        assert one.shape == other.shape
        assert (one - other).abs().max() <= TOLERANCE[dtype] * other.abs().max()


def test_no_more_logits_than_are_said_to_exist(at_a_time):
    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                self.numbers = max(self.numbers, out.numel())
            return out

    h, weight, targets = drawn(dim=8)
    with Largest() as largest:
        with_gradients(summed_loss, h, weight, targets)
    assert largest.numbers == 301 * max(8, min(at_a_time, 128))


def test_half_precision_ends_at_the_logits():
    h, weight, targets = drawn()
    half = (h.bfloat16() @ weight.bfloat16().T).float()
    expected = cross_entropy(half, targets.where(targets >= 0, -100), reduction="sum")
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(summed_loss(h.float(), weight.float(), targets), expected, rtol=1e-5, atol=0)


class Products(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += str(func) == "aten.mm.default"
        return func(*args, **(kwargs or {}))


def test_a_gradient_that_nobody_needs_is_not_computed():
    h, weight, targets = drawn()
    full = with_gradients(summed_loss, h, weight, targets, 1)
    for index in (0, 1):
        given = [h.clone(), weight.clone()]
        given[index].requires_grad_()
        with Products() as products:
            summed_loss(*given, targets).backward()
        assert torch.equal(given[index].grad, full[1 + index])
        assert given[1 - index].grad is None
        assert products.count == 2
    with Products() as products, torch.no_grad():
        assert summed_loss(h.requires_grad_(), weight.requires_grad_(), targets) == full[0]
    assert products.count == 1


def test_nothing_scored():
    h, weight, _ = drawn()
    loss, *gradients = with_gradients(summed_loss, h, weight, torch.full((len(h),), -100))
    assert loss == 0
    assert not any(gradient.any() for gradient in gradients)


def test_large_logits_do_not_overflow():
    h, weight, targets = drawn()
    found = with_gradients(summed_loss, 1e4 * h, weight, targets)
    for one, other in zip(found, with_gradients(plain, 1e4 * h, weight, targets), strict=True):
        torch.testing.assert_close(one, other)


def test_what_is_not_finite_shows():
    for bad in (float("inf"), float("nan")):
        h, weight, targets = drawn()
        h[2] = bad
        assert not with_gradients(summed_loss, h, weight, targets)[0].isfinite()


def test_the_same_bits_every_time():
    h, weight, targets = drawn(tokens=700)
    first, again = (with_gradients(summed_loss, h.float(), weight.float(), targets) for _ in range(2))
    assert all(map(torch.equal, first, again))


def test_the_scale_of_an_fp16_loss_keeps_sums_in_range():
    """The head's gradient of one token's logit is a sum over 600 tokens: beyond fp16 at the scale of 1."""
    h, weight = torch.full((600, 32), 200.0), torch.zeros(40, 32)
    targets = torch.zeros(600, dtype=torch.int64)
    for scale, finite in ((1.0, False), (2.0**-10, True)):
        leaf = weight.clone().requires_grad_()
        with torch.autocast("cpu", torch.float16):
            loss = summed_loss(h, leaf, targets, scale)
        loss.backward()
        assert bool(leaf.grad.isfinite().all()) is finite
    expected = torch.autograd.grad(scale * plain(h, leaf, targets), leaf)[0]
    torch.testing.assert_close(leaf.grad, expected, rtol=2e-3, atol=0)


def test_a_second_backward_gives_the_same():
    h, weight, targets = drawn()
    h.requires_grad_()
    loss = summed_loss(h, weight, targets)
    loss.backward(retain_graph=True)
    first, h.grad = h.grad, None
    loss.backward()
    assert torch.equal(h.grad, first)
