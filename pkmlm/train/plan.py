"""What a run would be, as `pkmlm train --dry-run` prints it."""

from collections.abc import Iterable
from shutil import get_terminal_size
from textwrap import fill

from pkmlm.cost import cost_of
from pkmlm.device import DeviceSettings
from pkmlm.train.job import Job
from pkmlm.train.out_of_memory import training_bytes

LABEL = 13  # characters


def plan(job: Job, settings: DeviceSettings, ranks: int) -> list[str]:
    """A line for each of device, parameters, batch, length and memory, with its label before it."""
    recipe, train = job.recipe, job.recipe.train
    cost = cost_of(recipe, job.vocab_size)
    micro_batches, sequences = recipe.micro_batches(ranks), recipe.sequences
    each = f" on each of {ranks} processes" if ranks > 1 else ""
    held = training_bytes(job, settings.precision, ranks)
    sizes = {name: f"{size / 1e6:,.1f}" for name, size in held.items()}
    parts = ", ".join(f"{name} {size}" for name, size in sizes.items() if size != "0.0")
    return [
        f"recipe       {recipe.name}",
        f"device       {settings.device}, {settings.precision} ({settings.reason})",
        f"parameters   {cost.dense:,} dense, {cost.memory:,} in memory, {cost.read_per_token:,} read for a token",
        f"batch        {sequences:,} sequence{'s' if sequences > 1 else ''} of {recipe.model.context:,} tokens, "
        f"in {micro_batches:,} micro-batch{'es' if micro_batches > 1 else ''} of {train.micro_batch:,}{each}",
        f"training     {train.steps:,} steps, {train.steps * train.batch_tokens:,} tokens, "
        f"{job.epochs:,.2f} epochs of {job.corpus.tokens:,}",
        f"memory       {sum(held.values()) / 1e6:,.1f} MB to train{each}: {parts}",
    ]


def print_labelled(lines: Iterable[str]) -> None:
    """Print lines, each wrapped to the terminal's width (80 characters where there is none) under its label."""
    width, indent = get_terminal_size().columns, " " * LABEL
    for line in lines:
        print(fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False), flush=True)
