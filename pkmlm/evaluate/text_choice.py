"""Which text a command measures: a split of a run's tokens, or any text file. Needs no torch."""

from pathlib import Path
from typing import NamedTuple

from pkmlm.data.index import FILE, PART
from pkmlm.errors import UserError
from pkmlm.recipe.schema import Recipe


class TextChoice(NamedTuple):
    """The text that the options of a command choose.

    Attributes:
        split: of the run's tokens; None: test.
        text: a file, or a pattern of several, in place of a split; "-" is standard input.
        separator: what divides the documents of `text`; None: a file is one document.
        field: key or column that holds the text, in files that have such.
        data: the folder of the run's tokens; None: where its recipe says.
    """

    split: str | None = None
    text: str | None = None
    separator: str | None = None
    field: str = "text"
    data: str | None = None

    @property
    def explicit(self) -> bool:
        """Whether the user chose a split or a text."""
        return any(each is not None for each in (self.split, self.text, self.data))

    def refuse_contradictions(self, field_given: bool) -> None:
        """Refuse options of which one would be ignored.

        Args:
            field_given: whether the user gave --field, be it its default.
        """
        if self.text is not None and self.split is not None:
            raise UserError("--split and --text exclude each other", "leave one of them out")
        if self.text is not None and self.data is not None:
            raise UserError("--data and --text exclude each other (a text is read as it is)", "leave one of them out")
        if self.text is None and self.separator is not None:
            raise UserError("--separator goes with --text (a split's documents are separated already)")
        if self.text is None and field_given:
            raise UserError("--field goes with --text (a split holds only tokens)")

    def refuse_standard_input(self, why: str) -> None:
        """Refuse standard input where it would be read more than once."""
        if self.text == "-":
            raise UserError(f"--text -: {why} (expected a file)")

    def tokens_folder(self, path: Path, recipe: Recipe) -> str:
        """The folder of the tokens of the run or export at `path`.

        Raises:
            UserError: neither the recipe nor --data names one, or it holds no tokens.
        """
        folder = self.data if self.data is not None else recipe.data.dir
        if folder is not None and any((Path(folder) / name).exists() for name in (FILE, PART)):
            return folder
        if self.data is not None:
            problem = f"holds no tokens (no {FILE} in it)" if Path(self.data).exists() else "does not exist"
            hint = "give a folder that `pkmlm tokenize -o` wrote, or a text with --text FILE"
            raise UserError(f"--data {self.data} {problem}", hint)
        message = f"{path} names no data.dir" if folder is None else f"the tokens of {path} are not in {folder}"
        raise UserError(message, "name their folder with --data DIR, or give a text with --text FILE")
