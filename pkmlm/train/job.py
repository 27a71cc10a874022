"""What a run is to train, and on what."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pkmlm.data.corpus import Corpus
from pkmlm.data.tokenizer import Tokenizer
from pkmlm.recipe.schema import Recipe

if TYPE_CHECKING:  # which imports torch
    from pkmlm.device import Precision

OFTEN = 20  # passes over the text that are worth a warning


@dataclass(frozen=True)
class Job:
    """A recipe, and what it names: its tokens to train on and their tokenizer, which fit it.

    Attributes:
        corpus: the train split.
        doubts: what a person may not have meant by the recipe.
    """

    recipe: Recipe
    corpus: Corpus
    tokenizer: Tokenizer
    doubts: tuple[str, ...] = ()

    @property
    def vocab_size(self) -> int:
        """Rows of the model's embedding: as the recipe says, or one for each token."""
        return self.recipe.model.vocab_size or self.tokenizer.size

    def recipe_in(self, precision: "Precision") -> Recipe:
        """The recipe in the precision that its "auto" has become, by which memory is counted."""
        return replace(self.recipe, train=replace(self.recipe.train, precision=precision))


def passes(recipe: Recipe, corpus: Corpus) -> float:
    """How often training reads the text, which `Batches` cuts into sequences."""
    return recipe.train.steps * recipe.sequences / -(-corpus.tokens // recipe.model.context)


def rereading(recipe: Recipe, corpus: Corpus) -> list[str]:
    """What to warn of, a line each: a text that is so short that training reads it again and again."""
    steps, context = recipe.train.steps, recipe.model.context
    times = passes(recipe, corpus)
    if times <= OFTEN:
        return []
    short = f", less than one sequence (model.context: {context:,})" * (corpus.tokens < context)
    several = f"{steps:,} steps read" if steps > 1 else "one step reads"
    return [f"{recipe.data.dir}: train has {corpus.tokens:,} tokens{short}: {several} them {times:,.0f} times"]


def no_validation(recipe: Recipe, corpus: Corpus) -> list[str]:
    """What to warn of, a line at most: tokens without a split to validate on."""
    if "valid" in corpus.splits:
        return []
    idle = "" if recipe.eval.patience is None else ", and eval.patience ends nothing"
    return [f"{recipe.data.dir} has no valid split: there will be no validation and no best checkpoint{idle}"]
