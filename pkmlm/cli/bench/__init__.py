"""`pkmlm bench`: speed on this machine; one file a sub-command."""

import click

from pkmlm.cli.bench import generate, loop, memory, tokenize, train


@click.group("bench")
def command() -> None:
    """Speed on this machine, as ratios taken side by side in one run.

    \b
    Examples:
      pkmlm bench memory
      pkmlm bench generate recipes/demo.yaml
      pkmlm bench train recipes/demo.yaml --rounds 9
      pkmlm bench loop recipes/demo.yaml --json
      pkmlm bench tokenize train.txt.zst --separator '\\n\\n\\n'
    """


for part in (memory, generate, train, loop, tokenize):
    command.add_command(part.command)
