"""`pkmlm tokenize` from outside: what it writes, what it prints, what it refuses without leaving a trace."""

import bz2
import filecmp
import gzip
import json
import lzma
import os
import random
import resource
import signal
import subprocess
import sys
import time

import click
import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from click.testing import CliRunner

from pkmlm.cli import cli
from pkmlm.data.corpus import Corpus, open_tokenizer
from pkmlm.errors import UserError
from tests import PATIENCE
from tests.conftest import pkmlm

TEXT = "a whale and the sea it was not so near to us all; he said: \u201cno\u201d"
WORDS = TEXT.split()


def prose(words, seed=0):
    draw = random.Random(seed)
    joins = [" "] * 20 + ["\n", "\r\n", "  ", "\n\n"]
    return "".join(draw.choice(WORDS) + draw.choice(joins) for _ in range(words))


@pytest.fixture
def texts(tmp_path):
    """Files of three splits; the documents of a text are divided by three newlines."""
    for seed, name in enumerate(("train", "valid", "test")):
        documents = [prose(400, 10 * seed + i).strip() for i in range(5)]
        (tmp_path / f"{name}.txt").write_text("\n\n\n".join(documents), newline="")
    return tmp_path


def tokenize(*arguments, data=None):
    """Run the command in this process and return what it printed; its errors are raised."""
    runner = CliRunner()
    result = runner.invoke(cli, ["tokenize", *map(str, arguments)], input=data, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_percentages_hold_out_documents_of_the_training_text(texts):
    documents = [prose(40, seed) for seed in range(300)]
    (texts / "all.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    (texts / "some.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents[:200]))
    common = ("--vocab-size", 300, "-q")
    tokenize(texts / "all.jsonl", "--valid", "20%", "--test", "5.5%", *common, "-o", texts / "out")
    corpora = {name: Corpus(texts / "out", name) for name in ("train", "valid", "test")}
    tokenizer = open_tokenizer(texts / "out")
    split = {
        tokenizer.decode(corpus.document(i)): name for name, corpus in corpora.items() for i in range(corpus.documents)
    }
    assert sum(corpus.documents for corpus in corpora.values()) == 300
    assert split.keys() == set(documents)
    assert 30 < corpora["valid"].documents < 90
    assert 3 < corpora["test"].documents < 35
    index = json.loads((texts / "out/index.json").read_text())
    assert index["held_out"] == {"valid": 20.0, "test": 5.5}
    assert [len(index["splits"][name]["sources"]) for name in corpora] == [1, 0, 0]
    # The tokenizer has not learnt from what is held out; other documents and percentages change nothing.
    tokenize(texts / "all.jsonl", "--valid", "20%", "--test", "5.5%", *common, "-o", texts / "again", "--jobs", 1)
    trained = "".join(json.dumps({"text": text}) + "\n" for text in documents if split[text] == "train")
    (texts / "trained.jsonl").write_text(trained)
    tokenize(texts / "trained.jsonl", *common, "-o", texts / "trained")
    assert json.loads((texts / "trained/index.json").read_text())["held_out"] == {}
    for name in ("train-00000.bin", "tokenizer.model"):
        assert filecmp.cmp(texts / "trained" / name, texts / "out" / name, shallow=False)
    model = ("--tokenizer", texts / "out/tokenizer.model", "-q")
    piped = (texts / "some.jsonl").read_text()
    tokenize("-", "--format", "jsonl", "--valid", "20%", *model, "-o", texts / "part", data=piped)
    valid = Corpus(texts / "part", "valid")
    found = [tokenizer.decode(valid.document(i)) for i in range(valid.documents)]
    assert found == [text for text in documents[:200] if split[text] == "valid"]


def test_a_tokenizer_is_given_or_learnt(texts):
    words = texts / "train.txt", "--tokenizer", "any.model", "-o", texts / "out"
    for option in (["--vocab-size", 320], ["--model-type", "unigram"]):
        assert option[0] in pkmlm("tokenize", *words, *option, code=2).stderr
    assert not (texts / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--valid", "0.05"], "--valid 0.05: expected files, or a percentage"),
        (["--valid", "100%"], "--valid 100%: expected files, or a percentage"),
        (["--test", "5%", "test.txt"], "--test takes files or one percentage"),
        (["--valid", "60%", "--test", "40%"], "leave no document for training"),
    ],
)
def test_percentages_that_mean_nothing_are_refused(arguments, message):
    result = CliRunner().invoke(cli, ["tokenize", "train.txt", *arguments, "-o", "out"], standalone_mode=False)
    assert isinstance(result.exception, click.UsageError)
    assert message in result.exception.message


def test_each_split_takes_all_the_files_after_it_and_no_other_does(texts):
    for name in ("valid", "test"):
        (texts / f"{name}-2.txt").write_text(f"more to {name}")
    files = {name: [texts / f"{name}.txt", texts / f"{name}-2.txt"] for name in ("valid", "test")}
    common = ("--vocab-size", 300, "--separator", r"\n\n\n", "-q")
    tokenize(texts / "train.txt", "--valid", *files["valid"], "--test", *files["test"], *common, "-o", texts / "out")
    read = lambda name: (texts / f"{name}.txt").read_bytes().decode()  # noqa: E731
    assert text_of(texts / "out") == read("train")
    for name in ("valid", "test"):
        assert text_of(texts / "out", name).endswith(f"\n\n\n{read(name)}"), "in the order of their names"
        assert text_of(texts / "out", name).startswith(f"more to {name}")
    for words, said in (
        (["--valid", texts / "valid.txt", texts / "train.txt"], "TRAIN..."),
        ([texts / "train.txt", "--valid", "--test", texts / "test.txt"], "'--valid' requires a file"),
    ):
        assert said in pkmlm("tokenize", *words, "-o", texts / "none", code=2).stderr
    joined = [f"--valid={files['valid'][0]}", files["valid"][1]]
    tokenize(*joined, *common, "-o", texts / "two", "--", texts / "train.txt")
    assert text_of(texts / "two") == read("train")
    assert text_of(texts / "two", "valid") == text_of(texts / "out", "valid")


def text_of(folder, split="train", separator="\n\n\n"):
    """The text of a split, decoded."""
    corpus, tokenizer = Corpus(folder, split), open_tokenizer(folder)
    corpus.verify()
    return separator.join(tokenizer.decode(corpus.document(i)) for i in range(corpus.documents))


def assert_same_folders(one, other):
    names = sorted(os.listdir(one))
    assert names == sorted(os.listdir(other))
    assert filecmp.cmpfiles(one, other, names, shallow=False) == (names, [], [])


def test_every_split_comes_back_and_what_is_printed_is_what_was_written(texts):
    given = [texts / "train.txt", "--valid", texts / "valid.txt", "--test", texts / "test.txt"]
    given += ["--separator", r"\n\n\n", "--vocab-size", "320", "--force", "-o", texts / "out"]
    done = pkmlm("tokenize", *given)
    assert done.stderr == "", "no progress where nobody looks"
    for split in ("train", "valid", "test"):
        assert text_of(texts / "out", split).encode() == (texts / f"{split}.txt").read_bytes()
    table = done.stdout.splitlines()
    assert all(len(line) <= 80 for line in table if str(texts) not in line)
    assert [line.split()[:3] for line in table if line.startswith(("train", "valid", "test"))] == [
        [split, "5", "0"] for split in ("train", "valid", "test")
    ]
    result = json.loads(tokenize(*given, "--json"))
    corpus, train = Corpus(texts / "out", "train"), result["splits"]["train"]
    assert (train["tokens"], train["words"], train["documents"]) == (corpus.tokens, corpus.words, 5)
    assert (result["tokenizer_sha256"], result["vocab_size"]) == (corpus.tokenizer_sha256, 320)
    assert result["learning_seconds"] > 0


def test_every_run_writes_the_same_bytes(texts):
    for folder, jobs in (("one", 1), ("five", 5)):
        tokenize(texts / "train.txt", "--valid", texts / "valid.txt", "--vocab-size", 320, "--jobs", jobs,
                 "-o", texts / folder)  # fmt: skip
    assert_same_folders(texts / "one", texts / "five")


def test_formats_and_compressions_give_the_same_tokens(texts):
    whole = (texts / "train.txt").read_bytes()
    documents = whole.decode().split("\n\n\n")
    lines = "".join(json.dumps({"text": text, "n": 1}) + "\n" for text in documents).encode()
    pq.write_table(pa.table({"text": documents}), texts / "a.parquet")
    files = {
        "a.txt.zst": zstandard.compress(whole),
        "a.txt.bz2": bz2.compress(whole),
        "a.jsonl.xz": lzma.compress(lines),
        "a.jsonl": lines,
        "a.jsonl.gz": gzip.compress(lines),
        "a.parquet.zst": zstandard.compress((texts / "a.parquet").read_bytes()),
    }
    tokenize(texts / "train.txt", "--separator", r"\n\n\n", "--vocab-size", 320, "-o", texts / "plain")
    plain = Corpus(texts / "plain", "train")
    for number, (name, data) in enumerate(files.items()):
        (texts / name).write_bytes(data)
        separator = ["--separator", r"\n\n\n"] if ".txt" in name else []
        tokenize(texts / name, *separator, "--vocab-size", 320, "-o", texts / f"out{number}")
        corpus = Corpus(texts / f"out{number}", "train")
        assert corpus.tokenizer_sha256 == plain.tokenizer_sha256
        assert np.array_equal(corpus.read(0, corpus.tokens), plain.read(0, plain.tokens))
        assert (corpus.words, corpus.bytes, corpus.documents) == (plain.words, plain.bytes, plain.documents)


def test_a_folder_of_datasets_and_the_folder_of_a_tokenizer(texts):
    documents = (texts / "train.txt").read_bytes().decode().split("\n\n\n")
    saved = datasets.Dataset.from_list([{"doc": {"text": text}} for text in documents])
    datasets.DatasetDict({"train": saved, "validation": saved.select([0])}).save_to_disk(texts / "saved")
    tokenize(texts / "train.txt", "--separator", r"\n\n\n", "--vocab-size", 320, "-o", texts / "plain")
    given = [texts / "saved/train", "--valid", texts / "saved/validation", "--field", "doc.text", "-q"]
    tokenize(*given, "--tokenizer", texts / "plain", "-o", texts / "out")
    assert text_of(texts / "out") == text_of(texts / "plain")
    assert text_of(texts / "out", "valid") == documents[0]
    shown = pkmlm("tokenize", texts / "saved", "--field", "doc.text", "-o", texts / "none", code=2).stderr
    assert str(texts / "saved/train") in shown


def test_standard_input(texts):
    data = (texts / "train.txt").read_bytes()
    stored = gzip.compress(data)
    tokenize("-", "--vocab-size", 320, "-o", texts / "out", data=stored)
    assert text_of(texts / "out").encode() == data
    tokenize("-", "--tokenizer", texts / "out/tokenizer.model", "-o", texts / "again", data=stored)
    assert_same_folders(texts / "out", texts / "again")


def test_standard_input_has_a_format(texts):
    data = b"".join(json.dumps({"body": prose(300, i)}).encode() + b"\n" for i in range(9))
    tokenize("-", "--format", "jsonl", "--field", "body", "--vocab-size", 320, "-o", texts / "out", data=data)
    assert Corpus(texts / "out", "train").documents == 9
    pq.write_table(pa.table({"body": [prose(300, i) for i in range(9)]}), texts / "a.parquet")
    tokenize("-", "--format", "parquet", "--field", "body", "--vocab-size", 320, "-o", texts / "two",
             data=(texts / "a.parquet").read_bytes())  # fmt: skip
    assert text_of(texts / "two") == text_of(texts / "out")


# What is there already


def test_nothing_is_overwritten_without_force(texts):
    tokenize(texts / "train.txt", "--vocab-size", 320, "-o", texts / "out")
    before = (texts / "out/index.json").read_bytes()
    with pytest.raises(UserError, match="already exists"):
        tokenize(texts / "test.txt", "--vocab-size", 320, "-o", texts / "out")
    assert (texts / "out/index.json").read_bytes() == before
    tokenize(texts / "test.txt", "--vocab-size", 320, "-o", texts / "out", "--force")
    assert text_of(texts / "out").encode() == (texts / "test.txt").read_bytes()
    assert not list(texts.glob(".tmp-*"))


def test_force_can_read_what_it_replaces_and_folders_above_are_made(texts):
    tokenize(texts / "train.txt", "--vocab-size", 320, "-o", texts / "a/b/out")
    model = texts / "a/b/out/tokenizer.model"
    tokenize(texts / "test.txt", "--tokenizer", model, "-o", texts / "a/b/out", "--force")
    assert text_of(texts / "a/b/out").encode() == (texts / "test.txt").read_bytes()


def test_force_replaces_nothing_but_tokens(texts):
    (texts / "out").mkdir()
    (texts / "out/thesis.tex").write_text("years of work")
    (texts / "file").write_text("x")
    for place, message in (("out", r"holds 'thesis\.tex'"), ("file", "is a file"), ("file/out", "is not a folder")):
        with pytest.raises(UserError, match=message):
            tokenize(texts / "train.txt", "-o", texts / place, "--force")
    assert (texts / "out/thesis.tex").read_text() == "years of work"


def test_what_cannot_be_renamed_is_refused_before_any_work(texts, monkeypatch):
    (texts / "empty").mkdir()
    monkeypatch.chdir(texts / "empty")
    for place, message in ((".", "-o . is the working directory"), ("/proc", "-o /proc is a mount point")):
        with pytest.raises(UserError, match=message):
            tokenize(texts / "train.txt", "-o", place)


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["what\x1b.doc"], r"what\x1b\.doc"),
        (["train.txt", "--valid", "empty.txt"], r"valid in empty\.txt \(1 empty document\)"),
        (["train.txt", "--test", "empty.parquet"], r"test in empty\.parquet \(no documents\)"),
        (["train.txt", "--test", "bad.txt"], r"bad\.txt: .* byte 3 "),
        (["train.txt", "--vocab-size", "100000"], r"--vocab-size: 100,000 .* at most \d+"),
        (["train.txt", "--tokenizer", "train.txt"], r"train\.txt is not a SentencePiece model"),
        (["train.txt", "--separator", r"\d"], r"--separator .*escape"),
        (["a.jsonl", "--separator", "x"], "--separator is for text"),
        (["train.txt", "--field", "body"], "--field is for JSON lines"),
        (["cut.txt.gz"], r"cut\.txt\.gz: damaged"),
        (["empty.txt"], "too small to learn"),
        (["-", "--valid", "-"], "standard input is named for several splits"),
        (["train.txt", "--valid", "5%"], "of 1 document, none falls into valid"),
        ([""], "empty file name"),
    ],
)
def test_a_mistake_is_named_and_leaves_nothing(texts, monkeypatch, arguments, message):
    monkeypatch.chdir(texts)
    (texts / "empty.txt").touch()
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), "empty.parquet")
    (texts / "bad.txt").write_bytes(b"abc\xff")
    (texts / "a.jsonl").write_text('{"body": "x"}\n')
    (texts / "cut.txt.gz").write_bytes(gzip.compress(prose(500).encode())[:-9])
    before = sorted(os.listdir())
    options = [] if {"--vocab-size", "--tokenizer"} & set(arguments) else ["--vocab-size", "320"]
    with pytest.raises(UserError, match=message):
        tokenize(*arguments, *options, "-o", "out")
    assert sorted(os.listdir()) == before


def test_a_full_disk_is_named_and_leaves_nothing(texts):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))  # Python ignores the signal
    try:
        said = pkmlm("tokenize", texts / "train.txt", "--vocab-size", 320, "-o", texts / "out", code=1).stderr
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert said.startswith("error: cannot write ")
    assert said.endswith(": File too large\n")
    assert not list(texts.glob("*out*"))


def test_an_interrupt_ends_the_wait_for_standard_input(texts):
    tokenize(texts / "train.txt", "--vocab-size", 320, "-o", texts / "first")
    command = [sys.executable, "-m", "pkmlm", "tokenize", "-", "--tokenizer", "first/tokenizer.model", "-o", "out"]
    pipe = subprocess.PIPE
    running = subprocess.Popen(command, cwd=texts, stdin=pipe, stderr=pipe)
    until = time.monotonic() + PATIENCE
    while not list(texts.glob(".tmp-*-out/tokenizer.model")) and time.monotonic() < until:
        time.sleep(0.005)
    time.sleep(0.1)  # for the first read, which nothing ends
    running.send_signal(signal.SIGINT)
    try:
        assert running.wait(PATIENCE) == 130
    finally:
        running.kill()
        errors = running.communicate()[1]
    assert errors.split() == [b"interrupted"]
    assert not list(texts.glob("*out"))
