"""`pkmlm bench loop`: what the training loop costs over a bare one."""

import json
import sys

import click

from pkmlm.cli.bench.waiting import waiting
from pkmlm.cli.options import PATH, json_option, quiet_option, set_option


@click.command("loop", short_help="The training loop over a bare PyTorch loop.")
@click.argument("recipe_file", type=PATH, metavar="RECIPE")
@set_option
@click.option(
    "--rounds", default=5, show_default=True, metavar="N", type=click.IntRange(min=1), help="Times that both are timed."
)
@click.option(
    "--steps", default=20, show_default=True, metavar="N", type=click.IntRange(min=1), help="Optimizer steps a round."
)
@json_option
@quiet_option
def command(recipe_file: str, overrides: tuple[str, ...], rounds: int, steps: int, as_json: bool, quiet: bool) -> None:
    """What the training loop costs over a bare PyTorch loop around the same model and batches.

    Rounds of both are interleaved; the ratio is the median over rounds.

    \b
    Examples:
      pkmlm bench loop recipes/demo.yaml
      pkmlm bench loop recipes/demo.yaml -s model.memory.kind=none --json
    """
    from pkmlm.bench.loop import loop_cost
    from pkmlm.console import Column, Table, number
    from pkmlm.device import select_device
    from pkmlm.train.job import open_job

    job = open_job(recipe_file, overrides, ranks=1, verify=False)
    with waiting(quiet) as say:
        cost = loop_cost(job, select_device(job.recipe.train.precision), rounds, steps, say)
    if as_json:
        seconds = {"loop": cost.whole.seconds, "bare": cost.bare.seconds}
        click.echo(json.dumps({**seconds, "tokens": cost.amount, "ratio": cost.ratio}))
        return
    rows = []
    for name, timing in (("pkmlm train", cost.whole), ("bare loop", cost.bare)):
        rows.append([name, *timing.milliseconds(), cost.amount / timing.median])
    times = [number(name, "{:,.1f}") for name in ("median (ms/step)", "min", "max")]
    columns = [Column("loop"), *times, number("tokens/s", "{:,.0f}")]
    sys.stdout.write(Table(f"{job.recipe.name}: {rounds} rounds of {steps} steps", columns, rows).render())
    click.echo(f"pkmlm train takes {cost.ratio:.3f} times the bare loop (median of the rounds' ratios)")
