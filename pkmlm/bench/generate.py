"""`bench generate`: whole models decoding and scoring, interleaved."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from pkmlm.bench.models import FEWER, ModelTimes, Variant, decode, prefilled, random_tokens
from pkmlm.bench.rounds import Say, check_room, interleaved_with_copy
from pkmlm.device import default_device
from pkmlm.model.transformer import Transformer, build_model


def time_inference(chosen: list[Variant], batches: Sequence[int], tokens: int, rounds: int, say: Say) -> ModelTimes:
    """Time decoding with a cache, after a prompt of half the context, and scoring a whole context, in fp32.

    Args:
        batches: sequences that are decoded or scored at once.
        tokens: to decode in a sequence; at most half the context is decoded.
    """
    check_room("these models together", sum(4 * (one.cost.dense + one.cost.memory) for one in chosen), FEWER)
    device, context = default_device(), chosen[0].recipe.model.context
    tokens = min(tokens, max(1, context // 2))
    actions: dict[tuple[str, int, int], Callable[[], object]] = {}
    for index, one in enumerate(chosen):
        say(f"building {one.name}")
        vocab_size = one.recipe.model.vocab_size or 0
        model = build_model(one.recipe, vocab_size, device).eval()
        for batch in batches:
            ids_BT = random_tokens(vocab_size, batch, context).to(device)
            half = context - context // 2
            filled = prefilled(model, ids_BT[:, : half - 1])
            actions["decode", index, batch] = partial(decode, model, filled, ids_BT[:, half - 1 : half], tokens)
            actions["score", index, batch] = partial(score_batch, model, ids_BT)
    times, bandwidth = interleaved_with_copy(actions, rounds, device, say)
    timed = {
        "decode": (f"decoding {tokens} tokens a sequence", tokens),
        "score": (f"scoring {context} tokens a sequence", context),
    }
    return ModelTimes(chosen, times, timed, {"decoded": tokens, "scored": context}, bandwidth)


@torch.no_grad()
def score_batch(model: Transformer, ids_BT: Tensor) -> Tensor:
    """The log-probability of a text under a model, all sequences together."""
    return -model.loss(ids_BT, ids_BT.roll(-1, 1))
