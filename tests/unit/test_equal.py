"""Runs at equal amounts, and dense models that would do as well: by hand, without runs."""

import math

import pytest

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
