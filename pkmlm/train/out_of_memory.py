"""What to lower where training runs out of memory, or would."""

import math
import os
from dataclasses import replace
from itertools import chain, islice
from typing import Any

from pkmlm.cost import bytes_held, cost_of
from pkmlm.device import DeviceSettings, Precision, free_bytes
from pkmlm.errors import UserError
from pkmlm.recipe.check import check_ranks, check_recipe
from pkmlm.recipe.schema import Recipe
from pkmlm.train.job import Job

TRIES = 1000  # values of a key: a check of a recipe takes half a millisecond
OF_A_FORWARD = ("activations", "search")  # parts of `Cost.training` that grow with the micro-batch


def out_of_memory_error(job: Job, precision: Precision, ranks: int) -> UserError:
    """The error that names the key to lower, and to what, for a run of so many ranks; exit code 1."""
    training = training_bytes(job, precision, ranks)
    parts = ", ".join(f"{name} {size / 1e6:,.0f} MB" for name, size in training.items() if size >= 1e6)
    key, value, lower = what_to_lower(job.recipe, training, ranks)
    return UserError(
        f"out of memory: {needed(training, ranks)} and the framework ({parts or 'little of each part'})",
        f"lower {key} from {value} to {lower}: -s {key}={lower} (under another -o, if the run has a checkpoint)",
        exit_code=1,
    )


def too_large_warning(job: Job, settings: DeviceSettings, ranks: int) -> list[str]:
    """A warning before memory runs out, which on Linux may end a process without a word."""
    training, free = training_bytes(job, settings.precision, ranks), free_bytes(settings.device)
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if settings.device.type == "cpu" else 1
    if beside * sum(training.values()) <= free:
        return []
    key, value, lower = what_to_lower(job.recipe, training, ranks)
    several = f" for {beside}" if beside > 1 else ""
    return [
        f"{needed(training, ranks)}, {free / 1e6:,.0f} MB are free{several}: lower {key} from {value}, to {lower} say"
    ]


def training_bytes(job: Job, precision: Precision, ranks: int) -> dict[str, int]:
    """Bytes that one rank holds in training, by part, in the precision that "auto" has become."""
    recipe = replace(job.recipe, train=replace(job.recipe.train, precision=precision))
    return bytes_held(recipe, cost_of(recipe, job.vocab_size), ranks, recipe.parallel.memory)


def needed(training: dict[str, int], ranks: int) -> str:
    return f"{'each rank' if ranks > 1 else 'training'} needs about {sum(training.values()) / 1e6:,.0f} MB"


def what_to_lower(recipe: Recipe, training: dict[str, int], ranks: int) -> tuple[str, int, int]:
    """A key, its value, and a lower one that the recipe may hold: the largest that halves what takes the most of a
    rank's `training` memory, or else the least.

    That is the micro-batch where a forward takes more than what does not depend on it; else the slots of the memory,
    the rows of the hash tables, the layers, or the width: the first that can be lowered.
    """
    model, memory, size = recipe.model, recipe.model.memory, recipe.train.micro_batch
    halves = []
    if 2 * sum(training.get(name, 0) for name in OF_A_FORWARD) > sum(training.values()):
        halves.append(("train.micro_batch", size, size // 2))
    if memory.kind != "none":
        halves.append(("model.memory.num_keys", memory.num_keys, math.floor(memory.num_keys / math.sqrt(2))))
    if model.projections == "hash":
        halves.append(("model.hash.bits", model.hash.bits, model.hash.bits - 1))  # nearly half of the rows
    halves += [("model.layers", model.layers, model.layers // 2), ("model.dim", model.dim, model.dim // 2)]
    for key, value, half in halves:
        for lower in islice(chain(range(half, 0, -1), range(half + 1, value)), TRIES):
            if may_hold(recipe, key, lower, ranks):
                return key, value, lower
    return "model.dim", model.dim, model.dim  # there is nothing smaller


def may_hold(recipe: Recipe, key: str, value: int, ranks: int) -> bool:
    """Whether a recipe with another value of a key could be trained by so many ranks."""
    try:
        check_ranks(check_recipe(with_value(recipe, key, value)), ranks, "")
    except UserError:
        return False
    return True


def with_value(section: Any, key: str, value: int) -> Any:
    """A recipe, or a section of one, with another value of a dotted key."""
    name, _, inner = key.partition(".")
    return replace(section, **{name: with_value(getattr(section, name), inner, value) if inner else value})
