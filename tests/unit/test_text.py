"""Reading text: what comes out is what was stored, however it is wrapped; faults are named and placed."""

import bz2
import gzip
import hashlib
import itertools
import json
import lzma
import os
import random
import re
import shlex
import tempfile
from collections import Counter

import datasets
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from pkmlm.data.sources import READ, find_sources, temporary_copy
from pkmlm.data.text import (
    AFTER_WORDS,
    AT_LINES,
    WINDOW,
    Chunk,
    Tally,
    chunks_of,
    cut,
    read_chunks,
    split_documents,
    unescape,
    within,
)
from pkmlm.errors import UserError

TRICKY = "\ufeffone\r\ntwo\rthree\x00\u2028four\x0bfive\x85\n\n  six\t\u2581seven \U0001f600\n"


def documents(path, separator=None, field="text", format=None):
    """The documents of a file that are not empty."""
    (source,) = find_sources([str(path)], format)
    with source.open() as stream:
        return joined(read_chunks(stream, separator, field))


def joined(chunks):
    found, parts = [], []
    for text, ends_document, _ in chunks:
        parts.append(text)
        if ends_document:
            found.append("".join(parts))
            parts = []
    return [text for text in found if text]


def pieces(text, places):
    """The text cut at the places, as pieces of one document."""
    ends = [0, *sorted(p % (len(text) + 1) for p in places), len(text)]
    return [(text[a:b], False) for a, b in itertools.pairwise(ends)] + [("", True)]


# Chunks


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("a" * 100 + "\n" + "b " * 900 + "\n" + "c d " * 500, "a" * 100 + "\n" + "b " * 900 + "\n"),
        ("x" * (WINDOW - 1) + "\n" + "y" * 10, "x" * (WINDOW - 1) + "\n"),
        ("a" * (WINDOW - 1) + " " + "b" * 10, "a" * (WINDOW - 1)),
        ("a" * 1000 + " bb  " + "c" * 3000, "a" * 1000),
        ("  " * 3000, "  " * 1024),
    ],
)
def test_a_chunk_ends_after_a_newline_or_before_a_single_space_or_fills_the_window(text, first):
    """The last newline, or single space, of the window counts; it may be its last character."""
    assert chunks_of(text)[0] == first
    assert "".join(chunks_of(text)) == text


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from([" ", "\n", "x", "word " * 100, "y" * 700, "  ", "\u2581", "é "]), max_size=40),
    st.lists(st.integers(0, 10**6), max_size=8),
)
def test_chunks_depend_on_the_text_alone(parts, places):
    text = "".join(parts)
    chunks = list(cut(pieces(text, places)))
    assert chunks == list(cut([(text, True)]))
    assert "".join(chunk.text for chunk in chunks) == text
    assert [chunk.ends_document for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert all(1 <= len(chunk.text) <= WINDOW for chunk in chunks) or text == ""


# Separators


@settings(max_examples=100, deadline=None)
@given(
    st.text("ab\n", max_size=60),
    st.sampled_from(["\n", "\n\n\n", "ab", "aba", "a"]),
    st.lists(st.integers(0, 10**6), max_size=8),
)
def test_separators_are_found_as_str_split_finds_them(text, separator, places):
    found, open_document = [], ""
    for piece, ends in split_documents([piece for piece, _ in pieces(text, places)], separator):
        open_document += piece
        if ends:
            found.append(open_document)
            open_document = ""
    assert found == text.split(separator)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (r"\n\n\n", "\n\n\n"),
        (r"\\n\x1e", "\\n\x1e"),
        (r"\\é", "\\é"),
        (r"\u2028é\U0001f600", "\u2028é\U0001f600"),
        ("<|end|>", "<|end|>"),
    ],
)
def test_separators_are_typed_with_escapes(typed, meant):
    assert unescape(typed) == meant


@pytest.mark.parametrize("typed", ["", r"\d", r"\x1", r"\ud800", r"\U00110000"])
def test_a_separator_that_means_nothing_is_refused(typed):
    with pytest.raises(UserError, match="--separator"):
        unescape(typed)


# Counts


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text("ab \n\u2003\u2581\U0001f600", max_size=30), max_size=4), st.integers(1, 5))
def test_counts_are_those_of_lm_eval(texts, width):
    tally = Tally()
    for text in texts:
        parts = [text[i : i + width] for i in range(0, len(text), width)] or [""]
        for i, part in enumerate(parts):
            tally.add(Chunk(part, i == len(parts) - 1))
    whole = [text for text in texts if text]
    assert tally.words == sum(len(re.split(r"\s+", text)) for text in whole)
    assert tally.bytes == sum(len(text.encode()) for text in whole)


def test_empty_documents_are_dropped_and_counted(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"--one--  ----two--")
    assert documents(path, "--") == ["one", "  ", "two"]
    with find_sources([str(path)])[0].open() as stream:
        tally = Tally()
        for chunk in read_chunks(stream, "--"):
            tally.add(chunk)
    assert (tally.documents, tally.empty) == (3, 3)


@pytest.mark.parametrize("block", [1, 3, READ])
def test_a_separator_with_other_line_ends_is_refused(tmp_path, monkeypatch, block):
    """It would divide nothing, or leave a part of the line end in every document."""
    monkeypatch.setattr("pkmlm.data.sources.READ", block)
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\r\n\r\ntwo")
    with pytest.raises(UserError, match=re.escape(rf"{path}: found '\r\n\r\n'")):
        documents(path, "\n\n")
    with pytest.raises(UserError, match=re.escape(rf"{path}: found '\r\n'")):
        documents(path, "\n")
    assert documents(path, "\r\n\r\n") == ["one", "two"]
    assert documents(path, None) == ["one\r\n\r\ntwo"]


# Splits


def divided(texts, *edges, cuts=AT_LINES):
    """The documents between each two edges, of one pass each."""
    pieces = [(text, True) for text in texts]
    kept = [[] for _ in edges[1:]]
    for documents, start, stop in zip(kept, edges[:-1], edges[1:], strict=True):
        parts = []
        for chunk in within(cut(pieces, cuts), start, stop):
            parts.append(chunk.text)
            if chunk.ends_document:
                documents.append("".join(parts))
                parts = []
        assert not parts
    return kept


def test_documents_are_divided_by_a_hash_of_their_text():
    draw = random.Random(0)
    texts = ["".join(draw.choices("ab c\n", k=draw.choice([0, 3, 500, 5000]))) for _ in range(3000)]
    train, valid, test = divided(texts, 0.0, 0.7, 0.9, 1.0)
    assert Counter(train) + Counter(valid) + Counter(test) == Counter(texts)
    assert len({*train, *valid, *test}) == len(set(train)) + len(set(valid)) + len(set(test))
    long = [len([text for text in part if len(text) > 3]) for part in (train, valid, test)]
    assert long == pytest.approx([1050, 300, 150], abs=60)  # three deviations of the largest: 53
    assert [text for text in texts if text in set(valid)] == valid  # in their order
    assert divided(texts, 0.0, 0.7, 0.9, 1.0, cuts=AFTER_WORDS) == [train, valid, test]
    assert divided(texts[:40], 0.7, 0.9) == [[text for text in texts[:40] if text in set(valid)]]
    assert divided([f"\n{text}\n" for text in valid], 0.7, 0.9) == [[f"\n{text}\n" for text in valid]]


def test_of_a_long_document_its_beginning_decides(monkeypatch):
    monkeypatch.setattr("pkmlm.data.text.HEAD", 3000)
    draw = random.Random(0)
    heads = ["".join(draw.choices("ab c\n", k=3000)).replace("\n", "a", 1) for _ in range(200)]
    texts = [head + str(number) * draw.randrange(9000) for number, head in enumerate(heads)]
    (chosen,) = divided(texts, 0.5, 1.0)
    assert 60 < len(chosen) < 140
    assert divided(heads, 0.5, 1.0) == [[head for head, text in zip(heads, texts, strict=True) if text in chosen]]


# Wrappings


def gzipped(data):
    return gzip.compress(data[:7]) + gzip.compress(data[7:])  # two members, as `cat a.gz b.gz` makes


def bzip2_streams(data):
    return bz2.compress(data[:7]) + bz2.compress(data[7:])


def xz_streams(data):
    return lzma.compress(data[:7]) + bytes(8) + lzma.compress(data[7:]) + bytes(4)  # filled up with NUL, as it may be


def zstandard_frames(data):
    press = zstandard.ZstdCompressor()
    within = data.find("\U0001f600".encode()) + 1  # a character, divided by a frame that holds nothing
    return press.compress(data[:within]) + press.compress(b"") + press.compress(data[within:])


def zstandard_of_a_long_window(data):
    """As `zstd --long=31` writes: it asks for 2 GB to be decompressed."""
    press = zstandard.ZstdCompressor(compression_params=zstandard.ZstdCompressionParameters(window_log=31))
    stream = press.compressobj()
    return stream.compress(data) + stream.flush()


@pytest.mark.parametrize(
    ("suffix", "press"),
    [
        *(("", bytes), (".gz", gzipped), (".zst", zstandard_frames), ("", gzipped), ("", zstandard_frames)),
        *((".bz2", bzip2_streams), (".xz", xz_streams), ("", bzip2_streams), ("", xz_streams)),
        (".zst", zstandard_of_a_long_window),
    ],
)
def test_nothing_in_a_text_is_changed_but_a_byte_order_mark_at_its_beginning(tmp_path, suffix, press):
    """Compression is seen with and without its suffix; what is stored is counted and hashed."""
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(press(TRICKY.encode() * 50_000))
    (source,) = find_sources([str(path)])
    with source.open() as stream:
        assert joined(read_chunks(stream)) == [(TRICKY * 50_000)[1:]]
    assert stream.count == path.stat().st_size
    assert stream.digest.hexdigest() == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("suffix", "press"),
    [("gz", gzip.compress), ("zst", zstandard.compress), ("bz2", bz2.compress), ("xz", lzma.compress)],
)
def test_damaged_compression_is_named(tmp_path, suffix, press):
    whole = press(os.urandom(5000).hex().encode())
    path = tmp_path / f"a.txt.{suffix}"
    damages = [whole[:-1], whole[: len(whole) // 2], whole[:3], b"", b"plain text", whole + b"tail"]
    damages.append(whole + whole[:-9])  # in the second part, of several
    if suffix != "zst":  # zstd adds no checksum unless it is asked to
        damages.append(whole[:2000] + bytes([whole[2000] ^ 4]) + whole[2001:])
    for data in damages:
        path.write_bytes(data)
        with pytest.raises(UserError, match=re.escape(str(path))):
            documents(path)


# UTF-8


@pytest.mark.parametrize(
    ("data", "offset"),
    [
        (b"ok \xff", 3),
        (b"abc\xe2\x96", 3),
        (b"\xed\xa0\x80", 0),  # a surrogate
        (b"a" * (READ - 1) + b"\xc3(" + b"b" * 10, READ - 1),  # the fault lies over the end of a block
        (b"\xc3\xa9" * READ + b"\x80", 2 * READ),
        (b"a" * (READ - 2) + b"\xe2\x96\x81\xfe", READ + 1),
    ],
)
def test_bad_utf8_is_named_by_file_and_byte(tmp_path, data, offset):
    for path, stored in ((tmp_path / "a.txt", data), (tmp_path / "b.txt.gz", gzip.compress(data))):
        path.write_bytes(stored)
        with pytest.raises(UserError, match=f"{re.escape(str(path))}: not UTF-8 at byte {offset:,} "):
            documents(path)


# JSON lines


def test_json_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [{"text": TRICKY}, {"text": "", "id": 1}, {"id": 2, "text": "\U0001f600"}]
    lines = [json.dumps(row, ensure_ascii=bool(i)) for i, row in enumerate(rows)]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n\n  \n".join(lines).encode())
    assert documents(path) == [TRICKY, "\U0001f600"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', "not valid JSON"),
        (b"[1]", r"found \[1\]"),
        (b'{"body": "a"}', "no key 'text' \\(found 'body'\\)"),
        (b'{"text": 3}', "'text' is 3"),
        (b'{"text": "\\ud800"}', "'text' has a lone surrogate"),
        (b'{"text": "\xff"}', None),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_a_bad_json_line_is_named(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b'\n{"text": "fine"}\n')
    expected = f"{re.escape(str(path))}:3: {message}" if message else "not UTF-8 at byte 28 "
    with pytest.raises(UserError, match=expected):
        documents(path)


NESTED = [{"doc": {"text": "a", "meta": {"body": "b"}}, "n": 1}, {"doc": None}, {"doc": {"text": None, "meta": None}}]


def test_a_field_may_lie_within_another(tmp_path):
    """In each format with fields; where one above it is null, the document is empty."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in NESTED))
    table = pa.Table.from_pylist(NESTED)
    pq.write_table(table, tmp_path / "a.parquet")
    write_arrow(tmp_path / "a.arrow", table)
    for name in ("a.jsonl", "a.parquet", "a.arrow"):
        path = tmp_path / name
        with find_sources([str(path)])[0].open() as stream:
            assert [chunk.text for chunk in read_chunks(stream, field="doc.text")] == ["a", "", ""], name
        assert documents(path, field="doc.meta.body") == ["b"]
        for field, found in (("doc.body", "'doc.text', 'doc.meta'"), ("body.text", "'doc', 'n'")):
            with pytest.raises(UserError, match=rf"no (key|column) '{field}' \(found {found}"):
                documents(path, field=field)
        for field in ("doc", "doc.meta", "n.text"):
            with pytest.raises(UserError, match=re.escape(str(path))):
                documents(path, field=field)


def test_a_field_with_a_dot_in_its_name_is_itself(tmp_path):
    rows = [{"doc.text": "whole", "doc": {"text": "inner"}}]
    (tmp_path / "a.jsonl").write_text(json.dumps(rows[0]))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    write_arrow(tmp_path / "a.arrow", pa.Table.from_pylist(rows))
    for name in ("a.jsonl", "a.parquet", "a.arrow"):
        assert documents(tmp_path / name, field="doc.text") == ["whole"]


def test_null_is_an_empty_document(tmp_path):
    rows = ["a", None, "", "b"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    write_parquet(tmp_path / "a.parquet", rows)
    for name in ("a.jsonl", "a.parquet"):
        assert documents(tmp_path / name) == ["a", "b"]
        (source,) = find_sources([str(tmp_path / name)])
        with source.open() as stream:
            assert list(read_chunks(stream)) == [(text or "", True, True) for text in rows], (
                "the null is counted as empty"
            )
    write_parquet(tmp_path / "none.parquet", [None, None])
    assert documents(tmp_path / "none.parquet") == []


# Parquet


def write_parquet(path, column, name="text"):
    pq.write_table(pa.table({"id": range(len(column)), name: column}), path, row_group_size=300)


def test_parquet(tmp_path):
    rows = [f"{TRICKY}{i}" * (i % 5) for i in range(1000)]
    for kind in (pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())):
        write_parquet(tmp_path / "a.parquet", pa.array(rows).cast(kind))
        assert documents(tmp_path / "a.parquet") == [row for row in rows if row]
    data = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "b.parquet.gz").write_bytes(gzip.compress(data))
    (tmp_path / "c.parquet.zst").write_bytes(zstandard.compress(data))
    write_parquet(tmp_path / "none.parquet", pa.array([], pa.string()))
    for name in ("a.parquet", "b.parquet.gz", "c.parquet.zst", "none.parquet"):
        with find_sources([str(tmp_path / name)])[0].open() as stream:
            texts = [chunk.text for chunk in read_chunks(stream) if chunk.ends_document]
        assert texts == (rows if name != "none.parquet" else [])
        assert stream.digest.hexdigest() == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()


def test_bad_parquet_is_named(tmp_path):
    path = tmp_path / "a.parquet"

    def refused(message, field="text"):
        with pytest.raises(UserError, match=f"{re.escape(str(path))}: {message}"):
            documents(path, field=field)

    write_parquet(path, ["a", "b"])
    refused("no column 'body' \\(found 'id', 'text'\\)", field="body")
    refused("column 'id' holds int64", field="id")
    pq.write_table(pa.Table.from_arrays([pa.array(["a"])] * 2, ["text", "text"]), path)
    refused("2 columns 'text'")
    bad = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")])
    write_parquet(path, bad)
    refused("'text' is not UTF-8")
    write_parquet(path, ["a" * 1000] * 1000)
    whole = path.read_bytes()
    for data in (b"", whole[:-10], b"PAR1" + whole[100:], b"not parquet at all"):
        path.write_bytes(data)
        refused("not a complete parquet file")


# Arrow


def write_arrow(path, table, new=pa.ipc.new_stream):
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=300)


def test_arrow(tmp_path):
    """As `datasets` writes it (a stream), with an index (Feather), and compressed within."""
    rows = [f"{TRICKY}{i}" * (i % 5) for i in range(1000)]
    for kind in (pa.string(), pa.large_string(), pa.string_view()):
        table = pa.table({"id": range(1000), "text": pa.array(rows, kind)})
        for new in (pa.ipc.new_stream, pa.ipc.new_file):
            write_arrow(tmp_path / "a.arrow", table, new)
            assert documents(tmp_path / "a.arrow") == [row for row in rows if row]
    pa.feather.write_feather(pa.table({"text": rows}), tmp_path / "b.arrow", compression="zstd")
    (tmp_path / "c.arrow.gz").write_bytes(gzip.compress((tmp_path / "a.arrow").read_bytes()))
    for name in ("b.arrow", "c.arrow.gz"):
        with find_sources([str(tmp_path / name)])[0].open() as stream:
            assert [chunk.text for chunk in read_chunks(stream) if chunk.ends_document] == rows
        assert stream.digest.hexdigest() == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()


def test_bad_arrow_is_named(tmp_path):
    path = tmp_path / "a.arrow"
    for new in (pa.ipc.new_stream, pa.ipc.new_file):
        write_arrow(path, pa.table({"text": ["a" * 1000] * 1000, "id": range(1000)}), new)
        whole = path.read_bytes()
        with pytest.raises(UserError, match=r"no column 'body' \(found 'text', 'id'\)"):
            documents(path, field="body")
        with pytest.raises(UserError, match="column 'id' holds int64"):
            documents(path, field="id")
        for data in (b"", whole[:-8], whole[:-10], whole[: len(whole) // 2], b"not Arrow at all"):
            path.write_bytes(data)
            with pytest.raises(UserError, match=f"{re.escape(str(path))}: not a complete Arrow file"):
                documents(path)
    write_arrow(path, pa.table({"text": ["\U0001f600" * 0x4321]}))
    whole, offsets = path.read_bytes(), bytes(4) + (4 * 0x4321).to_bytes(4, "little")
    before, _, after = whole.rpartition(offsets)  # further up, the same bytes say how long the text is
    beyond = before + b"\0\0\0\0\0\0\0\x7f" + after
    for data in (beyond, whole.replace(b"\x9f\x98\x80\xf0", b"\x9f\x98\xf0\xf0", 1)):
        path.write_bytes(data)  # a text that ends beyond the file; bad UTF-8
        with pytest.raises(UserError, match=re.escape(str(path))):
            documents(path)


# Finding sources


def test_sources_are_sorted_and_each_file_comes_once(tmp_path):
    for name in ("b.txt", "a.txt", "c.jsonl", "B.txt"):
        (tmp_path / name).write_text("x")
    (tmp_path / "d.txt").symlink_to(tmp_path / "a.txt")
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "folder.txt" / "e.txt").write_text("x")
    sources = find_sources([f"{tmp_path}/*.txt", str(tmp_path / "c.jsonl"), str(tmp_path / "a.txt")])
    names = [os.path.relpath(source.name, tmp_path) for source in sources]
    assert names == ["B.txt", "a.txt", "b.txt", "c.jsonl"]
    deep = find_sources([f"{tmp_path}/**/*.txt"])
    assert os.path.relpath(deep[-1].name, tmp_path) == "folder.txt/e.txt"


def test_a_file_whose_name_looks_like_a_glob_is_itself(tmp_path):
    (tmp_path / "a[1].txt").write_text("x")
    assert len(find_sources([str(tmp_path / "a[1].txt")])) == 1


def test_the_hint_for_a_folder_finds_its_files_whatever_its_name(tmp_path):
    folder = tmp_path / "it's [red] *"
    folder.mkdir()
    (folder / "a.txt").write_text("x")
    with pytest.raises(UserError, match="is a folder") as refused:
        find_sources([f"{folder}/"])
    (pattern,) = shlex.split(refused.value.hint.partition(": ")[2])
    assert len(find_sources([pattern])) == 1


def test_a_saved_data_set_is_its_files(tmp_path):
    """What `datasets` keeps beside them is not read twice; of several splits, each has a folder."""
    texts = [f"text {number}" for number in range(90)]
    saved = datasets.Dataset.from_list([{"id": i, "doc": {"text": text}} for i, text in enumerate(texts)])
    splits = datasets.DatasetDict({"train": saved, "test": saved.select(range(80, 90))})
    splits.save_to_disk(tmp_path / "saved", num_shards={"train": 3, "test": 1})
    write_arrow(tmp_path / "saved/train/cache-0123.arrow", pa.Table.from_pylist([{"doc": {"text": "twice"}}]))
    with pytest.raises(UserError, match="found the splits test, train") as refused:
        find_sources([str(tmp_path / "saved")])
    (named,) = shlex.split(refused.value.hint.partition(": ")[2])
    for folder, expected in ((tmp_path / "saved/train", texts), (named, texts[80:])):
        found = [each for source in find_sources([str(folder)]) for each in documents(source.name, field="doc.text")]
        assert found == expected


@pytest.mark.parametrize("name", ["deep/a.jsonl.xz", "a.parquet", "data-00000.arrow", "b.txt.bz2"])
def test_the_hint_for_any_folder_leads_to_files_that_are_read(tmp_path, name):
    path = tmp_path / "folder" / name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    (tmp_path / "folder/dataset_info.json").write_text("{}")
    with pytest.raises(UserError, match="is a folder") as refused:
        find_sources([str(tmp_path / "folder")])
    (pattern,) = shlex.split(refused.value.hint.partition(": ")[2])
    assert [source.name for source in find_sources([pattern])] == [str(path)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.txt", "No such file"),
        ("*.nothing", "matches no file"),
        (".", "is a folder"),
        ("pipe.txt", "not a regular file"),
        ("loop.txt", "cannot read"),
        ("what.doc", "unknown kind of file"),
        ("what.gz", "unknown kind of file"),
    ],
)
def test_what_cannot_be_read_is_refused_at_once(tmp_path, name, message):
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "loop.txt").symlink_to("loop.txt")
    (tmp_path / "what.doc").write_text("x")
    (tmp_path / "what.gz").write_bytes(gzip.compress(b"x"))
    with pytest.raises(UserError, match=message):
        find_sources([str(tmp_path / name)])


def test_a_full_temporary_folder_is_named(tmp_path, monkeypatch):
    """Also where all that is written fits its buffer."""
    (tmp_path / "a.txt").write_text("short")
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda: open("/dev/full", "r+b"))  # noqa: SIM115
    (source,) = find_sources([str(tmp_path / "a.txt")])
    with source.open() as stream, pytest.raises(UserError, match=f"cannot write {re.escape(tempfile.gettempdir())}"):
        temporary_copy(stream, decompress=False)
