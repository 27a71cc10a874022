"""`bench train`: whole models taking training steps, interleaved."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pkmlm.bench.models import FEWER, Variant, decode, prefilled, random_tokens, random_training, reading_table
from pkmlm.bench.rounds import Say, Timing, check_room, interleaved_with_copy
from pkmlm.console import Column, Table, number
from pkmlm.device import autocast, default_device, machine
from pkmlm.model.attention import KVCache
from pkmlm.model.transformer import Transformer
from pkmlm.train.step import train_step

DECODING = "token"
PHASES = {"forward": "forward", "step": "step", DECODING: "token, fp32"}  # with their names in tables


@dataclass(frozen=True)
class TrainingTimes:
    """Times of each model.

    Attributes:
        times: by (index of the model, one of `PHASES`): the forward of one micro-batch, an optimizer step of
            `train.batch_tokens`, and, if attention has a cache, the decoding of one token of one sequence, in fp32.
        precision: of the forwards and steps.
        bandwidth: bytes per second, read and written, of a copy.
    """

    models: list[Variant]
    times: dict[tuple[int, str], Timing]
    precision: str
    bandwidth: float

    @property
    def phases(self) -> list[str]:
        """What was timed, the same for all models."""
        return [phase for phase in PHASES if (0, phase) in self.times]

    def as_json(self) -> dict[str, Any]:
        return {
            "machine": machine(),
            "precision": self.precision,
            "copy_bytes_per_second": self.bandwidth,
            "models": [
                {**model.as_json(), **{phase: self.times[index, phase].as_json() for phase in self.phases}}
                for index, model in enumerate(self.models)
            ],
        }

    def tables(self) -> list[Table]:
        """Milliseconds, and as a ratio to the first model; if a token was timed, how fast it reads its weights."""
        columns = [Column("model"), Column("time of"), *(number(name, "{:,.1f}") for name in ("ms", "min", "max"))]
        columns += [number("x first", "{:.2f}"), number("M ops", "{:,.1f}"), number("MB read", "{:,.1f}")]
        rows = []
        for phase in self.phases:
            for index, model in enumerate(self.models):
                timing = self.times[index, phase]
                ratio = timing.median / self.times[0, phase].median
                sizes = [model.cost.flops_per_token / 1e6, model.read / 1e6]
                rows.append([model.name, PHASES[phase], *timing.milliseconds(), ratio, *sizes])
        recipe = self.models[0].recipe
        steps = f"steps of {recipe.train.batch_tokens:,} tokens, {recipe.train.micro_batch} sequences a forward"
        found = [Table(f"{recipe.name}: {steps}, {self.precision}", columns, rows)]
        if DECODING in self.phases:
            seconds = [self.times[index, DECODING].median for index in range(len(self.models))]
            found.append(reading_table(self.models, seconds, self.bandwidth))
        return found


def time_training(chosen: list[Variant], precision: str, rounds: int, say: Say) -> TrainingTimes:
    """Time the forward, the whole step as `pkmlm train` takes it, and one token at batch 1 after half a context."""
    check_room("these models together", sum(sum(one.cost.training.values()) for one in chosen), FEWER)
    device = default_device()
    actions: dict[tuple[int, str], Callable[[], object]] = {}
    for index, one in enumerate(chosen):
        say(f"building {one.name}")
        state = random_training(one.recipe, precision)
        recipe, model = one.recipe, state.model
        batch = state.batches.micro_batch(1, 0, recipe.train.micro_batch)
        tokens_BT, targets_BT = (part.to(device) for part in batch)
        actions[index, "forward"] = partial(forward, model, tokens_BT, targets_BT, precision)
        actions[index, "step"] = partial(train_step, state, 1)
        if recipe.model.attention == "softmax":
            prompt_1T = random_tokens(recipe.model.vocab_size or 0, 1, max(1, recipe.model.context // 2)).to(device)
            filled = prefilled(model.eval(), prompt_1T[:, :-1])
            actions[index, DECODING] = partial(one_token, model, filled, prompt_1T[:, -1:])
    times, bandwidth = interleaved_with_copy(actions, rounds, device, say)
    return TrainingTimes(chosen, times, precision, bandwidth)


@torch.no_grad()
def forward(model: Transformer, tokens_BT: Tensor, targets_BT: Tensor, precision: str) -> None:
    """The forward of a training step to its loss, without gradients."""
    model.train()
    with autocast(tokens_BT.device, precision):
        model.loss(tokens_BT, targets_BT)


def one_token(model: Transformer, filled: KVCache, last_11: Tensor) -> None:
    """The decoding of one token of one sequence."""
    model.eval()
    decode(model, filled, last_11, 1)
