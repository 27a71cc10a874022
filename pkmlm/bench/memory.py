"""A product-key memory timed beside the same layer in plain torch, and beside the FFN that it replaces.

N: tokens; D: width; H: heads; k: slots a head reads; r: reads of a token (H * k).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pkmlm.bench.bandwidth import bandwidth, beside_a_copy
from pkmlm.bench.contenders import actions, beside_one_another, inputs, product_key_layer
from pkmlm.bench.peak import peak_of_step
from pkmlm.bench.rounds import Timing
from pkmlm.bench.shape import WIDTH, Shape
from pkmlm.device import default_device, free_bytes
from pkmlm.errors import UserError
from pkmlm.model.memory.key_memory import ProductKeyMemory


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
    """Time each of `pkmlm.bench.LAYER_PHASES` of each layer in `names` (of `pkmlm.bench.LAYERS`), in turn.

    All memories of a round read and update one value table with one pair of moments: the same rows, without holding
    them four times. Nothing is clipped and no norm is computed, in none of the layers.
    """
    device = default_device()
    check_room(shape, names, device)
    peaks = {name: peak_of_step(shape, name, say) for name in names if name != "ffn"} if peak else {}
    say("filling the table")
    source = product_key_layer(shape, device)
    contenders = beside_one_another(names, shape, source)
    x_1ND, grad_1ND = inputs(shape, device)
    reads = reads_of(source, x_1ND)
    timed = {
        (name, phase): action
        for name, one in contenders.items()
        for phase, action in actions(one, x_1ND, grad_1ND, reads).items()
    }
    times, copy = beside_a_copy(timed, rounds, device, say)
    return LayerTimes(shape, len(reads[0].unique()), copy, times, peaks)


def check_room(shape: Shape, names: Sequence[str], device: torch.device) -> None:
    """Refuse a table that would drive the machine out of memory.

    Values, two moments and a copy while they are filled; with dense gradients that, and what Adam makes on the way. The
    query map and the sub-keys are each layer's own, with gradients and moments.
    """
    needed = (6 if {"plain-adam", "plain-fused"} & {*names} else 4) * shape.table_bytes
    needed += len(names) * 4 * shape.heads * shape.key_dim * (shape.dim + shape.num_keys) * WIDTH
    free = free_bytes(device)
    if needed > free:
        raise UserError(
            f"{shape.slots:,} slots of width {shape.dim} need {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free",
            "give fewer --slots, a smaller --dim, or --only pkmlm,plain-sparse",
            exit_code=1,
        )


def reads_of(layer: ProductKeyMemory, x_1ND: Tensor) -> tuple[Tensor, Tensor]:
    """The slots that the tokens read and their weights, both (N, r)."""
    seen: list[Tensor] = []
    handle = layer.tap.register_forward_hook(lambda tap, given, out: seen.extend(out))
    with torch.no_grad():
        layer(x_1ND)
    handle.remove()
    slots_NHk, weights_NHk = seen
    return slots_NHk.flatten(1), weights_NHk.flatten(1)
