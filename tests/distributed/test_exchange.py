"""What ranks send each other, and what they make of it."""

import pytest


@pytest.mark.parametrize(("rows", "reads_travel"), [(100, True), (5, False)])
@pytest.mark.parametrize("double", [False, True])
def test_a_divided_table_is_one_table(ranks, rows, reads_travel, double):
    ranks.run(4, "divided_tables", rows=rows, reads_travel=reads_travel, double=double)


def test_batch_norm_sees_the_tokens_of_all_ranks(ranks):
    ranks.run(4, "batch_norm_over_ranks")


def test_recomputation_on_ranks(ranks):
    ranks.run(4, "recomputed")


def test_a_resume_on_four_ranks_has_the_same_bits(ranks):
    """With three or more, the order of a sum decides its last bits."""
    ranks.run(4, "resumed_to_the_bit")


def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks):
    ranks.run(4, "overflow_on_one_rank")


def test_divergence_on_one_rank_ends_all_and_is_told_once(ranks):
    first, second = ranks.run(2, "divergence_on_one_rank", code=3)
    assert first.stdout.startswith("training diverged at step 1: loss 3")
    assert second.stdout == ""


# Reads travel; sums do; one rank has made sums by itself; one has read nothing.
@pytest.mark.parametrize(("rows", "other"), [(100, 9), (5, 9), (1, 9), (100, 0)])
def test_ranks_with_batches_of_other_sizes_have_the_gradient_of_all(ranks, rows, other):
    ranks.run(2, "row_gradients_of_other_sizes", rows=rows, other=other)


def test_row_adam_averages_over_the_ranks(ranks):
    ranks.run(2, "row_adam_of_all_ranks")


@pytest.mark.slow
def test_two_ranks_train_an_attached_memory_as_one(ranks):
    ranks.run(2, "attached_to_a_model")
