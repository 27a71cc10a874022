"""What must hold between a recipe and the processes that train it together."""

import math

from pkmlm.recipe.check import Check, nearest_divisors, nearest_multiples
from pkmlm.recipe.limits import MOST_SLOTS
from pkmlm.recipe.schema import Recipe


def check_ranks(recipe: Recipe, ranks: int, file: str) -> None:
    """What must hold where so many processes train together.

    Args:
        file: of the recipe, for the errors.

    Raises:
        UserError: a step does not fall into whole micro-batches on all of them, or they not into groups; more slots
            than they can tell each other of.
    """
    check = Check(dict.fromkeys(("parallel.memory", "train.micro_batch", "model.memory.num_keys"), file))
    portion, sequences, parts = recipe.train.micro_batch, recipe.sequences, recipe.parallel.memory
    memory = recipe.model.memory
    if ranks > 1 and memory.kind != "none" and memory.slots > MOST_SLOTS:
        message = f"found {memory.num_keys}, {memory.slots:.2g} slots"
        check.fail("model.memory.num_keys", message, f"at most {math.isqrt(MOST_SLOTS)} with more than one process")
    if ranks % parts:
        who = "1 process does" if ranks == 1 else f"{ranks} processes do"
        check.fail("parallel.memory", f"{who} not fall into groups of {parts}", nearest_divisors(ranks, parts))
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
