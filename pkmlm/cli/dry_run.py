"""`pkmlm train --dry-run`: what a run would be, and one real batch of it, with nothing written."""

import time
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from pkmlm.data.corpus import Corpus
    from pkmlm.data.tokenizer import Tokenizer
    from pkmlm.recipe.schema import Recipe
    from pkmlm.runtime.distributed import World


def report(recipe: "Recipe", corpus: "Corpus", tokenizer: "Tokenizer", world: "World") -> int:
    """Print the plan, then take the first step in memory and print how long it took; rank 0 prints."""
    import psutil

    from pkmlm.cli.train import arithmetic, starting_model
    from pkmlm.data.batches import Batches
    from pkmlm.model.cost import cost_of
    from pkmlm.model.ranks_cost import bytes_held
    from pkmlm.recipe.doubts import doubts
    from pkmlm.runtime.distributed import ranks_of
    from pkmlm.train.step import stepper_for

    with world.together():
        device, precision, reason = arithmetic(recipe)
    cost = cost_of(recipe, recipe.model.vocab_size or tokenizer.size)
    train = recipe.train
    epochs = train.steps * train.batch_tokens / corpus.tokens
    forwards = recipe.micro_batches(world.size)
    several = f" on each of {world.size} processes" if world.size > 1 else ""
    held = bytes_held(recipe, cost, world.size, recipe.parallel.memory)
    parts = ", ".join(f"{name} {size / 1e6:,.0f} MB" for name, size in held.items())
    lines = [
        f"recipe       {recipe.name}",
        f"device       {device}, {precision} ({reason})",
        f"parameters   {cost.dense:,} dense, {cost.memory:,} in memory, {cost.read_per_token:,} read for a token",
        f"batch        {recipe.sequences} sequences of {recipe.model.context} tokens, in "
        f"{forwards} forward{'s' * (forwards != 1)} of {train.micro_batch}{several}",
        f"training     {train.steps:,} steps, {train.steps * train.batch_tokens:,} tokens, "
        f"{epochs:.2f} epochs of {corpus.tokens:,}",
        f"memory       {sum(held.values()) / 1e6:,.0f} MB to train{several}: {parts}",
    ]
    if world.rank == 0:
        click.echo("\n".join(lines))
        for text in doubts(recipe):
            click.echo(f"warning: {text}", err=True)
    ranks = ranks_of(world, recipe.parallel.memory)
    model = starting_model(recipe, tokenizer, device, ranks, fresh=True)
    batches = Batches(corpus, recipe.model.context, recipe.sequences, train.seed)
    stepper = stepper_for(recipe, model, batches, precision, ranks)
    began = time.monotonic()
    result = stepper.take(1)
    seconds = time.monotonic() - began
    resident = psutil.Process().memory_info().rss / 1e6
    if world.rank == 0:
        click.echo(f"first step   loss {result.loss:.3f}, {seconds:.2f} s (with warm-up), {resident:,.0f} MB resident")
    return 0
