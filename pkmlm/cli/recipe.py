"""`pkmlm recipe`: check recipes, show one in full, list every key."""

import os
import re
import shutil
import traceback
from typing import TYPE_CHECKING

import click

from pkmlm.cli.options import PATH, format_option, set_option
from pkmlm.cli.streams import warn
from pkmlm.errors import UserError, printable

if TYPE_CHECKING:
    from pkmlm.console import Format
    from pkmlm.recipe.dump import Key
    from pkmlm.recipe.schema import Recipe


@click.group(short_help="Check a recipe, show it in full, list every key.")
def command() -> None:
    """Check a recipe, show it in full, list every key.

    A recipe is a YAML file that says what to train and how. `base: other.yaml` in it inherits another recipe.

    \b
    Examples:
      pkmlm recipe check recipes/*.yaml
      pkmlm recipe show recipes/demo.yaml -s model.memory.kind=none
      pkmlm recipe keys
    """


@command.command()
@click.argument("files", nargs=-1, required=True, type=PATH, metavar="FILE...")
@set_option
@click.pass_obj
def check(settings: dict[str, bool], files: tuple[str, ...], overrides: tuple[str, ...]) -> int:
    """Check recipes: keys, types, and what must hold between them.

    Names the line of the first mistake in each, and exits with 2 if there is one. Warns of what is allowed and hardly
    meant: keys without effect, rates that rise to the end.

    \b
    Examples:
      pkmlm recipe check mine.yaml
      pkmlm recipe check recipes/*/*.yaml
      pkmlm recipe check mine.yaml -s model.layers=12
    """
    from pkmlm.cli import print_error

    code = 0
    for file in files:
        try:
            check_one(file, overrides)
        except UserError as error:
            if not re.search(rf"(?<!\S){re.escape(os.path.normpath(file))}(?![^\s:])", error.message):  # but its base
                error.message = f"{file}: {error.message}"
            code = max(code, print_error(error))
            if settings["verbose"]:
                traceback.print_exception(error)
    return code


def check_one(file: str, overrides: tuple[str, ...]) -> None:
    """Say that a recipe is right, and what is to be doubted in it.

    Raises:
        UserError: it is wrong.
    """
    from pkmlm.recipe.doubts import doubts, idle_keys
    from pkmlm.recipe.load import load_recipe

    recipe = load_recipe(file, overrides)
    click.echo(printable(f"ok  {file}: {summary(recipe)}"))
    for text in doubts(recipe) + idle_keys(recipe, file, overrides):
        warn(f"{file}: {text}")


def summary(recipe: "Recipe") -> str:
    """A recipe in one line."""
    from pkmlm.recipe.check import memory_layers

    model, memory = recipe.model, recipe.model.memory
    parts = [f"{recipe.name}, {model.layers} layer{'s' * (model.layers > 1)} of {model.dim}"]
    if model.attention != "softmax":
        parts.append(f"{model.attention} attention")
    if model.projections == "hash":
        parts.append(f"hash tables of {model.hash.bits} bits")
    if memory.kind != "none":
        layers = ", ".join(f"{layer}{'+' * beside}" for layer, beside in memory_layers(model).items())
        parts.append(f"{memory.kind} memory of {memory.slots:,} slots at {layers}")
    steps = recipe.train.steps
    parts.append(f"{steps:,} step{'s' * (steps > 1)} of {recipe.train.batch_tokens:,} tokens")
    return ", ".join(parts)


@command.command()
@click.argument("file", type=PATH, metavar="FILE")
@set_option
def show(file: str, overrides: tuple[str, ...]) -> None:
    """Print a recipe with everything that it inherits and every default.

    \b
    Examples:
      pkmlm recipe show recipes/demo.yaml
      pkmlm recipe show recipes/demo.yaml -s optim.lr=1e-3 > mine.yaml
    """
    from pkmlm.recipe.dump import dump_recipe
    from pkmlm.recipe.load import load_recipe

    click.echo(dump_recipe(load_recipe(file, overrides)), nl=False)


@command.command()
@format_option
def keys(format: "Format") -> None:
    """List every key of a recipe with its type, default and meaning.

    \b
    Examples:
      pkmlm recipe keys
      pkmlm recipe keys --format md > keys.md
    """
    from pkmlm.console import Column, Table
    from pkmlm.recipe import dump

    if format == "table":
        click.echo(by_section(dump.keys()), nl=False)
    else:
        columns = [Column("key"), Column("type"), Column("default"), Column("help")]
        click.echo(Table("", columns, dump.keys()).render(format), nl=False)


def by_section(keys: "list[Key]") -> str:
    """The keys as a terminal shows them: by section, with default, meaning and type."""
    formatter = click.HelpFormatter(width=min(100, shutil.get_terminal_size().columns))
    sections: dict[str, list[tuple[str, str]]] = {}
    for key in keys:
        section, _, leaf = key.name.rpartition(".")
        sections.setdefault(section, []).append((f"{leaf}: {key.default}", f"{key.help} [{key.type}]"))
    for section, rows in sections.items():
        with formatter.section(section or "(top level)"):
            formatter.write_dl(rows, col_max=32)
    return formatter.getvalue().lstrip()
