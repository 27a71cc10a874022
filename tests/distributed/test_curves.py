"""The same training for any number of ranks, however they divide the tables."""

import numpy as np
import pytest

# Biases of keys, and in front of a batch norm, do nothing: their gradients are rounding, of which Adam makes whole
# steps; the running mean follows.
IDLE = ("attention.qkv.bias", "query.map.2.bias", "query.norm.running_mean")
# kind, ranks, memory, micro_batch: batches of 8 sequences, in one forward or several
CASES = [
    *[("layer", *case) for case in [(1, 1, 8), (1, 1, 4), (2, 1, 4), (4, 2, 1), (4, 4, 2)]],
    *[("batch", *case) for case in [(1, 1, 4), (2, 2, 2), (4, 2, 1)]],
    *[("pool", *case) for case in [(1, 1, 8), (2, 2, 2), (4, 1, 2), (4, 2, 1)]],
    *[("peer", *case) for case in [(1, 1, 8), (2, 2, 2), (4, 1, 2), (4, 2, 1)]],
    *[("peer pool", *case) for case in [(1, 1, 8), (4, 2, 1)]],
    *[("ngram", *case) for case in [(1, 1, 8), (2, 2, 2), (4, 1, 2), (4, 2, 1)]],
    *[("hash", *case) for case in [(1, 1, 8), (2, 2, 2), (4, 1, 2)]],
    *[("mixed", *case) for case in [(1, 1, 4), (2, 2, 2), (4, 2, 1)]],
    *[("modern", *case) for case in [(1, 1, 4), (2, 2, 2)]],
]


@pytest.fixture(scope="module")
def found(ranks, tmp_path_factory):
    """Losses, norms, order of the sequences and last weights of each case."""
    folder = tmp_path_factory.mktemp("curves")
    ranks.run(4, "curves", limit=300, folder=folder, cases=CASES, steps=3)
    return {case: np.load(folder / "{}-{}-{}-{}.npz".format(*case)) for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_and_weights_are_those_of_one_process(found, case):
    one = found[next(other for other in CASES if other[0] == case[0])]
    many = found[case]
    assert (one["norms"] > 0).all()
    np.testing.assert_allclose(many["losses"], one["losses"], rtol=1e-5)
    np.testing.assert_allclose(many["norms"], one["norms"], rtol=1e-3)
    np.testing.assert_array_equal(many["order"], one["order"])
    assert many.files == one.files
    for name in [name for name in one.files[3:] if not name.endswith(IDLE)]:
        np.testing.assert_allclose(many[name], one[name], atol=2e-4, rtol=0, err_msg=name)
