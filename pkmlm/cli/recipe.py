"""`pkmlm recipe`: check recipes, show one in full, list every key, print the schema."""

import json
import shutil
import traceback
from pathlib import Path

import click

from pkmlm.cli.options import RECIPE, set_option
from pkmlm.cli.show import Output, report_options
from pkmlm.console import Column, Table, number, warn
from pkmlm.errors import UserError, printable


@click.group()
def command() -> None:
    """Check a recipe, show it in full, list recipes and keys, print the schema.

    A recipe is a YAML file that says what to train and how. `base: other.yaml` in it inherits another recipe.

    \b
    Examples:
      pkmlm recipe check mine.yaml
      pkmlm recipe show demo -s model.memories=null
      pkmlm recipe keys
    """


@command.command()
@click.argument("files", nargs=-1, required=True, type=RECIPE, metavar="RECIPE...")
@set_option
@click.pass_obj
def check(settings: dict[str, bool], files: tuple[str, ...], overrides: tuple[str, ...]) -> int:
    """Check recipes: their keys, types, ranges, and what must hold between keys.

    Names the line of the first mistake in each file, and exits with 2 if there is one. Warns about what is valid but
    probably not meant, such as a warm-up longer than training.

    \b
    Examples:
      pkmlm recipe check mine.yaml
      pkmlm recipe check recipes/*.yaml
      pkmlm recipe check mine.yaml -s model.layers=12
    """
    from pkmlm.cli import print_error
    from pkmlm.recipe.load import load_recipe
    from pkmlm.recipe.warnings import warnings

    code = 0
    for file in files:
        try:
            recipe = load_recipe(file, overrides)
            click.echo(printable(f"ok  {file}: {recipe.name}"))
            for text in warnings(recipe, counted=recipe.train.epochs is None):
                warn(f"{file}: {text}")
        except UserError as error:
            if f" {Path(file)}" not in f" {error.message}":  # the mistake is in an override or in the file's base
                error.message = f"{file}: {error.message}"
            code = max(code, print_error(error))
            if settings["verbose"]:
                traceback.print_exception(error)
    return code


@command.command()
@click.argument("file", type=RECIPE, metavar="RECIPE")
@set_option
def show(file: str, overrides: tuple[str, ...]) -> None:
    """Print a recipe with everything that it inherits and every default.

    \b
    Examples:
      pkmlm recipe show demo > mine.yaml
      pkmlm recipe show my.yaml -s optim.lr=1e-3
    """
    from pkmlm.recipe.load import load_recipe
    from pkmlm.recipe.schema import dump_recipe

    click.echo(dump_recipe(load_recipe(file, overrides)), nl=False)


@command.command("list")
def list_recipes() -> None:
    """List the recipes and grids that are installed with the package.

    Commands take such a name wherever they take a file. A file of that name takes precedence.

    \b
    Examples:
      pkmlm recipe list
      pkmlm train demo -o runs/demo
    """
    from pkmlm.recipe.load import load_recipe
    from pkmlm.recipe.nodes import parse, yaml_text
    from pkmlm.recipe.shipped import find_recipe, shipped_names

    recipes, grids = [], []
    for name in shipped_names():
        path = find_recipe(name)
        tree = parse(yaml_text(path), name)
        keys = tree.value if isinstance(tree.value, dict) else {}
        if "axes" in keys:
            grids.append([name, keys["title"].value])
        else:
            model = load_recipe(path).model
            recipes.append([name, model.layers, model.dim, " ".join(model.kinds) or "none", model.attention])
    columns = [Column("Recipe"), number("Layers"), number("Width"), Column("Memory"), Column("Attention")]
    tables = [Table("", columns, recipes), Table("", [Column("Grid"), Column("Title")], grids)]
    click.echo("\n".join(table.render() for table in tables), nl=False)


@command.command()
@report_options()
def keys(out: Output) -> None:
    """List every key of a recipe with its type, default and meaning.

    <product-key> stands for the name of a memory of that kind: -s model.memories.pkm.topk=16.

    \b
    Examples:
      pkmlm recipe keys
      pkmlm recipe keys --format md > keys.md
      pkmlm recipe keys --json | jq
    """
    from pkmlm.recipe.schema import list_keys

    names = ("key", "type", "default", "help")
    record = [dict(zip(names, key, strict=True)) for key in list_keys()]
    table = Table("", [Column(name) for name in names], list_keys())
    out.show(record, [keys_by_section() if out.shown_as == "table" else table], csv=table)


def keys_by_section() -> str:
    """Every key of a recipe, by section, as a terminal shows them. What kinds of memories share is shown once."""
    from pkmlm.recipe.schema import Key, list_keys

    sections: dict[str, list[Key]] = {}
    for key in list_keys():
        section, _, leaf = key.name.rpartition(".")
        sections.setdefault(section, []).append(key._replace(name=leaf))
    formatter = click.HelpFormatter(width=min(100, shutil.get_terminal_size().columns))
    told: dict[tuple[str, Key], str] = {}
    for section, keys in sections.items():
        start, _, inner = section.partition(">")
        kind = start.partition("<")[2]  # empty outside memories
        rows: list[tuple[str, str]] = []
        again: dict[str, list[str]] = {}
        for key in keys:
            first = told.setdefault((inner, key), kind) if kind else kind
            if first == kind:
                rows.append((f"{key.name}: {key.default}", f"{key.help} [{key.type}]"))
            else:
                again.setdefault(first, []).append(key.name)
        rows += [(f"as of <{first}>", ", ".join(names)) for first, names in again.items()]
        title = f"{section} (<{kind}>: the name of a memory of that kind)" if kind and not inner else section
        with formatter.section(title or "(top level)"):
            formatter.write_dl(rows, col_max=32)
    return formatter.getvalue().strip()


@command.command()
def schema() -> None:
    """Print the JSON Schema of recipes: types, ranges, choices, defaults and help of all keys.

    An editor with a YAML language server completes and checks a recipe whose first line names a file with the schema:
    `# yaml-language-server: $schema=schema.json`.

    \b
    Examples:
      pkmlm recipe schema > schema.json
    """
    from pkmlm.recipe.schema import json_schema

    click.echo(json.dumps(json_schema(), indent=2))
