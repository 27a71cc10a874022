"""Options that several commands share."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from pkmlm.cli import remember
from pkmlm.errors import UserError
from pkmlm.report.equal import OVERS

Command = Callable[..., Any]
PATH = click.Path(readable=False)  # any name, which a shell can complete; the commands check it
COUNT: dict[str, Any] = {"type": click.IntRange(min=1), "metavar": "N"}  # of options that are a number of something


class RecipePath(click.Path):
    """The file of a recipe or grid, or the name of one that is installed with the package."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from pkmlm.recipe.shipped import find_recipe

        return str(find_recipe(value))


RECIPE = RecipePath(readable=False)
set_option = click.option(
    "-s",
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key of the recipe, e.g. -s model.memories.pkm.topk=16. May be repeated.",
)
step_option = click.option(
    "--step",
    default="latest",
    metavar="latest|best|N",
    help="Which checkpoint of the run to read.",
)
quiet_option = click.option("-q", "--quiet", is_flag=True, callback=remember, help="No progress on standard error.")


def given(context: click.Context, name: str) -> bool:
    """Whether the user has set an option, even to its default."""
    return context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def unescaped(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """An option's value with its escapes, such as \\n, resolved."""
    from pkmlm.data.text import unescape

    return None if value is None else unescape(value)


def readable(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """A text of the command line; refuses bytes that are not valid in its encoding."""
    if value is not None and value != value.encode(errors="ignore").decode():
        raise UserError(f"{parameter.human_readable_name} is not in the encoding of the terminal", "write it in UTF-8")
    return value


prompt_argument = click.argument("prompt", required=False, callback=readable)
field_option = click.option(
    "--field",
    default="text",
    metavar="NAME",
    help="Key or column that holds the text, or a field of it (doc.text); null is an empty document.",
)
separator_option = click.option(
    "--separator",
    metavar="S",
    callback=unescaped,
    help=r"What separates documents in text, e.g. '\n\n\n'. Default: a file is one document.",
)


def several(kind: click.ParamType) -> Callable[[click.Context, click.Parameter, str | None], tuple[Any, ...]]:
    """A callback that reads distinct values of one kind, separated by commas; none if the option is not given."""

    def convert(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[Any, ...]:
        texts = [] if value is None else value.split(",")
        return tuple(dict.fromkeys(kind.convert(text.strip(), parameter, context) for text in texts))

    return convert


over_option = click.option(
    "--over",
    callback=several(click.Choice(OVERS)),
    metavar=",".join(OVERS),
    help="Also compare at equal amounts of these, and draw over them; for seconds, steps are timed side by side, once.",
)


def plot_options(command: Command) -> Command:
    """Add the options that say how pictures are written. The command receives `plot_format` (names) and `plot_width`
    (inches, or None).
    """
    for option in (
        click.option(
            "--plot-width",
            type=click.FloatRange(3, 20),
            metavar="INCHES",
            help="Width of pictures for a paper, without titles; 3.3 fits a column. Default: 6, with titles.",
        ),
        click.option(
            "--plot-format",
            default="png",
            callback=several(click.Choice(["png", "pdf", "svg"])),
            metavar="png,pdf,svg",
            help="Formats of pictures: one or several.",
        ),
    ):
        command = option(command)
    return command


base_option = click.option(
    "--base",
    type=PATH,
    metavar="DIR",
    help="Folder of the pretrained model, if RUN is an attached memory. Default: where it was loaded from.",
)
force_option = click.option("--force", is_flag=True, help="Overwrite what is there.")


def only_one(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> str | None:
    """The value of an option that may be given once; of two, click would silently take the last."""
    if len(value) > 1:
        raise click.BadParameter(f"{len(value)} files (expected one; score one after the other, or join them)")
    return value[0] if value else None


def text_options(command: Command, reads_train: bool = False) -> Command:
    """Add the options that choose a text. The command receives them as one argument, `choice`, a TextChoice.

    Args:
        command: the command to which they are added.
        reads_train: whether it reads the run's train split besides the text.
    """

    @wraps(command)
    def choosing(**options: Any) -> Any:
        from pkmlm.evaluate.documents import TextChoice

        choice = TextChoice(**{name: options.pop(name) for name in TextChoice._fields})
        choice.refuse_contradictions(given(click.get_current_context(), "field"), reads_train)
        return command(choice=choice, **options)

    for option in (
        click.option(
            "--data",
            type=PATH,
            multiple=True,
            callback=lambda context, parameter, value: value or None,
            metavar="DIR",
            help="Where the run's tokens are now; once for each folder. Default: its recipe's data.dir.",
        ),
        field_option,
        separator_option,
        click.option(
            "--text",
            type=PATH,
            multiple=True,
            callback=only_one,
            metavar="FILE",
            help="Any text that `pkmlm tokenize` reads, instead of a split.",
        ),
        click.option("--split", metavar="NAME", help="A split of the run's tokens. Default: test."),
    ):
        choosing = option(choosing)
    return choosing
