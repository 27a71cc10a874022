"""What `pkmlm cost --world` says is what ranks send."""

import pytest

from tests.distributed.jobs import MODELS

CASES = [
    *[("layer", *case, {}) for case in [(4, 1, 2), (4, 2, 1), (4, 4, 2), (2, 2, 4)]],
    *[("batch", *case, {}) for case in [(4, 1, 1), (4, 2, 2), (2, 2, 2)]],
    *[
        (kind, *case, {})
        for kind in ("pool", "peer", "peer pool", "mixed")
        for case in [(4, 1, 2), (4, 2, 2), (4, 4, 1)]
    ],
    *[(kind, *case, {}) for kind in ("hash", "ngram") for case in [(4, 1, 2), (4, 4, 1), (2, 1, 4)]],
    *[(kind, 4, 2, 2, {"recompute": True}) for kind in MODELS if kind != "peer pool"],  # two forwards
    *[(kind, 4, memory, 2, {"only": "values"}) for kind in ("batch", "pool", "peer", "mixed") for memory in (1, 2)],
]


def test_bytes_sent_are_those_that_were_counted(ranks):
    for rank in ranks.run(4, "beside_the_cost", cases=CASES):
        for case, line in zip(CASES, rank.stdout.splitlines(), strict=True):
            counted, said = map(float, line.split())
            assert said == pytest.approx(counted, abs=200), case  # the loss, norms and flags are left out
            assert said > 5000
