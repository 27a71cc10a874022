"""The documents that a trained model is measured on: a split of its tokens, or any text. Needs no torch."""

import hashlib
import itertools
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pkmlm.console import stage_progress
from pkmlm.data.corpus import FILE, Corpus, Folders, read_indexes
from pkmlm.data.shards import Progress, SplitReader, encode_batches, undivided_warning
from pkmlm.data.sources import find_sources
from pkmlm.data.text import FIELD, Chunk, Tally, check_separator_and_field
from pkmlm.data.tokenizer import Tokenizer
from pkmlm.environment import usable_cores
from pkmlm.errors import UserError
from pkmlm.files import write_errors
from pkmlm.recipe.schema import Recipe

if TYPE_CHECKING:  # it imports torch
    from pkmlm.evaluate.load import LoadedRun


class TextChoice(NamedTuple):
    """The text that the options of a command choose.

    Attributes:
        split: of the run's tokens; None: test.
        text: a file, or a glob, to read instead of a split; "-" is standard input.
        separator: what divides the documents of `text`; None: a file is one document.
        field: key or column that holds the text, in files that have keys or columns.
        data: the folders of the run's tokens; None: the recipe's data.dir.
    """

    split: str | None = None
    text: str | None = None
    separator: str | None = None
    field: str = FIELD
    data: tuple[str, ...] | None = None

    @property
    def explicit(self) -> bool:
        """Whether the user chose a split or a text."""
        return any(each is not None for each in (self.split, self.text, self.data))

    def refuse_contradictions(self, field_given: bool, reads_train: bool = False) -> None:
        """Refuse combinations in which one option would be ignored.

        Args:
            field_given: whether the user gave --field, even if with its default.
            reads_train: whether the command reads the train split even with a text, so that --data has a use.
        """
        if self.text is not None and self.split is not None:
            raise UserError("--split and --text exclude each other", "leave one of them out")
        if self.text is not None and self.data is not None and not reads_train:
            raise UserError("--data and --text exclude each other (--text uses no tokens)", "leave one of them out")
        if self.text is None and self.separator is not None:
            raise UserError("--separator requires --text (a split's documents are already separated)")
        if self.text is None and field_given:
            raise UserError("--field requires --text (a split holds only tokens)")

    def refuse_standard_input(self, why: str) -> None:
        """Refuse standard input where it would be read more than once."""
        if self.text == "-":
            raise UserError(f"--text -: {why} (expected a file)")

    def token_folders(self, path: Path, recipe: Recipe) -> tuple[str, ...]:
        """The folders of the tokens of the run or export at `path`.

        Raises:
            UserError: neither the recipe nor --data gives one, or one holds no tokens.
        """
        folders = recipe.data.folders if self.data is None else self.data
        missing = next((folder for folder in folders if not (Path(folder) / FILE).exists()), None)
        if folders and missing is None:
            return folders
        if self.data is not None:
            problem = f"holds no tokens (no {FILE} in it)" if Path(str(missing)).exists() else "does not exist"
            hint = "give a folder that `pkmlm tokenize -o` wrote, or a text with --text FILE"
            raise UserError(f"--data {missing} {problem}", hint)
        message = f"{path} has no data.dir" if missing is None else f"the tokens of {path} are not in {missing}"
        raise UserError(message, "give the folder of the tokens with --data DIR, or a text with --text FILE")


@dataclass(frozen=True)
class Documents:
    """Tokenized documents and the size of their text.

    Attributes:
        name: of the split or the file; for several files, their number and pattern.
        ids: the documents' token ids, without the end-of-document token; to be read only once.
        tokens: of these, those that are scored; words: of their text, as `len(re.split(r"\\s+", text))` summed over
            documents; bytes: in UTF-8.
        source: where they come from, as results record it; warnings: about what may make the result misleading.
        unscored: how many ids of each document, its prompt, are not scored; None: documents have none.
    """

    name: str
    ids: Iterable[np.ndarray]
    tokens: int
    words: int
    bytes: int
    source: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    unscored: Sequence[int] | None = None

    def with_prompts(self) -> Iterator[tuple[np.ndarray, int]]:
        """The ids of each document, and how many of them, its prompt, are not scored; to be read only once."""
        return zip(self.ids, itertools.repeat(0) if self.unscored is None else self.unscored, strict=False)


def chosen_documents(choice: TextChoice, run: "LoadedRun", quiet: bool = True) -> Documents:
    """The documents that the options of a command choose, for one pass.

    Args:
        quiet: show no progress where a text is tokenized.

    Raises:
        UserError: they cannot be read, or --data gives other tokens than those that the run was trained on.
    """
    if choice.text is not None:
        usual = separator_of(run.recipe.data.folders)
        with stage_progress(quiet) as (progress, _):
            return documents_of_text(choice.text, run.tokenizer, choice.separator, choice.field, usual, progress)
    folders = choice.token_folders(run.path, run.recipe)
    corpus = open_split(folders, choice.split or "test", run.tokenizer)
    documents, now = documents_of_split(corpus, run.tokenizer), corpus.hashes
    others = [name for name in ("train", "valid") if name in now and run.data.get(name, now[name]) != now[name]]
    if not others:
        return documents
    found = f"the {' and '.join(others)} tokens in {corpus.name} are not those that run {run.name} was trained on"
    if choice.data is not None and not corpus.has_answers:
        raise UserError(f"--data: {found}", "to score another text, use --text FILE")
    warning = f"{found}: the model may have been trained on what it is scored on"
    return replace(documents, name=f"{documents.name} of {corpus.name}", warnings=(warning,))


def separator_of(folders: Sequence[str]) -> str | None:
    """What separates the documents of tokenized text; None if nothing does, or the tokens cannot be read."""
    try:
        return read_indexes(folders)[0][1].separator if folders else None
    except UserError:
        return None


def open_split(folders: Folders, split: str, tokenizer: Tokenizer) -> Corpus:
    """A tokenized split of one or several folders; its tokens are checked when they are first read.

    Raises:
        UserError: no such split, or it was made with another tokenizer.
    """
    corpus = Corpus(folders, split)
    if corpus.tokenizer_sha256 != tokenizer.sha256:
        raise UserError(
            f"{corpus.name} was tokenized with another tokenizer ({corpus.tokenizer_sha256[:12]}) than "
            f"{tokenizer.name} ({tokenizer.sha256[:12]})",
            f"tokenize the text again with --tokenizer {tokenizer.name}",
        )
    return corpus


def documents_of_split(corpus: Corpus, tokenizer: Tokenizer, tokens: int | None = None) -> Documents:
    """The documents of an open split, for one pass; with `tokens`, only its first so many tokens, the last document cut
    between characters.

    Raises:
        UserError: its files are damaged, which may also show when the documents are read.
    """
    split, scored = corpus.split, corpus.scored
    whole = (corpus.document(i) for i in range(corpus.documents))
    prompts: list[int] = []
    if corpus.has_answers:
        answers = corpus.answer_lengths(0, corpus.documents)
        prompts = (np.diff(corpus.boundaries(0, corpus.documents)) - answers).tolist()
    if tokens is None or tokens >= scored:
        source = {"folder": corpus.name, "sha256": corpus.sha256, "documents": corpus.documents}
        return Documents(split, whole, scored, corpus.words, corpus.bytes, source, unscored=prompts or None)
    first: list[np.ndarray] = []
    texts: list[str] = []
    for document, prompt in zip(whole, prompts or itertools.repeat(0), strict=False):
        kept = prompt + whole_characters(document[prompt:], tokens, tokenizer)
        first.append(document[:kept])
        texts.append(tokenizer.decode(document[prompt:kept].tolist()))
        tokens -= min(tokens, len(document) - prompt)
        if tokens <= 0:
            break
    found = documents_of_texts(split, first, texts)
    return replace(found, tokens=found.tokens - sum(prompts[: len(first)]), unscored=prompts) if prompts else found


def whole_characters(ids: np.ndarray, tokens: int, tokenizer: Tokenizer) -> int:
    """How many ids to keep, at most `tokens` and at least one, so that the last does not end inside a character, whose
    first bytes would each be decoded to U+FFFD.
    """
    if tokens >= len(ids):
        return len(ids)
    following = tokenizer.decode(ids[: tokens + 3].tolist())  # a character has at most four bytes
    fewer = range(tokens, max(0, tokens - 4), -1)
    return next((each for each in fewer if following.startswith(tokenizer.decode(ids[:each].tolist()))), tokens)


@dataclass
class PartTally(Tally):
    """Also notes whether a separator would divide one of the documents."""

    separator: str = "\n"
    divided: bool = False
    held: str = ""  # the end of the document so far

    def add(self, chunk: Chunk) -> None:
        super().add(chunk)
        text = self.held + chunk.text
        self.divided |= sum(map(bool, text.split(self.separator))) > 1
        self.held = "" if chunk.ends_document else text[-len(self.separator) - 1 :]


def documents_of_text(
    path: str,
    tokenizer: Tokenizer,
    separator: str | None = None,
    field: str = FIELD,
    usual: str | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> Documents:
    """The documents of a text file (any kind that `pkmlm tokenize` reads); "-" is standard input. They are tokenized as
    `tokenize` does it; the tokens lie in a temporary file, which disappears with the last array of them.

    Args:
        usual: what separates the documents of the run's tokens. Without `separator`, a text that this would divide
            gets a warning. So does any file that `separator` does not divide.
        progress: called with "tokenizing" and the bytes that are done.

    Raises:
        UserError: the file cannot be read, holds no text, or is of a format that `separator` or `field` is not for;
            (exit code 1) the temporary file cannot be written.
    """
    sources = find_sources([path])
    plain = any(source.format == "txt" for source in sources)
    check_separator_and_field(sources, separator, field)
    tally = PartTally(separator=usual) if usual is not None and plain and separator is None else Tally()
    reader = SplitReader("tokenizing", sources, separator, field, progress, (0.0, 1.0), tokenizer.cuts, tally=tally)
    tokens, ends = spilled(encode_batches(reader, tokenizer, usable_cores()), tokenizer.eos)
    one = "standard input" if path == "-" else sources[0].plain_name
    if not tally.documents:
        raise UserError(
            f"{one if path == '-' else path} holds no text", "give another text, or a split of the run with --split"
        )
    name = one if len(sources) == 1 else f"{len(sources)} files of {path}"
    warnings: tuple[str, ...] = ()
    if isinstance(tally, PartTally) and tally.divided:
        few = f"{tally.documents:,} document{'s' * (tally.documents > 1)}"
        warnings = (f"{name}: read as {few}, but --separator {usual!r}, as for the run's tokens, divides it",)
    if separator is not None and reader.undivided:
        warnings = (undivided_warning(reader.undivided, separator),)
    digests = [origin.sha256 for origin in reader.origins]
    sha256 = digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()
    read = {"file": path, "sha256": sha256, "separator": separator, "field": field, "documents": tally.documents}
    ids = (tokens[start + 1 : end] for start, end in itertools.pairwise([-1, *ends]))
    return Documents(name, ids, len(tokens) - len(ends), tally.words, tally.bytes, read, warnings)


def spilled(arrays: Iterable[np.ndarray], eos: int) -> tuple[np.ndarray, list[int]]:
    """Tokens as one array that is mapped from a temporary file without a name, and where `eos` is in it.

    Raises:
        UserError: (exit code 1) there is no room for them.
    """
    folder, tokens, ends = Path(tempfile.gettempdir()), np.empty(0, np.int64), list[int]()
    with write_errors(folder):
        file = tempfile.TemporaryFile()  # noqa: SIM115
    with file:
        written = 0
        for tokens in arrays:
            with write_errors(folder):
                file.write(tokens.data)
                file.flush()
            ends += (np.flatnonzero(tokens == eos) + written).tolist()
            written += len(tokens)
        return (np.asarray(np.memmap(file, tokens.dtype, "r", shape=(written,))) if written else tokens), ends


def documents_of_texts(name: str, ids: list[np.ndarray], texts: list[str]) -> Documents:
    """Documents whose tokens and texts are both known."""
    words = sum(1 + sum(1 for _ in re.finditer(r"\s+", text)) for text in texts)  # a list of words is 11 times the text
    return Documents(name, ids, sum(map(len, ids)), words, sum(len(text.encode()) for text in texts))
