"""Whole models training, timed in turn."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pkmlm.bench import MODEL_PHASES
from pkmlm.bench.bandwidth import bandwidth, beside_a_copy
from pkmlm.bench.models import RandomBatches, Variant, check_room, decode, prefilled, random_tokens
from pkmlm.bench.rounds import Timing
from pkmlm.device import autocast, default_device
from pkmlm.model.attention import Cache
from pkmlm.model.transformer import Transformer, build_model
from pkmlm.train.state import TrainState
from pkmlm.train.step import train_step


@dataclass(frozen=True)
class TrainingTimes:
    """Times of each model.

    Attributes:
        times: by (index of the model, one of `pkmlm.bench.MODEL_PHASES`): the forward of one micro-batch, an optimizer
            step of `train.batch_tokens`, and, where attention has a cache, the decoding of one token of one sequence,
            in fp32.
        copy: see `bench.bandwidth`.
    """

    models: list[Variant]
    times: dict[tuple[int, str], Timing]
    copy: Timing

    @property
    def phases(self) -> list[str]:
        """What was timed, of `pkmlm.bench.MODEL_PHASES`: of all models the same."""
        return [phase for phase in MODEL_PHASES if (0, phase) in self.times]

    def as_json(self) -> dict[str, Any]:
        return {
            "copy_bytes_per_second": bandwidth(self.copy),
            "models": [
                {**model.as_json(), **{phase: self.times[index, phase].as_json() for phase in self.phases}}
                for index, model in enumerate(self.models)
            ],
        }


def time_training(chosen: list[Variant], precision: str, rounds: int, say: Callable[[str], None]) -> TrainingTimes:
    """Time the forward, the whole step as `pkmlm train` takes it, and one token at batch 1 after half a context."""
    check_room(chosen, training=True)
    device = default_device()
    actions: dict[tuple[int, str], Callable[[], object]] = {}
    for index, one in enumerate(chosen):
        say(f"building {one.name}")
        recipe = one.recipe
        vocab_size = recipe.model.vocab_size or 0
        model = build_model(recipe, vocab_size, device)
        batches = RandomBatches(recipe, vocab_size)
        state = TrainState(recipe, model, batches, precision)
        batch = batches.micro_batch(1, 0, recipe.train.micro_batch)
        tokens_BT, targets_BT = (part.to(device) for part in batch)
        actions[index, "forward"] = partial(forward, model, tokens_BT, targets_BT, precision)
        actions[index, "step"] = partial(train_step, state, 1)
        if recipe.model.attention == "softmax":
            prompt_1T = random_tokens(vocab_size, 1, max(1, recipe.model.context // 2)).to(device)
            filled = prefilled(model.eval(), prompt_1T[:, :-1])
            actions[index, "token"] = partial(one_token, model, filled, prompt_1T[:, -1:])
    times, copy = beside_a_copy(actions, rounds, device, say)
    return TrainingTimes(chosen, times, copy)


@torch.no_grad()
def forward(model: Transformer, tokens_BT: Tensor, targets_BT: Tensor, precision: str) -> None:
    """The forward of a training step to its loss, without gradients."""
    model.train()
    with autocast(tokens_BT.device, precision):
        model.loss(tokens_BT, targets_BT)


def one_token(model: Transformer, filled: Cache, last_11: Tensor) -> None:
    """The decoding of one token of one sequence."""
    model.eval()
    decode(model, filled, last_11, 1)
