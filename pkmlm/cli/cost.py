"""`pkmlm cost`: parameters, operations, bytes and memory of a recipe."""

from contextlib import suppress

import click

from pkmlm.cli.options import RECIPE, set_option
from pkmlm.cli.show import NO_CSV, Output, report_options
from pkmlm.errors import printable


def byte_size(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """A number of bytes such as 80GB or 79.1GiB."""
    if value is None:
        return None
    from pydantic import ByteSize, TypeAdapter

    with suppress(ValueError):
        if size := TypeAdapter(ByteSize).validate_python(value):
            return int(size)
    raise click.BadParameter(f"found {printable(value)!r} (expected bytes, such as 80GB or 79.1GiB)")


@click.command()
@click.argument("recipe_file", type=RECIPE, metavar="RECIPE")
@set_option
@click.option(
    "--entry-bytes",
    type=click.Choice(["2", "4"]),
    default="2",
    help="Bytes per entry of values and tables: 2 as the papers count (fp16), 4 for fp32.",
)
@click.option("--world", type=click.IntRange(1, 1 << 16), metavar="W", help="Also show what each of W ranks needs.")
@click.option(
    "--device-memory",
    metavar="SIZE",
    callback=byte_size,
    help="With --world: memory of a device, e.g. 80GB; shows the largest model memory that fits.",
)
@report_options(NO_CSV)
def command(
    recipe_file: str,
    overrides: tuple[str, ...],
    entry_bytes: str,
    world: int | None,
    device_memory: int | None,
    out: Output,
) -> None:
    """Count parameters, operations, bytes and memory of RECIPE's model, without building it.

    Operations are multiply-adds, each counted once, over one sequence of model.context tokens. "built" sums the layers;
    "paper" is the block formula of MemoryFormer, for the blocks that it describes. Training memory is an
    estimate: fp32 weights, gradients and Adam moments, and one micro-batch of activations; train.precision=auto
    is counted as fp32 (on a GPU it may be bf16: -s train.precision=bf16). --world counts what each rank holds,
    for every possible parallel.memory.

    \b
    Examples:
      pkmlm cost memoryformer/tiny
      pkmlm cost demo -s model.vocab_size=4096 --json
      pkmlm cost pkm/16-layers -s model.memories.pkm.num_keys=1024
      pkmlm cost pkm/16-layers --world 8 --device-memory 80GB
    """
    if world is None and device_memory is not None:
        raise click.UsageError("--device-memory requires --world (1 for one device).")

    from pkmlm.cost_tables import recipe_report
    from pkmlm.recipe.load import load_recipe

    recipe = load_recipe(recipe_file, overrides)
    result, tables = recipe_report(recipe, recipe_file, int(entry_bytes), world, device_memory)
    out.show(result, tables)
