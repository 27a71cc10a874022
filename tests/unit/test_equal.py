"""Runs at equal amounts, and dense models that would do as well: by hand, without runs."""

import math

import pytest

from pkmlm.report.compare import Group
from pkmlm.report.dense_equivalent import dense_equivalents
from pkmlm.report.equal import at_equal


def test_losses_at_equal_amounts_by_hand():
    """Of a run that was validated on other tokens meanwhile, these do not count."""
    points = {
        "short": [(10, 5.0, 9), (20, 4.0, 9)],
        "long": [(10, 6.0, 9), (20, 4.5, 9), (22, 8.0, 7), (40, 3.5, 9)],
        "late": [(90, 2.0, 9)],
        "none": [],
    }
    keys = ("step", "loss", "tokens")
    runs = {
        name: [{"event": "valid", **dict(zip(keys, each, strict=True))} for each in found]
        for name, found in points.items()
    }
    equal = at_equal("operations", {"short": 3.0, "long": 2.4, "late": 1.0, "none": 1.0}, runs)
    assert (equal.amount, equal.shortest) == (60.0, "short")
    told = {
        name: [facts[f"equal_operations_{key}"] for key in ("step", "valid_loss", "between")]
        for name, facts in equal.facts.items()
    }
    assert told == {"short": [20, 4.0, 0], "long": [25, 4.25, 20], "late": [60, None, None], "none": [None] * 3}
    assert equal.facts["long"]["equal_operations_valid_token_ppl"] == pytest.approx(math.exp(4.25))
    assert equal.facts["long"]["equal_operations_valid_bits_per_byte"] is None, (
        "nothing says how many bytes a token has"
    )
    runs["long"][0]["bits_per_byte"] = 3.0  # half a bit per byte for a nat per token, at each validation
    equal = at_equal("operations", {"short": 3.0, "long": 2.4, "late": 1.0, "none": 1.0}, runs)
    assert equal.facts["long"]["equal_operations_valid_bits_per_byte"] == pytest.approx(4.25 / 2)
    assert at_equal("tokens", {"none": 1.0}, {"none": []}) is None


def of(name, size, *ppls, kind="dense", key="test_token_ppl"):
    return Group(name, [{"run": f"{name}-{n}", "kind": kind, "total": size, key: ppl} for n, ppl in enumerate(ppls)])


def test_dense_equivalents_by_hand():
    """N is proportional to L^-a between two sizes; the range is from worst against best to best against worst."""
    dense = [of("s", 10_000, 100.0, 96.0), of("m", 20_000, 60.0), of("l", 40_000, 40.0)]
    left_out = [of("worse", 80_000, 41.0), of("twin", 20_000, 70.0), of("part", 15_000, 50.0, None)]
    memory = of("memory", 1, 82.0, 78.0, kind="product-key")
    (found,) = dense_equivalents([*dense, *left_out, memory])["memory"].values()

    def size(small, loss):
        return 10_000 * 2 ** (math.log(small / loss) / math.log(small / math.log(60)))

    mean = (math.log(82) + math.log(78)) / 2
    assert found.parameters == pytest.approx(size((math.log(100) + math.log(96)) / 2, mean))
    assert found.low == pytest.approx(size(math.log(96), math.log(82)))
    assert found.high == pytest.approx(size(math.log(100), math.log(78)))
    assert (found.smallest, found.largest) == (10_000, 40_000)
    for by, key in (("valid", "valid_token_ppl"), ("equal_tokens", "equal_tokens_valid_token_ppl")):
        groups = [of(str(n), n, ppl, key=key) for n, ppl in ((1, 9.0), (2, 8.0), (3, 7.0))]
        other = dense_equivalents([*groups, of("memory", 1, 8.0, kind="peer", key=key)], ["tokens"])
        assert other == {"memory": {by: (pytest.approx(2), None, None, 1, 3)}}
