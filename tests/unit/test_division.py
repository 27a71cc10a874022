"""What each of several machines reads: all documents, each once, cut where one machine would cut them."""

import gzip
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pkmlm.data.division import divide, next_document_end
from pkmlm.data.sources import READ, find_sources


def contents(folder, names, separator, parts, format=None):
    """The bytes that each part reads, as (part, file, bytes) in order."""
    sources = find_sources([f"{folder}/{name}" for name in names], format)
    found = []
    for source, division in zip(sources, divide(sources, separator, parts), strict=True):
        data = Path(source.name).read_bytes()
        assert division.bytes == len(data)
        found += [(each.part, division.name, data[each.start : each.stop]) for each in division.ranges]
    assert [part for part, _, _ in found] == sorted(part for part, _, _ in found)
    return found


SEPARATORS = st.sampled_from(["\n", "\n\n", "aba", "\u20ac", "ab", "\n\u20ac\n"])


@settings(max_examples=300, deadline=None)
@given(st.text("ab\n\u20ac", max_size=60), SEPARATORS, st.integers(1, 7))
@example("\n\n\n", "\n\n", 3)  # cut at an even share, the documents would be "\n" and ""
@example("aababababb", "aba", 4)
def test_text_is_cut_between_its_documents_and_nowhere_else(tmp_path_factory, text, separator, parts):
    folder = tmp_path_factory.getbasetemp()
    (folder / "division.txt").write_bytes(text.encode())
    found = contents(folder, ["division.txt"], separator, parts)
    documents = [document for _, _, data in found for document in data.decode().split(separator)]
    assert documents == text.split(separator)
    assert len({part for part, _, _ in found}) == len(found)  # at most one range of a file for each part


KINDS = st.sampled_from(["txt", "jsonl", "parquet", "txt.gz"])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(KINDS, st.text("a\n", max_size=20)), min_size=1, max_size=5), st.integers(1, 9))
def test_parts_follow_each_other_through_all_files(tmp_path_factory, files, parts):
    folder = tmp_path_factory.mktemp("mixed")
    names = [f"{number}.{kind}" for number, (kind, _) in enumerate(files)]
    for name, (_, text) in zip(names, files, strict=True):
        (folder / name).write_text(text)
    found = contents(folder, names, "\n", parts)  # in order
    for name, (kind, text) in zip(names, files, strict=True):
        ranges = [data.decode() for _, each, data in found if each == name]
        assert "\n".join(ranges) == text
        assert len(ranges) == 1 or kind in ("txt", "jsonl")


def test_shares_are_even(tmp_path):
    (tmp_path / "a.txt").write_text("|".join(["x" * 9] * 1000))
    (tmp_path / "b.jsonl").write_text("{}\n" * 3333)
    sizes = [len(data) for _, _, data in contents(tmp_path, ["a.txt", "b.jsonl"], "|", 5)]
    assert len(sizes) == 6  # the third of five parts reads the end of a.txt and the beginning of b.jsonl
    assert max(sizes) <= 19_998 // 5 + 10


def test_whole_files_go_where_their_middle_lies(tmp_path):
    for name, size in (("a.txt", 90), ("b.txt", 100), ("c.txt", 110)):
        (tmp_path / name).write_bytes(b"x" * size)
    assert [part for part, _, _ in contents(tmp_path, ["*.txt"], None, 3)] == [1, 2, 3]
    assert [part for part, _, _ in contents(tmp_path, ["*.txt"], None, 300)] == [46, 141, 246]


@pytest.mark.parametrize("name", ["a.txt.gz", "hidden.txt", "a.parquet", "a.jsonl.gz"])
def test_what_cannot_be_cut_is_not(tmp_path, name):
    (tmp_path / name).write_bytes(gzip.compress(b"a\n\nb" * 999, compresslevel=0, mtime=0))  # separators can be seen
    assert len(contents(tmp_path, [name], "\n\n", 5)) == 1


def test_a_document_longer_than_shares_leaves_parts_empty(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"{}\n" + b"x" * 1000 + b"\n{}\n")
    found = contents(tmp_path, ["a.jsonl"], None, 10)
    assert found == [(1, "a.jsonl", b"{}\n" + b"x" * 1000), (10, "a.jsonl", b"{}\n")]


def test_separators_across_blocks_of_reading_are_found(tmp_path):
    for place in range(READ - 4, READ + 2):
        (tmp_path / "a.txt").write_bytes(b"a" * place + b"<|>" + b"a" * 99)
        (source,) = find_sources([str(tmp_path / "a.txt")])
        assert next_document_end(source, b"<|>", 5) == place
        assert next_document_end(source, b"<|>", place) == place
        assert next_document_end(source, b"<|>", place + 1) is None


def test_empty_files_are_read_by_somebody(tmp_path):
    (tmp_path / "a.txt").touch()
    (tmp_path / "b.jsonl").touch()
    assert contents(tmp_path, ["a.txt", "b.jsonl"], None, 3) == [(3, "a.txt", b""), (3, "b.jsonl", b"")]
