"""Runs at equal tokens, operations or seconds: validation losses where each had taken as much as the shortest."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

Over = Literal["tokens", "operations", "seconds"]
OVERS: tuple[Over, ...] = get_args(Over)


class Equal(NamedTuple):
    """The point at which runs are compared.

    Attributes:
        over: what all of them have taken equally much of.
        amount: how much: what the shortest run took up to its last validation.
        shortest: the name of that run.
        facts: by run: equal_OVER_step, the step at which it had taken that amount; equal_OVER_valid_loss (nats per
            token), equal_OVER_valid_bits_per_byte and equal_OVER_valid_token_ppl at that step; and equal_OVER_between,
            how many steps apart the two validations are that these are interpolated from, 0 if one is at that step.
            None if no validation is that early.
    """

    over: Over
    amount: float
    shortest: str
    facts: dict[str, dict[str, float | None]]

    def as_json(self) -> dict[str, Any]:
        """The amount and the shortest run, without the facts: these are shown with the runs."""
        return {"amount": self.amount, "shortest": self.shortest}


def at_equal(
    over: Over, per_step: Mapping[str, float], runs: Mapping[str, Sequence[Mapping[str, Any]]]
) -> Equal | None:
    """Read each run's validation curve where it had taken as much as the shortest run; None if no run has a curve.

    The loss is interpolated linearly between the two validations around that step.

    Args:
        per_step: what a step of each run takes.
        runs: the lines of metrics.jsonl of each.
    """
    from pkmlm.runs.results import perplexity, validations  # need numpy, which the options of a command do without

    curves = {
        name: [(event["step"], event["loss"]) for event in validations(events) if event.get("loss") is not None]
        for name, events in runs.items()
    }
    ends = {name: curve[-1][0] * per_step[name] for name, curve in curves.items() if curve}
    if not ends:
        return None
    shortest = min(ends, key=lambda name: ends[name])
    amount = ends[shortest]
    facts: dict[str, dict[str, float | None]] = {}
    for name, curve in curves.items():
        bits = bits_of_a_nat(validations(runs[name]))
        step = loss = between = None
        if name in ends:
            step = round(amount / per_step[name], 6)  # a whole number for the shortest run
            loss, between = loss_at(curve, step)
        facts[name] = {
            f"equal_{over}_step": step,
            f"equal_{over}_between": between,
            f"equal_{over}_valid_loss": loss,
            f"equal_{over}_valid_bits_per_byte": None if loss is None or bits is None else loss * bits,
            f"equal_{over}_valid_token_ppl": None if loss is None else perplexity(loss),
        }
    return Equal(over, amount, shortest, facts)


def bits_of_a_nat(validations: Iterable[Mapping[str, Any]]) -> float | None:
    """Bits per byte for a nat per token on the validation text, which has as many tokens for a byte at each step."""
    known = (
        event["bits_per_byte"] / event["loss"]
        for event in validations
        if event.get("bits_per_byte") and event.get("loss")
    )
    return next(known, None)


def loss_at(curve: Sequence[tuple[int, float]], step: float) -> tuple[float | None, int | None]:
    """The loss at a step of a curve of (step, loss), and the distance in steps of the two points around it."""
    for at, loss in curve:
        if at == step:
            return loss, 0
    for (before, higher), (after, lower) in pairwise(curve):
        if before < step < after:
            return higher + (lower - higher) * (step - before) / (after - before), after - before
    return None, None
