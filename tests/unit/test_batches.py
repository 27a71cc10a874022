"""Batches: every token scored once an epoch, in an order that follows from the seed alone."""

from pathlib import Path

import numpy as np
import pytest
import torch

from pkmlm.data.batches import IGNORED, Batches, permute
from pkmlm.data.corpus import Corpus
from tests.conftest import pkmlm


@pytest.fixture
def corpus(tokens: Path) -> Corpus:
    return Corpus(tokens, "valid")


def test_a_permutation_takes_every_place_once():
    for size in (1, 2, 3, 5, 64, 65, 1000, 4097):
        for seed in range(3):
            assert sorted(permute(np.arange(size), size, seed)) == list(range(size))


def test_a_permutation_of_many_is_computed_not_stored():
    size = 10**13
    some = permute(np.arange(size - 1000, size), size, 1)
    assert len(set(some)) == 1000
    assert 0 <= some.min() < some.max() < size
    assert abs(some.mean() / size - 0.5) < 0.05


def test_seeds_and_epochs_give_other_orders():
    orders = [tuple(permute(np.arange(50), 50, seed)) for seed in range(20)]
    assert len(set(orders)) == 20


@pytest.mark.parametrize(("context", "sequences"), [(32, 4), (31, 3), (500, 2), (10_000, 1)])
def test_every_token_is_scored_once_an_epoch_after_the_token_before_it(corpus, context, sequences):
    stream = np.concatenate([[corpus.eos], corpus.read(0, corpus.tokens)])
    batches = Batches(corpus, context, sequences, seed=1)
    assert batches.pieces == -(-corpus.tokens // context)
    pairs, step = [], 0
    while len(pairs) < corpus.tokens:
        step += 1
        batch = batches.micro_batch(step, 0, sequences)
        assert batch.tokens_BT.shape == batch.targets_BT.shape == (sequences, context)
        assert batches.scored(step) == int((batch.targets_BT != IGNORED).sum())
        for tokens, targets in zip(batch.tokens_BT.tolist(), batch.targets_BT.tolist(), strict=True):
            pairs += [(a, b) for a, b in zip(tokens, targets, strict=True) if b != IGNORED]
            if len(pairs) == corpus.tokens:
                break
    assert sorted(pairs) == sorted(zip(stream[:-1].tolist(), stream[1:].tolist(), strict=True))


class Places:
    """A corpus whose tokens say where they stand."""

    tokens, eos, documents, has_answers = 99, 0, 1, False

    def read(self, start, stop):
        return np.arange(start, stop)

    def as_input(self, ids):
        return ids


def test_each_epoch_has_an_order_of_its_own_and_batches_run_over_the_border():
    batches = Batches(Places(), 1, 4, seed=1)
    drawn = [batches.micro_batch(step, 0, 4).targets_BT[:, 0] for step in range(1, 100)]
    epochs = np.concatenate(drawn).reshape(4, 99)
    assert all(sorted(epoch) == list(range(99)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_the_end_of_the_last_piece_is_real_text_that_is_not_scored(corpus):
    batches = Batches(corpus, 10_000, 1, seed=1)
    batch = batches.micro_batch(1, 0, 1)
    missing = 10_000 - corpus.tokens
    assert missing > 0
    assert (batch.targets_BT[0, -missing:] == IGNORED).all()
    assert batch.tokens_BT[0, corpus.tokens + 1 :].tolist() == corpus.read(0, missing - 1).tolist()


def test_ranks_and_micro_batches_cut_one_global_batch(corpus):
    batches = Batches(corpus, 16, 8, seed=3)
    whole = batches.micro_batch(5, 0, 8).tokens_BT
    halves = [batches.micro_batch(5, index, 4).tokens_BT for index in range(2)]
    assert torch.equal(torch.cat(halves), whole)
    ranks = [batches.micro_batch(5, index, 2, rank, 2).tokens_BT for index in range(2) for rank in range(2)]
    assert torch.equal(torch.cat(ranks), whole)


def test_another_seed_gives_another_order(corpus):
    first, second = (Batches(corpus, 16, 8, seed).micro_batch(1, 0, 8).tokens_BT for seed in (1, 2))
    assert not torch.equal(first, second)


def test_later_epochs_read_every_document_whole_in_another_order(novels, tokens, tmp_path):
    reused = ("--tokenizer", tokens / "tokenizer.model", "--separator", r"\n\n", "-o", tmp_path / "apart")
    pkmlm("tokenize", novels / "valid.txt", *reused)
    corpus = Corpus(tmp_path / "apart", "train")
    assert corpus.documents > 3
    documents = sorted(corpus.document(number).tolist() for number in range(corpus.documents))
    batches, orders = Batches(corpus, 16, 1, seed=1), []
    for epoch in range(3):
        pieces = {}  # of this epoch, by their places
        for step in range(epoch * batches.pieces + 1, (epoch + 1) * batches.pieces + 1):
            (at,) = batches._numbers(step, 0, 1)
            assert at[0] == epoch
            targets = batches.micro_batch(step, 0, 1).targets_BT[0]
            pieces[at[1]] = targets[targets >= 0].tolist()
        stream = [token for place in sorted(pieces) for token in pieces[place]]
        assert len(stream) == corpus.tokens
        found = " ".join(map(str, stream)).split(f" {corpus.eos}")[:-1]
        read = [[int(token) for token in text.split()] for text in found]
        assert sorted(read) == documents
        orders.append(read)
    assert orders[0] == [corpus.document(number).tolist() for number in range(corpus.documents)]
    assert orders[0] != orders[1] != orders[2] != orders[0]
