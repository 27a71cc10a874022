"""How large a dense model would have to be to reach the loss of a model with a memory."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

from pkmlm.report.compare import Group
from pkmlm.report.equal import Over

FEWEST = 3  # sizes of dense models: a line fits any two


class Equivalent(NamedTuple):
    """A dense-equivalent size, in parameters; 0: below the smallest usable dense model, infinite: above the largest
    (see `dense_equivalents`).

    Attributes:
        parameters: at the mean losses over seeds.
        low, high: for the worst seed against the best dense seeds, and for the best seed against the worst; None if all
            models have a single seed.
        smallest, largest: sizes of the usable dense models.
    """

    parameters: float
    low: float | None
    high: float | None
    smallest: int
    largest: int

    def as_json(self) -> dict[str, float | None]:
        """A size beyond the dense models is None, and more_than or less_than is its bound; the same holds for the ends
        of the range, with high_more_than and low_less_than.
        """
        found = [size if size and math.isfinite(size) else None for size in (self.parameters, self.low, self.high)]
        bounds = {
            "more_than": self.largest if self.parameters == math.inf else None,
            "less_than": self.smallest if self.parameters == 0 else None,
            "high_more_than": self.largest if self.high == math.inf else None,
            "low_less_than": self.smallest if self.low == 0 else None,
        }
        return dict(zip(("parameters", "low", "high"), found, strict=True)) | bounds

    def texts(self) -> list[str | None]:
        """The size and the ends of its range, as text."""
        beyond = {0.0: f"< {self.smallest:,}", math.inf: f"> {self.largest:,}"}
        sizes = (self.parameters, self.low, self.high)
        return [None if size is None else beyond.get(size, f"{size:,.0f}") for size in sizes]


def dense_equivalents(groups: Sequence[Group], overs: Sequence[Over] = ()) -> dict[str, dict[str, Equivalent]]:
    """The dense-equivalent sizes of all models that are not dense, by the name of their group and by the loss that is
    compared: "test", "valid" (the best validation), "equal_OVER". A loss is left out if it is known of fewer than three
    usable sizes of dense models.

    The loss of dense models follows a power law in their parameters (Kaplan et al. 2020, eq. 1.1), a straight line in
    logarithms. Between neighbouring sizes, the logarithm of the loss in nats is therefore interpolated linearly in the
    logarithm of all parameters, embeddings included. (Interpolating the loss itself, the logarithm of perplexity, would
    give values above the law; a power law with an irreducible loss would need more sizes than anyone trains.) Of
    several dense models of one size, the one with the best validation counts (if none is known, the one with the best
    loss); a model that is no better than a smaller one is not used.
    """
    ppls = {"test": "test_token_ppl", "valid": "valid_token_ppl"}
    ppls |= {f"equal_{over}": f"equal_{over}_valid_token_ppl" for over in overs}
    found: dict[str, dict[str, Equivalent]] = {}
    for name, key in ppls.items():
        known = {group.name: [math.log(ppl) for run in group.runs if (ppl := run.get(key))] for group in groups}
        whole = {group.name: known[group.name] for group in groups if len(known[group.name]) == len(group.runs)}
        dense: dict[int, list[float]] = {}
        best_last = sorted(groups, key=lambda group: (mean_validation(group), fmean(known[group.name] or [0.0])))[::-1]
        for group in best_last:
            size = group.runs[0]["total"]
            if group.runs[0]["kind"] == "dense" and size and (seeds := whole.get(group.name)):
                dense[size] = seeds
        curve = better_with_size(dense, fmean)
        if len(curve) < FEWEST:
            continue
        used = {size: dense[size] for size, _ in curve}
        for group in groups:
            if group.runs[0]["kind"] != "dense" and (seeds := whole.get(group.name)):
                size, low, high = size_at(fmean(seeds), curve), None, None
                if len(seeds) > 1 or any(len(each) > 1 for each in used.values()):
                    low = min(size, size_at(max(seeds), better_with_size(used, min)))
                    high = max(size, size_at(min(seeds), better_with_size(used, max)))
                ends = curve[0][0], curve[-1][0]
                found.setdefault(group.name, {})[name] = Equivalent(size, low, high, *ends)
    return found


def mean_validation(group: Group) -> float:
    """The mean over seeds of the best validation loss; infinite where one is missing."""
    losses = [loss for run in group.runs if (loss := run.get("valid_loss")) is not None]
    return fmean(losses) if len(losses) == len(group.runs) else math.inf


def better_with_size(
    dense: dict[int, list[float]], of_seeds: Callable[[Sequence[float]], float]
) -> list[tuple[int, float]]:
    """(size, loss) of dense models in order of size, without those that are no better than a smaller one.

    Args:
        of_seeds: makes one loss of those of a model's seeds.
    """
    curve: list[tuple[int, float]] = []
    for size, seeds in sorted(dense.items()):
        if not curve or of_seeds(seeds) < curve[-1][1]:
            curve.append((size, of_seeds(seeds)))
    return curve


def size_at(loss: float, curve: Sequence[tuple[int, float]]) -> float:
    """The size at which a curve of (size, falling loss) has a loss: 0 above the curve, infinite below it."""
    if loss > curve[0][1] or loss < curve[-1][1]:
        return 0.0 if loss > curve[0][1] else math.inf
    for (small, higher), (large, lower) in pairwise(curve):
        if lower <= loss:
            return small * (large / small) ** (math.log(higher / loss) / math.log(higher / lower))
    return float(curve[0][0])
