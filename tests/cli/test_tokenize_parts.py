"""`pkmlm tokenize --shard` and `--join`: several machines write what one writes."""

import gzip
import json
import os
import random
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pkmlm.data import shards
from pkmlm.data.corpus import HASHED, Corpus
from pkmlm.data.join_parts import join_parts
from pkmlm.data.shards import Encoding, assign_parts, write_corpus
from pkmlm.data.sources import find_sources
from pkmlm.data.tokenizer import Tokenizer
from tests.cli.test_tokenize import WORDS, assert_same_folders
from tests.conftest import pkmlm

SEPARATOR = ("--separator", r"\n\n\n")


def prose(words, seed):
    draw = random.Random(seed)
    return "".join(draw.choice(WORDS) + draw.choice(" " * 9 + "\n") for _ in range(words)).strip()


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Files of all kinds, and a tokenizer."""
    folder = tmp_path_factory.mktemp("texts")
    draw = random.Random(0)
    long = [prose(draw.randrange(1, 500), seed) for seed in range(40)]
    (folder / "a.txt").write_bytes("\n\n\n".join([*long[:20], "", *long[20:], "", ""]).encode())  # some are empty
    rows = [json.dumps({"text": prose(draw.randrange(1, 90), seed)}) for seed in range(99)]
    (folder / "b.jsonl").write_text("\r\n".join(rows))
    (folder / "c.txt.gz").write_bytes(gzip.compress("\n\n\n".join(long[:9]).encode(), mtime=0))
    pq.write_table(pa.table({"text": long[:5]}), folder / "d.parquet")
    (folder / "e.jsonl").write_text("".join(f"{row}\n" for row in rows[:30]))
    (folder / "v.txt").write_text("one document is fewer than three")
    (folder / "m.model").write_bytes(Tokenizer.learn(long, 330).model_bytes)
    return folder


# Which part takes what


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 99), min_size=1, max_size=9), st.integers(1, 9))
def test_parts_take_runs_of_whole_files_of_about_their_share(tmp_path_factory, sizes, parts):
    folder = tmp_path_factory.mktemp("sizes")
    for number, size in enumerate(sizes):
        (folder / f"{number}.txt").write_bytes(b"x" * size)
    files = assign_parts(find_sources([f"{folder}/*.txt"]), parts)
    assert [(file.name, file.bytes) for file in files] == [(f"{n}.txt", size) for n, size in enumerate(sizes)]
    numbers = [file.part for file in files]
    assert numbers == sorted(numbers)
    assert set(numbers) <= set(range(1, parts + 1))
    for part in range(1, parts + 1):
        assert sum(file.bytes for file in files if file.part == part) <= sum(sizes) / parts + max(sizes) + 1


def test_fewer_files_than_parts_are_refused(texts, tmp_path):
    given = [texts / "a.txt", texts / "b.jsonl", "--tokenizer", texts / "m.model", *SEPARATOR]
    error = pkmlm("tokenize", *given, "--shard", "1/3", "-o", tmp_path / "out", code=2).stderr
    assert "--shard 1/3" in error
    assert "2 files" in error
    assert not list(tmp_path.iterdir())


# What parts make


@pytest.mark.parametrize("parts", [1, 5])
def test_parts_make_what_one_machine_makes(texts, tmp_path, parts):
    """Of five files of all kinds; valid has fewer than parts, and so is empty in some."""
    names = ["a.txt", "b.jsonl", "c.txt.gz", "d.parquet", "e.jsonl"]
    given = [*(texts / name for name in names), "--valid", texts / "v.txt", "--test", "20%", *SEPARATOR]
    given += ["--tokenizer", texts / "m.model"]
    pkmlm("tokenize", *given, "-o", tmp_path / "one")
    places = [tmp_path / "parts" / str(part) for part in range(1, parts + 1)]
    for part, place in enumerate(places, 1):
        pkmlm("tokenize", *given, "--shard", f"{part}/{parts}", "-o", place)
    random.Random(1).shuffle(places)
    pkmlm("tokenize", "--join", *places, "-o", tmp_path / "joined")
    assert_same_folders(tmp_path / "one", tmp_path / "joined")
    Corpus(tmp_path / "joined", "train").verify()
    assert Corpus(tmp_path / "joined", "valid").documents == 1
    assert sum((place / "valid-00000.bin").exists() for place in places) == 1


def test_shards_of_joined_parts_are_full(texts, tmp_path, monkeypatch):
    """Shards of 256 KiB, which end within parts, and parts that end within blocks."""
    for name in "abcd":
        rows = [json.dumps({"text": prose(1500, i % 9)}) + "\n" for i in range(50)]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    sources, tokenizer = {"train": find_sources([f"{tmp_path}/*.jsonl"])}, Tokenizer.load(texts / "m.model")
    monkeypatch.setattr(shards, "SHARD_BYTES", 2 * HASHED)
    for part in range(1, 4):
        write_corpus(tmp_path / str(part), sources, Encoding(tokenizer), (part, 3))
    monkeypatch.setattr(shards, "SHARD_BYTES", HASHED)
    write_corpus(tmp_path / "one", sources, Encoding(tokenizer))
    join_parts(tmp_path / "joined", [tmp_path / str(part) for part in (1, 2, 3)])
    assert (tmp_path / "one/train-00002.bin").exists()
    assert_same_folders(tmp_path / "one", tmp_path / "joined")


def test_what_is_printed(texts, tmp_path):
    given = [texts / "b.jsonl", texts / "e.jsonl", "--valid", texts / "v.txt", "--tokenizer", texts / "m.model"]
    printed = [
        json.loads(pkmlm("tokenize", *given, "--shard", f"{part}/2", "-o", tmp_path / str(part), "--json").stdout)
        for part in (1, 2)
    ]
    assert [(each["part"], each["parts"]) for each in printed] == [(1, 2), (2, 2)]
    joined = pkmlm("tokenize", "--join", tmp_path / "1", tmp_path / "2", "-o", tmp_path / "all", "--json").stdout
    whole = json.loads(joined)
    for split in ("train", "valid"):
        for count in ("documents", "empty", "words", "bytes", "tokens"):
            assert whole["splits"][split][count] == sum(each["splits"][split][count] for each in printed)
    assert whole["sha256"] == json.loads((tmp_path / "all/index.json").read_text())["sha256"]
    assert "part 2 of 2" in pkmlm("tokenize", *given, "--shard", "2/2", "-o", tmp_path / "2", "--force").stdout


# Mistakes


@pytest.fixture
def parts(texts, tmp_path):
    """A folder with three parts."""
    for part in range(1, 4):
        encode(texts, tmp_path / str(part), f"{part}/3")
    return tmp_path


def encode(texts, place, shard, *options, names=("a.txt", "b.jsonl", "c.txt.gz"), separator=r"\n\n\n"):
    given = [*(texts / name for name in names), "--separator", separator, "--tokenizer", texts / "m.model"]
    pkmlm("tokenize", *given, "--shard", shard, *options, "-o", place, "--force")


def refused(folder, names):
    error = pkmlm("tokenize", "--join", *(folder / name for name in names), "-o", folder / "out", code=2).stderr
    assert not [name for name in os.listdir(folder) if "out" in name]
    return error


def test_missing_and_doubled_parts_are_named(parts):
    assert "of 3 parts, part 2 is missing" in refused(parts, "13")
    shutil.copytree(parts / "2", parts / "copy")
    assert f"{parts}/2 and {parts}/copy" in refused(parts, ["1", "2", "copy", "3"])
    assert f"{parts}/4 holds no part" in refused(parts, "14")
    places = [parts / name for name in "123"]
    assert "one of the parts" in pkmlm("tokenize", "--join", *places, "-o", places[1], "--force", code=2).stderr


def test_parts_of_other_corpora_are_named(texts, parts):
    def differs(*changes, **how):
        encode(texts, parts / "2", *changes, **how)
        (line,) = [line for line in refused(parts, "123").splitlines() if line.startswith("error")]
        assert line.startswith(f"error: {parts}/2 ")
        return line

    assert "number of parts" in differs("2/2")
    assert "--separator" in differs("2/3", separator=r"\n")
    assert "file 1 of valid" in differs("2/3", "--valid", texts / "v.txt")
    assert "its --valid is 5% (expected none)" in differs("2/3", "--valid", "5%")
    assert "file 3 of train" in differs("2/3", names=("a.txt", "b.jsonl", "e.jsonl"))
    (parts / "m.model").write_bytes(Tokenizer.learn([prose(500, 3)], 300).model_bytes)
    assert "tokenizer" in differs("2/3", "--tokenizer", parts / "m.model")


def test_damage_is_named(parts):
    place = next(parts.glob("*/train-00000.bin")).parent
    for path in (place / "part.json", place / "train-00000.bin", place / "train.hashes"):
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2] + bytes([whole[len(whole) // 2] ^ 1]) + whole[len(whole) // 2 + 1 :])
        assert str(path) in refused(parts, "123")
        path.write_bytes(whole)
    (parts / "1/tokenizer.model").write_bytes(b"x")
    assert f"{parts}/1/tokenizer.model is damaged" in refused(parts, "123")


def test_a_part_is_not_taken_for_a_corpus(parts, write_recipe):
    recipe = write_recipe(parts, "dense")
    error = pkmlm("train", recipe, "-s", f"data.dir={parts}/1", "--dry-run", code=2).stderr
    assert f"error: {parts}/1 is one part of a corpus" in error
    assert "--join" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.txt", "--shard", "1/3"], "--shard needs --tokenizer"),
        (["a.txt", "--shard", "4/3", "--tokenizer", "m.model"], "expected I/N with 1 <= I <= N"),
        (["a.txt", "--shard", "one", "--tokenizer", "m.model"], "expected I/N with 1 <= I <= N"),
        (["a.txt", "--vocab-size", "320", "--tokenizer", "m.model"], "--vocab-size is for learning"),
        (["-", "--shard", "1/3", "--tokenizer", "m.model"], "standard input cannot be divided"),
        (["p", "--join", "--valid", "v.txt"], "--valid is for encoding text, and --join reads none"),
        (["p", "--join", "--tokenizer", "m.model"], "--tokenizer is for encoding text"),
    ],
)
def test_contradictions_are_refused(texts, monkeypatch, arguments, message):
    monkeypatch.chdir(texts)
    assert message in " ".join(pkmlm("tokenize", *arguments, "-o", "out", code=2).stderr.split())


def test_no_text_in_any_part_is_refused(texts, tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("\n\n\n\n")
    for part in (1, 2):
        given = ["--separator", r"\n", "--tokenizer", texts / "m.model", "--shard", f"{part}/2"]
        pkmlm("tokenize", f"{tmp_path}/*.txt", *given, "-o", tmp_path / str(part))
    assert "no text for train in a.txt, b.txt (10 empty documents)" in refused(tmp_path, "12")
