"""`bench train`: whole models taking training steps, interleaved."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from pkmlm.bench.models import FEWER, ModelTimes, Variant, decode, prefilled, random_tokens, random_training
from pkmlm.bench.peaks import peak_of
from pkmlm.bench.rounds import Say, check_room, interleaved_with_copy
from pkmlm.device import Precision, autocast, default_device, name_of
from pkmlm.model.attention import KVCache
from pkmlm.model.transformer import Transformer
from pkmlm.train.step import queue_step


def time_training(chosen: list[Variant], precision: Precision, rounds: int, say: Say) -> ModelTimes:
    """Time the forward, the whole step as `pkmlm train` takes it, and one token at batch 1 after half a context."""
    check_room("these models together", sum(sum(one.cost.training.values()) for one in chosen), FEWER)
    device = default_device()
    recipe, context = chosen[0].recipe, chosen[0].recipe.model.context
    timed = {
        "forward": (f"a forward pass of {recipe.train.micro_batch} sequences, {precision}", context),
        "step": (f"steps of {recipe.train.batch_tokens:,} tokens, {precision}", context),
    }
    actions: dict[tuple[str, int, int], Callable[[], object]] = {}
    for index, one in enumerate(chosen):
        say(f"building {one.name}")
        state = random_training(one.recipe, precision)
        recipe, model = one.recipe, state.model
        batch = state.batches.micro_batch(1, 0, recipe.train.micro_batch)
        tokens_BT, targets_BT = (part.to(device) for part in batch)
        actions["forward", index, recipe.train.micro_batch] = partial(forward, model, tokens_BT, targets_BT, precision)
        actions["step", index, recipe.sequences] = partial(queue_step, state, 1)
        if recipe.model.attention == "softmax":
            prompt_1T = random_tokens(recipe.model.vocab_size or 0, 1, max(1, context // 2)).to(device)
            filled = prefilled(model.eval(), prompt_1T[:, :-1])
            timed["decode"] = ("one token of one sequence, fp32", 1)
            actions["decode", index, 1] = partial(one_token, model, filled, prompt_1T[:, -1:])
    times, bandwidth = interleaved_with_copy(actions, rounds, device, say)
    return ModelTimes(chosen, times, timed, {"precision": precision}, bandwidth, peak_of(name_of(device), precision))


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
