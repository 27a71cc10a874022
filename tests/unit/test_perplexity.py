"""Perplexity: windows by hand, and the sum against a slow loop over every token."""

import math
import re
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pkmlm.data.batches import Batches
from pkmlm.data.corpus import Corpus, open_tokenizer
from pkmlm.errors import UserError
from pkmlm.evaluate.documents import Documents, documents_of_split, documents_of_text, open_split
from pkmlm.evaluate.generate import Sampling, sample_token, stream_text
from pkmlm.evaluate.load import load_run
from pkmlm.evaluate.perplexity import score, windows
from pkmlm.model.transformer import build_model
from pkmlm.recipe.schema import Train
from pkmlm.signals import StopRequest
from pkmlm.train.step import TrainState
from pkmlm.train.validation import validator
from tests.conftest import model_2019, pkmlm, recipe_2019


def cut(length: int, context: int, stride: int) -> list[tuple[list[int], list[int]]]:
    ids = np.arange(1, length + 1)
    return [(w.tokens.tolist(), w.targets.tolist()) for w in windows(ids, 0, context, stride)]


def test_windows_by_hand():
    assert cut(3, 4, 4) == [([0, 1, 2], [1, 2, 3])]
    assert cut(4, 4, 4) == [([0, 1, 2, 3], [1, 2, 3, 4])]
    assert cut(6, 4, 4) == [([0, 1, 2, 3], [1, 2, 3, 4]), ([2, 3, 4, 5], [5, 6])]
    assert cut(6, 4, 1) == [([0, 1, 2, 3], [1, 2, 3, 4]), ([1, 2, 3, 4], [5]), ([2, 3, 4, 5], [6])]
    assert cut(0, 4, 4) == []


@pytest.mark.parametrize("stride", [1, 3, 8])
def test_every_token_is_scored_once_after_the_right_context(stride):
    for length in range(1, 40):
        scored = []
        for tokens, targets in cut(length, 8, stride):
            assert len(tokens) <= 8
            assert tokens[len(tokens) - len(targets) :] == [target - 1 for target in targets]
            scored += targets
        assert scored == list(range(1, length + 1))


def model_and_documents() -> tuple[torch.nn.Module, Documents]:
    recipe = recipe_2019(
        model=model_2019(dim=16, layers=2, heads=2, context=8), train=Train(batch_tokens=16, micro_batch=2)
    )
    random = np.random.default_rng(0)
    ids = [random.integers(0, 30, length) for length in (1, 8, 9, 30, 5)]
    return build_model(recipe, 30).eval(), Documents("test", ids, sum(map(len, ids)), 20, 100)


@pytest.mark.parametrize(("stride", "batch"), [(None, 16), (2, 3)])
def test_the_sum_is_that_of_a_slow_loop(stride, batch):
    model, documents = model_and_documents()
    expected = 0.0
    for ids in documents.ids:
        for window in windows(ids, 1, 8, stride or 8):
            logits = model(torch.from_numpy(window.tokens)[None])[0, -len(window.targets) :].double()
            expected -= logits.log_softmax(-1)[range(len(window.targets)), window.targets].sum().item()
    masks = []
    result = score(model, documents, 1, stride=stride, batch=batch, watch=masks.append)
    assert result.nll == pytest.approx(expected, rel=1e-6)
    assert result.tokens == documents.tokens == sum(int(mask.sum()) for mask in masks)
    assert result.token_ppl == pytest.approx(math.exp(expected / 53), rel=1e-6)
    assert result.word_ppl == pytest.approx(math.exp(expected / 20), rel=1e-5)
    assert result.byte_ppl == pytest.approx(math.exp(expected / 100), rel=1e-6)
    assert result.bits_per_byte == pytest.approx(expected / 100 / math.log(2), rel=1e-6)


def test_scores_that_are_not_finite_are_an_error():
    model, documents = model_and_documents()
    model.norm.weight.data[3] = float("nan")
    with pytest.raises(UserError, match="not finite"):
        score(model, documents, 1)
    with pytest.raises(UserError, match="not finite"):
        sample_token(torch.tensor([0.0, float("inf")]), Sampling(), torch.Generator())


def test_a_stride_beyond_the_context_is_refused():
    model, documents = model_and_documents()
    with pytest.raises(UserError, match="--stride 9"):
        score(model, documents, 1, stride=9)


def test_splits_and_texts_count_as_the_harness_does(tokens: Path, novels: Path):
    tokenizer = open_tokenizer(tokens)
    text = (novels / "test.txt").read_bytes().decode()
    of_split = documents_of_split(open_split(str(tokens), "test", tokenizer), tokenizer)
    of_text = documents_of_text(str(novels / "test.txt"), tokenizer)
    for documents in (of_split, of_text):
        assert documents.words == len(re.split(r"\s+", text))
        assert documents.bytes == len(text.encode())
    assert [ids.tolist() for ids in of_split.ids] == [ids.tolist() for ids in of_text.ids]


def peak_of(work):
    """The most bytes that Python and numpy hold at a time."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_long_document_is_never_held_whole(tokens, novels, tmp_path):
    """Neither its text nor its tokens, which take more as int64."""
    tokenizer, path = open_tokenizer(tokens), tmp_path / "long.txt"
    text = ((novels / "train.txt").read_text() * 50)[:6_000_000]
    path.write_text(text, newline="")
    pkmlm("tokenize", path, "-o", tmp_path / "split", "--tokenizer", tokens / "tokenizer.model", "-q")
    corpus = open_split(tmp_path / "split", "train", tokenizer)

    def scored(read):
        documents = read()
        count = sum(len(each.targets) for ids in documents.ids for each in windows(ids, tokenizer.eos, 32, 32))
        assert documents.tokens == count == corpus.tokens - 1
        assert documents.bytes == path.stat().st_size

    peaks = [
        peak_of(lambda: scored(lambda: documents_of_text(str(path), tokenizer))),
        peak_of(lambda: scored(lambda: documents_of_split(corpus, tokenizer))),
    ]
    assert 8 * corpus.tokens > 16e6
    assert peaks[0] < 12e6, "a few batches of a million characters"
    assert peaks[1] < 4e6, "and blocks of which a sha256 is taken"


def test_the_first_tokens_of_a_split(tokens: Path):
    tokenizer, corpus = open_tokenizer(tokens), Corpus(tokens, "test")
    documents = documents_of_split(corpus, tokenizer, 100)
    assert np.concatenate(list(documents.ids)).tolist() == corpus.document(0)[:100].tolist()
    assert documents.bytes == len(tokenizer.decode(corpus.document(0)[:100].tolist()).encode())


def test_documents_are_cut_between_characters(tokens, tmp_path):
    """Half a character would be counted as three bytes for each of its own."""
    text = tmp_path / "text.txt"
    text.write_text("a\u4e8c\u4e09\U0001f600b")  # of 1, 3, 3, 4 and 1 bytes, each a token
    pkmlm("tokenize", text, "-o", tmp_path / "cjk", "--tokenizer", tokens / "tokenizer.model", "-q")
    corpus, tokenizer = Corpus(tmp_path / "cjk", "train"), open_tokenizer(tmp_path / "cjk")
    begins = len(tokenizer.encode("a"))
    found = [documents_of_split(corpus, tokenizer, begins + more) for more in range(12)]
    assert [each.bytes for each in found] == [1, 1, 1, 4, 4, 4, 7, 7, 7, 7, 11, 12]
    assert [each.tokens - begins + 1 for each in found] == [each.bytes for each in found]


@pytest.mark.parametrize("most", [None, 100])
def test_all_validations_of_a_run_open_its_split_once(trained, monkeypatch, most):
    run, opened = load_run(trained("product-key"), "latest"), []
    recipe = replace(run.recipe, eval=replace(run.recipe.eval, tokens=most))
    state = TrainState(recipe, run.model, Batches.of(Corpus(recipe.data.dir, "train"), recipe), "fp32")
    whole = Corpus.__init__
    monkeypatch.setattr(Corpus, "__init__", lambda *where: opened.append(where) or whole(*where))
    validate = validator(state, run.tokenizer, print)
    assert validate(StopRequest()) == validate(StopRequest())
    assert len(opened) == 1


def test_sampling_keeps_to_top_k_and_top_p():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    random = torch.Generator().manual_seed(0)
    for sampling, allowed in [
        (Sampling(), {0, 1, 2, 3}),
        (Sampling(top_k=2), {0, 1}),
        (Sampling(top_p=0.65), {0, 1}),
        (Sampling(top_p=0.75), {0, 1, 2}),
        (Sampling(temperature=0.01), {0}),
        (Sampling(temperature=0), {0}),
        (Sampling(temperature=1e-300), {0}),  # 0 in fp32
        (Sampling(top_p=1e-300), {0}),
    ]:
        assert {sample_token(logits.clone(), sampling, random) for _ in range(200)} == allowed
    assert len({sample_token(torch.zeros(4), Sampling(top_k=2), random) for _ in range(200)}) == 2  # all equally likely


def test_streamed_text_is_the_decoded_text(tokens: Path):
    tokenizer = open_tokenizer(tokens)
    text = "caf\u00e9 \U0001f600 and\n\n  \u4e2d\u6587 \u2581 end"
    prompt, ids = tokenizer.encode("It was"), tokenizer.encode(text)
    pieces = list(stream_text(tokenizer, prompt, [*ids, tokenizer.eos, 5]))
    assert "".join(pieces) == text
    assert len(pieces) > 10
    assert "\ufffd" not in "".join(pieces)
