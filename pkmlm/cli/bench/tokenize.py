"""`pkmlm bench tokenize`: what tokenizing costs over SentencePiece alone."""

import json

import click

from pkmlm.cli.bench.waiting import waiting
from pkmlm.cli.options import PATH, json_option, quiet_option, separator_option
from pkmlm.errors import UserError


@click.command("tokenize", short_help="Tokenizing over SentencePiece alone.")
@click.argument("files", nargs=-1, required=True, type=PATH, metavar="FILE...")
@separator_option
@click.option(
    "--vocab-size",
    default=8192,
    show_default=True,
    metavar="N",
    type=click.IntRange(1, 1 << 24),
    help="To learn first.",
)
@click.option(
    "--jobs", default=2, show_default=True, metavar="N", type=click.IntRange(1, 1024), help="Threads that encode."
)
@click.option(
    "--rounds", default=5, show_default=True, metavar="N", type=click.IntRange(min=1), help="Times that both are timed."
)
@json_option
@quiet_option
def command(
    files: tuple[str, ...], separator: str | None, vocab_size: int, jobs: int, rounds: int, as_json: bool, quiet: bool
) -> None:
    """What tokenizing costs over SentencePiece's own encoding of the same text in memory.

    The learning of the tokenizer comes first and is not timed. Rounds of both are interleaved; the ratio is the median
    over rounds.

    \b
    Examples:
      pkmlm bench tokenize recipes/demo/train.txt.zst --vocab-size 4096
    """
    from pkmlm.bench.tokenize import tokenize_cost
    from pkmlm.data.sources import STANDARD_INPUT, find_sources
    from pkmlm.data.text import check_separator_and_field

    if STANDARD_INPUT in files:
        raise UserError("-: the text is read more than once (expected files)")
    sources = find_sources(files)
    check_separator_and_field(sources, separator)
    with waiting(quiet) as say:
        cost = tokenize_cost(sources, separator, vocab_size, jobs, rounds, say)
    if as_json:
        seconds = {"whole": cost.whole.seconds, "bare": cost.bare.seconds}
        click.echo(json.dumps({**seconds, "bytes": cost.amount, "ratio": cost.ratio}))
        return
    for name, timing in (("pkmlm tokenize", cost.whole), ("bare encode", cost.bare)):
        click.echo(f"{name:14}  {timing.median:8.2f} s  {cost.amount / timing.median / 1e6:6.1f} MB/s")
    click.echo(f"pkmlm tokenize takes {cost.ratio:.3f} times the bare encoding (median of the rounds' ratios)")
