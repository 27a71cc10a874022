"""Documents that two splits share are found as comparing their texts finds them, in memory that train does not fill."""

import random
import tracemalloc

import numpy as np
import pytest

from pkmlm.data import corpus
from pkmlm.data.corpus import LEAST, Overlap, overlaps
from pkmlm.data.index import HASHED, Index, Shard, Split
from pkmlm.data.shards import Encoding, write_corpus
from pkmlm.data.sources import find_sources
from pkmlm.data.tokenizer import Tokenizer
from pkmlm.errors import UserError

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


@pytest.mark.parametrize("run", [31, 97, 997])
def test_shared_documents_are_those_whose_texts_are_the_same(tmp_path, tokenizer, monkeypatch, run):
    """Documents of all lengths, over the ends of reads, of groups and of shards."""
    monkeypatch.setattr(corpus, "RUN", run)
    monkeypatch.setattr(corpus, "GROUP", 50)
    draw = random.Random(run)
    pool = [drawn_text(draw, draw.choice([3, 20, 40, 80, 500, 5000])) for _ in range(200)]
    pool.append(drawn_text(draw, 400_000))
    texts = {
        split: [varied(draw, draw.choice(pool)) for _ in range(count)]
        for split, count in (("train", 250), ("valid", 60), ("test", 70))
    }
    texts["train"][100], texts["test"][3] = pool[-1], f"{pool[-1]}\n"
    for split, documents in texts.items():
        (tmp_path / f"{split}.txt").write_text(SEPARATOR.join(documents), newline="")
    sources = {split: find_sources([f"{tmp_path}/{split}.txt"]) for split in texts}
    index = write_corpus(tmp_path / "out", sources, Encoding(tokenizer, SEPARATOR, shard_bytes=HASHED))
    assert len(index.splits["train"].shards) > 1
    expected = []
    for earlier, later in (("train", "valid"), ("train", "test"), ("valid", "test")):
        seen = set(map(bare, texts[earlier]))
        counted = [bare(text) for text in texts[later] if len(tokenizer.encode(bare(text))) >= LEAST]
        expected.append(Overlap(earlier, later, sum(text in seen for text in counted), len(counted)))
    assert overlaps(tmp_path / "out", index, tokenizer) == expected
    assert all(0 < each.shared < each.documents for each in expected)


def written(folder, splits):
    """The files that are looked at of a corpus, and its index: splits of documents, as rows of ids."""
    folder.mkdir()
    about = {}
    for split, ids in splits.items():
        ids.astype("<u2").tofile(folder / f"{split}-00000.bin")
        np.arange(0, ids.size + 1, ids.shape[1], dtype="<i8").tofile(folder / f"{split}.documents")
        shard = Shard(f"{split}-00000.bin", ids.size, 2 * ids.size)
        about[split] = Split(ids.size, len(ids), 0, 0, 0, (shard,), "", ())
    return Index("uint16", 290, 1, "", None, about)


def test_memory_does_not_grow_with_train(tmp_path, tokenizer, monkeypatch):
    """Every document of train is as long as those of test, and so is read and hashed."""
    monkeypatch.setattr(corpus, "RUN", 1 << 12)
    monkeypatch.setattr(corpus, "GROUP", 1 << 12)
    draw, peaks = np.random.default_rng(0), []
    for number, documents in enumerate((5_000, 50_000)):
        ids = draw.integers(3, 290, (documents, 30))
        ids[:, -1] = 1
        index = written(tmp_path / str(number), {"train": ids, "test": ids[-500:]})
        tracemalloc.start()
        assert overlaps(tmp_path / str(number), index, tokenizer) == [Overlap("train", "test", 500, 500)]
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 200_000, peaks


def test_a_file_that_is_cut_short_meanwhile_is_named(tmp_path, tokenizer):
    index = written(tmp_path / "a", {"train": np.full((9, 30), 5), "test": np.full((2, 30), 5)})
    (tmp_path / "a/train-00000.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"train-00000\.bin is damaged: it ends before byte 0"):
        overlaps(tmp_path / "a", index, tokenizer)


def test_without_other_splits_nothing_is_shared(tmp_path, tokenizer):
    assert overlaps(tmp_path / "a", written(tmp_path / "a", {"train": np.full((9, 30), 5)}), tokenizer) == []
