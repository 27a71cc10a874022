"""`pkmlm train --dry-run`: what a run would be, and one real batch of it, with nothing written."""

import time
from shutil import get_terminal_size
from textwrap import fill
from typing import TYPE_CHECKING

import click

from pkmlm.console import warn

if TYPE_CHECKING:
    from pkmlm.device import DeviceSettings
    from pkmlm.distributed import World
    from pkmlm.train.job import Job


def refuse_output(output: str, job: "Job", resume: str) -> None:
    """Refuse a run directory that training would refuse."""
    from pkmlm.cli.train import refuse
    from pkmlm.runs.directory import RunDirectory
    from pkmlm.train.resume import refuse_changes

    run = RunDirectory(output)
    refuse(run, job, resume)
    if run.steps():
        refuse_changes(run, job.recipe)


def report(job: "Job", world: "World") -> int:
    """Print the plan, then take the first step in memory and print how long it took; rank 0 prints."""
    from pkmlm.cli.train import device_settings_of, explained
    from pkmlm.train.init_from import check_initial
    from pkmlm.train.out_of_memory import too_large

    with world.collective_errors():
        settings = device_settings_of(job.recipe)
        initial = check_initial(job) if world.rank == 0 else []
    if world.rank == 0:
        click.echo("\n".join(map(hanging, plan(job, settings, world.size))))
        for text in (*job.doubts, *initial, *too_large(job, settings, world.size)):
            warn(text)
    with explained(job, settings, world):
        line = first_step(job, settings, world)
    if world.rank == 0:
        click.echo(hanging(line))
    return 0


def plan(job: "Job", settings: "DeviceSettings", ranks: int) -> list[str]:
    """A line for each of what a run would have: device, parameters, batch, length, memory."""
    from pkmlm.model.cost import cost_of
    from pkmlm.train.job import passes
    from pkmlm.train.out_of_memory import held_in_training

    recipe, train = job.recipe, job.recipe.train
    cost = cost_of(recipe, job.vocab_size)
    forwards = recipe.micro_batches(ranks)
    several = f" on each of {ranks} processes" if ranks > 1 else ""
    held = held_in_training(job, settings.precision, ranks)
    sizes = {name: f"{size / 1e6:,.1f}" for name, size in held.items()}
    parts = ", ".join(f"{name} {size}" for name, size in sizes.items() if size != "0.0")
    return [
        f"recipe       {recipe.name}",
        f"device       {settings.device}, {settings.precision} ({settings.reason})",
        f"parameters   {cost.dense:,} dense, {cost.memory:,} in memory, {cost.read_per_token:,} read for a token",
        f"batch        {recipe.sequences:,} sequence{'s' * (recipe.sequences != 1)} of {recipe.model.context:,} "
        f"tokens, in {forwards:,} forward{'s' * (forwards != 1)} of {train.micro_batch:,}{several}",
        f"training     {train.steps:,} steps, {train.steps * train.batch_tokens:,} tokens, "
        f"{passes(recipe, job.corpus):,.2f} epochs of {job.corpus.tokens:,}",
        f"memory       {sum(held.values()) / 1e6:,.1f} MB to train{several}: {parts}",
    ]


def first_step(job: "Job", settings: "DeviceSettings", world: "World") -> str:
    """Take it, and say how it went."""
    from pkmlm.data.batches import Batches
    from pkmlm.device import held_bytes
    from pkmlm.distributed import build_process_groups
    from pkmlm.train.init_from import starting_model
    from pkmlm.train.state import TrainState
    from pkmlm.train.step import train_step

    ranks = build_process_groups(world, job.recipe.parallel.memory)
    model = starting_model(job, settings.device, ranks, fresh=True)
    state = TrainState(job.recipe, model, Batches.of(job.corpus, job.recipe), settings.precision, ranks)
    began = time.monotonic()
    result = train_step(state, 1)
    seconds = time.monotonic() - began
    size, where = held_bytes(settings.device)
    return f"first step   loss {result.loss:.3f}, {seconds:.2f} s (with warm-up), {size / 1e6:,.0f} MB {where}"


def hanging(line: str) -> str:
    """A line in as many as the terminal's width asks for (80 characters where there is none), under its label."""
    width, indent = get_terminal_size().columns, " " * 13
    return fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
