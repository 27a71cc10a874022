"""`pkmlm bench`: speed on this machine."""

import json
import statistics
import sys

import click

from pkmlm.cli.options import json_option, separator_option, set_option
from pkmlm.errors import UserError


@click.group("bench")
def command() -> None:
    """Speed on this machine, as ratios taken side by side in one run.

    \b
    Examples:
      pkmlm bench train recipes/demo.yaml
      pkmlm bench train my.yaml --rounds 9 --steps 50 --json
      pkmlm bench tokenize train.txt.zst --separator '\\n\\n\\n'
    """


@command.command("train")
@click.argument("recipe_file", metavar="RECIPE")
@set_option
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(min=1), help="Times that both are timed.")
@click.option("--steps", default=20, show_default=True, type=click.IntRange(min=1), help="Optimizer steps a round.")
@json_option
def bench_train(recipe_file: str, overrides: tuple[str, ...], rounds: int, steps: int, as_json: bool) -> None:
    """What the training loop costs over a bare PyTorch loop around the same model and batches.

    Rounds of both are interleaved; the ratio is the median over rounds.

    \b
    Examples:
      pkmlm bench train recipes/demo.yaml
      pkmlm bench train recipes/demo.yaml -s model.memory.kind=none --json
    """
    from pkmlm.data.corpus import Corpus
    from pkmlm.recipe.load import load_recipe
    from pkmlm.report.tables import Column, Table
    from pkmlm.runtime.device import choose_device, choose_precision
    from pkmlm.train.bench import loop_cost

    recipe = load_recipe(recipe_file, overrides)
    if recipe.data.dir is None:
        raise UserError(f"{recipe_file}: data.dir is not set", "add -s data.dir=DIR, a folder from `pkmlm tokenize`")
    device = choose_device()
    precision, _ = choose_precision(recipe.train.precision, device)
    cost = loop_cost(recipe, Corpus.open(recipe.data.dir, "train"), device, precision, rounds, steps)
    if as_json:
        click.echo(json.dumps({"loop": cost.loop, "bare": cost.bare, "tokens": cost.tokens, "ratio": cost.ratio}))
        return
    rows = []
    for name, seconds in (("pkmlm train", cost.loop), ("bare loop", cost.bare)):
        median = statistics.median(seconds)
        rows.append([name, 1000 * median, 1000 * min(seconds), 1000 * max(seconds), cost.tokens / median])
    columns = [
        Column("loop"),
        Column("median (ms/step)", "right", "{:,.1f}"),
        Column("min", "right", "{:,.1f}"),
        Column("max", "right", "{:,.1f}"),
        Column("tokens/s", "right", "{:,.0f}"),
    ]
    sys.stdout.write(Table(f"{recipe.name}: {rounds} rounds of {steps} steps", columns, rows).render())
    click.echo(f"pkmlm train takes {cost.ratio:.3f} times the bare loop (median of the rounds' ratios)")


@command.command("tokenize")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@separator_option
@click.option("--vocab-size", default=8192, show_default=True, type=click.IntRange(1, 1 << 24), help="To learn first.")
@click.option("--jobs", default=2, show_default=True, type=click.IntRange(1, 1024), help="Threads that encode.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(min=1), help="Times that both are timed.")
@json_option
def bench_tokenize(
    files: tuple[str, ...], separator: str | None, vocab_size: int, jobs: int, rounds: int, as_json: bool
) -> None:
    """What tokenizing costs over SentencePiece's own encoding of the same text in memory.

    The learning of the tokenizer comes first and is not timed; rounds of both are interleaved.

    \b
    Examples:
      pkmlm bench tokenize recipes/demo/train.txt.zst --vocab-size 4096
    """
    from pkmlm.data.bench import tokenize_cost
    from pkmlm.data.sources import find_sources
    from pkmlm.data.text import read_chunks
    from pkmlm.data.tokenizer import Tokenizer

    sources = find_sources(files)
    texts = (chunk.text for source in sources for chunk in read_chunks(source.open(), separator))
    cost = tokenize_cost(sources, separator, Tokenizer.learn(texts, vocab_size), jobs, rounds)
    whole, bare = statistics.median(cost.whole), statistics.median(cost.bare)
    if as_json:
        click.echo(json.dumps({"whole": cost.whole, "bare": cost.bare, "bytes": cost.bytes, "ratio": bare / whole}))
        return
    for name, median in (("pkmlm tokenize", whole), ("bare encode", bare)):
        click.echo(f"{name:14}  {median:8.2f} s  {cost.bytes / median / 1e6:6.1f} MB/s")
    click.echo(f"pkmlm tokenize runs at {bare / whole:.2f} of the speed of the bare encoding (medians)")
