"""Tables: every format says the same, nothing is cut, nothing in a cell is taken for markup."""

import csv
import io
from typing import get_args

import pytest

from pkmlm.console import Column, Format, Table, number
from pkmlm.memory.address import entry_of
from pkmlm.report.tables import background_table

COLUMNS = [
    Column("Run"),
    Column("Slots", "right", "{:,}"),
    Column("Usage", "right", "{:.1%}"),
    Column("KL (nats)", "right", "{:.3f}"),
]
ROWS = [["a", 262_144, 0.97949, None], ["longer name", 16, 1.0, 0.68123]]


@pytest.fixture(autouse=True)
def width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the terminal."""
    monkeypatch.setenv("COLUMNS", "80")


def test_text_aligns_and_shows_missing_values() -> None:
    lines = Table("Title", COLUMNS, ROWS).render().splitlines()
    assert lines[0] == "Title"
    assert lines[2].split() == ["Run", "Slots", "Usage", "KL", "(nats)"]
    assert set(lines[3]) == {"-"}
    assert lines[4].split() == ["a", "262,144", "97.9%", "-"]
    assert lines[4].index("262,144") + 7 == lines[5].index("16") + 2, "numbers end in one column"
    assert all(len(line) <= 80 and line == line.rstrip() for line in lines)


def test_text_never_cuts_a_number_and_wraps_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    for many in (1, 8):  # more columns than the width has room for
        columns = [*COLUMNS, Column("Text")] * many
        text = Table("", columns, [["r", 10**15, 1.0, 12345.678, "word " * 40] * many]).render()
        assert text.count("1,000,000,000,000,000") == text.count("12345.678") == many
        assert text.count("Slots") == many
        assert text.count("word") == 40 * many


@pytest.mark.parametrize("width", [8, 40, 64, 80, 120])
def test_numbers_and_names_are_whole_and_spreads_fold(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    columns = [Column("model"), *(number(f"perplexity {n}") for n in range(6))]
    text = Table("", columns, [["memory", *["118.89 +-0.23"] * 6]] * 2).render()
    words = text.split()
    assert (words.count("118.89"), words.count("+-0.23"), words.count("memory")) == (12, 12, 2)
    assert words.count("perplexity") == 6
    assert ("118.89 +-0.23" in text) is (width >= 6 + 6 * 15)


def test_a_long_name_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "product-key-0.003-seed-1-very-long-name"
    table = Table("", [Column("Run"), *COLUMNS[1:]], [[name, 262_144, 0.97949, None]])
    for width in ("40", "80"):
        monkeypatch.setenv("COLUMNS", width)
        lines = table.render().splitlines()
        start = lines.index(next(line for line in lines if line.startswith("product")))
        assert "".join(line.split()[0] for line in lines[start:]) == name
        assert max(map(len, lines)) <= int(width)
    monkeypatch.setenv("COLUMNS", "16")
    assert "0123456789abcdef\n0123456789" in Table("", [Column("Run")], [["0123456789abcdef" * 2]]).render()


def test_no_colours_even_where_they_are_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = Table("Title", COLUMNS, ROWS, "note").render()
    assert text.isascii()
    assert text.replace("\n", "").isprintable()


def test_floats_from_a_billion_on_are_short_in_tables_alone() -> None:
    columns = [Column("count", "right", "{:,}"), Column("ppl", "right", "{:,.3f}")]
    table = Table("", columns, [[10**12, 2.2754e49], [1, 999_999_999.5]])
    for format in ("table", "md"):
        text = table.render(format)
        assert [found in text for found in ("1,000,000,000,000", "2.28e+49", "999,999,999.500")] == [True] * 3
    assert "2.2754e+49" in table.render("csv")


def test_markup_and_control_characters_stay_text() -> None:
    rows = [["[red]x[/red] \x1b[31m", 1, 0.0, 0.0]]
    for format in get_args(Format):
        text = Table("t \x1b]0;", COLUMNS, rows).render(format)
        assert "\x1b" not in text
        assert "red" in text
    assert "[red]x[/red] \\x1b[31m" in Table("", COLUMNS, rows).render()
    assert "[red]name" in Table("", [Column("[red]name")], []).render()
    for format in ("table", "md", "csv"):
        assert Table("", [Column("a\x1b[31m\nb")], []).render(format).count("\\x1b") == 1


def test_markdown() -> None:
    lines = Table("Title", COLUMNS, [["a|b*", 1000, 0.5, None]]).render("md").splitlines()
    assert lines == [
        "**Title**",
        "",
        "| Run | Slots | Usage | KL (nats) |",
        "|---|---:|---:|---:|",
        r"| a\|b\* | 1,000 | 50.0% | - |",
    ]


def test_latex() -> None:
    columns = [Column("Run_a"), number("x %"), number("y")]
    text = Table("A & B", columns, [["a_{1,2}#", "0.5 +-0.1", -1.5], ["~$^\\", "7%", None]], "a note").render("latex")
    lines = text.splitlines()
    assert r"\caption{A \& B. a note}" in lines
    assert r"\begin{tabular}{lrr}" in lines
    rows = lines[lines.index(r"\toprule") : lines.index(r"\end{tabular}")]
    assert rows == [
        r"\toprule",
        r"Run\_a & x \% & y \\",
        r"\midrule",
        r"a\_\{1,2\}\# & 0.5 $\pm\,$0.1 & $-$1.5 \\",
        r"$\sim$\$\textasciicircum{}\textbackslash{} & 7\% & -- \\",
        r"\bottomrule",
    ]


def test_csv_keeps_every_digit() -> None:
    table = Table("Title", COLUMNS, ROWS)
    assert list(csv.reader(io.StringIO(table.render("csv")))) == [
        ["Run", "Slots", "Usage", "KL (nats)"],
        ["a", "262144", "0.97949", ""],
        ["longer name", "16", "1.0", "0.68123"],
    ]


@pytest.mark.parametrize("format", get_args(Format))
def test_no_rows_and_wrong_rows(format: str) -> None:
    assert Table("", COLUMNS, []).render(format).endswith("\n")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="zip"):
        Table("", COLUMNS, [["too", "short"]]).render(format if format != "csv" else "md")  # type: ignore[arg-type]


def test_a_table_is_called_by_its_memory() -> None:
    facts = {"slots": 4, "read": 2, "every_batch": 1, "mean_batches": 0.5}
    tables = [
        {"table": "blocks.2.parts.memory_pkm.values", **entry_of("pkm", 3, "product-key"), **facts},
        {"table": "blocks.0.attention.qkv.values", **entry_of("tables", 1, "hash", "qkv"), **facts},
        {"table": "blocks.9.parts.memory_experts.inputs", **entry_of("experts", 10, "peer"), **facts},
        {"table": "pools.memory_plus.values", **entry_of("plus", None, "product-key"), **facts},
    ]
    record = {"batches": 2, "batch_tokens": 9, "run": "r", "step": 1, "split": "train", "tables": tables}
    labels = [row[0] for row in background_table(record).rows]
    assert labels == ["3 pkm", "1 tables qkv", "10 experts inputs", "plus"]
