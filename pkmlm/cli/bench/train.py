"""`pkmlm bench train`: whole models taking training steps."""

import json
import sys
from typing import TYPE_CHECKING

import click

from pkmlm.bench import MODEL_PHASES
from pkmlm.cli.bench.models import chosen_models, only_option, reading_table, slots_option
from pkmlm.cli.bench.waiting import waiting
from pkmlm.cli.options import PATH, json_option, quiet_option, set_option

if TYPE_CHECKING:
    from pkmlm.bench.train import TrainingTimes
    from pkmlm.console import Table


@click.command("train", short_help="Whole models taking training steps.")
@click.argument("recipe_file", type=PATH, metavar="RECIPE")
@set_option
@slots_option
@only_option
@click.option(
    "--rounds", default=5, show_default=True, metavar="N", type=click.IntRange(min=1), help="Times that each is timed."
)
@json_option
@quiet_option
def command(
    recipe_file: str,
    overrides: tuple[str, ...],
    num_keys: tuple[int, ...],
    kinds: tuple[str, ...] | None,
    rounds: int,
    as_json: bool,
    quiet: bool,
) -> None:
    """Whole models of RECIPE's shape training: forward, whole step, and one token at batch 1 (softmax attention only).

    dense: its layers without a memory; memory: with it; double: twice the layers; hash: a MemoryFormer. Random
    weights and tokens; a step is `pkmlm train`'s own, in the recipe's precision, a forward that of one micro-batch.
    M ops are millions of multiply-adds of a token's forward, MB the weights that it reads in fp32.

    \b
    Examples:
      pkmlm bench train recipes/demo.yaml -s model.vocab_size=4096
      pkmlm bench train recipes/memoryformer/tiny.yaml --only dense,hash \\
        -s train.batch_tokens=2048 -s train.micro_batch=1
    """
    from pkmlm.bench.bandwidth import bandwidth
    from pkmlm.bench.train import time_training
    from pkmlm.device import machine, select_device
    from pkmlm.recipe.load import load_recipe

    recipe = load_recipe(recipe_file, overrides)
    precision = select_device(recipe.train.precision).precision
    chosen = chosen_models(recipe, num_keys, kinds)
    with waiting(quiet) as say:
        times = time_training(chosen, precision, rounds, say)
    if as_json:
        click.echo(json.dumps({"machine": machine(), "precision": precision, **times.as_json()}, indent=2))
        return
    sys.stdout.write(training_table(recipe.name, precision, times).render())
    if "token" in times.phases:
        seconds = [times.times[index, "token"].median for index in range(len(chosen))]
        sys.stdout.write("\n" + reading_table(chosen, seconds, bandwidth(times.copy)).render())


def training_table(name: str, precision: str, times: "TrainingTimes") -> "Table":
    """Milliseconds, and as a ratio to the first model."""
    from pkmlm.console import Column, Table, number

    columns = [Column("model"), Column("time of"), *(number(name, "{:,.1f}") for name in ("ms", "min", "max"))]
    columns += [number("x first", "{:.2f}"), number("M ops", "{:,.1f}"), number("MB read", "{:,.1f}")]
    rows = []
    for phase in times.phases:
        for index, model in enumerate(times.models):
            timing = times.times[index, phase]
            ratio = timing.median / times.times[0, phase].median
            sizes = [model.operations / 1e6, model.read / 1e6]
            rows.append([model.name, MODEL_PHASES[phase], *timing.milliseconds(), ratio, *sizes])
    train = times.models[0].recipe.train
    title = f"{name}: steps of {train.batch_tokens:,} tokens, {train.micro_batch} sequences a forward, {precision}"
    return Table(title, columns, rows)
