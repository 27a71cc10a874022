"""How reports end: one pair of options, files before the result, warnings after it."""

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest

from pkmlm.cli.show import Output
from pkmlm.console import Column, Table
from pkmlm.errors import UserError
from tests import PATIENCE
from tests.cli.test_help import ALL
from tests.conftest import ROOT


def options_of(command: click.Command, name: str) -> list[click.Option]:
    return [each for each in command.params if isinstance(each, click.Option) and name in each.opts]


def test_every_command_with_json_takes_it_as_a_form_of_its_own():
    for path, command in ALL:
        forms = [option for option in options_of(command, "--format") if isinstance(option.type, click.Choice)]
        if path == ("tokenize",):  # whose --format is that of the input
            continue
        for option in forms:
            if "json" in option.type.choices:
                (short,) = options_of(command, "--json")
                assert (short.name, short.flag_value) == (option.name, "json"), path
        assert bool(options_of(command, "--json")) == any("json" in option.type.choices for option in forms), path


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
    assert "does not occur" in warning
    assert error.startswith("error: ")
    assert done.returncode == 1
