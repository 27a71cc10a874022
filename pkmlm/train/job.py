"""What a run trains, and on what: a recipe, the tokens that it names, and their tokenizer."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from pkmlm.data.canonical import canonical_ids
from pkmlm.data.corpus import Corpus, open_tokenizer
from pkmlm.data.tokenizer import Tokenizer
from pkmlm.errors import UserError
from pkmlm.measure.background import Background
from pkmlm.recipe.constraints import check_ranks
from pkmlm.recipe.load import load_recipe
from pkmlm.recipe.schema import Recipe
from pkmlm.recipe.warnings import warnings as recipe_warnings
from pkmlm.runs.directory import IMPORTED, RunDirectory

MANY_EPOCHS = 20  # worth a warning


@dataclass(frozen=True)
class Job:
    """A recipe, and the tokens and the tokenizer that it names, checked to fit it.

    Attributes:
        corpus: the train split.
        warnings: what the user may not have meant by the recipe.
        background: the counts by which slots are chosen; None: there are none.
    """

    recipe: Recipe
    corpus: Corpus
    tokenizer: Tokenizer
    warnings: tuple[str, ...] = ()
    background: Background | None = None

    @property
    def vocab_size(self) -> int:
        """Rows of the model's embedding: as the recipe says, or one for each token."""
        return self.recipe.model.vocab_size or self.tokenizer.size

    @cached_property
    def token_ids(self) -> dict[str, np.ndarray]:
        """By the sort of ids that memories ask for, the id of each row of the embedding, by which they know tokens."""
        asked = [lookback.ids for lookback in self.recipe.model.lookbacks]
        return {ids: canonical_ids(self.tokenizer, self.vocab_size, ids == "canonical") for ids in sorted(set(asked))}

    @property
    def epochs(self) -> float:
        """How often training reads the text, which `Batches` cuts into sequences."""
        of_one = self.recipe.epoch_sequences(self.corpus.tokens, self.corpus.documents)
        return self.recipe.train.steps * self.recipe.sequences / of_one


def open_job(recipe_file: str, overrides: Sequence[str], ranks: int, *, verify: bool = False) -> Job:
    """Read a recipe, open its tokens, and check that they fit together. Nothing here needs torch.

    Args:
        overrides: KEY=VALUE strings.
        ranks: how many processes will train.
        verify: check every byte of the tokens, not only their sizes and index.

    Raises:
        UserError: the recipe, the tokens or the background are wrong, or do not fit each other or `ranks` processes.
    """
    recipe = load_recipe(recipe_file, overrides)
    folders = recipe.data.folders
    if not folders:
        hint = "add -s data.dir=DIR, a folder that `pkmlm tokenize` wrote"
        raise UserError(f"{recipe_file}: data.dir is not set", hint)
    corpus, tokenizer = Corpus(folders, "train"), open_tokenizer(folders)
    recipe = recipe.with_epochs(corpus.tokens, corpus.documents)
    valid = Corpus(folders, "valid") if "valid" in corpus.splits else None
    if verify:
        corpus.verify()
        if valid is not None:
            valid.verify()
    if recipe.model.vocab_size is not None and recipe.model.vocab_size < tokenizer.size:
        raise UserError(
            f"model.vocab_size: {recipe.model.vocab_size} (expected at least the tokenizer's {tokenizer.size})",
            "leave it null, or tokenize with a smaller --vocab-size, or with the model's own --tokenizer",
        )
    check_ranks(recipe, ranks, recipe_file)
    job = Job(recipe, corpus, tokenizer)
    warnings = recipe_warnings(recipe) + of_imported_model(Path(recipe_file), recipe)
    if job.epochs > MANY_EPOCHS:
        reading = f"{recipe.train.steps:,} steps read it {job.epochs:,.0f} times"
        warnings.append(f"{corpus.name}: the train split has {corpus.tokens:,} tokens; {reading}")
    warnings += no_validation_warning(job) + cut_documents_warning(job)
    background = None
    if recipe.finetune.slots in ("tfidf", "kl"):
        try:
            background = Background.read(Path(str(recipe.finetune.background)))
        except UserError as error:
            raise UserError(f"finetune.background: {error.message}", error.hint, error.exit_code) from None
    return Job(recipe, corpus, tokenizer, tuple(warnings), background)


def of_imported_model(recipe_file: Path, recipe: Recipe) -> list[str]:
    """A warning if a model is trained by the recipe of an imported one, but not from its weights."""
    run = RunDirectory(recipe_file.parent)
    if recipe.train.init_from or recipe_file.name != run.recipe_file.name or run.facts().get("status") != IMPORTED:
        return []
    return [f"{run.path} is an imported model, but training begins with random weights: -s train.init_from={run.path}"]


def hashes_of(job: Job) -> dict[str, str]:
    """The sha256 of everything that a resumed run must find again, by name."""
    found = dict(job.corpus.hashes)
    if job.background is not None:
        found["background"] = job.background.digest
    return found


def cut_documents_warning(job: Job) -> list[str]:
    """A warning where documents are longer than the sequences that have one each."""
    if job.recipe.data.pack:
        return []
    context, corpus = job.recipe.model.context, job.corpus
    longer = int((np.diff(corpus.boundaries(0, corpus.documents)) > context).sum())
    cut = f"{corpus.name}: {longer:,} of {corpus.documents:,} documents are longer than the context of {context:,}"
    return [f"{cut}: only the last {context:,} tokens of each are read"] if longer else []


def no_validation_warning(job: Job) -> list[str]:
    """A warning where the tokens have no split to validate on."""
    if "valid" in job.corpus.splits:
        return []
    return [
        f"{job.corpus.name} has no valid split, so there is no validation, no best checkpoint and no early stopping"
    ]
