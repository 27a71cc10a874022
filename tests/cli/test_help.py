"""Help: every command has it, with examples, at once."""

import os
import shutil
import subprocess
import sys

import click
import pytest
from click.shell_completion import BashComplete

from pkmlm.cli import COMMANDS, cli
from pkmlm.errors import UserError
from tests import PATIENCE
from tests.conftest import ROOT, pkmlm


def commands(group: click.Group, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], click.Command]]:
    found = []
    for name in group.list_commands(click.Context(group)):
        _, command, _ = group.resolve_command(click.Context(group), [name])
        found.append(((*path, name), command))
        if isinstance(command, click.Group):
            found += commands(command, (*path, name))
    return found


ALL = commands(cli)


@pytest.mark.parametrize(("path", "command"), ALL, ids=[" ".join(path) for path, _ in ALL])
def test_every_command_has_help_with_examples(path, command):
    said = pkmlm(*path, "--help").stdout
    assert said == pkmlm(*path, "-h").stdout == pkmlm(*path, "-q", "-v", "-h").stdout
    assert "Examples:" in said
    assert f"pkmlm {path[0]}" in said
    assert all(len(line) <= 80 for line in said.splitlines()), max(said.splitlines(), key=len)
    assert "RANGE" not in said
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.name


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_in_the_readme(name):
    assert f"pkmlm {name}" in (ROOT / "README.md").read_text()


def test_help_needs_nothing_heavy_and_comes_at_once():
    code = """
import sys
from contextlib import suppress

import pkmlm.cli

for words in ([], ["train"], ["usage-report"], ["tokenize"], ["bench", "memory"], ["sweep"]):
    sys.argv = ["pkmlm", *words, "--help"]
    with suppress(SystemExit):
        pkmlm.cli.main()
    print(words, {"torch", "numpy", "sentencepiece", "pyarrow", "rich"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE)
    assert done.stdout.count("Usage: ") == done.stdout.count("] set()\n") == 6


def test_versions_and_wrong_words():
    assert pkmlm("--version").stdout.startswith("pkmlm 0.")
    for words, command, names in (
        (["trian"], "", ("trian", "'train'")),
        (["train", "--frob\x1b"], "train ", ("'--frob\\x1b'",)),
        (["tokenize", "a.txt", "-o", "b", "--jobs", "0"], "tokenize ", ("--jobs", "1024")),
    ):
        error, hint = pkmlm(*words, code=2).stderr.splitlines()
        assert error.startswith("error: ")
        assert all(name in error for name in names)
        assert hint.startswith(f"hint: `pkmlm {command}--help`")
    assert pkmlm(code=2).stderr.startswith("Usage: pkmlm [OPTIONS] COMMAND")


@pytest.mark.parametrize(
    ("option", "key"),
    [("--lr", "optim.lr"), ("--micro-batch", "train.micro_batch"), ("--topk", "model.memories.NAME.topk")],
)
def test_an_option_that_is_a_recipes_key_is_told_as_one(option, key):
    assert pkmlm("train", "recipes/demo.yaml", option, "1", code=2).stderr.count(f"-s {key}=") == 1
    assert "-s " not in pkmlm("eval", "runs/demo", option, "1", code=2).stderr, "it takes no keys"


def test_a_shell_completes_names_of_files():
    """click's completion offers none by itself, and takes the shell's own away."""
    complete = BashComplete(cli, {}, "pkmlm", "_PKMLM_COMPLETE").get_completions
    names = {"RUN", "DIR", "FILE", "RECIPE", "GRID", "TRAIN"}
    for path, command in ALL:
        for parameter in command.params:
            if (parameter.metavar or "").rstrip(".") in names:
                before = parameter.opts[:1] if isinstance(parameter, click.Option) else []
                (found,) = complete([*path, *before], "ab")
                assert (found.type, found.value) == ("file", "ab"), (path, parameter.name)
    (found,) = complete(["tokenize", "a.txt", "--valid", "b.txt"], "c")
    assert found.type == "file"


@pytest.mark.parametrize(
    "words",
    [
        ["-v", "trian"],
        ["recipe", "check", "nowhere.yaml", "-v"],
    ],
)
def test_verbose_shows_where_an_error_arose_wherever_it_stands(words):
    command = [sys.executable, "-m", "pkmlm", *words]
    said = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE).stderr
    short = pkmlm(*(word for word in words if word != "-v"), code=2).stderr
    assert said.startswith(short + "Traceback (most recent call last):\n")
    assert len(short.splitlines()) <= 2


def test_quiet_may_stand_before_the_command(tmp_path, write_recipe):
    recipe = write_recipe(tmp_path, "product-key")
    words = ["train", recipe, "-s", "train.steps=1", "-s", "optim.warmup_steps=0"]
    assert pkmlm("-q", *words, "-o", tmp_path / "before").stderr == ""
    assert pkmlm(*words, "-o", tmp_path / "behind", "-q").stderr == ""
    assert "training in" in pkmlm(*words, "-o", tmp_path / "neither").stderr


@pytest.mark.parametrize(("words", "quiet"), [([], False), (["-q"], True)])
def test_quiet_reaches_commands_of_commands(monkeypatch, words, quiet):
    def status_line(quiet):
        raise UserError(f"quiet: {quiet}")

    monkeypatch.setattr("pkmlm.cli.bench.status_line", status_line)
    assert pkmlm(*words, "bench", "memory", "--slots", "16k", code=2).stderr == f"error: quiet: {quiet}\n"


def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m pkmlm -v recipe keys | true"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE
    )
    assert done.stderr == ""
    assert done.returncode == 0


def test_a_link_to_the_script_runs_its_checkout(tmp_path, foreign_code):
    """And neither what lies in the working folder nor what PYTHONPATH names."""
    checkout = tmp_path / "a checkout"
    for part in ("bin", "pkmlm"):
        (checkout / part).mkdir(parents=True)
    shutil.copy(ROOT / "bin" / "pkmlm", checkout / "bin")
    (checkout / "pkmlm" / "__init__.py").write_text("")
    (checkout / "pkmlm" / "cli.py").write_text("import random, sys\ndef main(): print(__file__, sys.argv[1:])\n")
    (tmp_path / "link").symlink_to(checkout / "bin" / "pkmlm")
    for safe in ({}, {"PYTHONSAFEPATH": "1"}):
        where = os.environ | {"PYTHONPATH": str(ROOT)} | safe
        words = [tmp_path / "link", "a b", "--version"]
        done = subprocess.run(words, cwd=foreign_code, env=where, capture_output=True, text=True, timeout=PATIENCE)
        assert done.stdout == f"{checkout / 'pkmlm' / 'cli.py'} ['a b', '--version']\n", done.stderr
