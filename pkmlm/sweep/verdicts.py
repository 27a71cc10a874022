"""Whether the measurements show the orderings that a paper claims."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import lt
from statistics import correlation, fmean
from typing import Any

from pkmlm.report.metrics import MEASURES
from pkmlm.sweep.grid import Claim, Grid, Point

BySeed = Callable[[str, Point], Mapping[int, float]]  # of a measure at a point
Tokenizers = Callable[[Point], str | None]  # of the runs of a point


@dataclass(frozen=True)
class Verdict:
    """How far a claim holds, or how a measure's order agrees with the paper's.

    Attributes:
        pairs: how many pairs of points were measured, each compared by the seeds that both have.
        held: of these, how many have means in the claimed order.
        seeded: of the pairs, how many have two seeds or more in common.
        in_every: of these, how many have the claimed order in each seed.
        clear: of these, how many have every seed of one point beyond every seed of the other.
        apart: how many pairs were left out because their tokens are of different tokenizers; in place of a correlation,
            how many points.
        equal: what the runs have taken equally much of, "tokens" for example; None: not equally much of anything.
        correlation: Spearman's rank correlation with the paper over points; None for a claim.
    """

    text: str
    pairs: int = 0
    held: int = 0
    seeded: int = 0
    in_every: int = 0
    clear: int = 0
    apart: int = 0
    equal: str | None = None
    correlation: float | None = None

    def row(self) -> list[Any]:
        if self.correlation is not None:
            return [self.text, f"{self.correlation:+.2f}", None, None, self.equal]
        counts = [(self.held, self.pairs), (self.in_every, self.seeded), (self.clear, self.seeded)]
        holds, *others = [f"{part} of {whole}" if whole else None for part, whole in counts]
        if self.apart:
            holds = "; ".join(filter(None, (holds, f"{self.apart} not comparable: other tokenizers")))
        return [self.text, holds, *others, self.equal]


def verdict(
    grid: Grid,
    claim: Claim,
    values: BySeed,
    tokenizer: Tokenizers,
    equal: str | None,
    points: Sequence[Point],
) -> Verdict:
    """Compare all measured pairs of points that a claim orders, by the seeds that both have: perplexity differs more
    between seeds than between models. What is measured by the token is not compared across tokenizers.

    Args:
        values: gives a measure at a point, by seed.
        tokenizer: of the runs of a point.
        equal: what the runs of `points` have taken equally much of.
        points: of these the claim is made.
    """
    ordered = [pair for pair in pairs_of(grid, claim) if set(pair) <= set(points)]
    by_token = MEASURES[claim.measure].by_token
    alike = [(less, more) for less, more in ordered if not by_token or tokenizer(less) == tokenizer(more)]
    found = [(values(claim.measure, less), values(claim.measure, more)) for less, more in alike]
    both = [[(less[seed], more[seed]) for seed in less.keys() & more.keys()] for less, more in found]
    measured = [tuple(zip(*pair, strict=True)) for pair in both if pair]
    seeded = [(less, more) for less, more in measured if len(less) > 1]
    return Verdict(
        claim.text,
        pairs=len(measured),
        held=sum(fmean(less) < fmean(more) for less, more in measured),
        seeded=len(seeded),
        in_every=sum(all(map(lt, less, more)) for less, more in seeded),
        clear=sum(max(less) < min(more) for less, more in seeded),
        apart=sum(all(values(claim.measure, point) for point in pair) for pair in set(ordered) - set(alike)),
        equal=equal,
    )


def pairs_of(grid: Grid, claim: Claim) -> Iterator[tuple[Point, Point]]:
    """The pairs (less, greater) of points that a claim orders, equal in all axes that it does not mention."""
    allowed = [p for p in grid.points() if all(grid.place(p)[axis] in names for axis, names in claim.at.items())]
    along = claim.rising or claim.falling
    if along:
        at = list(grid.axes).index(along)
        rows: dict[Point, list[Point]] = {}
        for point in allowed:
            rows.setdefault(point[:at] + point[at + 1 :], []).append(point)
        for row in rows.values():
            for first, second in pairwise(row):
                yield (first, second) if claim.rising else (second, first)
        return
    for greater in allowed:
        place = grid.place(greater)
        less = tuple((place | claim.less).values())
        if claim.greater.items() <= place.items() and less in allowed:
            yield less, greater


def rank_correlations(
    grid: Grid, values: BySeed, tokenizer: Tokenizers, equal: str | None, points: Sequence[Point]
) -> list[Verdict]:
    """Spearman's correlation of the measured means with the paper's numbers, for each measure that has both at three of
    `points` or more. Means are over the seeds that all of these points have. What is measured by the token is not
    ranked across tokenizers.

    Args:
        values, tokenizer, equal, points: as of `verdict`.
    """
    found = []
    for measure in grid.measure:
        both_at = [point for point in points if values(measure, point) and grid.paper_value(measure, point) is not None]
        known = [(values(measure, point), grid.paper_value(measure, point)) for point in both_at]
        text = f"{MEASURES[measure].heading}: rank correlation with the paper, {{}} points"
        if MEASURES[measure].by_token and len(set(map(tokenizer, both_at))) > 1:
            found.append(Verdict(text.format(len(known)), apart=len(known), equal=equal))
            continue
        shared = [seed for seed in grid.seeds if all(seed in measured for measured, _ in known)]
        both = [(fmean(measured[seed] for seed in shared), paper) for measured, paper in known if shared]
        columns = [list(column) for column in zip(*both, strict=True)]
        if len(both) >= 3 and all(len(set(column)) > 1 for column in columns):
            agreement = correlation(*map(ranks, columns))
            found.append(Verdict(text.format(len(both)), correlation=agreement, equal=equal))
    return found


def ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value, from 1; equal values have their mean rank."""
    return [sum(other < value for other in values) + (values.count(value) + 1) / 2 for value in values]
