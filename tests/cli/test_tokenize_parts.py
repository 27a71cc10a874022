"""`pkmlm tokenize --shard` and `--join`: several machines write what one writes."""

import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pkmlm.data.corpus import Corpus
from pkmlm.data.index import HASHED
from pkmlm.data.joining import join_parts
from pkmlm.data.parts import write_part
from pkmlm.data.shards import Encoding, write_corpus
from pkmlm.data.sources import find_sources
from pkmlm.data.tokenizer import Tokenizer
from pkmlm.errors import UserError
from tests.cli.test_tokenize import WORDS, assert_same_folders
from tests.conftest import pkmlm


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


def commands(texts, tmp_path, inputs, parts, *options):
    """Encode the inputs at once, and in parts that are joined; returns both folders."""
    given = [*(texts / name for name in inputs), *options, "--tokenizer", texts / "m.model"]
    pkmlm("tokenize", *given, "-o", tmp_path / "one")
    places = [tmp_path / "parts" / str(part) for part in range(1, parts + 1)]
    for part, place in enumerate(places, 1):
        pkmlm("tokenize", *given, "--shard", f"{part}/{parts}", "-o", place)
    random.Random(1).shuffle(places)
    pkmlm("tokenize", "--join", *places, "-o", tmp_path / "joined")
    return tmp_path / "one", tmp_path / "joined"


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(
    "inputs",
    [["a.txt"], ["b.jsonl"], ["c.txt.gz", "d.parquet"], ["a.txt", "b.jsonl", "c.txt.gz", "d.parquet", "e.jsonl"]],
    ids=",".join,
)
def test_parts_make_what_one_machine_makes(texts, tmp_path, inputs, parts):
    separator = ["--separator", r"\n\n\n"] if any(".txt" in name for name in inputs) else []
    one, joined = commands(texts, tmp_path, inputs, parts, *separator)
    assert_same_folders(one, joined)
    Corpus(joined, "train").verify()


def test_fewer_documents_than_parts_and_several_splits(texts, tmp_path):
    splits = ["--valid", texts / "v.txt", "--test", texts / "e.jsonl", "--separator", r"\n\n\n"]
    one, joined = commands(texts, tmp_path, ["a.txt"], 7, *splits)
    assert_same_folders(one, joined)
    assert Corpus(joined, "valid").documents == 1
    assert sum((tmp_path / "parts" / str(i) / "valid-00000.bin").exists() for i in range(1, 8)) == 1


def test_shards_of_joined_parts_are_full(texts, tmp_path):
    """Shards of 256 KiB, which end within parts, and parts that end within blocks."""
    (tmp_path / "big.jsonl").write_text("".join(json.dumps({"text": prose(1500, i % 9)}) + "\n" for i in range(190)))
    sources, tokenizer = {"train": find_sources([f"{tmp_path}/big.jsonl"])}, Tokenizer.load(texts / "m.model")
    write_corpus(tmp_path / "one", sources, Encoding(tokenizer, shard_bytes=HASHED))
    for part in range(1, 4):
        write_part(tmp_path / str(part), sources, Encoding(tokenizer, shard_bytes=2 * HASHED), part, 3)
    join_parts(tmp_path / "joined", [tmp_path / str(part) for part in (1, 2, 3)], shard_bytes=HASHED)
    assert (tmp_path / "one/train-00002.bin").exists()
    assert_same_folders(tmp_path / "one", tmp_path / "joined")


def test_what_is_printed(texts, tmp_path):
    given = [texts / "b.jsonl", "--valid", texts / "v.txt", "--tokenizer", texts / "m.model"]
    printed = [
        json.loads(pkmlm("tokenize", *given, "--shard", f"{part}/3", "-o", tmp_path / str(part), "--json").stdout)
        for part in (1, 2, 3)
    ]
    assert [(each["part"], each["parts"]) for each in printed] == [(1, 3), (2, 3), (3, 3)]
    said = pkmlm("tokenize", "--join", *(tmp_path / str(part) for part in (1, 2, 3)), "-o", tmp_path / "all", "--json")
    whole = json.loads(said.stdout)
    for split in ("train", "valid"):
        for count in ("documents", "empty", "words", "bytes", "tokens"):
            assert whole["splits"][split][count] == sum(each["splits"][split][count] for each in printed)
    assert whole["sha256"] == json.loads((tmp_path / "all/index.json").read_text())["sha256"]
    again = pkmlm("tokenize", *given, "--shard", "2/3", "-o", tmp_path / "2", "--force").stdout
    assert "part 2 of 3" in again


# Mistakes


@pytest.fixture
def parts(texts, tmp_path):
    """A folder with three parts."""
    for part in range(1, 4):
        encode(texts, tmp_path / str(part), f"{part}/3")
    return tmp_path


def encode(texts, place, shard, *options, source="a.txt", separator=r"\n\n\n", code=0):
    given = [texts / source, "--separator", separator, "--tokenizer", texts / "m.model", "--shard", shard]
    return pkmlm("tokenize", *given, *options, "-o", place, "--force", code=code).stderr


def refused(folder, names):
    error = pkmlm("tokenize", "--join", *(folder / name for name in names), "-o", folder / "out", code=2).stderr
    assert not [name for name in os.listdir(folder) if "out" in name]
    return error


def test_a_part_is_not_replaced_by_the_whole(parts):
    (parts / "link").symlink_to(parts / "2")
    places, before = [parts / name for name in "123"], sorted(parts.rglob("*"))
    for name in ("1", "link", "3/../3"):
        error = pkmlm("tokenize", "--join", *places, "-o", parts / name, "--force", code=2).stderr
        assert error.startswith("error: -o ")
        assert " is one of the parts to join (expected another folder)\nhint: " in error
    with pytest.raises(UserError, match="is one of the parts to join"):
        join_parts(parts / "link", places, replace=True)
    assert sorted(parts.rglob("*")) == before
    pkmlm("tokenize", "--join", *places, "-o", parts / "out")


def test_missing_and_doubled_parts_are_named(parts):
    assert "error: part 2 of 3 is missing (found 2 of them)" in refused(parts, "13")
    assert "error: part 2, 3 of 3 is missing (found 1 of them)" in refused(parts, "1")
    shutil.copytree(parts / "2", parts / "copy")
    error = refused(parts, ["1", "2", "copy", "3"])
    assert f"part 2 of 3 is there twice: {parts}/2 and {parts}/copy" in error
    assert f"{parts}/4 holds no part of a corpus (expected part.json)" in refused(parts, "14")


def test_parts_of_other_corpora_are_named(texts, parts):
    def differs(*changes, **how):
        encode(texts, parts / "2", *changes, **how)
        (line,) = [line for line in refused(parts, "123").splitlines() if line.startswith("error")]
        assert line.startswith(f"error: {parts}/2 is no part of the same corpus as {parts}/1: ")
        return line.split(": ", 2)[2]

    assert differs("2/4") == "its number of parts is 4 (expected 3)"
    assert differs("2/3", separator=r"\n") == "its --separator is '\\n' (expected '\\n\\n\\n')"
    (texts / "v.jsonl").write_text('{"body": "a"}')
    told = differs("2/3", "--valid", texts / "v.jsonl", "--field", "body")
    assert told == "its --field is 'body' (expected 'text')"
    assert differs("2/3", "--valid", texts / "v.txt") == "its splits is ['train', 'valid'] (expected ['train'])"
    assert differs("2/3", source="c.txt.gz").startswith("for train it has c.txt.gz of ")
    assert differs("2/3", texts / "v.txt") == "it has 2 files for train (expected 1)"
    other = Tokenizer.learn([prose(500, 3)], 300)
    (parts / "m.model").write_bytes(other.model_bytes)
    assert differs("2/3", "--tokenizer", parts / "m.model").startswith(f"its tokenizer is '{other.sha256[:16]}' (exp")


def test_a_machine_with_another_text_of_the_same_size_is_named(texts, parts):
    (parts / "copy").mkdir()
    data = bytearray((texts / "a.txt").read_bytes())
    data[len(data) // 2] = ord("#")
    (parts / "copy/a.txt").write_bytes(data)
    (parts / "copy/m.model").write_bytes((texts / "m.model").read_bytes())
    encode(parts / "copy", parts / "2", "2/3")
    assert f"error: {parts}/2 was made from another a.txt than {parts}/1: bytes " in refused(parts, "123")


def test_damage_is_named(parts):
    whole = shutil.copytree(parts / "2", parts / "whole")
    for name in sorted(os.listdir(whole)):
        if name in ("train.documents", "tokenizer.model"):  # of this part, not needed
            continue
        data = bytearray((whole / name).read_bytes())
        data[len(data) // 2] ^= 1
        (parts / "2" / name).write_bytes(data)
        assert f"{parts}/2/{name}" in refused(parts, "123")
        (parts / "2" / name).unlink()
        assert f"{parts}/2" in refused(parts, "123")
        (parts / "2" / name).write_bytes((whole / name).read_bytes())
    (parts / "1/tokenizer.model").write_bytes(b"x")
    assert f"{parts}/1/tokenizer.model is damaged" in refused(parts, "123")


def test_a_part_is_not_taken_for_a_corpus(parts, write_recipe):
    recipe = write_recipe(parts, "dense")
    error = pkmlm("train", recipe, "-s", f"data.dir={parts}/1", "--dry-run", code=2).stderr
    assert f"error: {parts}/1 is one part of a corpus (expected the whole)\nhint: join its parts" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.txt", "--shard", "1/3"], "--shard needs --tokenizer"),
        (["a.txt", "--shard", "4/3", "--tokenizer", "m.model"], "expected I/N with 1 <= I <= N"),
        (["a.txt", "--shard", "0/3", "--tokenizer", "m.model"], "expected I/N with 1 <= I <= N"),
        (["a.txt", "--shard", "one", "--tokenizer", "m.model"], "expected I/N with 1 <= I <= N"),
        (["-", "--shard", "1/3", "--tokenizer", "m.model"], "standard input cannot be divided"),
        (["p", "--join", "--valid", "v.txt"], "--valid is for encoding text, and --join reads none"),
        (["p", "--join", "--tokenizer", "m.model"], "--tokenizer is for encoding text"),
        (["p", "--join", "--shard", "1/3"], "--shard is for encoding text"),
    ],
)
def test_contradictions_are_refused(texts, monkeypatch, arguments, message):
    monkeypatch.chdir(texts)
    assert message in " ".join(pkmlm("tokenize", *arguments, "-o", "out", code=2).stderr.split())


def test_bad_text_is_named_by_its_place_in_the_file(texts, tmp_path):
    row = b'{"text": "a whale"}\n'
    (tmp_path / "a.jsonl").write_bytes(row * 9 + b"{}\n")
    (tmp_path / "b.jsonl").write_bytes(row * 9 + b'{"text": "\xff"}\n')
    model = ["--tokenizer", texts / "m.model"]
    error = pkmlm("tokenize", tmp_path / "a.jsonl", *model, "--shard", "2/2", "-o", tmp_path / "out", code=2).stderr
    assert f"{tmp_path}/a.jsonl:5 (from byte 100): no key 'text'" in error
    error = pkmlm("tokenize", tmp_path / "b.jsonl", *model, "--shard", "2/2", "-o", tmp_path / "out", code=2).stderr
    assert f"{tmp_path}/b.jsonl: not UTF-8 at byte 190 " in error


def test_no_text_in_any_part_is_refused(texts, tmp_path):
    (tmp_path / "a.txt").write_text("\n\n\n\n")
    for part in (1, 2):
        given = ["--separator", r"\n", "--tokenizer", texts / "m.model", "--shard", f"{part}/2"]
        pkmlm("tokenize", tmp_path / "a.txt", *given, "-o", tmp_path / str(part))
    assert "error: no text for train in a.txt (5 empty documents)" in refused(tmp_path, "12")


def test_a_part_that_was_killed_is_made_again(texts, tmp_path):
    (tmp_path / "a.txt").write_text("\n\n\n".join([prose(100_000, 1)] * 8))
    (tmp_path / "m.model").write_bytes((texts / "m.model").read_bytes())
    arguments = ["a.txt", "--separator", r"\n\n\n", "--tokenizer", "m.model", "--shard", "1/2", "-o", "1"]
    running = subprocess.Popen([sys.executable, "-m", "pkmlm", "tokenize", *arguments], cwd=tmp_path)
    until = time.monotonic() + 30
    while not list(tmp_path.glob(".tmp-*/.tmp-*train-00000.bin")) and time.monotonic() < until:
        time.sleep(0.002)
    running.send_signal(signal.SIGKILL)
    assert running.wait(30) == -signal.SIGKILL
    assert not (tmp_path / "1").exists()
    encode(tmp_path, tmp_path / "1", "1/2")
    encode(tmp_path, tmp_path / "2", "2/2")
    assert not list(tmp_path.glob(".tmp-*"))
    pkmlm("tokenize", "--join", tmp_path / "1", tmp_path / "2", "-o", tmp_path / "joined")
    Corpus(tmp_path / "joined", "train").verify()
    assert Corpus(tmp_path / "joined", "train").documents == 8
