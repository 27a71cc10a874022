"""One step: accumulation, precision, the loss scale, divergence."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pkmlm.data.batches import Batches
from pkmlm.data.corpus import Corpus
from pkmlm.errors import UserError
from pkmlm.kernels.row_gradient import RowGradient
from pkmlm.model.transformer import build_model
from pkmlm.recipe.load import load_recipe
from pkmlm.recipe.schema import Recipe
from pkmlm.train.loss_scale import LossScale
from pkmlm.train.step import MOST_SKIPS, TrainState, queue_step, train_step


@pytest.fixture
def recipe(tmp_path: Path, write_recipe) -> Recipe:
    return load_recipe(write_recipe(tmp_path, "product-key"))


def with_pkm(recipe: Recipe, norm: str = "batch", **learns) -> Recipe:
    """The recipe with another query norm, or another way in which the values learn."""
    pkm = recipe.model.memories["pkm"]
    pkm = replace(pkm, query_norm=norm, optim=replace(pkm.optim, **learns))
    return replace(recipe, model=replace(recipe.model, memories={"pkm": pkm}))


def state_of(recipe: Recipe, precision: str = "fp32") -> TrainState:
    corpus = Corpus(recipe.data.dir, "train")
    return TrainState(recipe, build_model(recipe, corpus.vocab_size), Batches.of(corpus, recipe), precision)


def weights(state: TrainState) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in state.model.state_dict().items()}


@pytest.mark.parametrize(("norm", "optimizer"), [("layer", "row-adam"), ("none", "adam")])
def test_accumulation_does_not_change_a_step(recipe, norm, optimizer):
    recipe = with_pkm(recipe, norm, optimizer=optimizer, clip=0.01)  # a batch norm sees micro-batches, by its nature
    recipe = replace(recipe, optim=replace(recipe.optim, clip=0.1))
    results = {}
    for size in (8, 2):
        state = state_of(replace(recipe, train=replace(recipe.train, micro_batch=size)))
        state.model.double()
        taken = [train_step(state, step) for step in (1, 2)]
        results[size] = ([result.loss for result in taken], taken[1].norms, weights(state))
    assert results[8][0] == pytest.approx(results[2][0], rel=1e-9)
    assert results[8][1] == pytest.approx(results[2][1], rel=1e-6)
    for name, tensor in results[8][2].items():
        torch.testing.assert_close(tensor, results[2][2][name], rtol=1e-6, atol=1e-9, msg=name)


def test_batch_norm_counts_each_forward_once_and_weighs_a_step_the_same(recipe):
    for size in (8, 2):
        state = state_of(replace(recipe, train=replace(recipe.train, micro_batch=size)))
        norm = state.model.blocks[1].parts["memory_pkm"].query.norm
        queries, mean = [], norm.running_mean.clone()
        norm.register_forward_hook(lambda _, inputs, out, queries=queries: queries.append(inputs[0]))
        train_step(state, 1)
        assert len(queries) == 8 // size
        for each in queries:
            mean.lerp_(each.mean(0), norm.momentum)
        torch.testing.assert_close(norm.running_mean, mean)
        assert 1 - (1 - norm.momentum) ** (8 // size) == pytest.approx(0.1)


def test_half_precision_has_the_norms_of_fp32(recipe):
    norms = [train_step(state_of(recipe, precision), 1).norms for precision in ("fp32", "fp16", "bf16")]
    for half in norms[1:]:
        assert half == pytest.approx(norms[0], rel=0.05)


@pytest.mark.parametrize(("precision", "optimizer"), [("fp32", "adam"), ("bf16", "row-adam"), ("fp16", "adam")])
def test_every_precision_and_optimizer_learns(recipe, precision, optimizer):
    state = state_of(with_pkm(recipe, optimizer=optimizer), precision)
    losses = [train_step(state, step).loss for step in range(1, 16)]
    assert losses[0] == pytest.approx(math.log(state.model.embedding.num_embeddings), abs=1), "nats of a token"
    assert losses[-1] < losses[0] - 0.3
    assert all(tensor.dtype in (torch.float32, torch.int64) for tensor in state.model.state_dict().values())


@pytest.mark.parametrize("group", range(4))
def test_an_overflow_in_one_group_skips_all(tmp_path, write_recipe, group):
    state = state_of(load_recipe(write_recipe(tmp_path, "mixed")), "fp16")
    train_step(state, 1)
    before, scale = weights(state), state.loss_scale.scale

    def overflow(grad: torch.Tensor) -> torch.Tensor:
        bad = grad.clone()
        bad[0] = float("inf")
        return bad

    if gradients := state.param_groups[group].row_gradients:
        gradients[0].add = lambda x, *reads: RowGradient.add(gradients[0], overflow(x), *reads)
    else:
        hook = next(iter(state.param_groups[group].parameters.values())).register_hook(overflow)
    result = train_step(state, 2)
    if gradients:
        del gradients[0].add
    else:
        hook.remove()
    assert result.skipped
    for name, parameter in state.model.named_parameters():
        assert torch.equal(parameter, before[name]), name
    assert state.loss_scale.scale == scale / 2
    assert not train_step(state, 3).skipped
    assert state.progress.skips == 0


@pytest.mark.parametrize(("scale", "last"), [(2.0**4, 5), (2.0**40, MOST_SKIPS)])  # to the floor of 1; still above it
def test_too_many_skips_in_a_row_end_training(recipe, scale, last):
    state = state_of(recipe, "fp16")
    state.loss_scale = LossScale(scale)
    with torch.no_grad():
        state.model.norm.weight.fill_(float("inf"))
    for step in range(1, last):
        assert train_step(state, step).skipped
    with pytest.raises(UserError, match=rf"diverged at step {last}.* after {last} skipped steps in a row") as caught:
        train_step(state, last)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_loss_that_is_not_finite_ends_training_before_the_update(recipe, precision):
    state = state_of(recipe, precision)
    with torch.no_grad():
        state.model.norm.bias[0] = float("nan")
    before = weights(state)
    with pytest.raises(UserError, match="diverged at step 1: loss nan, gradient norm of dense and pkm") as caught:
        train_step(state, 1)
    assert caught.value.exit_code == 3
    for name, parameter in state.model.named_parameters():
        assert torch.equal(parameter.nan_to_num(), before[name].nan_to_num()), name


def moments(state: TrainState) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in state.tensors()[1].items()}


@pytest.mark.parametrize("kind", ["mixed", "modern"])
def test_a_step_without_a_wait_is_the_same_step(tmp_path, write_recipe, kind):
    """To the bit, or with Muon, which adds up in another way, to rounding: where it multiplies in bf16, a hundredth of
    what a weight moves.
    """
    recipe = load_recipe(write_recipe(tmp_path, kind), ["optim.clip=0.5", "model.memories.pkm.query_norm=layer"])
    waiting, going_on = state_of(recipe), state_of(recipe)
    going_on.waits = False
    queued = [queue_step(going_on, step) for step in (1, 2, 3)]
    assert [each.result() for each in queued[:1]] == [train_step(waiting, 1)]
    for step in (2, 3):
        result = train_step(waiting, step)
        assert queued[step - 1].result().loss == pytest.approx(result.loss, rel=1e-5)
        assert queued[step - 1].result().norms == pytest.approx(result.norms, rel=1e-5)
    rtol, of_weights, of_moments = (1e-3, 3e-4, 1e-6) if kind == "modern" else (0, 0, 0)
    for held, atol in ((weights, of_weights), (moments, of_moments)):
        expected = held(waiting)
        for name, tensor in held(going_on).items():
            torch.testing.assert_close(tensor, expected[name], rtol=rtol, atol=atol, msg=name)


@pytest.mark.parametrize("where", range(4))
@pytest.mark.parametrize("optimizer", ["row-adam", "row-sgd"])
def test_without_a_wait_nothing_changes_from_the_step_that_diverged_on(tmp_path, write_recipe, optimizer, where):
    """Whichever group it diverged in: dense, Muon's matrices, the values; and whether or not its moments exist."""
    recipe = load_recipe(write_recipe(tmp_path, "modern"), [f"model.memories.pkm.optim.optimizer={optimizer}"])
    state = state_of(recipe)
    state.waits = False
    first = 1 if where == 3 else 2
    for step in range(1, first):
        queue_step(state, step)
    before = weights(state), moments(state)
    group = state.param_groups[where % 3]

    def bad(grad: torch.Tensor) -> torch.Tensor:
        return torch.full_like(grad, float("nan"))

    if gradients := group.row_gradients:
        gradients[0].add = lambda x, *reads: RowGradient.add(gradients[0], bad(x), *reads)
        diverged = queue_step(state, first)
        del gradients[0].add
    else:
        hook = next(iter(group.parameters.values())).register_hook(bad)
        diverged = queue_step(state, first)
        hook.remove()
    after = queue_step(state, first + 1)
    assert math.isfinite(after.result().loss)
    with pytest.raises(UserError, match=f"diverged at step {first}: .*norm of {group.name} not finite") as caught:
        diverged.result()
    assert caught.value.exit_code == 3
    for found, expected in zip((weights(state), moments(state)), before, strict=True):
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(("precision", "optimizer"), [("fp32", "row-adam"), ("fp16", "adam")])
def test_what_moves_is_the_clipped_gradient(recipe, precision, optimizer):
    """After one step the first moments are a tenth of it."""
    recipe = with_pkm(recipe, clip=1e-5, optimizer=optimizer, betas=(0.9, 0.999))
    optim = replace(recipe.optim, clip=1e-4, betas=(0.9, 0.98))
    state = state_of(replace(recipe, optim=optim), precision)
    norms = train_step(state, 1).norms
    for group in state.param_groups:
        assert norms[group.name] > group.clip
        moments = [each["exp_avg"].flatten() for each in group.optimizer.state.values()]
        assert float(torch.cat(moments).norm()) == pytest.approx(0.1 * group.clip, rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "precision"),
    [("product-key", "fp16"), ("memory-plus", "bf16"), ("peer", "fp32"), ("hash", "fp32"), ("mixed", "fp16")],
)
def test_recomputing_activations_changes_no_bit_and_counts_no_forward_twice(tmp_path, write_recipe, kind, precision):
    recipe = load_recipe(write_recipe(tmp_path, kind), ["model.dropout=0.1"])
    results = []
    for recompute in (False, True):
        state = state_of(replace(recipe, train=replace(recipe.train, recompute=recompute)), precision)
        forwards = []
        state.model.blocks[1].norm.register_forward_hook(lambda *_, forwards=forwards: forwards.append(1))
        results.append(([train_step(state, step).loss for step in (1, 2)], weights(state), len(forwards)))
    (losses, plain, once), (same, again, twice) = results
    assert losses == same
    assert twice == 2 * once
    for name, tensor in plain.items():
        assert torch.equal(tensor, again[name]), name


def test_the_loss_scale_is_that_of_torchs_scaler(recipe):
    state = state_of(recipe, "fp16")
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    state.loss_scale = LossScale(2.0**8, interval=3)
    parameter = torch.zeros(1, requires_grad=True)
    sgd = torch.optim.SGD([parameter], lr=1.0)
    for step, factor in enumerate((1, 1, math.inf, 1, 1, 1, 1, math.inf, 1), 1):
        hook = state.model.norm.weight.register_hook(lambda grad, factor=factor: grad * factor)
        train_step(state, step)
        hook.remove()
        theirs.scale(torch.ones(()))
        parameter.grad = torch.tensor([float(factor)])
        theirs.step(sgd)
        theirs.update()
        assert state.loss_scale.scale == theirs.get_scale(), step
