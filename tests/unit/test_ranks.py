"""What does not need other processes: the recipe of several ranks, initial columns, what travels, one rank alone."""

import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from pkmlm.distributed import World
from pkmlm.environment import SIZE, TIMEOUT, collective_timeout, launched_processes
from pkmlm.errors import UserError
from pkmlm.kernels.row_gradient import exchange_bytes
from pkmlm.launched import init_distributed
from pkmlm.memory import init
from pkmlm.memory.hash.spec import HashSpec
from pkmlm.memory.product_key.spec import ProductKeySpec
from pkmlm.memory.spec import Spec
from pkmlm.memory.table import _Collective
from pkmlm.recipe.constraints import check_ranks, check_recipe
from pkmlm.recipe.schema import Parallel, Recipe, Train
from tests.conftest import model_2019, recipe_2019

KEYS = (46_340, 46_341)  # their squares lie on both sides of 2^31
PKM = ProductKeySpec(layers=("2",))


def recipe_of(**memories: Spec) -> Recipe:
    model = model_2019(dim=24, layers=2, heads=2, context=10, memories=memories)
    return recipe_2019(model=model, train=Train(batch_tokens=120, micro_batch=2))


RECIPE = recipe_of(pkm=PKM)


@pytest.mark.parametrize(
    ("ranks", "memory", "expected"),
    [
        (4, 1, "micro-batches of 2 on each of 4 processes (expected a divisor of 3)"),
        (5, 1, "(expected a train.batch_tokens that 100 divides"),
        (3, 2, "my.yaml: parallel.memory: 2 does not divide the number of processes, 3 (expected a divisor of 3)"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(ranks, memory, expected):
    recipe = replace(RECIPE, parallel=Parallel(memory=memory))
    with pytest.raises(UserError, match=re.escape(expected)):
        check_ranks(recipe, ranks, "my.yaml")
    for fitting in (1, 2, 3, 6):
        check_ranks(RECIPE, fitting, "my.yaml")
        assert RECIPE.micro_batches(fitting) * fitting * 2 == 12
    with pytest.raises(UserError, match="2 does not divide the number of processes, 1"):
        check_ranks(replace(RECIPE, parallel=Parallel(memory=2)), 1, "my.yaml")


def test_slots_that_ranks_cannot_tell_each_other_of_are_refused():
    sizes = {keys: recipe_of(pkm=replace(PKM, num_keys=keys)) for keys in KEYS}
    check_ranks(sizes[46_340], 2, "my.yaml")
    check_ranks(sizes[46_341], 1, "my.yaml")
    with pytest.raises(UserError, match=r"num_keys: 2,147,488,281 rows in a table .expected at most 2,147,483,648 "):
        check_ranks(sizes[46_341], 2, "my.yaml")


@pytest.mark.parametrize(
    ("memories", "ranks", "expected"),
    [
        ({"pkm": PKM}, 5, "5 ranks cannot divide tables of 24 columns (expected a divisor of 24)"),
        ({"tables": HashSpec(bits=8)}, 4, "tables of 24, 30 and 72 columns (expected a divisor of 6)"),
        ({}, 2, "2 ranks, but the model has no table to divide (expected 1)"),
    ],
)
def test_tables_fall_into_whole_columns(memories, ranks, expected):
    with pytest.raises(UserError, match=re.escape(expected)):
        check_recipe(replace(recipe_of(**memories), parallel=Parallel(memory=ranks)))
    check_recipe(replace(RECIPE, parallel=Parallel(memory=6)))


def test_a_part_that_a_memory_does_not_have_counts_for_nothing():
    maps = HashSpec(bits=8, parts=("qkv",))
    check_recipe(replace(recipe_of(pkm=PKM, tables=maps), parallel=Parallel(memory=4)))


@pytest.mark.parametrize("rows", [16, 100, 161])
@pytest.mark.parametrize("width", [17, 32])
def test_blocks_and_columns_of_a_matrix_are_those_of_the_whole(monkeypatch, rows, width):
    whole = torch.empty(rows, width).normal_(0, 0.5, generator=torch.Generator().manual_seed(3))
    monkeypatch.setattr(init, "BLOCK", 32)
    for first, columns in ((0, width), (3, 9)):
        drawn = torch.empty(rows, columns)
        init.draw_columns(drawn, 0.5, width, first, torch.Generator().manual_seed(3))
        assert torch.equal(drawn, whole[:, first : first + columns])
    drawn = torch.empty(rows, width)
    init.draw_columns(drawn, 0.5, None, 0, torch.Generator().manual_seed(3))
    assert torch.equal(drawn, whole)


def test_reads_travel_where_they_are_fewer_bytes_than_rows():
    few = exchange_bytes(4096, 128, 1 << 20, 512, ranks=2)
    assert few == (4096 * (128 * 8 + 512 * 4), (1 << 20) * (512 * 4 + 1))
    reads, rows = exchange_bytes(65536, 64, 1 << 14, 1536, ranks=8)
    assert reads > rows


def test_a_gradient_that_goes_by_other_ranks_is_not_differentiated_again():
    x, ranks = torch.ones(3, 2, requires_grad=True), World()
    gathered = _Collective.apply(x, ranks.all_gather, ranks.reduce_scatter)
    (grad,) = torch.autograd.grad(gathered.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_one_process_needs_nobody(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with init_distributed() as world, world.collective_errors():
        x = torch.arange(3.0)
        assert world == World()
        for same in (world.all_sum(x), world.all_gather(x), world.reduce_scatter(x), world.all_to_all(x)):
            assert same is x
        assert (world.all_max(7), world.broadcast({"a": 1}), world.gather_objects(2)) == (7, {"a": 1}, [2])


@pytest.mark.parametrize("text", ["0", "soon", "nan", "1e300"])
def test_a_time_to_wait_is_a_number_of_seconds(monkeypatch, text):
    monkeypatch.setenv(TIMEOUT, text)
    with pytest.raises(UserError, match="expected seconds, more than 0"):
        collective_timeout()


@pytest.mark.parametrize("text", ["", "two", "0", "9" * 5000])
def test_a_launcher_has_started_a_whole_number_of_processes(monkeypatch, text):
    monkeypatch.setenv(SIZE, text)
    with pytest.raises(UserError, match=r"WORLD_SIZE: found '.*expected the number of processes"):
        launched_processes()


def test_half_of_a_launchers_environment_is_an_error(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match="WORLD_SIZE is set"), init_distributed():
        pass


def test_a_gpu_that_cannot_be_used_is_no_network_error(monkeypatch):
    def busy(index: int) -> None:
        raise RuntimeError("CUDA-capable device(s) is/are busy\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", busy)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(UserError, match=r"GPU of rank 3 on this machine: .* busy$") as error, init_distributed():
        pass
    assert error.value.exit_code == 1


@pytest.mark.parametrize("gpus", [0, 8])
@pytest.mark.parametrize("kind", [None, UserError, KeyboardInterrupt])
def test_a_rank_that_fails_does_not_wait_for_the_others_on_gpus(monkeypatch, gpus, kind):
    """NCCL's groups end when all ranks end them; where one has failed, the others may wait for its share of a sum."""
    called, chosen = [], []
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", "3")
    for name in ("init_process_group", "all_reduce", "destroy_process_group"):
        monkeypatch.setattr(dist, name, lambda *_, name=name, **__: called.append(name))
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    with pytest.raises(kind) if kind else nullcontext() as caught, init_distributed():
        assert chosen == ([3] if gpus else [])
        if kind:
            raise kind("no room")
    stays = gpus > 0 and kind is not None
    assert called == ["init_process_group", "all_reduce"] + ["destroy_process_group"] * (not stays)
    if kind is UserError:
        assert caught.value.message == "rank 3: no room"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "NCCL error in: x.cpp:93, invalid usage\nLast error:\nDuplicate GPU detected : rank 1",
            "NCCL: Duplicate GPU ",
        ),
        ("NCCL error in: x.cpp:93, remote process exited\nLast error:\nsocket: Connection timed out", "NCCL: socket: "),
        ("NCCL error in: x.cpp:93, unhandled system error\nLast error:\n", "the connection to another rank is lost"),
        ("gloo/pair.cc:547 Timed out waiting 1000ms for recv", "another rank did not answer"),
        ("gloo/pair.cc:534 Connection closed by peer", "the connection to another rank is lost"),
    ],
)
def test_the_error_of_a_network_is_told_as_far_as_the_library_knows_it(monkeypatch, said, told):
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    error = World(1, 2).network_error(RuntimeError(said))
    assert error.message.startswith(f"rank 1: {told}")
    assert "\n" not in error.message
