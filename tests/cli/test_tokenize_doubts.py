"""What `pkmlm tokenize` warns of: text that is probably not as it was meant."""

import pytest

from tests.conftest import pkmlm

STORY = "a whale and the sea it was not so near to us all; "


@pytest.fixture
def texts(tmp_path):
    """Two texts, of six documents and of one."""
    (tmp_path / "train.txt").write_text("\n\n\n".join(STORY * 20 + str(i) for i in range(6)))
    (tmp_path / "valid.txt").write_text(STORY * 20)
    return tmp_path


def warnings(*arguments):
    """What tokenize says on standard error."""
    return pkmlm("tokenize", *arguments, "-q").stderr


def test_a_file_in_two_splits_is_warned_of(texts):
    (texts / "link.txt").symlink_to(texts / "train.txt")
    given = [texts / "train.txt", "--valid", texts / "link.txt", "--vocab-size", 290, "-o", texts / "out"]
    assert warnings(*given) == f"warning: {texts}/link.txt is in both train and valid\n"


def test_the_same_bytes_in_two_splits_are_warned_of(texts):
    """Two copies, one of the same name; empty files are all the same."""
    (texts / "b").mkdir()
    for copy in ("copy.txt", "b/train.txt"):
        (texts / copy).write_bytes((texts / "train.txt").read_bytes())
    for empty in ("none.txt", "nothing.txt"):
        (texts / empty).touch()
    splits = ["--valid", texts / "valid.txt", texts / "copy.txt", texts / "none.txt", "--test", texts / "b/train.txt"]
    given = [texts / "train.txt", texts / "nothing.txt", *splits]
    told = "warning: copy.txt is in both train and valid (as train.txt)\nwarning: train.txt is in both train and test\n"
    assert warnings(*given, "--vocab-size", 290, "-o", texts / "out") == told
    for part in (1, 2):
        cut = ["--tokenizer", texts / "out/tokenizer.model", "--shard", f"{part}/2", "-o", texts / str(part)]
        assert warnings(*given, *cut) == ""
    assert warnings("--join", texts / "1", texts / "2", "-o", texts / "all") == told


def test_what_is_given_twice_is_warned_of(texts):
    given = ["--vocab-size", 290, "-o", texts / "out", "--force"]
    told = f"warning: {texts}/train.txt is given again for train: it is read once\n"
    assert warnings(texts / "train.txt", texts / "train.txt", *given) == told
    (texts / "link.txt").symlink_to(texts / "train.txt")
    told = f"warning: {texts}/link.txt (and 1 more) is given again for train: it is read once\n"
    assert warnings(f"{texts}/t*.txt", f"{texts}/l*.txt", f"{texts}/t*.txt", *given) == told


def test_a_separator_that_never_occurs_is_warned_of(texts):
    given = [texts / "train.txt", "--vocab-size", 290, "--force", "-o", texts / "out", "--separator"]
    told = "warning: '<|endoftext|>' occurs nowhere: each file is one document\n"
    assert warnings(*given, "<|endoftext|>") == told
    assert warnings(*given, r"\n\n\n") == ""
    assert warnings(*given, r"\n\n\n", "--valid", texts / "valid.txt") == "", "one document to validate on is no fault"
    (texts / "crlf.txt").write_bytes((texts / "train.txt").read_bytes().replace(b"\n", b"\r\n"))
    assert warnings(texts / "crlf.txt", *given[1:], r"\n\n\n", "--valid", texts / "valid.txt") == (
        r"warning: '\n\n\n' occurs nowhere: each file is one document "
        r"(where lines end in CRLF, it is '\r\n\r\n\r\n')" + "\n"
    )
    (texts / "one.jsonl").write_text('{"text": "a whale"}\n')  # lines are not separated by it
    assert warnings(*given, "|", "--valid", texts / "one.jsonl") == ""


def test_a_separator_that_is_in_no_part_is_warned_of_when_they_are_joined(texts):
    warnings(texts / "train.txt", "--vocab-size", 290, "-o", texts / "out")
    given = [texts / "train.txt", "--tokenizer", texts / "out/tokenizer.model"]
    told = "warning: '|' occurs nowhere: each file is one document\n"
    for separator, expected in ((r"\n\n\n", ""), ("|", told)):
        for part in (1, 2):
            cut = ["--separator", separator, "--shard", f"{part}/2", "-o", texts / str(part), "--force"]
            assert warnings(*given, *cut) == ""
        assert warnings("--join", texts / "1", texts / "2", "-o", texts / "all", "--force") == expected
