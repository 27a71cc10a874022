"""What must hold between a recipe and the processes that train it together."""

from pkmlm.recipe.check import Check, nearest_divisors, nearest_multiples
from pkmlm.recipe.schema import Recipe


def check_ranks(recipe: Recipe, ranks: int, file: str) -> None:
    """What must hold where so many processes train together.

    Args:
        file: of the recipe, for the errors.

    Raises:
        UserError: a step does not fall into whole micro-batches on all of them, or they not into groups.
    """
    check = Check(dict.fromkeys(("parallel.memory", "train.micro_batch"), file))
    portion, sequences, parts = recipe.train.micro_batch, recipe.sequences, recipe.parallel.memory
    if ranks % parts:
        message = f"{ranks} processes do not fall into groups of {parts}"
        check.fail("parallel.memory", message, nearest_divisors(ranks, parts))
    if sequences % (portion * ranks):
        unit = portion * ranks * recipe.model.context
        expected = f"a train.batch_tokens of {nearest_multiples(recipe.train.batch_tokens, unit)}"
        if sequences % ranks == 0:
            expected += f", or a micro-batch of {nearest_divisors(sequences // ranks, portion)}"
        check.fail(
            "train.micro_batch",
            f"the {sequences} sequences of a step (train.batch_tokens / model.context) do not fall into micro-batches "
            f"of {portion} on each of {ranks} processes",
            expected,
        )
