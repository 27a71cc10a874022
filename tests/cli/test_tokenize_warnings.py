"""What `pkmlm tokenize` warns of: text that is probably not as it was meant."""

import re

import pytest

from tests.cli.test_tokenize import prose
from tests.conftest import pkmlm

STORY = "a whale and the sea it was not so near to us all; "


@pytest.fixture
def texts(tmp_path):
    """Two texts, of six documents and of one."""
    (tmp_path / "train.txt").write_text("\n\n\n".join(STORY * 20 + str(i) for i in range(6)))
    (tmp_path / "valid.txt").write_text(STORY * 20)
    return tmp_path


def assert_warns(arguments, *expected):
    """Run tokenize; it must say as many lines on standard error, each with these words, in order."""
    lines = pkmlm("tokenize", *arguments, "-q").stderr.splitlines()
    assert len(lines) == len(expected), lines
    for line, words in zip(lines, expected, strict=True):
        assert re.search(".*".join(map(re.escape, ("warning: ", *words))), line), line


def test_documents_in_two_splits_are_warned_of(texts):
    """Only whole documents count, however long, and short ones do not."""
    long, short = [f"{number}: {STORY * number}".strip() for number in range(1, 40)], ["Yes.", "No.", ""]
    splits = {"valid": [*long[:4], *short], "test": [long[3], long[3], *long[4:9], *short]}
    splits["train-1"] = [*short, *(f"{line} " for line in long[9:20])]
    splits["train-2"] = [*long[4:6], *short, *long[1:4]]
    splits["train-3"] = long[20:]
    files = {name: texts / f"{name}-lines.txt" for name in splits}
    for name, documents in splits.items():
        files[name].write_text("\n".join(documents) + "\n")
    others = ["--valid", files["valid"], "--test", files["test"], "--separator", r"\n"]
    given = [*(files[f"train-{part}"] for part in (1, 2, 3)), *others]
    told = [("3 of 4 valid documents", "in train"), ("4 of 7 test documents", "in train")]
    told += [("2 of 7 test documents", "in valid")]
    assert_warns([*given, "--vocab-size", 290, "-o", texts / "out"], *told)


def test_a_novel_is_the_same_with_and_without_the_newline_that_ends_its_file(texts):
    """A file's last document has one newline more than the same document between others; what follows it, maybe too."""
    first, second, third = (prose(3000, seed).strip() for seed in range(3))
    (texts / "train.txt").write_text(f"{first}\n\n\n{second}\n\n\n\n{third}\n", newline="")
    (texts / "valid.txt").write_text(f"{second}\n", newline="")
    (texts / "test.txt").write_text(third, newline="")
    given = [texts / "train.txt", "--valid", texts / "valid.txt", "--test", texts / "test.txt", "--vocab-size", 290]
    told = ("1 of 1 valid document ", "in train"), ("1 of 1 test document ", "in train")
    assert_warns([*given, "--separator", r"\n\n\n", "-o", texts / "out"], *told)


def test_a_separator_that_never_occurs_is_warned_of(texts):
    given = [texts / "train.txt", "--vocab-size", 290, "--force", "-o", texts / "out", "--separator"]
    assert_warns([*given, "<|endoftext|>"], ("'<|endoftext|>'",))
    assert_warns([*given, r"\n\n\n"])
    assert_warns([*given, r"\n\n\n", "--valid", texts / "valid.txt"])  # one document to validate on is no fault
    (texts / "one.jsonl").write_text('{"text": "a whale"}\n')  # lines are not separated by it
    assert_warns([*given, "|", "--valid", texts / "one.jsonl"], ("train.txt: the separator '|' does not occur",))


@pytest.mark.parametrize("separator", ["\n\n\n", "\n", "---\n", "|"])
def test_each_file_that_a_separator_does_not_divide_is_named(texts, separator):
    """In every split that has others, and alone where it has the separator with other line ends; not a whole novel."""
    typed = separator.replace("\n", r"\n")
    given = ["--vocab-size", 290, "--force", "-o", texts / "out", f"--separator={typed}"]
    whole = [STORY * 20 + str(number) for number in range(9)]
    mac = separator.replace("\n", "\r")
    contents = {
        "a": separator.join(whole[:3]),
        "b": mac.join(whole[3:5]) if mac != separator else whole[3],
        "c": whole[5],
        "d": separator.join(whole[6:8]),
        "e": whole[8],
    }
    for name, text in contents.items():
        (texts / f"{name}.txt").write_bytes(text.encode())
    files = {name: texts / f"{name}.txt" for name in contents}
    nothing = f"the separator {separator!r} does not occur"
    assert_warns([*map(files.get, "abc"), "--valid", files["e"], *given], ("b.txt, ", "c.txt: ", nothing))
    assert_warns([files["a"], "--valid", files["d"], files["e"], *given], ("e.txt: ", nothing))
    alone = [("b.txt: ", nothing, repr(mac))] if mac != separator else []
    assert_warns([files["a"], "--valid", files["b"], "--test", files["c"], *given], *alone)
    # What is held out does not count twice.
    assert_warns([*map(files.get, "abcd"), "--test", "40%", *given], ("b.txt, ", "c.txt: ", nothing))
