"""What a command reads: a split of the run's tokens, or any text; and the options that say so."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from pkmlm.cli.options import PATH, field_option, given, separator_option
from pkmlm.cli.streams import warn
from pkmlm.errors import UserError

if TYPE_CHECKING:
    from pkmlm.evaluate.load import LoadedRun
    from pkmlm.evaluate.perplexity import Documents
    from pkmlm.recipe.schema import Recipe

NAME_BYTES = 100  # of a text's or of tasks' names, in the names of results


def the_only(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> str | None:
    """The file of an option that a user may believe to take several; click would take the last in silence."""
    if len(value) > 1:
        raise click.BadParameter(f"{len(value)} files (expected one; score one after the other, or join them)")
    return value[0] if value else None


TEXT_OPTIONS = (
    click.option("--split", metavar="NAME", help="A split of the run's tokens. Default: test."),
    click.option(
        "--text",
        type=PATH,
        multiple=True,
        callback=the_only,
        metavar="FILE",
        help="Any text file instead of a split (.txt, .jsonl, .parquet, .gz, .zst).",
    ),
    separator_option,
    field_option,
    click.option(
        "--data", type=PATH, metavar="DIR", help="Where the run's tokens are now. Default: its recipe's data.dir."
    ),
)


class TextChoice(NamedTuple):
    """A split (None: test) of the tokens in `data` (None: where the recipe says), or (with `text`) a file, cut by
    `separator`, its text in `field`.
    """

    split: str | None
    text: str | None
    separator: str | None
    field: str
    data: str | None

    @property
    def made(self) -> bool:
        """Whether a split or a text was asked for."""
        return any(each is not None for each in (self.split, self.text, self.data))

    def refuse_contradictions(self, field_given: bool) -> None:
        """Refuse options of which one would be ignored."""
        if self.text is not None and self.split is not None:
            raise UserError("--split and --text exclude each other", "leave one of them out")
        if self.separator is not None and self.text is None:
            raise UserError("--separator goes with --text (a split's documents are separated already)")
        if field_given and self.text is None:
            raise UserError("--field goes with --text (of a split there are tokens alone)")
        if self.data is not None and self.text is not None:
            raise UserError("--data and --text exclude each other (a text is read as it is)", "leave one of them out")

    def refuse_standard_input(self, why: str) -> None:
        """Refuse it where it would be read more than once."""
        if self.text == "-":
            raise UserError(f"--text -: {why} (expected a file)")

    def tokens(self, path: Path, recipe: "Recipe") -> str:
        """The folder of the tokens of a run or an export.

        Raises:
            UserError: nobody says where they are, or they are not there.
        """
        from pkmlm.data.index import FILE, PART

        folder = self.data if self.data is not None else recipe.data.dir
        if folder is not None and any((Path(folder) / name).exists() for name in (FILE, PART)):
            return folder
        if self.data is not None:
            problem = f"holds no tokens (no {FILE} in it)" if Path(self.data).exists() else "does not exist"
            hint = "give a folder that `pkmlm tokenize -o` wrote, or a text with --text FILE"
            raise UserError(f"--data {self.data} {problem}", hint)
        if folder is None:
            what = f"{path} names no data.dir"
        else:
            seen = "" if Path(folder).is_absolute() else f", seen from {Path.cwd()}"
            what = f"the tokens of {path} are not in {folder}{seen}"
        raise UserError(what, "say where they are with --data DIR, or give a text with --text FILE")

    def documents(self, run: "LoadedRun") -> "Documents":
        """The documents that were chosen; for one pass.

        Raises:
            UserError: they cannot be had; `data` holds other tokens than those that the run was trained on.
        """
        from pkmlm.evaluate.perplexity import documents_of_split, documents_of_text, open_split

        if self.text is not None:
            usual = separator_of(run.recipe.data.dir)
            return documents_of_text(self.text, run.tokenizer, self.separator, self.field, usual)
        folder = self.tokens(run.path, run.recipe)
        corpus = open_split(folder, self.split or "test", run.tokenizer)
        documents, now = documents_of_split(corpus, run.tokenizer), corpus.hashes
        others = [name for name in ("train", "valid") if name in now and run.data.get(name, now[name]) != now[name]]
        if not others:
            return documents
        found = f"the {' and '.join(others)} tokens in {folder} are not those that run {run.name} trained with"
        if self.data is not None:
            raise UserError(f"--data: {found}", "give any other text with --text FILE")
        return replace(documents, doubts=(f"{found}: what is scored may be what it learnt",))


def separator_of(folder: str | None) -> str | None:
    """What separates the documents of tokens; None where it is not known, or nothing does."""
    from pkmlm.data.index import read_index

    try:
        return None if folder is None else read_index(Path(folder)).separator
    except UserError:
        return None


def warn_of(doubts: Iterable[str]) -> None:
    """Say on standard error what is doubtful, each once."""
    for doubt in dict.fromkeys(doubts):
        warn(doubt)


def kept_name(name: str, sha256: str, separator: str | None, field: str) -> str:
    """The name under which a run keeps what was found of a text: with a mark of its bytes and of how they were read,
    for others may have its name.
    """
    return f"text-{plain(name)}-{mark(json.dumps([sha256, separator, field]))}"


def plain(name: str) -> str:
    """What of a name stands in the names of results: no blanks and signs that mean something to a shell, and no more
    than a file's name can hold.
    """
    return re.sub(r"[^\w.-]+", "_", name).encode(errors="ignore")[:NAME_BYTES].decode(errors="ignore")


def mark(text: str) -> str:
    """What tells the names of results apart that have too little room for all of `text`."""
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:8]


def kept_split(folder: Path, split: str, key: str, sha256: str) -> str:
    """The name under which a run keeps what was found of a split in --data: the split's; or, where what `folder` has
    under that is of other tokens, the split's with a mark of these. Which test split is a run's own nobody knows, but
    `compare` takes what has its name for it.

    Args:
        key: in the "source" of what is kept, that of the sha256.
    """
    from pkmlm.runs.shapes import read_shaped

    kept = set()
    for file in folder.glob("*.json"):
        if file.name.startswith(f"{split}-step-"):
            with suppress(UserError):  # it is damaged, or of a time when results did not say of what they are
                kept.add(read_shaped(file, {"source": {key: (str,)}}, "the results")["source"][key])
    if not kept or sha256 in kept:
        return split
    name = f"{split}-{sha256[:8]}"
    warn(f"--data: what the run has kept of {split} is of other tokens: this is kept as {name}")
    return name


def text_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that choose a text to a command; it gets them as one argument, `choice`."""

    @wraps(command)
    def choosing(**options: Any) -> Any:
        choice = TextChoice(**{name: options.pop(name) for name in TextChoice._fields})
        choice.refuse_contradictions(given(click.get_current_context(), "field"))
        return command(choice=choice, **options)

    for option in reversed(TEXT_OPTIONS):
        choosing = option(choosing)
    return choosing
