"""`pkmlm cost`: parameters, operations, bytes and memory of a recipe."""

import click

from pkmlm.cli.options import RECIPE, set_option
from pkmlm.cli.show import NO_CSV, Output, report_options


@click.command()
@click.argument("recipe_file", type=RECIPE, metavar="RECIPE")
@set_option
@report_options(NO_CSV)
def command(recipe_file: str, overrides: tuple[str, ...], out: Output) -> None:
    """Count parameters, operations, bytes read and training memory of RECIPE's model, without building it.

    Operations are multiply-adds, each counted once, over one sequence of model.context tokens. "built" sums the layers;
    "paper" is the block formula of MemoryFormer, for the blocks that it describes. Training memory is an
    estimate: fp32 weights, gradients and the optimizer's moments, and one micro-batch of activations;
    train.precision=auto is counted as fp32 (on a GPU it may be bf16: -s train.precision=bf16).

    \b
    Examples:
      pkmlm cost memoryformer/tiny
      pkmlm cost demo -s model.vocab_size=4096 --json
      pkmlm cost pkm/16-layers -s model.memories.pkm.num_keys=1024
    """
    from pkmlm.cost_tables import recipe_report
    from pkmlm.recipe.load import load_recipe

    out.show(*recipe_report(load_recipe(recipe_file, overrides)))
