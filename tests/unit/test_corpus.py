"""A corpus gives back exactly what was written; every damage to its files is found and named."""

import hashlib
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pkmlm.data import shards
from pkmlm.data.corpus import Corpus, Index, open_tokenizer, read_index
from pkmlm.data.shards import Encoding, TokenStream, write_corpus, write_tokens
from pkmlm.data.sources import find_sources
from pkmlm.data.text import Tally
from pkmlm.data.tokenizer import Tokenizer
from pkmlm.errors import UserError
from pkmlm.files import json_text
from tests import PATIENCE
from tests.conftest import pkmlm

SEPARATOR = "\n\n\n"
SHARD = 256 << 10  # bytes of a full shard of `made`


def text_documents():
    """Some 700 kB in documents of very different lengths."""
    draw = random.Random(1)
    lengths = [1, 5, 300_000, 40, *(draw.randrange(1, 2000) for _ in range(300)), 90_000]
    texts = ["".join(draw.choice("abcdefgh  \n") for _ in range(length)) for length in lengths]
    return [text.replace("\n\n", "ab").strip("\n") or "a" for text in texts]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.learn(["abc defgh\n" * 20, "hgf cba bad cafe " * 20], 290)


@pytest.fixture(scope="module")
def made(tmp_path_factory, tokenizer):
    """A corpus in shards of 256 KiB, its documents, and its tokens as one array."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = text_documents()
    (folder / "train.txt").write_text(SEPARATOR.join(texts), newline="")
    (folder / "valid.txt").write_text("abc\u2581d")
    sources = {split: find_sources([f"{folder}/{split}.txt"]) for split in ("train", "valid")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "SHARD_BYTES", SHARD)
        write_corpus(folder / "tokens", sources, Encoding(tokenizer, SEPARATOR))
    tokens = np.concatenate([[*tokenizer.encode(text), tokenizer.eos] for text in texts])
    return folder / "tokens", texts, tokens


@pytest.fixture
def copy(made, tmp_path):
    return Path(shutil.copytree(made[0], tmp_path / "copy"))


def test_what_was_written_is_read(made, tokenizer):
    folder, texts, tokens = made
    corpus = Corpus(folder, "train")
    corpus.verify()
    assert len(list(folder.glob("train-*.bin"))) > 1
    assert (corpus.tokens, corpus.documents) == (len(tokens), len(texts))
    assert corpus.bytes == sum(map(len, texts))
    assert (corpus.eos, corpus.vocab_size, corpus.splits) == (1, 290, ("train", "valid"))
    assert corpus.tokenizer_sha256 == tokenizer.sha256 == open_tokenizer(folder).sha256
    assert np.array_equal(corpus.read(0, corpus.tokens), tokens)
    assert [tokenizer.decode(corpus.document(i)) for i in range(corpus.documents)] == texts
    assert tokenizer.decode(Corpus(folder, "valid").document(0)) == "abc\u2581d"
    assert corpus.document(0).tolist() == tokenizer.encode(texts[0])


def test_reads_go_over_the_ends_of_shards(made):
    folder, _, tokens = made
    corpus = Corpus(folder, "train")
    for place in (0, SHARD // 2, SHARD, len(tokens)):
        for start, stop in ((place - 3, place + 3), (place, place), (place - 1, place), (place, place + SHARD)):
            start, stop = max(0, start), min(len(tokens), stop)
            ids = corpus.read(start, stop)
            assert ids.dtype == np.int64
            assert np.array_equal(ids, tokens[start:stop])
    ids[:] = 7  # the caller's own


def test_reads_beyond_the_corpus_are_errors(made):
    corpus = Corpus(made[0], "train")
    for start, stop in ((-1, 3), (3, 2), (0, 10**9)):
        with pytest.raises(IndexError):
            corpus.read(start, stop)
    for i in (-1, corpus.documents):
        with pytest.raises(IndexError):
            corpus.document(i)


def test_the_index_says_what_is_there(made):
    folder, _, tokens = made
    index = json.loads((folder / "index.json").read_bytes())
    train = index["splits"]["train"]
    assert (index["format"], index["dtype"], index["separator"]) == ("pkmlm-tokens-2", "uint16", SEPARATOR)
    assert sum(shard["tokens"] for shard in train["shards"]) == train["tokens"] == len(tokens)
    assert {shard["tokens"] for shard in train["shards"][:-1]} == {SHARD // 2}
    for name, sha256 in [("train.documents", train["documents_sha256"])] + [
        (shard["name"], shard["sha256"]) for shard in train["shards"]
    ]:
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == sha256
    stored = (folder.parent / "train.txt").read_bytes()
    origin = {"name": "train.txt", "bytes": len(stored), "sha256": hashlib.sha256(stored).hexdigest()}
    assert train["sources"] == [origin]
    assert str(folder.parent) not in json.dumps(index)
    raw = np.fromfile(folder / "train-00000.bin", "<u2")
    assert np.array_equal(raw, tokens[: len(raw)])
    starts = np.fromfile(folder / "train.documents", "<i8")
    assert np.array_equal(starts[1:], np.flatnonzero(tokens == 1) + 1)
    assert starts[0] == 0


def test_ids_beyond_16_bits_are_kept(tmp_path):
    import sentencepiece

    with open(tmp_path / "wide.model", "wb") as model:
        symbols = ["\n", *(f"zq{i:05d}" for i in range(66_000))]
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["abc def gh " * 50]),
            model_writer=model,
            vocab_size=66_400,
            hard_vocab_limit=False,
            model_type="unigram",
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            byte_fallback=True,
            user_defined_symbols=symbols,
            minloglevel=3,
        )
    wide = Tokenizer.load(tmp_path / "wide.model")
    assert wide.size > 1 << 16
    (tmp_path / "a.txt").write_text("abc zq00001 zq65999 zq65998")
    write_corpus(tmp_path / "out", {"train": find_sources([f"{tmp_path}/a.txt"])}, Encoding(wide))
    corpus = Corpus(tmp_path / "out", "train")
    assert read_index(tmp_path / "out").dtype == "uint32"
    assert corpus.read(0, corpus.tokens).max() > 1 << 16
    assert wide.decode(corpus.document(0)) == "abc zq00001 zq65999 zq65998"


def test_a_character_that_a_foreign_tokenizer_lacks_is_named(tmp_path, tokenizer):
    """Its unknown token stands for nothing that could be decoded."""
    (tmp_path / "a.txt").write_text("abc\u0416")
    lacking = Tokenizer(tokenizer.model_bytes)
    lacking.unknown = lacking.encode("\u0416")[0]
    with pytest.raises(UserError, match=r"cannot spell '\\u0416'"):
        write_corpus(tmp_path / "out", {"train": find_sources([f"{tmp_path}/a.txt"])}, Encoding(lacking))
    assert not (tmp_path / "out").exists()


def test_full_shards_end_at_any_token(tmp_path, monkeypatch):
    """Tokens that fill their shards exactly, in arrays of odd sizes, shorter and longer than a shard."""
    tokens = np.arange(3000, dtype="<u2") % 9
    monkeypatch.setattr(shards, "SHARD_BYTES", 2000)
    for pieces in (7, 1):
        stream = TokenStream(np.array_split(tokens, pieces), Tally(documents=int((tokens == 1).sum())), [], None)
        about = write_tokens(tmp_path, "train", stream, 1)
        assert [shard.tokens for shard in about.shards] == [1000] * 3
        assert np.array_equal(np.concatenate([np.fromfile(path, "<u2") for path in shard_files(tmp_path)]), tokens)


def shard_files(folder):
    return sorted(folder.glob("train-*.bin"))


def test_the_sha256_of_a_split_is_that_of_its_tokens(made, tokenizer, tmp_path):
    """Whatever its files are called, and whatever the other splits are."""
    folder, texts, _ = made
    again, other = tmp_path / "again.txt", tmp_path / "other.txt"
    again.write_text(SEPARATOR.join(texts), newline="")
    other.write_text(SEPARATOR.join([*texts[:-1], f"{texts[-1]}a"]), newline="")
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "SHARD_BYTES", SHARD)
        for path in (again, other):
            write_corpus(tmp_path / path.stem, {"train": find_sources([str(path)])}, Encoding(tokenizer, SEPARATOR))
            found.append(Corpus(tmp_path / path.stem, "train").sha256)
    assert Corpus(folder, "train").sha256 == found[0] != found[1]
    assert Corpus(folder, "valid").hashes.keys() == {"tokenizer", "train", "valid"}


# Damage


def read_everything(folder):
    open_tokenizer(folder)
    for split in ("train", "valid"):
        Corpus(folder, split).verify()


def test_every_flipped_bit_is_found(copy):
    for path in sorted(copy.iterdir()):
        whole = path.read_bytes()
        for place in sorted({0, len(whole) // 2, len(whole) - 1}):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
            with pytest.raises(UserError, match=path.name):
                read_everything(copy)
        path.write_bytes(whole)
    read_everything(copy)


def test_every_missing_shortened_or_longer_file_is_found_at_once(copy):
    for path in sorted(copy.iterdir()):
        split = "valid" if path.name.startswith("valid") else "train"
        whole = path.read_bytes()
        for data in (None, b"", whole[:-2], whole[: len(whole) // 2], whole + b"\n\0"):
            path.unlink()
            if data is not None:
                path.write_bytes(data)
            with pytest.raises(UserError, match=path.name):
                (Corpus(copy, split), open_tokenizer(copy))
            path.write_bytes(whole)
    read_everything(copy)


def test_a_file_is_checked_when_it_is_first_read(copy):
    path = copy / "train-00001.bin"
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)
    corpus = Corpus(copy, "train")
    corpus.read(0, SHARD // 2)
    for start, stop in ((SHARD // 2 - 1, SHARD // 2 + 1), (SHARD // 2 + 99, SHARD // 2 + 100)):
        with pytest.raises(UserError, match=path.name):
            corpus.read(start, stop)


def test_tokens_that_the_disk_has_changed_are_noticed_before_tokenizing_ends(tmp_path, tokenizer, monkeypatch):
    (tmp_path / "m.model").write_bytes(tokenizer.model_bytes)
    (tmp_path / "a.txt").write_text("abc defgh")

    def write(index, folder):
        (folder / "train-00000.bin").write_bytes(bytes((folder / "train-00000.bin").stat().st_size))
        return whole(index, folder)

    whole = Index.write
    monkeypatch.setattr(Index, "write", write)
    words = ("tokenize", tmp_path / "a.txt", "--tokenizer", tmp_path / "m.model", "-o", tmp_path / "out")
    assert "train-00000.bin" in pkmlm(*words, code=2).stderr


def test_a_folder_without_tokens_or_without_the_split_is_named(made, tmp_path):
    with pytest.raises(UserError, match="holds no tokens"):
        Corpus(tmp_path, "train")
    with pytest.raises(UserError, match=r"no split 'test' \(found train, valid\)"):
        Corpus(made[0], "test")


def rewritten(folder, change):
    """Change the index and make its own sha256 right again."""
    content = json.loads((folder / "index.json").read_bytes())
    change(content)
    content["sha256"] = hashlib.sha256(json.dumps(content | {"sha256": ""}, sort_keys=True).encode()).hexdigest()
    (folder / "index.json").write_text(json_text(content))


def test_an_index_in_which_a_count_is_another_is_refused(copy):
    rewritten(copy, lambda content: None)
    Corpus(copy, "train")
    text = (copy / "index.json").read_text()
    words = json.loads(text)["splits"]["train"]["words"]
    (copy / "index.json").write_text(text.replace(f'"words": {words}', f'"words": {words + 1}'))
    with pytest.raises(UserError, match=r"index\.json"):
        Corpus(copy, "train")


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("eos", True, "eos"),
        ("dtype", "float64", "dtype"),
        ("separator", 3, "separator"),
        ("more", 3, "more"),
        ("splits", {"train": {}}, r"splits\.train"),
        ("format", "pkmlm-tokens-1", "format"),
    ],
)
def test_an_index_of_another_shape_is_refused(copy, key, value, named):
    rewritten(copy, lambda content: content.update({key: value}))
    with pytest.raises(UserError, match=named):
        Corpus(copy, "train")


# Size


def test_memory_does_not_grow_with_the_text(tmp_path):
    """One line of 12 MB takes little more than one of 1 MB."""
    (tmp_path / "m.model").write_bytes(Tokenizer.learn(["some words in a line " * 99], 272, "unigram").model_bytes)
    program = (
        "import resource, sys; from pathlib import Path; from pkmlm.data.shards import Encoding, write_corpus\n"
        "from pkmlm.data.sources import find_sources; from pkmlm.data.tokenizer import Tokenizer\n"
        "sources = {'train': find_sources([sys.argv[1]])}\n"
        "encoding = Encoding(Tokenizer.load(Path(sys.argv[2])), jobs=2)\n"
        "write_corpus(Path(sys.argv[1] + '.out'), sources, encoding)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    peaks = []
    for size in (1, 12):
        path = tmp_path / f"{size}.txt"
        path.write_bytes(b"some words in a line " * (size * 50_000))
        done = [sys.executable, "-c", program, str(path), str(tmp_path / "m.model")]
        peaks.append(int(subprocess.run(done, capture_output=True, text=True, check=True, timeout=PATIENCE).stdout))
    assert (peaks[1] - peaks[0]) * (1 if sys.platform == "darwin" else 1024) < 30 << 20
