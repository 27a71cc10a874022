"""What `bench generate` and `bench train` share on the command line: which models are timed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from pkmlm.bench import MODELS
from pkmlm.cli.bench.lists import numbers_of_keys, some_of
from pkmlm.errors import UserError

if TYPE_CHECKING:
    from pkmlm.bench.models import Variant
    from pkmlm.console import Table
    from pkmlm.recipe.schema import Recipe


only_option = click.option(
    "--only",
    "kinds",
    metavar="A,B",
    callback=some_of(MODELS),
    help=f"Some of {', '.join(MODELS)}. Default: all there are.",
)
slots_option = click.option(
    "--slots",
    "num_keys",
    metavar="N,N",
    callback=numbers_of_keys,
    help="Sizes of the memory, a model for each: 16k,1M. Default: the recipe's.",
)


def chosen_models(recipe: "Recipe", num_keys: tuple[int, ...], kinds: tuple[str, ...] | None) -> "list[Variant]":
    """The models of a recipe; without `--only` all that it can be."""
    from pkmlm.bench.models import variants
    from pkmlm.cost_tables import vocab_size_of

    if kinds is None:
        possible = {
            "memory": recipe.model.memory.kind != "none",
            "hash": recipe.model.dim % recipe.model.hash.bits == 0,
        }
        kinds = tuple(kind for kind in MODELS if possible.get(kind, True))
    if num_keys and "memory" not in kinds:
        raise UserError("--slots: no model here has a memory", "leave it out")
    return variants(recipe, vocab_size_of(recipe), num_keys, kinds)


def reading_table(models: "Sequence[Variant]", seconds: Sequence[float], bandwidth: float) -> "Table":
    """How fast one token of one sequence reads the weights that it needs, beside a copy.

    Args:
        seconds: of each model, for one token.
        bandwidth: of a copy, in bytes a second.
    """
    from pkmlm.console import Column, Table, number

    columns = [Column("model"), number("MB read", "{:,.1f}"), number("ms", "{:,.2f}")]
    columns += [number("GB/s", "{:,.1f}"), number("of a copy", "{:.0%}")]
    rows = []
    for model, taken in zip(models, seconds, strict=True):
        speed = model.read / taken
        rows.append([model.name, model.read / 1e6, taken * 1e3, speed / 1e9, speed / bandwidth])
    return Table(f"One token of one sequence; a copy: {bandwidth / 1e9:.1f} GB/s", columns, rows)
