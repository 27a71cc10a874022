"""Documents that two splits share are found as comparing their texts finds them, in memory that train does not fill."""

import hashlib
import random
import tracemalloc

import numpy as np
import pytest

from pkmlm.data import overlap, shards
from pkmlm.data.corpus import Corpus, Index
from pkmlm.data.overlap import LEAST, Overlap, overlaps
from pkmlm.data.shards import Encoding, TokenStream, write_corpus, write_tokens
from pkmlm.data.sources import find_sources
from pkmlm.data.text import Tally
from pkmlm.data.tokenizer import Tokenizer

SEPARATOR = "|"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.learn(["abc defgh\n" * 20, "hgf cba bad cafe " * 20], 290)


def drawn_text(draw, length):
    return "".join(draw.choice("abcdefgh  \n") for _ in range(length))


def varied(draw, text):
    """A document that is the same, with a newline at an end or without, or one that is hardly another."""
    return draw.choice([text, text, f"{text}\n", f"\n{text}", f" {text}", f"{text}\n\n", f"{text[:-1]}x", text[:-1]])


def bare(text):
    return text.removeprefix("\n").removesuffix("\n")


def test_shared_documents_are_those_whose_texts_are_the_same(tmp_path, tokenizer, monkeypatch):
    """Documents of all lengths, over the ends of reads, of groups and of shards."""
    monkeypatch.setattr(overlap, "RUN", 97)
    monkeypatch.setattr(overlap, "GROUP", 50)
    draw = random.Random(97)
    pool = [drawn_text(draw, draw.choice([3, 20, 40, 80, 500, 5000])) for _ in range(200)]
    pool.append(drawn_text(draw, 200_000))
    texts = {
        split: [varied(draw, draw.choice(pool)) for _ in range(count)]
        for split, count in (("train", 250), ("valid", 60), ("test", 70))
    }
    texts["train"][100], texts["test"][3] = pool[-1], f"{pool[-1]}\n"
    for split, documents in texts.items():
        (tmp_path / f"{split}.txt").write_text(SEPARATOR.join(documents), newline="")
    sources = {split: find_sources([f"{tmp_path}/{split}.txt"]) for split in texts}
    monkeypatch.setattr(shards, "SHARD_BYTES", 256 << 10)
    index = write_corpus(tmp_path / "out", sources, Encoding(tokenizer, SEPARATOR))
    assert len(index.splits["train"].shards) > 1
    expected = []
    for earlier, later in (("train", "valid"), ("train", "test"), ("valid", "test")):
        seen = set(map(bare, texts[earlier]))
        counted = [bare(text) for text in texts[later] if len(tokenizer.encode(bare(text))) >= LEAST]
        expected.append(Overlap(earlier, later, sum(text in seen for text in counted), len(counted)))
    assert overlaps(opened(tmp_path / "out", texts), tokenizer) == expected
    assert all(0 < each.shared < each.documents for each in expected)


def opened(folder, splits):
    return {split: Corpus(folder, split) for split in splits}


def written(folder, splits):
    """A corpus of splits of documents, as rows of ids."""
    folder.mkdir()
    about = {}
    for split, ids in splits.items():
        ids[:, -1] = 1
        stream = TokenStream([ids.astype("<u2").ravel()], Tally(documents=len(ids)), [], None)
        about[split] = write_tokens(folder, split, stream, 1)
    (folder / "tokenizer.model").touch()
    Index("uint16", 290, 1, 1, hashlib.sha256().hexdigest(), None, about, {}).write(folder)
    return opened(folder, splits)


def test_memory_does_not_grow_with_train(tmp_path, tokenizer, monkeypatch):
    """Every document of train is as long as those of test, and so is read and hashed."""
    monkeypatch.setattr(overlap, "RUN", 1 << 12)
    monkeypatch.setattr(overlap, "GROUP", 500)
    draw, peaks = np.random.default_rng(0), []
    for number, documents in enumerate((1_000, 4_000)):
        ids = draw.integers(3, 290, (documents, 30))
        corpora = written(tmp_path / str(number), {"train": ids, "test": ids[-500:]})
        for corpus in corpora.values():
            corpus.verify()  # as `tokenize` does before: reading a file to hash it takes up to a MiB
        tracemalloc.start()
        assert overlaps(corpora, tokenizer) == [Overlap("train", "test", 500, 500)]
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 100_000, peaks


def test_without_other_splits_nothing_is_shared(tmp_path, tokenizer):
    assert overlaps(written(tmp_path / "a", {"train": np.full((9, 30), 5)}), tokenizer) == []
