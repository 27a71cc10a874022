"""The `pkmlm` command: a table of sub-commands, each imported only when it is used.

Neither importing this file nor `--help` imports torch: the commands import what they need when they run.
"""

import errno
import importlib
import os
import re
import sys
import traceback
from typing import Any

import click

from pkmlm import __version__
from pkmlm.console import prepare_streams
from pkmlm.errors import UserError, is_out_of_memory, printable
from pkmlm.signals import interrupt_after_imports

# A file that does not or cannot exist: the user has given a wrong name (exit code 2).
WRONG_NAME = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL)
# Standard output takes no more: a closed pipe, a full disk.
OUTPUT_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

COMMANDS = {  # each is in the module of its name
    "tokenize": "Learn a tokenizer and turn text into tokens.",
    "import": "Turn a pretrained model of transformers into a run.",
    "train": "Train the model of a recipe, or resume a run.",
    "eval": "Measure perplexity on any text, and zero-shot tasks.",
    "usage-report": "Show how the memory's slots are used.",
    "slots": "Show what single slots hold, and which tokens read them.",
    "probe": "Measure what the memory is worth, by replacing its output.",
    "generate": "Continue a text.",
    "export": "Write a model as a folder that transformers loads.",
    "cost": "Count parameters, operations, bytes read and training memory of a recipe.",
    "sweep": "Train and measure every cell of a grid, and print a table.",
    "compare": "Show runs side by side: curves, perplexity, usage, speed.",
    "bench": "Measure speed on this machine.",
    "recipe": "Check a recipe, show it in full, list recipes and keys.",
    "doctor": "Show versions, devices, memory, disk, and what is wrong.",
    "help": "Show the manual.",
}


class LazyGroup(click.Group):
    """A group that knows only a name and a line of help of each command, and imports a command when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # click would sort them

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None:
            command = importlib.import_module(f"pkmlm.cli.{name.replace('-', '_')}").command
            accept_anywhere(command)
        return name, command, rest

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:  # click itself would call it a failure
            ctx.exit(report_error(error))


def remember(context: click.Context, parameter: click.Parameter, value: bool) -> bool:
    """Note -v, which `main` reads after an error, or -q, and return whether it was given before or after the command.
    Commands that show no progress accept -q, too, so that a script can pass it to any of them.
    """
    settings: dict[str | None, bool] = context.ensure_object(dict)
    settings[parameter.name] = value or settings.get(parameter.name, False)
    return settings[parameter.name]


VERBOSE = click.Option(
    ["-v", "--verbose"],
    is_flag=True,
    expose_value=False,
    callback=remember,
    help="On an error, also print the traceback.",
)
QUIET = click.Option(
    ["-q", "--quiet"], is_flag=True, expose_value=False, callback=remember, help="No progress on standard error."
)


def accept_anywhere(command: click.Command) -> None:
    """Accept -v and -q after the command, too."""
    for common in (QUIET, VERBOSE):
        if all(common.name != each.name for each in command.params):
            command.params.append(common)
    if isinstance(command, click.Group):
        for each in command.commands.values():
            accept_anywhere(each)


@click.group(
    cls=LazyGroup,
    commands={name: click.Command(name, short_help=text) for name, text in COMMANDS.items()},
    params=[QUIET, VERBOSE],
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.version_option(__version__, message="pkmlm %(version)s")
def cli() -> None:
    """Train, evaluate and inspect language models with a large, sparsely read memory.

    \b
    From raw text to a measured model:
      pkmlm tokenize my.txt --valid v.txt --test t.txt -o data/mine
      pkmlm train demo -o runs/mine -s data.dir=data/mine
      pkmlm eval runs/mine
      pkmlm usage-report runs/mine

    Results go to standard output, progress to standard error. `pkmlm help` shows the manual.
    """


def main() -> None:
    """Run the command line; the exit codes are in `pkmlm help training`."""
    # Set before torch reads them. Huge pages make random reads of a large table a fifth faster; torch's idle OpenMP
    # threads would spin, and take a third of the time of our own kernels' threads.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # otherwise its stack traces come before our error lines
    prepare_streams()
    interrupt_after_imports()
    settings: dict[str, bool] = {}
    try:
        code = cli.main(prog_name="pkmlm", standalone_mode=False, obj=settings)
        sys.stdout.flush()  # a closed pipe shows here, not in the interpreter's shutdown
    except click.exceptions.Exit as stop:
        code = stop.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        code = 2
    except (KeyboardInterrupt, click.Abort):
        if os.environ.get("RANK", "0") == "0":
            print("\ninterrupted", file=sys.stderr)
        code = 130
    except Exception as error:
        code = report_error(error)
        if code and settings.get("verbose"):
            vars(error).pop("__notes__", None)  # the hint, which is shown already
            traceback.print_exception(error)
    sys.exit(code if isinstance(code, int) else 0)


def report_error(error: Exception) -> int:
    """Report a user's error or a failure of the machine in two lines, and return its exit code; re-raise all others."""
    if isinstance(error, UserError):
        return print_error(error)
    if isinstance(error, click.ClickException):
        context = error.ctx if isinstance(error, click.UsageError) else None
        hint = f"`{context.command_path} --help` shows how it is used" if context else ""
        if isinstance(error, click.NoSuchOption):
            hint = key_hint(error) or hint
        return print_error(UserError(printable(error.format_message()).rstrip("."), hint))
    if isinstance(error, ImportError) and not (error.name or "").startswith("pkmlm"):
        what = f"a library cannot be loaded: {(str(error) or 'it gives no reason').splitlines()[0]}"
        hint = "`pkmlm doctor` says what is missing; if nothing is, memory or open files are limited (`ulimit -a`)"
        return print_error(UserError(what, hint, exit_code=1))
    if isinstance(error, OSError):
        if error.filename is not None:  # reads; writes are reported where they fail
            code = 2 if error.errno in WRONG_NAME else 1
            return print_error(UserError(f"cannot read {error.filename}: {error.strerror}", exit_code=code))
        if error.errno is None:
            raise error
        if error.errno not in OUTPUT_ERRORS:
            return print_error(UserError(f"the system refused: {error.strerror}", exit_code=1))
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # takes what is still buffered
        if error.errno == errno.EPIPE:  # `| head` has enough
            return 0
        return print_error(UserError(f"cannot write to standard output: {error.strerror}", exit_code=1))
    if is_out_of_memory(error):
        return print_error(UserError("out of memory", exit_code=1))  # `pkmlm train` has said what to lower
    raise error


def key_hint(error: click.NoSuchOption) -> str:
    """A hint on how to set a recipe's keys that end in an unknown option; empty if the command takes no keys."""
    if error.ctx is None or all(parameter.name != "overrides" for parameter in error.ctx.command.params):
        return ""
    from pkmlm.recipe.schema import list_keys

    name = error.option_name.lstrip("-").replace("-", "_")
    found = (re.sub("<.+>", "NAME", key.name) for key in list_keys() if key.name.rpartition(".")[2] == name)
    keys = dict.fromkeys(found)
    return f"set a recipe's key with -s: -s {'=... or -s '.join(keys)}=..." if keys else ""


def print_error(error: UserError) -> int:
    """Print the two lines of a user's error on standard error and return its exit code."""
    print(f"error: {printable(error.message)}", file=sys.stderr)
    if error.hint:
        print(f"hint: {printable(error.hint)}", file=sys.stderr)
    return error.exit_code
