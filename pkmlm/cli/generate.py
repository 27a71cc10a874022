"""`pkmlm generate`: continue a text."""

import math
import sys

import click

from pkmlm.cli.options import COUNT, PATH, base_option, prompt_argument, step_option
from pkmlm.errors import UserError, printable


@click.command()
@click.argument("run_path", type=PATH, metavar="RUN")
@prompt_argument
@click.option("-n", "--tokens", default=200, **COUNT, help="Maximum number of tokens to add.")
@click.option(
    "--temperature",
    default=0.8,
    metavar="X",
    type=click.FloatRange(min=0, max=math.inf, max_open=True),
    help="Flattens (above 1) or sharpens the choice; 0 takes the most likely token.",
)
@click.option("--top-k", **COUNT, help="Choose among the N most likely tokens.")
@click.option(
    "--top-p",
    metavar="X",
    type=click.FloatRange(min=0, max=1, min_open=True),
    help="Choose among the most likely tokens that together have this probability.",
)
@click.option(
    "--seed", default=1, type=click.IntRange(0, 2**63 - 1), metavar="N", help="The same seed draws the same text."
)
@step_option
@base_option
def command(
    run_path: str,
    prompt: str | None,
    tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    step: str,
    base: str | None,
) -> None:
    """Continue PROMPT with RUN's model, printing as it goes.

    Without PROMPT, the text is read from standard input; if that is a terminal, the model begins a document.

    \b
    Examples:
      pkmlm generate runs/demo "It was a dark night, and"
      pkmlm generate runs/demo --temperature 0 -n 50 < beginning.txt
      pkmlm generate attached --base gpt2 "It was a dark night, and"
    """
    from pkmlm.evaluate.generate import Sampling, generate, stream_text
    from pkmlm.evaluate.load import load_run
    from pkmlm.recipe.constraints import require_softmax

    run = load_run(run_path, step, base=base)
    require_softmax(run.recipe.model, run_path, "generate")
    if prompt is None:
        try:
            prompt = "" if sys.stdin.isatty() else sys.stdin.buffer.read().decode().removeprefix("\ufeff")
        except UnicodeDecodeError as error:
            raise UserError(f"standard input: not UTF-8 at byte {error.start}") from None
    ids = [run.prefix, *run.tokenizer.encode(prompt)]
    sampling = Sampling(temperature, top_k, top_p, seed)
    write(prompt)
    for piece in stream_text(run.tokenizer, ids, generate(run.model, ids, sampling, tokens, run.tokenizer.size)):
        write(piece)
    write("\n")


def write(text: str) -> None:
    """Print at once; on a terminal, control characters other than line ends and tabs are shown as escapes."""
    if sys.stdout.isatty():
        text = "".join(c if c in "\n\t" else printable(c) for c in text)
    sys.stdout.write(text)
    sys.stdout.flush()
