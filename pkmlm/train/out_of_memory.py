"""Which key to lower where training runs out of memory, or would."""

from dataclasses import replace

from pkmlm.cost import bytes_held, cost_of
from pkmlm.device import DeviceSettings, Precision, free_bytes
from pkmlm.distributed import ranks_of_machine
from pkmlm.errors import UserError
from pkmlm.recipe.schema import Recipe, flatten, scalar_text
from pkmlm.train.job import Job

OF_A_FORWARD = ("activations", "search")  # parts of `Cost.training` that grow with the micro-batch
STAYS = ("weights", "moments")  # from step to step


def out_of_memory_error(job: Job, precision: Precision, ranks: int) -> UserError:
    """The error that says what a run of this many ranks needs, and which key to lower; exit code 1."""
    training = rank_bytes(job, precision)
    parts = ", ".join(f"{name} {size / 1e6:,.0f} MB" for name, size in training.items() if size >= 1e6)
    key, value = key_to_lower(job.recipe, job.vocab_size, training)
    elsewhere = "" if key == "train.micro_batch" else " (under another -o, if the run has a checkpoint)"
    return UserError(
        f"out of memory: {needed(training, ranks)} besides the framework ({parts or 'little of each part'})",
        f"lower {key}, which is {value}{elsewhere}",
        exit_code=1,
    )


def too_large_warning(job: Job, settings: DeviceSettings, ranks: int) -> list[str]:
    """A warning before memory runs out, which on Linux may end a process without a message."""
    training, free = rank_bytes(job, settings.precision), free_bytes(settings.device)
    beside = ranks_of_machine() if settings.device.type == "cpu" else 1
    if beside * sum(training.values()) <= free:
        return []
    key, value = key_to_lower(job.recipe, job.vocab_size, training)
    several = f" for {beside} ranks" if beside > 1 else ""
    return [f"{needed(training, ranks)}; {free / 1e6:,.0f} MB are free{several}: lower {key}, which is {value}"]


def rank_bytes(job: Job, precision: Precision) -> dict[str, int]:
    """Bytes that one rank holds in training, by part, in a precision (what "auto" has been resolved to)."""
    recipe = replace(job.recipe, train=replace(job.recipe.train, precision=precision))
    return bytes_held(recipe, cost_of(recipe, job.vocab_size))


def step_bytes(job: Job, precision: Precision) -> int:
    """Bytes that a rank's step takes and gives back."""
    return sum(size for name, size in rank_bytes(job, precision).items() if name not in STAYS)


def needed(training: dict[str, int], ranks: int) -> str:
    return f"{'each rank' if ranks > 1 else 'training'} needs about {sum(training.values()) / 1e6:,.0f} MB"


def key_to_lower(recipe: Recipe, vocab_size: int, training: dict[str, int]) -> tuple[str, str]:
    """The key, and its value, of what takes most of a rank's `training` memory: the micro-batch if a forward pass takes
    more than everything else; otherwise what makes most of the parameters of a memory so many, or the width.
    """
    model, micro_batch = recipe.model, recipe.train.micro_batch
    if micro_batch > 1 and 2 * sum(training.get(name, 0) for name in OF_A_FORWARD) > sum(training.values()):
        return "train.micro_batch", str(micro_batch)
    sizes = {"model.dim": 0}
    for name, memory in model.memories.items():
        found = memory.sizes(model.dim, vocab_size, len(memory.layer_places(model.layers)))
        sizes |= {f"model.memories.{name}.{key}": size for key, size in found.items()}
    largest = max(sizes, key=lambda key: sizes[key])
    return largest, scalar_text(flatten(recipe)[largest])
