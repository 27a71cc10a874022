"""A dry run: the plan of a run, and its first step in memory. Nothing is written."""

import time
from collections.abc import Collection

from pkmlm.console import warn
from pkmlm.cost import cost_of
from pkmlm.data.batches import Batches
from pkmlm.device import DeviceSettings, held_bytes, select_device
from pkmlm.distributed import World, build_process_groups
from pkmlm.runs.directory import RunDirectory
from pkmlm.train.init_from import check_init_from
from pkmlm.train.job import Job
from pkmlm.train.out_of_memory import rank_bytes, too_large_warning
from pkmlm.train.resume_check import check_allowed, refuse_changed_recipe, refuse_other_data, refuse_output
from pkmlm.train.run import build_state, explaining_failure, initial_model
from pkmlm.train.slot_choice import check_background
from pkmlm.train.step import train_step


def dry_run(job: Job, output: str | None, world: World, *, resume: str = "auto", allowed: Collection[str] = ()) -> None:
    """Print what `train` would do, take the first step of a new run in memory, and print how it went; rank 0 prints.

    Args:
        output: the run directory that `train` would write, which is only checked; None: check none.
        resume, allowed: as in `train`.

    Raises:
        UserError: as `train`.
    """
    lead, run = world.rank == 0, RunDirectory(output) if output else None
    start: int | None = None
    warnings: list[str] = []
    with world.collective_errors():
        settings = select_device(job.recipe.train.precision)
        if lead:
            check_allowed(job.recipe, allowed)
            if run:
                refuse_output(run, resume)
                if run.steps():
                    refuse_changed_recipe(run, job.recipe, allowed)
                    refuse_other_data(run, job)
            if run is None or not run.steps():  # a resume does not read `train.init_from`
                start, warnings = check_init_from(job)
            check_background(job)
            print(*plan(job, settings, world.size), sep="\n", flush=True)
            for text in [*job.warnings, *warnings, *too_large_warning(job, settings, world.size)]:
                warn(text)
    with explaining_failure(job, settings, world):
        groups = build_process_groups(world, job.recipe.parallel.memory)
        state = build_state(job, initial_model(job, settings, groups, world.broadcast(start)), settings, groups)
        began = time.monotonic()
        loss = train_step(state, 1).loss
        seconds = time.monotonic() - began
    if lead:
        size, where = held_bytes(settings.device)
        print(f"first step   loss {loss:.3f}, {seconds:.2f} s (with warm-up), {size / 1e6:,.0f} MB {where}", flush=True)


TRAINS = {
    "all": "all parameters",
    "memories": "the memories alone",
    "values": "tables of the memories alone",
    "gates": "gates of the memories alone",
}


def plan(job: Job, settings: DeviceSettings, ranks: int) -> list[str]:
    """What a run would be, in labelled lines: recipe, device, parameters, batch, length, what trains, and memory."""
    recipe, train = job.recipe, job.recipe.train
    cost = cost_of(recipe, job.vocab_size)
    micro_batches, sequences = recipe.micro_batches(ranks), recipe.sequences
    each = f" on each of {ranks} processes" if ranks > 1 else ""
    held = rank_bytes(job, settings.precision)
    sizes = {name: f"{size / 1e6:,.1f}" for name, size in held.items()}
    parts = ", ".join(f"{name} {size}" for name, size in sizes.items() if size != "0.0")
    spec = recipe.finetune
    chosen = "" if spec.slots == "all" else f", of each table the first {spec.top:,} slots of a step by {spec.slots}"
    trains = TRAINS[train.only]
    read = Batches.of(job.corpus, recipe).mean_read
    up_to, about = ("", "") if recipe.data.pack else ("up to ", "about ")
    return [
        f"recipe       {recipe.name}",
        f"device       {settings.device}, {settings.precision} ({settings.reason})",
        f"parameters   {cost.dense:,} dense, {cost.memory:,} in memory, {cost.read_per_token:,} read for a token",
        f"batch        {sequences:,} sequence{'s' if sequences > 1 else ''} of {up_to}{recipe.model.context:,} tokens, "
        f"in {micro_batches:,} micro-batch{'es' if micro_batches > 1 else ''} of {train.micro_batch:,}{each}",
        f"training     {train.steps:,} steps, {about}{round(train.steps * read):,} tokens, "
        f"{job.epochs:,.2f} epochs of {job.corpus.tokens:,}"
        + f" in {job.corpus.documents:,} sequences"
        * (not recipe.data.pack),
        f"trains       {trains}{chosen}",
        f"memory       {sum(held.values()) / 1e6:,.1f} MB to train{each}: {parts}",
    ]
