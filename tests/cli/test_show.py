"""How reports end: one pair of options, files before the result, warnings after it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from pkmlm.cli.show import Output
from pkmlm.console import Column, Table
from pkmlm.errors import UserError
from tests import PATIENCE
from tests.cli.test_help import ALL
from tests.conftest import ROOT, pkmlm

SMALL = ["-s", "model.vocab_size=600", "-s", "model.layers=1", "-s", "model.memories.pkm.layers=1"]
ONCE = ["--rounds", 1, "--only"]
REPORTS: dict[str, list[object]] = {  # RUN and RECIPE stand for a trained run and its recipe
    "eval": ["RUN"],
    "usage-report": ["RUN"],
    "slots": ["RUN", "--top", 2],
    "probe": ["RUN", "--fit-tokens", 200],
    "cost": ["RECIPE"],
    "compare": ["RUN"],
    "sweep": ["memoryformer/grids/figure-1", "--dry-run"],
    "bench memory": [
        "--dim",
        16,
        "--heads",
        2,
        "--topk",
        4,
        "--key-dim",
        8,
        "--tokens",
        8,
        "--slots",
        64,
        *ONCE,
        "ffn",
    ],
    "bench generate": ["RECIPE", *SMALL, "--tokens", 2, "--batch", 1, *ONCE, "dense"],
    "bench train": ["RECIPE", *SMALL, *ONCE, "dense"],
    "recipe keys": [],
    "doctor": [],
}
MEASURED = ("bench", "doctor")  # numbers that are not the same twice


def options_of(command: click.Command, name: str) -> list[click.Option]:
    return [each for each in command.params if isinstance(each, click.Option) and name in each.opts]


def without_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_numbers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [without_numbers(each) for each in value]
    return None if isinstance(value, int | float) else value


def test_every_command_with_json_is_tried_here():
    found = set()
    for path, command in ALL:
        formats = [option.type for option in options_of(command, "--format")]
        if any(isinstance(each, click.Choice) and "json" in each.choices for each in formats):
            assert options_of(command, "--json"), path
            found.add(" ".join(path))
        elif options_of(command, "--json"):
            assert path == ("tokenize",), "only there, --format is that of the input"
    assert found == REPORTS.keys()


@pytest.mark.parametrize("command", REPORTS)
def test_json_has_two_spellings(command, trained):
    run = trained("product-key")
    places = {"RUN": run, "RECIPE": run.with_suffix(".yaml")}
    words = [*command.split(), *(places.get(str(word), word) for word in REPORTS[command])]
    short, long = (json.loads(pkmlm(*words, "-q", *form).stdout) for form in (["--json"], ["--format", "json"]))
    if command.startswith(MEASURED):
        short, long = without_numbers(short), without_numbers(long)
    assert short == long
    assert pkmlm(*words, "-q").stdout.count("\n") > 3, "a table"


def test_lines_between_tables_are_text_in_every_form():
    table = Table("", [Column("a")], [["x"]])
    shown = {}
    for form in ("table", "md", "latex"):
        said = Output(form)._text({}, [table, "one\n\ntwo"], None)
        assert said.startswith(table.render(form))
        shown[form] = said.removeprefix(table.render(form))
    assert shown == {"table": "\none\n\ntwo\n", "md": "\n- one\n\n- two\n", "latex": "\n% one\n\n% two\n"}


def test_a_file_that_cannot_be_written_costs_no_result(capsys):
    warnings = ["early"]

    def write() -> None:
        warnings.append("late")
        raise UserError("no room", exit_code=1)

    with pytest.raises(UserError, match="no room"):
        Output("json").show({"a": 1}, [], write=write, warnings=warnings)
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"a": 1}
    assert [line.split()[-1] for line in shown.err.splitlines()] == ["early", "late"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_warnings_are_told_though_the_result_cannot_be_printed(trained, tmp_path):
    text = tmp_path / "one.txt"
    text.write_text("One document.\n")
    words = ["slots", str(trained("product-key")), "--text", str(text), "--separator", "@", "--top", "1", "-q"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "pkmlm", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            timeout=PATIENCE,
        )
    warning, error = done.stderr.splitlines()
    assert warning.startswith("warning: ")
    assert "divides nothing" in warning
    assert error.startswith("error: ")
    assert done.returncode == 1
