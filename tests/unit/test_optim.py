"""Parameter groups, schedules, row Adam, clipping, accumulation."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from pkmlm.device import autocast
from pkmlm.distributed import ProcessGroups
from pkmlm.errors import UserError
from pkmlm.memory import table as values_module
from pkmlm.memory.hash.spec import HashSpec
from pkmlm.memory.key_spec import KeyedOptim, KeysOptim
from pkmlm.memory.ngram.spec import NGramSpec
from pkmlm.memory.product_key.spec import ProductKeySpec
from pkmlm.memory.registry import SPECS
from pkmlm.memory.row_adam import RowAdam, RowSGD
from pkmlm.memory.spec import EveryRowOptim
from pkmlm.memory.table import Values
from pkmlm.model.transformer import build_model
from pkmlm.recipe.schema import Recipe, Train
from pkmlm.train.lr_schedule import LrSchedule
from pkmlm.train.optim import parameter_groups
from tests.conftest import model_2019, optim_2019, recipe_2019

PKM = {"layers": ("2",), "num_keys": 8, "heads": 2, "topk": 4, "key_dim": 8}


def recipe_of(*, tables: HashSpec | None = None, ngrams: NGramSpec | None = None, optim=None, **values) -> Recipe:
    """A model with product keys in layer 2, whose tables learn as `values` says, and other memories."""
    memories = {"pkm": ProductKeySpec(**PKM, optim=KeyedOptim(**values)), "tables": tables, "ngrams": ngrams}
    model = model_2019(dim=16, layers=2, heads=2, context=8, memories={k: v for k, v in memories.items() if v})
    return recipe_2019(model=model, train=Train(batch_tokens=32, micro_batch=2), optim=optim or optim_2019())


RECIPE = recipe_of()
HASHED = HashSpec(bits=4, layers=("1",))


def lrs(schedule: str, *steps: int) -> list[float]:
    return [LrSchedule(2.0, schedule, warmup_steps=10, steps=110, final=0.1).lr_at(step) for step in steps]


def test_schedules():
    assert lrs("inverse-sqrt", 1, 5, 10, 40, 90) == pytest.approx([0.2, 1.0, 2.0, 1.0, 2 / 3])
    quarter = 2 - 1.8 * (1 - math.sqrt(0.5)) / 2
    assert lrs("cosine", 5, 10, 35, 60, 110, 500) == pytest.approx([1.0, 2.0, quarter, 1.1, 0.2, 0.2])
    assert lrs("linear", 5, 10, 35, 60, 110, 500) == pytest.approx([1.0, 2.0, 1.55, 1.1, 0.2, 0.2])
    assert lrs("constant", 5, 10, 60, 500) == pytest.approx([1.0, 2.0, 2.0, 2.0])
    assert LrSchedule(1.0, "constant", warmup_steps=0, steps=5, final=0.1).lr_at(1) == 1.0


def test_a_decay_at_the_end_multiplies_whatever_the_schedule_gives():
    stable = LrSchedule(2.0, "constant", warmup_steps=10, steps=110, final=0.1, decay_steps=20)
    assert [stable.lr_at(step) for step in (5, 90, 100, 110, 500)] == pytest.approx([1.0, 2.0, 1.1, 0.2, 0.2])
    recipe = recipe_of(optim=optim_2019(lr=2.0, schedule="constant", warmup_steps=0, decay_steps=4, final_lr=0.0))
    recipe = replace(recipe, train=replace(recipe.train, steps=10))
    for group in parameter_groups(build_model(recipe, 40, "cpu"), recipe):
        rates = [group.schedule.lr_at(step) for step in (1, 6, 8, 10)]
        assert rates == pytest.approx([rates[0], rates[0], rates[0] / 2, 0.0]), group.name


def test_the_relative_schedule_is_the_dense_one_times_a_falling_factor():
    dense = LrSchedule(2.0, "cosine", warmup_steps=10, steps=110, final=0.1)
    relative = replace(dense, times=(4.0, 1.0))
    assert relative.lr_at(5) == pytest.approx(1.0 * (4 - 3 * 5 / 110))  # in the warm-up
    assert relative.lr_at(55) == pytest.approx(dense.lr_at(55) * 2.5)
    assert relative.lr_at(110) == pytest.approx(0.2)
    assert relative.lr_at(500) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("values", "middle", "last"),
    [
        ({"lr": 1.0, "schedule": "linear"}, 0.55, 0.1),  # final_lr is that of optim
        ({"lr": 1.0, "schedule": "linear", "final_lr": 0.5}, 0.75, 0.5),
        ({"lr": 1.0, "schedule": "linear", "final_lr": 0.0}, 0.5, 0.0),
        ({"schedule": "relative", "times": (8.0, 2.0)}, 0.275 * 5, 0.05 * 2),
    ],
)
def test_values_have_their_own_end_and_may_follow_the_dense_rate(values, middle, last):
    recipe = recipe_of(optim=optim_2019(lr=0.5, schedule="linear", warmup_steps=0, final_lr=0.1), **values)
    recipe = replace(recipe, train=replace(recipe.train, steps=100))
    groups = {group.name: group for group in parameter_groups(build_model(recipe, 20), recipe)}
    found = []
    for step in (50, 100):
        groups["pkm"].step(step)
        found.append(groups["pkm"].optimizer.param_groups[0]["lr"])
    assert found == pytest.approx([middle, last])


def test_every_parameter_is_in_one_group():
    recipe = recipe_of(tables=HASHED)
    model = build_model(recipe, 20)
    groups = {group.name: group for group in parameter_groups(model, recipe)}
    assert list(groups) == ["dense", "pkm", "tables"]
    names = [name for group in groups.values() for name in group.parameters]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert list(groups["pkm"].parameters) == ["blocks.1.parts.memory_pkm.values.weight_KD"]
    assert all(".tap" not in name and "values" in name for name in groups["tables"].parameters)
    for step in (1, 4000, 9000):
        assert groups["tables"].schedule.lr_at(step) == pytest.approx(3 * groups["dense"].schedule.lr_at(step))
    assert groups["pkm"].schedule.lr_at(1) == pytest.approx(1e-3)


def test_weight_decay_moves_matrices_alone():
    recipe = recipe_of(optim=optim_2019(weight_decay=0.5, schedule="constant", warmup_steps=0, lr=0.1))
    model = build_model(recipe, 20)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for group in parameter_groups(model, recipe):
        if group.name == "dense":
            for parameter in group.parameters.values():
                parameter.grad = torch.zeros_like(parameter)
            group.step(1)
    for name, parameter in model.named_parameters():
        decayed = parameter.ndim == 2 and "values" not in name
        expected = before[name] * 0.95 if decayed else before[name]
        torch.testing.assert_close(parameter.detach(), expected, msg=name)


@pytest.mark.parametrize(("kind", "name"), [("product-key", "subkeys_H2nf"), ("flat-key", "keys_HKq")])
def test_keys_move_at_their_own_lr_and_nothing_else_does(kind, name):
    slow = SPECS[kind](**PKM, optim=KeyedOptim(keys=KeysOptim(0.25)))
    other = SPECS[kind](**{**PKM, "layers": ("1+",)})  # whose keys learn as all else
    recipe = recipe_of(optim=optim_2019(schedule="constant", warmup_steps=0, lr=0.1, clip=0.0))
    recipe = replace(recipe, model=replace(recipe.model, memories={"slow": slow, "other": other}))
    dense = parameter_groups(build_model(recipe, 20), recipe)[0]
    before = {path: p.detach().clone() for path, p in dense.parameters.items()}
    for parameter in dense.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    dense.step(1)  # Adam's first step is the rate itself
    keys = f"blocks.1.parts.memory_slow.{name}"
    assert keys in dense.parameters
    for path, parameter in dense.parameters.items():
        moved = before[path] - (0.1 * 0.25 if path == keys else 0.1)
        torch.testing.assert_close(parameter.detach(), moved, msg=path)


@pytest.mark.parametrize("optimizer", ["row-adam", "adam"])
def test_the_values_may_have_an_epsilon_of_their_own(optimizer):
    def moved(**eps: float) -> torch.Tensor:
        recipe = recipe_of(optim=optim_2019(eps=1e-3, clip=0), optimizer=optimizer, lr=0.1, clip=0, **eps)
        group = parameter_groups(build_model(recipe, 20), recipe)[1]
        (table,) = group.parameters.values()
        before, x = table.detach().clone(), torch.full((1, 16), 1e-3)
        group.row_gradients[0].add(x, torch.tensor([[5]]), torch.ones(1, 1))
        group.step(1)
        return (before - table.detach())[5]

    torch.testing.assert_close(moved(), torch.full((16,), 0.05))  # 1e-3 / (1e-3 + 1e-3) of the rate
    torch.testing.assert_close(moved(eps=1e-12), torch.full((16,), 0.1))


def table_of(start: torch.Tensor) -> Values:
    table = Values(*start.shape, std=1.0)
    with torch.no_grad():
        table.weight_KD.copy_(start)
    return table


def read(table: Values, rows: list[int], x: torch.Tensor) -> None:
    """Give the table a gradient that is x[i] in rows[i]."""
    table.gradient.add(x, torch.tensor(rows)[:, None], torch.ones(len(rows), 1, dtype=x.dtype))


@pytest.mark.parametrize("every_row", [False, True])
def test_row_adam_is_adam_where_every_row_is_read_and_where_it_is_told_to_update_all(every_row):
    torch.manual_seed(0)
    start = torch.randn(5, 3)
    ours, theirs = table_of(start), torch.nn.Parameter(start.clone())
    how = {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-7, "weight_decay": 0.1}
    row_adam, adam = RowAdam([ours], every_row=every_row, **how), torch.optim.AdamW([theirs], **how)
    for _ in range(6):
        rows = torch.randperm(5)[: 2 if every_row else 5]
        x = torch.randn(len(rows), 3)
        read(ours, rows.tolist(), x)
        theirs.grad = torch.zeros(5, 3).index_copy(0, rows, x)
        row_adam.step()
        adam.step()
        row_adam.zero_grad()
    torch.testing.assert_close(ours.weight_KD, theirs, rtol=1e-5, atol=1e-6)


def test_row_adam_in_double_precision_is_as_exact_as_torchs():
    torch.manual_seed(0)
    ours = table_of(torch.randn(5, 3)).double()
    theirs = torch.nn.Parameter(ours.weight_KD.detach().clone())
    row_adam, adam = RowAdam([ours], lr=0.01), torch.optim.Adam([theirs], lr=0.01)
    for _ in range(6):
        x = torch.randn(5, 3, dtype=torch.float64)
        read(ours, list(range(5)), x)
        theirs.grad = x
        row_adam.step()
        adam.step()
    torch.testing.assert_close(ours.weight_KD, theirs, rtol=1e-12, atol=1e-12)


def test_a_gradient_stays_what_it_was_whatever_becomes_of_storage_that_is_shared():
    """Autograd gives the gradient of a sum to both terms. One of them may be a parameter, whose `grad` is then clipped,
    or added to in the next backward pass.
    """
    table, bias = table_of(torch.zeros(4, 2)), torch.nn.Parameter(torch.zeros(3, 2))
    RowAdam([table])
    slots, x = torch.tensor([[0], [2], [2]]), torch.randn(3, 2)
    for _ in range(2):
        ((table(slots, torch.ones(3, 1))[None] + bias[None]) * x).sum().backward()
    bias.grad.zero_()
    expected = torch.stack([x[0], torch.zeros(2), x[1] + x[2], torch.zeros(2)])
    torch.testing.assert_close(table.gradient.dense(), 2 * expected)


@pytest.mark.parametrize("kind", [RowAdam, RowSGD])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tables_in_half_precision_train(kind, dtype):
    table = table_of(torch.ones(3, 2)).to(dtype)
    optimizer = kind([table], lr=0.25)
    table(torch.tensor([[0, 2]]), torch.ones(1, 2)).float().sum().backward()
    optimizer.step()
    assert table.weight_KD[:, 0].tolist() == pytest.approx([0.75, 1, 0.75], abs=1e-2)


def test_layers_of_one_table_may_read_differently_often():
    table = table_of(torch.zeros(4, 2))
    optimizer = RowAdam([table, table], lr=1.0)  # as of two layers with a pool
    for reads in (1, 3):
        table(torch.arange(reads)[None], torch.ones(1, reads)).sum().backward()
    optimizer.step()
    assert table.weight_KD[:, 0].tolist() == pytest.approx([-1, -1, -1, 0])


def test_row_adam_leaves_rows_that_were_not_read():
    table = table_of(torch.randn(5, 3))
    values = table.weight_KD
    optimizer = RowAdam([table], lr=0.1)
    for rows in ([0, 1], [1, 3]):
        before = values.detach().clone()
        moments = {key: state.clone() for key, state in optimizer.state[values].items() if key != "step"}
        read(table, rows, torch.ones(2, 3))
        optimizer.step()
        optimizer.zero_grad()
        others = [row for row in range(5) if row not in rows]
        assert torch.equal(values[others], before[others])
        assert (values[rows] < before[rows]).all()
        for key, state in moments.items():
            assert torch.equal(optimizer.state[values][key][others], state[others])
            assert not torch.equal(optimizer.state[values][key][rows], state[rows])


def test_a_slot_that_is_first_read_late_moves_far():
    """The numbers of `RowAdam`'s docstring, at the default betas and a rate of 1."""
    table = table_of(torch.zeros(5, 1))
    optimizer, values = RowAdam([table], lr=1.0), table.weight_KD.detach()

    def moved(row: int, step: int) -> float:
        before = float(values[row])
        optimizer.state[table.weight_KD]["step"].fill_(step - 1)
        read(table, [row], torch.full((1, 1), 1e-3))
        optimizer.step()
        return before - float(values[row])

    read(table, [0], torch.ones(1, 1))
    optimizer.step()  # now it has a state
    firsts = [moved(1, 106), moved(2, 1000), moved(3, 5000)]
    assert firsts == pytest.approx([1.0, 2.5, 3.15], rel=0.01)
    moves = [moved(4, 100_000 + later) for later in range(40)]
    assert max(moves) == moves[11] == pytest.approx(6.57, rel=0.01)


def test_a_table_leaves_its_gradient_with_one_optimizer():
    table = table_of(torch.zeros(3, 2))
    optimizer = RowAdam([table])
    other = table_of(torch.zeros(3, 2))
    with pytest.raises(ValueError, match="an optimizer already"):
        RowAdam([other, table])
    RowAdam([other])  # of which the refused one has nothing
    read(table, [1], torch.ones(1, 2))
    optimizer.step()
    assert table.weight_KD[1].abs().sum() > 0


@pytest.mark.parametrize(
    "how",
    [
        *({"lr": lr} for lr in (-1.0, math.nan, math.inf, "1e-3")),
        *({"betas": betas} for betas in ((1.0, 0.9), (0.9, -0.1))),
        *({name: -1.0} for name in ("eps", "weight_decay")),
    ],
)
def test_impossible_settings_are_refused_and_leave_the_table_free(how):
    table = table_of(torch.zeros(4, 2))
    with pytest.raises(ValueError, match=next(iter(how))):
        RowAdam([table], **how)
    RowAdam([table])


def test_row_adam_takes_tables_alone():
    with pytest.raises(TypeError, match="Parameter"):
        RowAdam(table_of(torch.zeros(4, 2)).parameters())


def test_a_copy_of_a_table_trains_as_any_parameter():
    table = table_of(torch.ones(3, 2))
    RowAdam([table])
    twin = copy.deepcopy(table)
    twin(torch.tensor([[1]]), torch.ones(1, 1)).sum().backward()
    assert twin.weight_KD.grad is not None
    assert twin.weight_KD.grad.tolist() == [[0, 0], [1, 1], [0, 0]]


def test_a_step_of_row_adam_uses_up_the_gradient():
    """A loop may clear gradients by the network's own `zero_grad`, which cannot reach them."""
    table = table_of(torch.ones(3, 2))
    optimizer = RowAdam([table])
    for _ in range(3):
        table(torch.tensor([[1]]), torch.ones(1, 1)).sum().backward()
        assert table.gradient is not None
        assert table.gradient.dense().tolist() == [[0, 0], [1, 1], [0, 0]]
        optimizer.step()
        table.zero_grad()


@pytest.mark.parametrize("kind", [RowAdam, RowSGD])
@pytest.mark.parametrize("unscaled", [False, True])
def test_scaled_gradients_are_refused_and_those_of_a_scaler_that_is_off_are_not(kind, unscaled):
    """As a network's own parameters have, `.grad` may have zeros, in which a scaler finds nothing (as under DDP)."""
    for enabled in (True, False):
        table, scaler = table_of(torch.ones(4, 2)), torch.amp.GradScaler("cpu", enabled=enabled)
        optimizer = kind([table], lr=0.1)
        scaler.scale(table(torch.tensor([[1]]), torch.ones(1, 1)).sum()).backward()
        table.weight_KD.grad = torch.zeros(4, 2)
        if unscaled:
            scaler.unscale_(optimizer)
        if enabled:
            with pytest.raises(UserError, match="scaled"):
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
        assert bool((table.weight_KD[1] == 1).all()) == enabled


def test_a_table_whose_weights_were_replaced_is_not_trained_as_if_it_were_the_old_one():
    table = table_of(torch.ones(4, 2))
    optimizer = RowAdam([table])
    table.weight_KD = torch.nn.Parameter(torch.ones(6, 2))  # as by more rows for new tokens
    read(table, [5], torch.ones(1, 2))
    with pytest.raises(ValueError, match="replaced"):
        optimizer.step()


@pytest.mark.parametrize("kind", [RowAdam, RowSGD])
def test_a_saved_optimizer_goes_on_to_the_bit(kind, tmp_path):
    def trained(table: Values, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            for part in range(2):  # accumulation
                draw = torch.Generator().manual_seed(10 * step + part)
                read(table, [step % 3, 5], torch.randn(2, 4, generator=draw))
            optimizer.step()

    whole = table_of(torch.ones(6, 4))
    trained(whole, kind([whole], lr=0.1), range(6))
    first = table_of(torch.ones(6, 4))
    optimizer = kind([first], lr=0.1)
    trained(first, optimizer, range(3))
    torch.save([first.state_dict(), optimizer.state_dict()], tmp_path / "checkpoint.pt")
    table = table_of(torch.zeros(6, 4))
    optimizer = kind([table], lr=0.5)
    for each, state in zip((table, optimizer), torch.load(tmp_path / "checkpoint.pt"), strict=True):
        each.load_state_dict(state)
    trained(table, optimizer, range(3, 6))
    assert torch.equal(table.weight_KD, whole.weight_KD)


@pytest.mark.parametrize("tables", [None, replace(HASHED, optim=EveryRowOptim(clip=0))])
def test_adam_on_a_whole_model_is_adamw(tables):
    recipe = recipe_of(tables=tables, optim=optim_2019(clip=0), optimizer="adam", lr=0.01, clip=0)
    ours, theirs = build_model(recipe, 20), build_model(recipe, 20)
    groups = parameter_groups(ours, recipe)
    adamw = [
        torch.optim.AdamW(
            [dict(theirs.named_parameters())[name] for name in group.parameters],
            betas=group.optimizer.param_groups[0]["betas"],
            weight_decay=0.0,
        )
        for group in groups
    ]
    for step in range(1, 13):
        tokens = torch.randint(0, 20, (4, 8), generator=torch.Generator().manual_seed(step))
        for model in (ours, theirs):
            model(tokens).logsumexp(-1).sum().backward()
        for group, optimizer in zip(groups, adamw, strict=True):
            optimizer.param_groups[0]["lr"] = group.schedule.lr_at(step)
            optimizer.step()
            optimizer.zero_grad()
            group.step(step)
            group.optimizer.zero_grad()
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(dict(ours.named_parameters())[name], parameter, rtol=1e-4, atol=1e-5, msg=name)


def test_a_table_without_row_adam_trains_as_any_parameter():
    table = table_of(torch.ones(5, 3))
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    table(torch.tensor([[1, 1], [3, 1]]), torch.ones(2, 2)).sum().backward()
    optimizer.step()
    assert table.weight_KD[:, 0].tolist() == [1, -2, 1, 0, 1]


def test_copies_of_a_module_and_moved_modules_have_no_stale_copy(monkeypatch):
    monkeypatch.setattr(values_module, "HALF_ON", ("cpu",))
    table, slots, weights = table_of(torch.ones(3, 2)), torch.tensor([[0]]), torch.ones(1, 1)

    def first(module: Values) -> float:
        with autocast(torch.device("cpu"), "bf16"):
            return float(module(slots, weights)[0, 0].detach())

    assert first(table) == 1
    twin = copy.deepcopy(table)
    twin.load_state_dict({"weight_KD": torch.full((3, 2), 9.0)})
    assert (first(twin), first(table)) == (9, 1)
    assert table.to(torch.float64).copy_KD is None
    assert first(table) == 1
    table.requires_grad_(False)
    for value in (2.0, 3.0):  # each tensor has been changed as often as the one before
        table.load_state_dict({"weight_KD": torch.full((3, 2), value)}, assign=True)
        assert first(table) == value


@pytest.mark.parametrize("kind", ["fused", "foreach"])
def test_a_half_precision_copy_follows_every_optimizer(monkeypatch, kind):
    """Torch's fused optimizers change a parameter without counting up its version."""
    monkeypatch.setattr(values_module, "HALF_ON", ("cpu",))
    table, slots, weights = table_of(torch.ones(3, 2)), torch.tensor([[0]]), torch.ones(1, 1)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0, **{kind: True})
    for expected in (1, 0, -1):
        with autocast(torch.device("cpu"), "bf16"):
            out = table(slots, weights)
        assert out[0].tolist() == [expected] * 2
        out.sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_table_keeps_its_half_precision_copy(monkeypatch, frozen):
    monkeypatch.setattr(values_module, "HALF_ON", ("cpu",))
    table = table_of(torch.ones(3, 2)).requires_grad_(not frozen)
    copies = []
    for _ in range(2):
        with torch.no_grad(), autocast(torch.device("cpu"), "bf16"):
            table(torch.tensor([[0]]), torch.ones(1, 1))
        copies.append(table.copy_KD)
    assert (copies[0] is copies[1]) == frozen


@pytest.mark.parametrize("row_adam", [True, False])
def test_a_forward_in_inference_mode_leaves_the_table_trainable(monkeypatch, row_adam):
    monkeypatch.setattr(values_module, "HALF_ON", ("cpu",))
    table, slots, weights = table_of(torch.ones(3, 2)), torch.tensor([[0]]), torch.ones(1, 1)
    optimizers = [RowAdam([table])] if row_adam else []
    with torch.inference_mode(), autocast(torch.device("cpu"), "bf16"):
        table(slots, weights)
    with autocast(torch.device("cpu"), "bf16"):
        table(slots, weights).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    assert row_adam == bool((table.weight_KD[0] < 1).all())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_half_precision_copy_follows_its_table(monkeypatch, precision):
    """As on a GPU, where alone forwards read the copy."""
    monkeypatch.setattr(values_module, "HALF_ON", ("cpu",))
    torch.manual_seed(0)
    half, whole = (table_of(torch.linspace(-1, 1, 32).view(8, 4)) for _ in range(2))
    optimizers = [RowAdam([table], lr=0.1) for table in (half, whole)]
    for _ in range(3):
        slots, weights = torch.randint(0, 7, (6, 3)), torch.randn(6, 3, requires_grad=True)
        with autocast(torch.device("cpu"), precision):
            out = half(slots, weights)
        assert (out.dtype == torch.float32) == (precision == "fp32")
        out.sum().backward()
        weights_grad, weights.grad = weights.grad, None
        whole(slots, weights).sum().backward()
        torch.testing.assert_close(weights_grad, weights.grad, rtol=1e-2, atol=3e-2)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert half.weight_KD.dtype == torch.float32
    torch.testing.assert_close(half.weight_KD, whole.weight_KD, rtol=1e-2, atol=1e-2)
    if precision == "fp32":
        assert half.copy_KD is None
        return
    assert torch.equal(half.copy_KD, half.weight_KD.to(half.copy_KD.dtype))
    with torch.no_grad():
        half.weight_KD.fill_(0.5)  # a checkpoint is loaded, say
    with autocast(torch.device("cpu"), precision):
        assert (half(torch.tensor([[0]]), torch.ones(1, 1)) == 0.5).all()


@pytest.mark.parametrize("optimizer", ["row-adam", "adam"])
def test_gradient_norms(optimizer):
    recipe = recipe_of(optimizer=optimizer)
    model = build_model(recipe, 20)
    groups = {group.name: group for group in parameter_groups(model, recipe)}
    model(torch.randint(0, 20, (2, 8))).square().sum().backward()
    for group in groups.values():
        dense = [gradient.dense() for gradient in group.row_gradients] or [p.grad for p in group.parameters.values()]
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in dense))
        assert group.own_square(ProcessGroups()).sqrt().item() == pytest.approx(norm, rel=1e-4)
        group.scale_gradient(0.25)
        assert group.own_square(ProcessGroups()).sqrt().item() == pytest.approx(norm / 4, rel=1e-4)


def test_gradients_are_measured_and_scaled_as_one_by_one():
    """What torch's private functions do to the list."""
    model = build_model(RECIPE, 20)
    dense = parameter_groups(model, RECIPE)[0]
    model(torch.randint(0, 20, (2, 8))).square().sum().backward()
    grads = [p.grad.clone() for p in dense.parameters.values()]
    square = sum(torch.linalg.vector_norm(grad).double().square() for grad in grads)
    torch.testing.assert_close(dense.own_square(ProcessGroups()), square, rtol=1e-6, atol=0)  # CPUs sum in other orders
    dense.scale_gradient(0.3)
    assert all(torch.equal(p.grad, grad * 0.3) for p, grad in zip(dense.parameters.values(), grads, strict=True))


@pytest.mark.parametrize(("name", "peak"), [("pkm", 1e-3), ("tables", 2.0 * 3), ("ngrams", 2.0 * 5)])
def test_a_group_moves_as_its_own_section_says(name, peak):
    how = {"betas": (0.5, 0.75), "weight_decay": 0.25, "schedule": "linear", "warmup_steps": 4, "clip": 0.125}
    tables = replace(HASHED, optim=EveryRowOptim(**how))
    ngrams = NGramSpec(layers=("1",), orders=(2,), heads=1, rows=7, row_dim=4, optim=EveryRowOptim(**how))
    recipe = recipe_of(tables=tables, ngrams=ngrams, optim=optim_2019(lr=2.0, final_lr=0.5), **how)
    recipe = replace(recipe, train=replace(recipe.train, steps=12))
    (group,) = [each for each in parameter_groups(build_model(recipe, 20), recipe) if each.name == name]
    (settings,) = group.optimizer.param_groups
    assert (settings["betas"], settings["weight_decay"], group.clip) == ((0.5, 0.75), 0.25, 0.125)
    assert [group.schedule.lr_at(step) / peak for step in (1, 4, 8, 12)] == pytest.approx([0.25, 1, 0.75, 0.5])


def test_row_sgd_scales_decays_and_keeps_its_copy(monkeypatch):
    monkeypatch.setattr(values_module, "HALF_ON", ("cpu",))
    table, slots, weights = table_of(torch.ones(3, 2)), torch.tensor([[1]]), torch.ones(1, 1)
    optimizer = RowSGD([table], lr=0.5, weight_decay=0.25)
    with autocast(torch.device("cpu"), "bf16"):
        table(slots, weights).sum().backward()
    table.gradient.scale *= 0.5  # as clipping or a loss scale sets it
    optimizer.step()
    assert table.weight_KD[:, 0].tolist() == [1, 1 - 0.5 * 0.25 - 0.5 * 0.5, 1]
    with autocast(torch.device("cpu"), "bf16"):
        assert table(slots, weights).tolist() == [[0.625] * 2]
