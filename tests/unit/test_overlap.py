"""Documents that two splits share are found as comparing their texts finds them."""

import random

import pytest

from pkmlm.data import overlap, shards
from pkmlm.data.corpus import Corpus
from pkmlm.data.overlap import LEAST, Overlap, overlaps
from pkmlm.data.shards import Encoding, write_corpus
from pkmlm.data.sources import find_sources
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
    """Documents of all lengths, over the ends of reads and of shards."""
    monkeypatch.setattr(overlap, "BLOCK", 97)
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
    assert overlaps(opened(tmp_path / "out", ["train"]), tokenizer) == []


def opened(folder, splits):
    return {split: Corpus(folder, split) for split in splits}
