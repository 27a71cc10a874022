"""`bench generate`: whole models decoding and scoring, interleaved."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from pkmlm.bench.models import FEWER, Variant, decode, prefilled, random_tokens, reading_table
from pkmlm.bench.rounds import Say, Timing, check_room, interleaved_with_copy
from pkmlm.console import Column, Table, number
from pkmlm.device import default_device, machine
from pkmlm.model.transformer import Transformer, build_model


@dataclass(frozen=True)
class InferenceTimes:
    """Times of each model.

    Attributes:
        times: by (what: "decode" or "score", index of the model, batch).
        decoded, scored: tokens of a sequence in one timing.
        bandwidth: bytes per second, read and written, of a copy.
    """

    models: list[Variant]
    times: dict[tuple[str, int, int], Timing]
    decoded: int
    scored: int
    bandwidth: float

    def speed(self, what: str, model: int, batch: int) -> float:
        """Median tokens per second over all sequences of a batch."""
        tokens = self.decoded if what == "decode" else self.scored
        return batch * tokens / self.times[what, model, batch].median

    def batches(self) -> list[int]:
        return sorted({batch for _, _, batch in self.times})

    def as_json(self) -> dict[str, Any]:
        found = []
        for index, model in enumerate(self.models):
            times = [
                {"what": what, "batch": batch, "tokens_per_second": self.speed(what, index, batch), **timing.as_json()}
                for (what, owner, batch), timing in sorted(self.times.items(), key=itemgetter(0))
                if owner == index
            ]
            found.append({**model.as_json(), "times": times})
        sizes = {"decoded": self.decoded, "scored": self.scored}
        return {"machine": machine(), **sizes, "copy_bytes_per_second": self.bandwidth, "models": found}

    def tables(self) -> list[Table]:
        """Speeds of decoding and of scoring; if single sequences were decoded, how fast one token reads its weights."""
        found = [self.speed_table("decode"), self.speed_table("score")]
        if 1 in self.batches():
            seconds = [self.times["decode", index, 1].median / self.decoded for index in range(len(self.models))]
            found.append(reading_table(self.models, seconds, self.bandwidth))
        return found

    def speed_table(self, what: str) -> Table:
        """Tokens a second, and as a ratio to the first model."""
        columns = [Column("model"), number("batch"), number("tokens/s", "{:,.0f}"), number("x first", "{:.2f}")]
        columns += [number(name, "{:,.1f}") for name in ("ms", "min", "max", "M ops", "MB read")]
        rows = []
        for batch in self.batches():
            for index, model in enumerate(self.models):
                speed = self.speed(what, index, batch)
                timing = self.times[what, index, batch]
                sizes = [model.cost.flops_per_token / 1e6, model.read / 1e6]
                rows.append(
                    [model.name, batch, speed, speed / self.speed(what, 0, batch), *timing.milliseconds(), *sizes]
                )
        name = self.models[0].recipe.name
        doing = f"decoding {self.decoded}" if what == "decode" else f"scoring {self.scored}"
        return Table(f"{name}: {doing} tokens a sequence", columns, rows)


def time_inference(chosen: list[Variant], batches: Sequence[int], tokens: int, rounds: int, say: Say) -> InferenceTimes:
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
    return InferenceTimes(chosen, times, tokens, context, bandwidth)


@torch.no_grad()
def score_batch(model: Transformer, ids_BT: Tensor) -> Tensor:
    """The log-probability of a text under a model, all sequences together."""
    return -model.loss(ids_BT, ids_BT.roll(-1, 1))
