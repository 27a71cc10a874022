"""`pkmlm help`: the manual, in the terminal."""

import os
import re
import sys
from pathlib import Path

import click

ESCAPED = re.compile(r"\\([\\|`*<\[])")  # as `console.Table` escapes a table of Markdown
MANUAL = Path(__file__).parents[1] / "manual"
TOPICS = (  # in the order in which a new user needs them
    "data",
    "training",
    "pretrained",
    "finetuning",
    "evaluation",
    "usage",
    "keys",
    "sweeps",
    "processes",
    "export",
    "python",
    "attach",
    "models",
    "speed",
    "safety",
)


@click.command()
@click.argument("topic", required=False, type=click.Choice(TOPICS), metavar="[TOPIC]")
def command(topic: str | None) -> None:
    """Show the topics of the manual, or the page of one.

    On a terminal, a page is formatted and shown in a pager; elsewhere, its text is printed.

    \b
    Examples:
      pkmlm help
      pkmlm help training
    """
    if topic is None:
        click.echo("The manual has these pages; `pkmlm help TOPIC` shows one:\n")
        for name in TOPICS:
            heading = (MANUAL / f"{name}.md").read_text("utf-8").partition("\n")[0]
            click.echo(f"  {name:11} {heading.lstrip('# ')}")
        click.echo("\n`pkmlm COMMAND --help` explains a command, `pkmlm recipe keys` every key of a recipe.")
        return
    text = (MANUAL / f"{topic}.md").read_text("utf-8")
    if not sys.stdout.isatty():
        click.echo(ESCAPED.sub(r"\1", text), nl=False)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    os.environ.setdefault("LESS", "-FRX")  # colours, and no pager for what fits the screen
    if topic == "keys":  # a table that no terminal is wide enough for
        from pkmlm.cli.recipe import keys_by_section

        click.echo_via_pager(keys_by_section())
        return
    console = Console(width=min(100, Console().width))
    with console.pager(styles=True):
        console.print(Markdown(text, hyperlinks=False))
