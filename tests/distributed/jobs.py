"""What ranks do in tests: functions whose names and arguments the tests give."""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from pkmlm import launched
from pkmlm.cli import launch, main
from pkmlm.data.batches import Batches
from pkmlm.distributed import ProcessGroups, World, build_process_groups
from pkmlm.environment import TIMEOUT, source_sha256
from pkmlm.errors import UserError
from pkmlm.kernels.row_gradient import RowGradient
from pkmlm.launched import init_distributed
from pkmlm.memory.hash.spec import HashSpec
from pkmlm.memory.init import initialise
from pkmlm.memory.peer.spec import PEERSpec
from pkmlm.memory.product_key.spec import ProductKeySpec
from pkmlm.memory.query import QueryBatchNorm
from pkmlm.memory.row_adam import RowSGD
from pkmlm.memory.row_exchange import all_gather_row_gradients, even_row_gradients
from pkmlm.memory.table import Values
from pkmlm.model.transformer import Transformer, build_model
from pkmlm.recipe.schema import Parallel, Recipe, Train
from pkmlm.runs import checkpoint
from pkmlm.train import validation  # noqa: F401 (loaded once, for all children)
from pkmlm.train.step import StepResult, TrainState, train_step
from tests.conftest import recipe_2019
from tests.golden.test_curves import KEYS, Stream, golden_optim, with_memories
from tests.golden.test_curves import MODELS as GOLDEN

TWO = {**KEYS, "layers": ("1", "2")}
MODELS = {
    "layer": with_memories(pkm=ProductKeySpec(**KEYS, query_norm="layer")),
    "batch": with_memories(pkm=ProductKeySpec(**KEYS, query="mlp")),
    "pool": GOLDEN["memory-plus"],
    "peer": with_memories(experts=PEERSpec(**KEYS, query_norm="layer", value_dim=8)),
    "peer pool": with_memories(experts=PEERSpec(**TWO, query_norm="rms", share_values=True)),
    "ngram": GOLDEN["ngram"],
    "hash": replace(with_memories(tables=HashSpec(bits=4)), layers=1, positions="rotary"),
    "mixed": GOLDEN["mixed"],
    "modern": GOLDEN["modern"],
}


def warm() -> None:
    """Load what a child would load, with one thread."""
    train_step(state_of(recipe_of("layer"), None), 1)


def command(words: list[str], folder: str = ".") -> None:
    """A command line, given in a folder."""
    os.chdir(folder)
    sys.argv = ["pkmlm", *words]
    main()


def launch_a_rank(words: list[str]) -> None:
    """Start a command as `--nproc` starts a rank, and wait for it."""
    launcher = os.getpid()
    if not os.fork():
        sys.argv = ["-c", *words]
        launch.main(launcher, source_sha256())
    os.wait()


def command_with(words: list[str], environment: dict[str, str]) -> None:
    """A command line in another environment."""
    os.environ.update(environment)
    command(words)


def command_of_little_patience(words: list[str], environment: dict[str, str]) -> None:
    """The same, where a rank says at once for whom it waits."""
    launched.PATIENCE = 0.2
    command_with(words, environment)


def command_into(words: list[str], stdout: str) -> None:
    """A command line whose standard output goes to a file of that name."""
    os.dup2(os.open(stdout, os.O_WRONLY), 1)
    command(words)


def command_on_terminal(words: list[str], term: str, said: str) -> None:
    """A command line whose standard error is a terminal; what this gets is written to the file `said` at the end."""
    master, terminal = os.openpty()
    os.dup2(terminal, 2)
    os.close(terminal)
    os.environ["TERM"] = term
    got: list[bytes] = []

    def read() -> None:
        with suppress(OSError):  # its other end has been closed
            while block := os.read(master, 1 << 16):
                got.append(block)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        command(words)
    finally:
        os.close(2)
        reader.join()
        Path(said).write_bytes(b"".join(got))


def command_without_reader(words: list[str]) -> None:
    """A command line whose standard error is closed by its reader after the first bytes, and that heeds SIGHUP."""
    reader, writer = os.pipe()
    os.dup2(writer, 2)
    os.close(writer)

    def read() -> None:
        os.read(reader, 1)
        os.close(reader)

    threading.Thread(target=read).start()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests run under nohup
    command(words)


def command_counted(words: list[str]) -> None:
    """A command line, and on standard error how many forwards it took."""
    counts, hidden = [], Transformer.hidden

    def counted(*inputs: Any, **options: Any) -> Any:
        counts.append(1)
        return hidden(*inputs, **options)

    Transformer.hidden = counted
    try:
        command(words)
    finally:
        print(f"forwards: {len(counts)}", file=sys.stderr)


def ranks_among(world: World, size: int, memory: int) -> ProcessGroups:
    """As `build_process_groups` for a run of `size` ranks: the world is several such runs side by side."""

    def part(chosen: list[list[int]]) -> World:
        groups = [dist.new_group(members) for members in chosen]
        ((members, group),) = [(m, g) for m, g in zip(chosen, groups, strict=True) if world.rank in m]
        return World(members.index(world.rank), len(members), group, world.comm_state)

    starts = range(0, world.size, size)
    columns = [list(range(first, first + memory)) for first in range(0, world.size, memory)]
    same = [list(range(first + m, first + size, memory)) for first in starts for m in range(memory)]
    return ProcessGroups(part([list(range(first, first + size)) for first in starts]), part(columns), part(same))


def recipe_of(kind: str, memory: int = 1, micro_batch: int = 1, recompute: bool = False) -> Recipe:
    return recipe_2019(
        model=MODELS[kind],
        optim=golden_optim(kind),
        train=Train(steps=50, batch_tokens=128, micro_batch=micro_batch, recompute=recompute),
        parallel=Parallel(memory=memory),
    )


def state_of(recipe: Recipe, ranks: ProcessGroups | None, precision: str = "fp32") -> TrainState:
    model = build_model(recipe, 40, ranks=ranks)
    return TrainState(recipe, model, Batches.of(Stream(), recipe), precision, ranks)


def whole_weights(model: Transformer) -> dict[str, np.ndarray]:
    """All weights and buffers; tables with the columns of all ranks that divide them."""
    found = {}
    for path, module in model.named_modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if isinstance(module, Values):
                parts = module.ranks.all_gather(tensor.detach()).chunk(module.ranks.size)
                found[f"{path}.{name}"] = torch.cat(parts, 1).numpy()
            else:
                found[f"{path}.{name}"] = tensor.detach().numpy()
    return found


def curves(folder: str, cases: list[list[Any]], steps: int) -> None:
    """Train each case (kind, ranks, memory, micro_batch) and write losses, norms and weights into folder/NAME.npz."""
    with init_distributed() as world:
        alone = [case for case in cases if case[1] == 1]
        for case in alone[world.rank :: world.size]:
            curve(Path(folder), *case, steps, None)
        for kind, size, memory, micro_batch in [case for case in cases if case[1] > 1]:
            ranks = ranks_among(world, size, memory)
            curve(Path(folder), kind, size, memory, micro_batch, steps, ranks)


def curve(
    folder: Path, kind: str, size: int, memory: int, micro_batch: int, steps: int, several: ProcessGroups | None
) -> None:
    """Train one case; the first of `several` ranks writes what was found."""
    state = state_of(recipe_of(kind, memory, micro_batch), several)
    ranks = several or ProcessGroups()
    seen: list[Tensor] = []
    state.model.embedding.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    taken = [train_step(state, step) for step in range(1, steps + 1)]
    order = torch.cat([ranks.world.all_gather(tokens_BT) for tokens_BT in seen])
    weights = whole_weights(state.model)
    if several is None or dist.get_rank() == 0:
        save(folder / f"{kind}-{size}-{memory}-{micro_batch}.npz", taken, order, weights)


def save(path: Path, taken: list[StepResult], order: Tensor, weights: dict[str, np.ndarray]) -> None:
    norms = np.array([list(result.norms.values()) for result in taken])
    np.savez(path, losses=[result.loss for result in taken], norms=norms, order=order.numpy(), **weights)


def random_reads(rank: int, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """What one rank reads in a test: slots (5, 4), weights (5, 4), and the gradient of its output (5, 12)."""
    random = torch.Generator().manual_seed(rank)
    slots = torch.randint(rows, (5, 4), generator=random)
    return slots, torch.rand(5, 4, generator=random, dtype=dtype), torch.randn(5, 12, generator=random, dtype=dtype)


def table_of(rows: int, dtype: torch.dtype, ranks: World | None = None) -> Values:
    with torch.device("meta"):
        table = Values(rows, 12, std=1.0)
    if ranks is not None:
        table.divide(ranks)
    table.to_empty(device="cpu")
    initialise(table, 1)
    table.gradient = RowGradient(rows)
    return table.to(dtype)


def divided_tables(rows: int, reads_travel: bool, double: bool) -> None:
    """Two groups of two ranks: forward and gradients are those of one table that all four ranks' tokens read."""
    dtype = torch.float64 if double else torch.float32
    with init_distributed() as world:
        ranks = ranks_among(world, 4, 2)
        table, whole = table_of(rows, dtype, ranks.memory), table_of(rows, dtype)
        own = slice(ranks.memory.rank * 6, ranks.memory.rank * 6 + 6)
        assert torch.equal(table.weight_KD, whole.weight_KD[:, own])
        for backward in range(2):
            slots, weights, grad = random_reads(world.rank + 4 * backward, rows, dtype)
            divided, alone = weights.clone().requires_grad_(), weights.clone().requires_grad_()
            out, expected = table(slots, divided), whole(slots, alone)
            torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
            out.backward(grad)
            expected.backward(grad)
            torch.testing.assert_close(divided.grad, alone.grad, rtol=1e-6, atol=1e-6)
        whole.gradient.clear()
        for number in range(8):
            slots, weights, grad = random_reads(number, rows, dtype)
            whole(slots, weights).backward(grad)
        all_gather_row_gradients(table.gradient, ranks.data)
        assert (len(table.gradient.joined()[0]) == 40) is reads_travel
        torch.testing.assert_close(table.gradient.dense(), whole.gradient.dense()[:, own], rtol=1e-6, atol=1e-6)
        squares = ranks.memory.all_sum(table.gradient.norm().square())
        torch.testing.assert_close(squares.sqrt(), whole.gradient.norm(), rtol=1e-6, atol=0)
        assert torch.equal(table.gradient.joined()[1].rows_U, whole.gradient.joined()[1].rows_U)
        slots, weights, _ = random_reads(9, rows, dtype)  # the same on all ranks
        torch.testing.assert_close(table.eval()(slots, weights), whole(slots, weights), rtol=1e-6, atol=1e-6)


def batch_norm_over_ranks() -> None:
    """Statistics, outputs and gradients are torch's for the tokens of all ranks together."""
    random = torch.Generator().manual_seed(1)
    x_WNF, grad_WNF = (torch.randn(4, 6, 7, generator=random) for _ in range(2))
    x_WNF = x_WNF * torch.tensor([1, 2, 3, 4.0])[:, None, None] + 100  # a difference of squares would lose four digits
    with init_distributed() as world:
        ours, torchs = QueryBatchNorm(7, momentum=0.1), nn.BatchNorm1d(7).double()
        initialise(ours, 1)
        ours.ranks = world
        with torch.no_grad():
            for norm in (ours, torchs):
                norm.weight.copy_(torch.arange(7) - 3.0)
                norm.bias.fill_(0.5)
        for _ in range(2):
            x, every = x_WNF[world.rank].clone().requires_grad_(), x_WNF.double().flatten(0, 1).requires_grad_()
            out, expected = ours(x), torchs(every)
            torch.testing.assert_close(out.double(), expected.view(4, 6, 7)[world.rank], rtol=1e-4, atol=1e-4)
            out.backward(grad_WNF[world.rank])
            expected.backward(grad_WNF.double().flatten(0, 1))
            torch.testing.assert_close(x.grad.double(), every.grad.view(4, 6, 7)[world.rank], rtol=1e-4, atol=1e-5)
        for name in ("weight", "bias"):
            total = world.all_sum(getattr(ours, name).grad)
            torch.testing.assert_close(total.double(), getattr(torchs, name).grad, rtol=1e-4, atol=1e-4)
        for name in ("running_mean", "running_var"):
            torch.testing.assert_close(getattr(ours, name).double(), getattr(torchs, name), rtol=1e-5, atol=0)
            same = world.all_gather(getattr(ours, name)[None])
            assert (same == same[0]).all()


def recomputed() -> None:
    """On two groups of two ranks that keep no activations: losses and statistics are those of one process."""
    with init_distributed() as world:
        several, one = recipe_of("batch", 2, recompute=True), recipe_of("batch", 1, 4)
        states = [state_of(several, ranks_among(world, 4, 2)), state_of(one, None)]
        losses = [[train_step(state, step).loss for step in (1, 2, 3)] for state in states]
        assert np.allclose(*losses, rtol=1e-5, atol=0)
        buffers = [dict(state.model.named_buffers()) for state in states]
        assert len(buffers[0]) == 2
        for name in [name for name in buffers[0] if "running_mean" not in name]:  # which follows an idle bias
            tensor = buffers[0][name]
            torch.testing.assert_close(tensor, buffers[1][name], rtol=1e-4, atol=1e-5, msg=name)


def resumed_to_the_bit() -> None:
    """A state that has taken two steps, and a new one that is given what it holds: the next two have the same bits."""
    with init_distributed() as world:
        first, second = (state_of(recipe_of("layer"), ranks_among(world, 4, 1)) for _ in range(2))
        for step in (1, 2):
            train_step(first, step)
        for theirs, ours in zip(first.tensors()[:2], second.tensors()[:2], strict=True):
            for name, tensor in theirs.items():
                ours[name].data.copy_(tensor)
        for step in (3, 4):
            assert train_step(first, step) == train_step(second, step)
        for name, tensor in first.model.state_dict().items():
            assert torch.equal(tensor, second.model.state_dict()[name]), name


def overflow_on_one_rank() -> None:
    """fp16, two groups of two ranks: rank 1 overflows in the second step, and nobody moves."""
    with init_distributed() as world:
        state = state_of(recipe_of("batch", 2), ranks_among(world, 4, 2), "fp16")
        assert not train_step(state, 1).skipped
        seeds = world.all_gather(torch.tensor([torch.initial_seed()]))
        assert len(set(seeds.tolist())) == 4  # of dropout
        before = {name: tensor.clone() for name, tensor in state.model.state_dict().items()}
        scale = state.loss_scale.scale
        if world.rank == 1:
            hook = state.model.norm.weight.register_hook(lambda grad: grad * float("inf"))
        result = train_step(state, 2)
        if world.rank == 1:
            hook.remove()
        assert result.skipped
        for name, tensor in state.model.state_dict().items():
            assert torch.equal(tensor, before[name]), name
        assert state.loss_scale.scale == scale / 2
        for step in (3, 4):
            assert not train_step(state, step).skipped
        assert not torch.equal(state.model.norm.weight, before["norm.weight"])
        for tensor in whole_weights(state.model).values():
            every = world.all_gather(torch.from_numpy(tensor)[None])
            assert (every == every[0]).all()


def divergence_on_one_rank() -> None:
    """fp32: rank 1's gradient is not a number, and all end before the update."""
    with init_distributed() as world:
        state = state_of(recipe_of("layer", 2), ranks_among(world, 2, 2))
        before = {name: tensor.clone() for name, tensor in state.model.state_dict().items()}
        if world.rank == 1:
            state.model.norm.weight.register_hook(lambda grad: grad * float("nan"))
        try:
            train_step(state, 1)
        except UserError as error:
            print(error.message)
            raise SystemExit(error.exit_code) from None
        finally:
            assert all(torch.equal(tensor, before[name]) for name, tensor in state.model.state_dict().items())


def silent_neighbour(seconds: str) -> None:
    """Four ranks, two by two: say who is with whom; then rank 3 leaves rank 2 waiting for longer than it may."""
    os.environ[TIMEOUT] = seconds
    with init_distributed() as world:
        ranks = build_process_groups(world, 2)
        print(ranks.memory.gather_objects(world.rank), ranks.data.gather_objects(world.rank))
        if world.rank == 3:
            time.sleep(float(seconds) + 2)
            return
        try:
            ranks.memory.all_sum(torch.ones(1))
        except UserError as error:
            print(error.message)


def failing_rank(words: list[str]) -> None:
    """A command line, on whose rank 1 the disk takes no tensors."""

    def refused(path: Path, *_: Any) -> None:
        raise UserError(f"cannot write {path}: No space left on device", exit_code=1)

    if os.environ["RANK"] == "1":
        checkpoint.write_tensors = refused
    command(words)


def row_gradients_of_other_sizes(rows: int, other: int) -> None:
    """Two ranks with batches of other sizes (the second has one of so many tokens), in other numbers of passes, whose
    reads are those of one process.
    """
    draw = torch.Generator().manual_seed(1)
    reads = [
        [
            (
                torch.randn(n, 3, generator=draw),
                torch.randint(rows, (n, 2), generator=draw),
                torch.rand(n, 2, generator=draw),
            )
            for n in sizes
        ]
        for sizes in ((4, 2), (other,))
    ]
    one = RowGradient(rows)
    for each in (*reads[0], *reads[1]):
        one.add(*each)
    with init_distributed() as world:
        own = RowGradient(rows)
        for each in reads[world.rank]:
            own.add(*each)
        even_row_gradients(own, world)
        all_gather_row_gradients(own, world)
        assert torch.equal(own.joined()[1].rows_U, one.joined()[1].rows_U)
        torch.testing.assert_close(own.dense(), one.dense())
        every = world.all_gather(own.dense()[None])
        assert torch.equal(every[0], every[1])


def row_adam_of_all_ranks() -> None:
    """A network of a user's under DDP, with RowAdam for its values: both ranks hold what one process would."""
    import pkmlm

    x_BTD = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(3))

    def trained(world: World, *, clip: bool = False) -> dict[str, Tensor]:
        torch.manual_seed(0)
        memory = pkmlm.ProductKeyMemory(16, num_keys=8, heads=2, topk=4, key_dim=8, query_norm="rms")
        network = nn.Sequential(nn.Linear(16, 16), memory, nn.Linear(16, 16))
        values = memory.values
        rows = pkmlm.RowAdam([values], lr=0.01)
        rest = torch.optim.SGD([p for p in network.parameters() if p is not values.weight_KD], lr=0.1)
        called: nn.Module = network if world.size == 1 else nn.parallel.DistributedDataParallel(network)
        for _ in range(3):
            called(x_BTD.chunk(world.size)[world.rank]).square().mean().backward()
            if clip and world.rank == 1:
                values.gradient.scale = 0.5
            for optimizer in (rows, rest):
                optimizer.step()
                optimizer.zero_grad()
        moments = rows.state[values.weight_KD]["exp_avg"]
        return {"moments": moments, **{name: p.detach().clone() for name, p in network.named_parameters()}}

    alone = trained(World())
    with init_distributed() as world:
        for name, tensor in trained(world).items():
            torch.testing.assert_close(tensor, alone[name], msg=name, atol=1e-6, rtol=1e-4)
        for name, tensor in trained(world, clip=True).items():
            every = world.all_gather(tensor[None])
            assert torch.equal(every[0], every[1]), name
        table = Values(5, 3, std=1.0)
        with torch.no_grad():
            table.weight_KD.fill_(1.0)
        optimizer = pkmlm.RowAdam([table], lr=0.1)
        optimizer.step()  # no rank has read it
        if world.rank == 0:
            table(torch.tensor([[1]]), torch.ones(1, 1)).sum().backward()
        optimizer.step()
        torch.testing.assert_close(table.weight_KD[:3, 0].detach(), torch.tensor([1.0, 0.9, 1.0]))
        for kind in (pkmlm.RowAdam, RowSGD):  # sharing gradients alone, each rank would train a table of its own
            apart = Values(5, 3, std=1.0)
            with torch.no_grad():
                apart.weight_KD.fill_(1.0)[world.rank, 0] = 2.0
            optimizer = kind([apart], lr=0.1)
            apart(torch.tensor([[1]]), torch.ones(1, 1)).sum().backward()
            with pytest.raises(UserError, match="rank 1"):
                optimizer.step()
            fully_shard(divided := nn.Sequential(Values(6, 3, std=1.0)))
            with pytest.raises(ValueError, match="ignored_params"):
                kind(divided)


def attached_to_a_model() -> None:
    """A memory attached to a model under DDP: each rank with its texts, and both with those of all as one process."""
    from transformers import GPT2Config, GPT2LMHeadModel

    import pkmlm

    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    keys = {"kind": "product-key", "num_keys": 8, "heads": 2, "topk": 4, "key_dim": 8, "share_values": True}
    ngrams = {"kind": "ngram", "heads": 2, "rows": 11, "row_dim": 4, "canonical": False}
    ids = torch.randint(50, (2, 4, 16), generator=torch.Generator().manual_seed(3))  # micro-batches of four texts

    def trained(world: World, memory: dict[str, Any], shorter: int = 0) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=50, bos_token_id=0, eos_token_id=0, **sizes)).eval()
        attachment = pkmlm.attach(model, memory, layers=[1, 2], seed=4)
        optimizer = attachment.optimizer(0.01)
        called: nn.Module = model if world.size == 1 else nn.parallel.DistributedDataParallel(model)
        own = ids.chunk(world.size, 1)[world.rank][..., shorter * world.rank :]
        for _ in range(3):
            for texts in own:
                (called(input_ids=texts, labels=texts).loss / len(own)).backward()
            optimizer.step()
            optimizer.zero_grad()
        named = attachment.module.named_parameters()
        moments = {name: optimizer.state[parameter]["exp_avg"] for name, parameter in named}
        return moments | {f"{name}|": p.detach().clone() for name, p in attachment.module.named_parameters()}

    alone = [trained(World(), memory) for memory in (keys, ngrams)]
    with init_distributed() as world:
        for memory, expected in zip((keys, ngrams), alone, strict=True):
            for name, tensor in trained(world, memory).items():
                atol = 5e-5 if name.endswith("|") else 1e-5  # Adam's steps of 0.04 raise what is rounding
                torch.testing.assert_close(tensor, expected[name], msg=name, atol=atol, rtol=1e-4)
                every = world.all_gather(tensor[None])
                assert (every == every[0]).all(), name
        for num_keys in (8, 64):  # sums travel, reads do
            for name, tensor in trained(world, {**keys, "num_keys": num_keys}, shorter=6).items():
                every = world.all_gather(tensor[None])
                assert (every == every[0]).all(), name
