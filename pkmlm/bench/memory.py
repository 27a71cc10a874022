"""A product-key memory timed beside the same layer in plain torch, and beside the FFN that it replaces."""

import resource
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from pkmlm.bench import PHASES
from pkmlm.bench.bandwidth import bandwidth, copying
from pkmlm.bench.plain_memory import PlainMemory, plain_ffn
from pkmlm.bench.rounds import Timing, in_turn
from pkmlm.errors import UserError
from pkmlm.model.initial import initialise
from pkmlm.model.memory.product_key import ProductKeyMemory
from pkmlm.recipe.schema import Memory, Recipe
from pkmlm.runtime.device import choose_device
from pkmlm.runtime.seeds import generator
from pkmlm.train.optim import parameter_groups

WIDTH = 4  # bytes of an fp32 number
RATE = 1e-3


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
    def slots(self) -> int:
        return self.num_keys**2

    @property
    def table_bytes(self) -> int:
        """Of the values."""
        return self.slots * self.dim * WIDTH

    @property
    def memory(self) -> Memory:
        return Memory(
            kind="product-key",
            layers=("1",),
            num_keys=self.num_keys,
            heads=self.heads,
            topk=self.topk,
            key_dim=self.key_dim,
        )

    def least_bytes(self, touched: int) -> dict[str, int]:
        """What each phase must move at least, were nothing read twice from memory.

        forward: a row for each read, the input and the output. backward: the rows once more, for the gradients of the
        weights. step: besides, every touched row and its two moments, read and written.
        """
        rows = self.tokens * self.heads * self.topk * self.dim * WIDTH
        forward = rows + 2 * self.tokens * self.dim * WIDTH
        backward = forward + rows
        return {"forward": forward, "backward": backward, "step": backward + 6 * touched * self.dim * WIDTH}


@dataclass(frozen=True)
class Contender:
    """A layer with what updates it.

    Attributes:
        update: one optimizer step over all of the layer's gradients.
        clear: forget them.
        optimizers: those behind `update`.
    """

    layer: nn.Module
    update: Callable[[], None]
    clear: Callable[[], None]
    optimizers: list[torch.optim.Optimizer]


@dataclass(frozen=True)
class LayerTimes:
    """The result for one number of slots.

    Attributes:
        touched: distinct slots that the tokens read.
        copy: see `bench.bandwidth`.
        times: by layer and phase.
        peaks: bytes of a step at its highest, by layer; empty where it was not asked for.
    """

    shape: Shape
    touched: int
    copy: Timing
    times: dict[tuple[str, str], Timing]
    peaks: dict[str, int]

    @property
    def bandwidth(self) -> float:
        """Bytes a second, read and written, of a copy."""
        return bandwidth(self.copy)

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
        for layer, peak in self.peaks.items():
            layers[layer]["peak_bytes"] = peak
        return {
            "slots": self.shape.slots,
            "touched": self.touched,
            "state_bytes": 3 * self.shape.table_bytes,
            "copy_bytes_per_second": self.bandwidth,
            "layers": layers,
        }


def time_memory(
    shape: Shape, names: Sequence[str], rounds: int, say: Callable[[str], None], *, peak: bool
) -> LayerTimes:
    """Time forward, forward + backward and whole step of each layer in `names` (of `pkmlm.bench.LAYERS`), in turn.

    All memories of a round read and update one value table with one pair of moments: the same rows, without holding
    them four times. Nothing is clipped and no norm is computed, in none of the layers.
    """
    device = choose_device()
    check_room(shape, names, device)
    peaks = {name: peak_of_step(shape, name, say) for name in names if name != "ffn"} if peak else {}
    say("filling the table")
    source = product_key_layer(shape, device)
    contenders = {name: contender(name, shape, source) for name in names}
    x_1ND, grad_1ND = inputs(shape, device)
    share_moments(contenders, source.values.weight_KD)
    actions: dict[tuple[str, str], Callable[[], object]] = {
        (name, phase): action(one, phase, x_1ND, grad_1ND) for name, one in contenders.items() for phase in PHASES
    }
    actions["copy", ""] = copying(device)
    times = in_turn(actions, rounds, device, say)
    return LayerTimes(shape, touched_slots(source, x_1ND), times.pop(("copy", "")), times, peaks)


def check_room(shape: Shape, names: Sequence[str], device: torch.device) -> None:
    """Refuse a table that would drive the machine out of memory.

    Values, two moments and a copy while they are filled; with dense gradients that, and what Adam makes on the way. The
    query map and the sub-keys are each layer's own, with gradients and moments.
    """
    needed = (6 if {"plain-adam", "plain-fused"} & {*names} else 4) * shape.table_bytes
    needed += len(names) * 4 * shape.heads * shape.key_dim * (shape.dim + shape.num_keys) * WIDTH
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    if needed > free:
        raise UserError(
            f"{shape.slots:,} slots of width {shape.dim} need {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free",
            "give fewer --slots, a smaller --dim, or --only pkmlm,plain-sparse",
            exit_code=1,
        )


def product_key_layer(shape: Shape, device: torch.device) -> ProductKeyMemory:
    layer = ProductKeyMemory(shape.dim, shape.memory, 1, momentum=0.1).to(device)
    initialise(layer, 1)
    return layer


def inputs(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens (1, N, D) that want a gradient, and the gradient of the output; both N(0, 1), the same for every layer."""
    random = generator(1, "bench memory")
    x_1ND, grad_1ND = (torch.randn(1, shape.tokens, shape.dim, generator=random).to(device) for _ in range(2))
    return x_1ND.requires_grad_(), grad_1ND


def contender(name: str, shape: Shape, source: ProductKeyMemory) -> Contender:
    """A layer of `pkmlm.bench.LAYERS` with the weights of `source` and its values themselves."""
    device = source.values.weight_KD.device
    if name == "pkmlm":
        groups = parameter_groups(source, Recipe())
        optimizers = [group.optimizer for group in groups]

        def update() -> None:
            for group in groups:
                group.step(1)

        def clear() -> None:
            for optimizer in optimizers:
                optimizer.zero_grad()

        return Contender(source, update, clear, optimizers)
    if name == "ffn":
        layer: nn.Module = plain_ffn(shape.dim).to(device)
        return plain_contender(layer, [torch.optim.Adam(layer.parameters(), lr=RATE, fused=True)])
    plain = PlainMemory(shape.dim, shape.memory, sparse=name == "plain-sparse")
    plain.take_weights(source)
    plain.to(device)
    if name == "plain-adam":
        return plain_contender(plain, [torch.optim.Adam(plain.parameters(), lr=RATE)])
    if name == "plain-fused":
        return plain_contender(plain, [torch.optim.Adam(plain.parameters(), lr=RATE, fused=True)])
    values = plain.values.weight
    rest = [parameter for parameter in plain.parameters() if parameter is not values]
    return plain_contender(
        plain, [torch.optim.SparseAdam([values], lr=RATE), torch.optim.Adam(rest, lr=RATE, fused=True)]
    )


def plain_contender(layer: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Contender:
    def update() -> None:
        for optimizer in optimizers:
            optimizer.step()

    return Contender(layer, update, layer.zero_grad, optimizers)


def action(one: Contender, phase: str, x_1ND: Tensor, grad_1ND: Tensor) -> Callable[[], None]:
    """One phase of a layer in training mode, and the forgetting of its gradients."""

    def forward() -> None:
        with torch.no_grad():
            one.layer(x_1ND)

    def backward() -> None:
        one.layer(x_1ND).backward(grad_1ND)
        if phase == "step":
            one.update()
        one.clear()
        x_1ND.grad = None

    return forward if phase == "forward" else backward


def share_moments(contenders: dict[str, Contender], values_KD: nn.Parameter) -> None:
    """Let every optimizer that holds the value table use the same two moments."""
    moments = {name: torch.zeros_like(values_KD) for name in ("exp_avg", "exp_avg_sq")}
    for name, one in contenders.items():
        for optimizer in one.optimizers:
            held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            if not any(parameter is values_KD for parameter in held):
                continue
            count: Any = torch.zeros((), device=values_KD.device if name == "plain-fused" else "cpu")
            if name == "plain-sparse":
                count = 0
            elif name == "pkmlm":
                count = torch.zeros((), dtype=torch.int64)
            optimizer.state[values_KD].update(step=count, **moments)


def touched_slots(layer: ProductKeyMemory, x_1ND: Tensor) -> int:
    """Distinct slots that the tokens read."""
    seen: list[Tensor] = []
    handle = layer.tap.register_forward_hook(lambda tap, given, out: seen.append(out[0]))
    with torch.no_grad():
        layer(x_1ND)
    handle.remove()
    return len(seen[0].unique())


def peak_of_step(shape: Shape, name: str, say: Callable[[str], None]) -> int:
    """Bytes that a layer holds at the height of a training step, measured in a process of its own."""
    say(f"peak memory of {name}")
    try:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            return pool.submit(own_peak, shape, name).result()
    except BrokenProcessPool:
        message = f"the process that took a step of {name} with {shape.slots:,} slots was killed (out of memory?)"
        raise UserError(message, "give fewer --slots or a smaller --dim", exit_code=1) from None


def own_peak(shape: Shape, name: str) -> int:
    """Peak bytes of this process over two steps, less what it held before there was a table.

    A step on a small table comes first, so that compilers and buffers of the libraries do not count.
    """
    device = choose_device()
    two_steps(replace(shape, num_keys=max(16, shape.topk)), name, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        two_steps(shape, name, device)
        return torch.cuda.max_memory_allocated(device) - before
    before = psutil.Process().memory_info().rss
    two_steps(shape, name, device)
    return most_resident() - before


def most_resident() -> int:
    """Bytes that this process has held at most. (On Linux, ru_maxrss also counts what its parent had held before.)"""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS: in bytes
    peak = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(peak.split()[1]) * 1024


def two_steps(shape: Shape, name: str, device: torch.device) -> None:
    one = contender(name, shape, product_key_layer(shape, device))
    step = action(one, "step", *inputs(shape, device))
    step()
    step()
