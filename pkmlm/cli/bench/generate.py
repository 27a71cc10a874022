"""`pkmlm bench generate`: whole models decoding and scoring."""

import json
import sys
from typing import TYPE_CHECKING

import click

from pkmlm.cli.bench.lists import batch_sizes
from pkmlm.cli.bench.models import chosen_models, only_option, reading_table, slots_option
from pkmlm.cli.bench.waiting import waiting
from pkmlm.cli.options import PATH, json_option, quiet_option, set_option

if TYPE_CHECKING:
    from pkmlm.bench.generate import InferenceTimes
    from pkmlm.console import Table


@click.command("generate", short_help="Whole models decoding and scoring.")
@click.argument("recipe_file", type=PATH, metavar="RECIPE")
@set_option
@slots_option
@only_option
@click.option(
    "--batch",
    "batches",
    metavar="N,N",
    default="1,8",
    show_default=True,
    callback=batch_sizes,
    help="Sequences at once.",
)
@click.option(
    "--tokens", default=16, show_default=True, metavar="N", type=click.IntRange(min=1), help="To decode in a sequence."
)
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
    batches: tuple[int, ...],
    tokens: int,
    rounds: int,
    as_json: bool,
    quiet: bool,
) -> None:
    """Whole models of RECIPE's shape decoding and scoring: what a memory costs, and what it saves.

    dense: its layers without a memory; memory: with it; double: twice the layers; hash: a MemoryFormer. Random
    weights, random tokens, fp32. Decoding goes on from half a context, with a cache; scoring reads a whole context.
    M ops are millions of multiply-adds of a token's forward, MB the weights that it reads.

    \b
    Examples:
      pkmlm bench generate recipes/demo.yaml -s model.vocab_size=4096
      pkmlm bench generate recipes/pkm/12-layers.yaml -s model.vocab_size=32768 \\
        --only dense,memory,double
      pkmlm bench generate recipes/pkm/ablation.yaml -s model.dim=1024 \\
        -s model.vocab_size=32768 --only memory --slots 16k,1M
    """
    from pkmlm.bench.bandwidth import bandwidth
    from pkmlm.bench.generate import time_inference
    from pkmlm.recipe.check import require_softmax
    from pkmlm.recipe.load import load_recipe

    recipe = load_recipe(recipe_file, overrides)
    require_softmax(recipe.model, recipe.name, "decode: it has no cache")
    chosen = chosen_models(recipe, num_keys, kinds)
    with waiting(quiet) as say:
        times = time_inference(chosen, batches, tokens, rounds, say)
    if as_json:
        from pkmlm.device import machine

        click.echo(json.dumps({"machine": machine(), **times.as_json()}, indent=2))
        return
    sys.stdout.write(speed_table(recipe.name, times, "decode").render() + "\n")
    sys.stdout.write(speed_table(recipe.name, times, "score").render())
    if 1 in times.batches():
        seconds = [times.decode[index, 1].median / times.decoded for index in range(len(chosen))]
        sys.stdout.write("\n" + reading_table(chosen, seconds, bandwidth(times.copy)).render())


def speed_table(name: str, times: "InferenceTimes", what: str) -> "Table":
    """Tokens a second, and as a ratio to the first model."""
    from pkmlm.console import Column, Table, number

    columns = [Column("model"), number("batch"), number("tokens/s", "{:,.0f}"), number("x first", "{:.2f}")]
    columns += [number(name, "{:,.1f}") for name in ("ms", "min", "max", "M ops", "MB read")]
    rows = []
    for batch in times.batches():
        for index, model in enumerate(times.models):
            speed = times.speed(what, index, batch)
            timing = (times.decode if what == "decode" else times.score)[index, batch]
            sizes = [model.operations / 1e6, model.read / 1e6]
            ratio = speed / times.speed(what, 0, batch)
            rows.append([model.name, batch, speed, ratio, *timing.milliseconds(), *sizes])
    tokens = times.decoded if what == "decode" else times.scored
    doing = f"decoding {tokens} tokens" if what == "decode" else f"scoring {tokens} tokens"
    return Table(f"{name}: {doing} a sequence", columns, rows)
