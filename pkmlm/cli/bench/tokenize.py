"""`pkmlm bench tokenize`: what tokenizing costs over SentencePiece alone."""

import json
import statistics

import click

from pkmlm.cli.options import json_option, separator_option


@click.command("tokenize", short_help="Tokenizing over SentencePiece alone.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@separator_option
@click.option("--vocab-size", default=8192, show_default=True, type=click.IntRange(1, 1 << 24), help="To learn first.")
@click.option("--jobs", default=2, show_default=True, type=click.IntRange(1, 1024), help="Threads that encode.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(min=1), help="Times that both are timed.")
@json_option
def command(
    files: tuple[str, ...], separator: str | None, vocab_size: int, jobs: int, rounds: int, as_json: bool
) -> None:
    """What tokenizing costs over SentencePiece's own encoding of the same text in memory.

    The learning of the tokenizer comes first and is not timed; rounds of both are interleaved.

    \b
    Examples:
      pkmlm bench tokenize recipes/demo/train.txt.zst --vocab-size 4096
    """
    from pkmlm.bench.tokenize import tokenize_cost
    from pkmlm.data.sources import find_sources

    cost = tokenize_cost(find_sources(files), separator, vocab_size, jobs, rounds)
    whole, bare = statistics.median(cost.whole), statistics.median(cost.bare)
    if as_json:
        click.echo(json.dumps({"whole": cost.whole, "bare": cost.bare, "bytes": cost.bytes, "ratio": bare / whole}))
        return
    for name, median in (("pkmlm tokenize", whole), ("bare encode", bare)):
        click.echo(f"{name:14}  {median:8.2f} s  {cost.bytes / median / 1e6:6.1f} MB/s")
    click.echo(f"pkmlm tokenize runs at {bare / whole:.2f} of the speed of the bare encoding (medians)")
