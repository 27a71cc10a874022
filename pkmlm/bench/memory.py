"""`bench memory`: a product-key memory timed beside the same layer in plain torch, and the FFN that it replaces.

B: sequences; T: positions; D: model width; N: tokens (B * T); H: heads; n: sub-keys of a half; f: width of a sub-key;
k: slots a head reads; r: reads of a token (H * k); c: k^2 candidates; F: entries of all heads' queries.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from pkmlm.bench import COMPILED, LAYERS, short
from pkmlm.bench.rounds import Say, Timing, check_room, interleaved_with_copy
from pkmlm.console import Column, Table, number
from pkmlm.device import default_device, machine
from pkmlm.errors import UserError
from pkmlm.kernels.matmul import Linear
from pkmlm.memory.init import initialise
from pkmlm.memory.product_key.layer import ProductKeyMemory
from pkmlm.memory.product_key.spec import ProductKeySpec
from pkmlm.recipe.schema import Model, Recipe
from pkmlm.seeds import generator
from pkmlm.train.compile_and_recompute import check_compiler
from pkmlm.train.optim import parameter_groups

LR = 1e-3
# What is timed of a layer, with its name in tables: the weighted sum of its values alone; then phases that each include
# those before.
PHASES = {"values": "values alone", "forward": "forward", "backward": "+ backward", "step": "+ update"}


@dataclass(frozen=True)
class Shape:
    """A memory and the tokens that read it; all numbers are fp32."""

    num_keys: int
    dim: int
    heads: int
    topk: int
    key_dim: int
    tokens: int

    @property
    def memory(self) -> ProductKeySpec:
        return ProductKeySpec(
            layers=("1",),
            num_keys=self.num_keys,
            heads=self.heads,
            topk=self.topk,
            key_dim=self.key_dim,
        )

    @property
    def slots(self) -> int:
        return self.num_keys**2

    @property
    def table_bytes(self) -> int:
        """Bytes of the values."""
        return 4 * self.slots * self.dim

    def least_bytes(self, touched: int) -> dict[str, int]:
        """Bytes that each phase must move, if nothing is read twice from memory.

        values: a row for each read, and the output. forward: the input, too. backward: the rows once more, for the
        gradients of the weights. step: also every touched row and its two moments, read and written.
        """
        rows, tokens = 4 * self.tokens * self.heads * self.topk * self.dim, 4 * self.tokens * self.dim
        forward, backward = rows + 2 * tokens, 2 * rows + 2 * tokens
        step = backward + 6 * touched * 4 * self.dim
        return {"values": rows + tokens, "forward": forward, "backward": backward, "step": step}


class PlainMemory(nn.Module):
    """Product keys as one writes them in torch: top-k of either half, all k^2 sums, top-k of these, `EmbeddingBag`.

    It computes what `ProductKeyMemory` computes (Lample et al. 2019, sec. 3.1), with a linear query and BatchNorm.

    Args:
        sparse: whether the values' gradient is sparse, with one row for each read.
    """

    def __init__(self, dim: int, memory: ProductKeySpec, *, sparse: bool):
        super().__init__()
        self.memory = memory
        width = memory.heads * memory.key_dim
        self.query = nn.Linear(dim, width)
        self.norm = nn.BatchNorm1d(width)
        self.subkeys_H2nf = nn.Parameter(torch.empty(memory.heads, 2, memory.num_keys, memory.key_dim // 2))
        self.values = nn.EmbeddingBag(memory.slots, dim, mode="sum", sparse=sparse, device="meta")

    @torch.no_grad()
    def take_weights(self, layer: ProductKeyMemory) -> None:
        """Copy a layer's weights, but share its values."""
        source = dict(layer.named_parameters())
        self.query.weight.copy_(source["query.map.weight"])
        self.query.bias.copy_(source["query.map.bias"])
        self.norm.weight.copy_(source["query.norm.weight"])
        self.norm.bias.copy_(source["query.norm.bias"])
        self.subkeys_H2nf.copy_(source["subkeys_H2nf"])
        self.values.weight = layer.values.weight_KD

    def forward(self, x_BTD: Tensor) -> Tensor:
        heads, n, k = self.memory.heads, self.memory.num_keys, self.memory.topk
        q_NF = self.norm(self.query(x_BTD.flatten(0, 1)))
        q_NH2f = q_NF.view(len(q_NF), heads, 2, -1)
        scores_NH2n = torch.einsum("nhsf,hsmf->nhsm", q_NH2f, self.subkeys_H2nf)
        best_NH2k, index_NH2k = scores_NH2n.topk(k)
        sums_NHc = (best_NH2k[:, :, 0, :, None] + best_NH2k[:, :, 1, None, :]).flatten(2)
        slots_NHc = (index_NH2k[:, :, 0, :, None] * n + index_NH2k[:, :, 1, None, :]).flatten(2)
        top_NHk, chosen_NHk = sums_NHc.topk(k)
        slots_NHk = slots_NHc.gather(-1, chosen_NHk)
        return self.sum_values(slots_NHk.flatten(1), top_NHk.softmax(-1).flatten(1)).view_as(x_BTD)

    def sum_values(self, slots_Nr: Tensor, weights_Nr: Tensor) -> Tensor:
        """The weighted sum of values (N, D)."""
        out: Tensor = self.values(slots_Nr, per_sample_weights=weights_Nr)
        return out


@dataclass(frozen=True)
class Contender:
    """A layer and what updates it.

    Attributes:
        count: the steps of its value table, in the form in which its optimizer counts them; None: it has no table.
        values: computes the weighted sum of values from slots and weights (N, r); None: it has no values, or does not
            sum them by themselves.
    """

    layer: nn.Module
    optimizers: list[torch.optim.Optimizer]
    count: Tensor | int | None = None
    values: Callable[[Tensor, Tensor], Tensor] | None = None

    @torch.no_grad()
    def sum_values(self, slots_Nr: Tensor, weights_Nr: Tensor) -> None:
        """The weighted sum of values, without gradients."""
        assert self.values is not None
        self.values(slots_Nr, weights_Nr)

    @torch.no_grad()
    def forward(self, x_1ND: Tensor) -> None:
        """A forward, without gradients."""
        self.layer(x_1ND)

    def backward(self, x_1ND: Tensor, grad_1ND: Tensor, *, update: bool) -> None:
        """A forward and backward, with or without the optimizers' update; the gradients are then cleared."""
        self.layer(x_1ND).backward(grad_1ND)
        for optimizer in self.optimizers:
            if update:
                optimizer.step()
            optimizer.zero_grad()
        x_1ND.grad = None


def product_key_layer(shape: Shape, device: torch.device) -> ProductKeyMemory:
    """This package's layer, with the weights that every memory starts from."""
    with torch.device("meta"):
        layer = ProductKeyMemory(shape.dim, **shape.memory.arguments)
    layer.to_empty(device=device)
    initialise(layer, 1)
    return layer


def contender(name: str, shape: Shape, source: ProductKeyMemory) -> Contender:
    """One of `pkmlm.bench.LAYERS`, with copies of a layer's weights, but the very same values.

    pkmlm: the layer, whose values are updated straight from their reads. plain-adam, plain-fused: plain torch, a dense
    gradient, Adam as it comes or fused. plain-compiled: as plain-fused, with forward and backward compiled for this
    shape as a whole. plain-sparse: a sparse gradient of the values and SparseAdam; fused Adam for the rest. ffn: the
    FFN of the same width, fused Adam.
    """
    device = source.values.weight_KD.device
    if name == "pkmlm":
        recipe = Recipe(model=Model(memories={source.tap.name: shape.memory}))
        optimizers = [group.optimizer for group in parameter_groups(source, recipe)]
        return Contender(source, optimizers, torch.zeros((), dtype=torch.int64, device=device), source.values)
    if name == "ffn":
        layer = nn.Sequential(Linear(shape.dim, 4 * shape.dim), nn.GELU(), Linear(4 * shape.dim, shape.dim)).to(device)
        return Contender(layer, [torch.optim.Adam(layer.parameters(), lr=LR, fused=True)])
    plain = PlainMemory(shape.dim, shape.memory, sparse=name == "plain-sparse")
    plain.take_weights(source)
    plain = plain.to(device)
    if name == "plain-sparse":
        values = plain.values.weight
        rest = [parameter for parameter in plain.parameters() if parameter is not values]
        sparse: list[torch.optim.Optimizer] = [torch.optim.SparseAdam([values], lr=LR)]
        return Contender(plain, [*sparse, torch.optim.Adam(rest, lr=LR, fused=True)], 0, plain.sum_values)
    fused = name != "plain-adam"
    count = torch.zeros((), device=device if fused else "cpu")
    optimizers = [torch.optim.Adam(plain.parameters(), lr=LR, fused=fused)]
    if name != COMPILED:
        return Contender(plain, optimizers, count, plain.sum_values)
    plain.forward = torch.compile(plain.forward, dynamic=False)  # type: ignore[method-assign]
    return Contender(plain, optimizers, count)


def contenders(names: Sequence[str], shape: Shape, source: ProductKeyMemory) -> dict[str, Contender]:
    """Contenders by name. All that have a value table train that of `source`, with one shared pair of moments."""
    values_KD = source.values.weight_KD
    found = {name: contender(name, shape, source) for name in names}
    moments = {name: torch.zeros_like(values_KD) for name in ("exp_avg", "exp_avg_sq")}
    for one in found.values():
        for optimizer in one.optimizers:
            if any(parameter is values_KD for group in optimizer.param_groups for parameter in group["params"]):
                optimizer.state[values_KD].update(step=one.count, **moments)
    return found


def inputs(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens (1, N, D) that need a gradient, and the gradient of the output; both N(0, 1), the same for every layer."""
    random = generator(1, "bench memory")
    x_1ND, grad_1ND = (torch.randn(1, shape.tokens, shape.dim, generator=random).to(device) for _ in range(2))
    return x_1ND.requires_grad_(), grad_1ND


def reads_of(layer: ProductKeyMemory, x_1ND: Tensor) -> tuple[Tensor, Tensor]:
    """The slots that the tokens read and their weights, both (N, r)."""
    seen: list[Tensor] = []
    with torch.no_grad(), layer.tap.listen(lambda *reads: seen.extend(reads)):
        layer(x_1ND)
    slots_NHk, weights_NHk = seen
    return slots_NHk.flatten(1), weights_NHk.flatten(1)


@dataclass(frozen=True)
class LayerTimes:
    """The result for one number of slots.

    Attributes:
        touched: distinct slots that the tokens read.
        bandwidth: bytes per second, read and written, of a copy.
        times: by layer and phase.
    """

    shape: Shape
    touched: int
    bandwidth: float
    times: dict[tuple[str, str], Timing]

    def ratio(self, layer: str, phase: str) -> float | None:
        """Median time over that of this package's layer, where that was timed."""
        ours = self.times.get(("pkmlm", phase))
        return None if ours is None else self.times[layer, phase].median / ours.median

    def bytes_per_second(self, layer: str, phase: str) -> float | None:
        """The least bytes of a memory over the median time; an FFN has none."""
        if layer == "ffn":
            return None
        return self.shape.least_bytes(self.touched)[phase] / self.times[layer, phase].median

    def as_json(self) -> dict[str, Any]:
        layers: dict[str, dict[str, Any]] = {}
        for (layer, phase), timing in self.times.items():
            speed = self.bytes_per_second(layer, phase)
            layers.setdefault(layer, {})[phase] = {
                **timing.as_json(),
                "ratio": self.ratio(layer, phase),
                "bytes_per_second": speed,
                "share_of_copy": None if speed is None else speed / self.bandwidth,
            }
        return {
            "slots": self.shape.slots,
            "touched": self.touched,
            "state_bytes": 3 * self.shape.table_bytes,
            "copy_bytes_per_second": self.bandwidth,
            "layers": layers,
        }

    def table(self) -> Table:
        """Milliseconds, and beside this package's layer and a copy."""
        columns = [Column("layer"), Column("time of"), *(number(name, "{:,.1f}") for name in ("ms", "min", "max"))]
        columns += [number("x pkmlm", "{:.2f}"), number("GB/s", "{:,.1f}"), number("of a copy", "{:.0%}")]
        rows = []
        for (layer, phase), timing in self.times.items():
            speed = self.bytes_per_second(layer, phase)
            speeds = [None, None] if speed is None else [speed / 1e9, speed / self.bandwidth]
            rows.append([layer, PHASES[phase], *timing.milliseconds(), self.ratio(layer, phase), *speeds])
        shape = self.shape
        title = (
            f"{shape.slots:,} slots of width {shape.dim}, {shape.tokens:,} tokens reading {shape.heads} x {shape.topk} "
            f"each, {self.touched:,} slots in all"
        )
        return Table(title, columns, rows)


def time_sizes(shapes: Sequence[Shape], names: Sequence[str], rounds: int, say: Say) -> list[LayerTimes]:
    """`time_memory` for each size.

    Args:
        names: of `pkmlm.bench.LAYERS`; empty: all, but on a CPU no compiled one.

    Raises:
        UserError: a size is not possible, or too large for this machine.
    """
    first = shapes[0]
    least = min(shape.num_keys for shape in shapes)
    if first.topk > least:
        raise UserError(f"--topk: found {first.topk} (expected at most {least}, the sub-keys of {least**2} slots)")
    if first.key_dim % 2:
        raise UserError(f"--key-dim: found {first.key_dim} (expected an even width: a sub-key has half of it)")
    on_cpu = default_device().type == "cpu"
    if COMPILED in names or not (names or on_cpu):
        check_compiler(default_device(), f"--only {COMPILED}", "leave it out")
    chosen = [name for name in LAYERS if (name in names if names else name != COMPILED or not on_cpu)]
    return [time_memory(shape, chosen, rounds, say) for shape in shapes]


def time_memory(shape: Shape, names: Sequence[str], rounds: int, say: Say) -> LayerTimes:
    """Time each of `PHASES` of each layer in `names`, interleaved, in training mode.

    All memories read and update one value table with one pair of moments: the same rows, without holding them four
    times. No layer clips gradients or computes their norm.

    Raises:
        UserError: (exit code 1) the table would drive the machine out of memory.
    """
    device = default_device()
    # Values, two moments and a copy while they are filled; with dense gradients also these and Adam's temporaries.
    # The query map and the sub-keys are each layer's own, with gradients and moments.
    needed = (6 if {"plain-adam", "plain-fused", COMPILED} & {*names} else 4) * shape.table_bytes
    needed += len(names) * 16 * shape.heads * shape.key_dim * (shape.dim + shape.num_keys)
    fewer = "give fewer --slots, a smaller --dim, or --only pkmlm,plain-sparse"
    check_room(f"{shape.slots:,} slots of width {shape.dim}", needed, fewer)
    say(f"filling a table of {short(shape.slots)} slots")
    source = product_key_layer(shape, device)
    x_1ND, grad_1ND = inputs(shape, device)
    reads = reads_of(source, x_1ND)
    actions: dict[tuple[str, str], Callable[[], object]] = {}
    for name, one in contenders(names, shape, source).items():
        if one.values is not None:
            actions[name, "values"] = partial(one.sum_values, *reads)
        actions[name, "forward"] = partial(one.forward, x_1ND)
        actions[name, "backward"] = partial(one.backward, x_1ND, grad_1ND, update=False)
        actions[name, "step"] = partial(one.backward, x_1ND, grad_1ND, update=True)
    times, bandwidth = interleaved_with_copy(actions, rounds, device, say)
    return LayerTimes(shape, len(reads[0].unique()), bandwidth, times)


def as_json(results: Sequence[LayerTimes]) -> dict[str, Any]:
    """What `bench memory --json` prints."""
    shape = {name: value for name, value in asdict(results[0].shape).items() if name != "num_keys"}
    return {"machine": machine(), "shape": shape, "sizes": [result.as_json() for result in results]}


def growth(results: Sequence[LayerTimes]) -> str:
    """Lines that say how a step grows between sizes, and what the machine is."""
    lines = []
    for small, large in pairwise(results):
        names = dict.fromkeys(name for name, _ in large.times)
        grown = [f"{name} {large.times[name, 'step'].median / small.times[name, 'step'].median:.2f}" for name in names]
        lines.append(f"Step, {short(large.shape.slots)} over {short(small.shape.slots)} slots: {', '.join(grown)}")
    copy = ", ".join(f"{result.bandwidth / 1e9:.1f}" for result in results)
    facts = machine()
    lines.append(f"A copy moves {copy} GB/s; {facts['device']}, torch {facts['torch']}; medians of rounds")
    return "\n".join(lines)
