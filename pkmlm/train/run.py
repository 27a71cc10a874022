"""The life of a run: check, lock, fall back, begin, restore, train, end."""

import os
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace

import torch

from pkmlm.data.batches import Batches
from pkmlm.device import DeviceSettings, select_device
from pkmlm.distributed import ProcessGroups, World, build_process_groups, is_network_error
from pkmlm.errors import UserError, is_out_of_memory, printable
from pkmlm.files import remove_file, write_text
from pkmlm.model.transformer import Transformer, build_model
from pkmlm.recipe.schema import Recipe
from pkmlm.runs.checkpoint import quarantine_damaged_checkpoints
from pkmlm.runs.directory import RunDirectory
from pkmlm.runs.record import Progress, read_progress
from pkmlm.signals import StopRequest, stop_on_signals
from pkmlm.train.init_from import IDS, check_init_from, load_init_from
from pkmlm.train.job import Job, no_validation_warning
from pkmlm.train.log import RunLog, SilentLog, TrainingLog
from pkmlm.train.loop import Outcome, Training
from pkmlm.train.monitor import TrainingMonitor
from pkmlm.train.out_of_memory import out_of_memory_error, too_large_warning
from pkmlm.train.provenance import provenance
from pkmlm.train.resume_check import (
    change_warnings,
    check_allowed,
    is_complete,
    refuse_changed_recipe,
    refuse_other_data,
    refuse_output,
)
from pkmlm.train.slot_choice import check_background
from pkmlm.train.step import TrainState
from pkmlm.train.validation import validator


def train(
    job: Job,
    output: str,
    world: World,
    *,
    resume: str = "auto",
    allowed: Collection[str] = (),
    quiet: bool = False,
) -> int:
    """Train a job in the run directory `output`, from its latest intact checkpoint if it has one; all ranks call this.

    Args:
        resume: "auto", "must" (there must be a checkpoint) or "never" (there must be none).
        allowed: keys of the recipe that may have changed since the checkpoint, besides those that always may.
        quiet: write nothing but warnings to standard error.

    Returns:
        the exit code: 0, or that of the signal on which training stopped with a checkpoint saved.

    Raises:
        UserError: the run is refused, training diverged, memory or the disk is full, or another rank is lost; once
            training has begun, run.json says how it ended.
    """
    run, lead = RunDirectory(output), world.rank == 0
    warnings: list[str] = []
    complete, start = False, None
    answer = "stopping after this step (again: at once)" if lead and not quiet else ""
    with ExitStack() as held, stop_on_signals(world.all_max, answer) as stop:
        with world.collective_errors():
            settings = select_device(job.recipe.train.precision)
            if lead:
                check_allowed(job.recipe, allowed)
                refuse_output(run, resume)  # before anything is written, not even a folder
                if not run.steps():
                    start, warnings = check_init_from(job)
                check_background(job)
                held.enter_context(run.locked())
                if run.steps():
                    warnings += quarantine_damaged_checkpoints(run)
                    refuse_changed_recipe(run, job.recipe, allowed)
                    refuse_other_data(run, job)
                complete = is_complete(run, job.recipe)
        if world.broadcast(complete):
            if lead:
                done = f"run {printable(output)} is already complete at step {run.steps()[-1]}"
                longer = "train.steps" if job.recipe.train.epochs is None else "train.epochs"
                if run.facts().get("status") == "patience":
                    longer = "eval.patience"
                print(f"{done}; raise {longer} to train it further", flush=True)
            return 0
        start = world.broadcast(start)
        with world.collective_errors():
            if lead:
                recipe = begun_recipe(run, job.recipe)
                warnings += begin(run, job, recipe, settings, world.size)
                job = replace(job, recipe=recipe)
                if start is not None:
                    run.write_facts(init_from_step=start)
        with noting_failure(run, world), explaining_failure(job, settings, world):
            outcome = run_training(run, job, settings, warnings, stop, quiet, world, start)
        with world.collective_errors():
            if lead:
                run.write_facts(**asdict(outcome))
                if outcome.exit_code == 0:  # nothing is left to do; the file `done`, written last, says so
                    run.clean()  # what could not be deleted before: the same command would do nothing more
                    write_text(run.path / "done", f"{outcome.status} at step {outcome.step}\n")
    return outcome.exit_code


def begun_recipe(run: RunDirectory, recipe: Recipe) -> Recipe:
    """A recipe with the `train.init_from` that the run actually started from."""
    source = run.recipe().train.init_from if run.steps() else recipe.train.init_from
    return replace(recipe, train=replace(recipe.train, init_from=source))


def begin(run: RunDirectory, job: Job, recipe: Recipe, settings: DeviceSettings, ranks: int) -> list[str]:
    """Make the run's folder, clear what an earlier process has left of work that will be done again, and write in
    run.json that this process trains; return warnings.

    Args:
        recipe: that of the job, as `begun_recipe` returns it.
    """
    step = max(run.steps(), default=0)
    latest = read_progress(run.checkpoint(step)) if step else Progress()
    facts, warnings = provenance(job, settings, ranks, run), list(job.warnings)
    if step:
        warnings = change_warnings(run.recipe(), job.recipe, run.facts(), facts)
    remove_file(run.path / "done")  # before the recipe changes, by which `is_complete` knows whether all is done
    run.create(recipe)
    run.clean()
    # Before the log opens the file, which this replaces. A validation that the checkpoint does not know is repeated;
    # where there is no checkpoint, everything is.
    run.cut_metrics(step or -1, validated=latest.validations.step == step)
    run.write_tokenizer(job.tokenizer.file, job.tokenizer.model_bytes)
    if step:
        warnings += no_validation_warning(job)
    folders = [os.path.abspath(folder) for folder in job.corpus.folders]
    data = {"data_dir": folders[0] if isinstance(job.recipe.data.dir, str) else folders}
    data |= {"data_sha256": job.corpus.sha256, "tokenizer_sha256": job.tokenizer.sha256}
    run.write_facts(**data, **facts, status="running", exit_code=None, seconds=None, rank=None, message=None)
    return warnings + too_large_warning(job, settings, ranks)


def run_training(
    run: RunDirectory,
    job: Job,
    settings: DeviceSettings,
    warnings: list[str],
    stop: StopRequest,
    quiet: bool,
    world: World,
    start: int | None,
) -> Outcome:
    """Open the log, build the model, restore the latest checkpoint, and train.

    Args:
        start: as in `initial_model`.
    """
    recipe = job.recipe
    groups = build_process_groups(world, recipe.parallel.memory)
    log: RunLog = SilentLog()
    with ExitStack() as opened:
        with world.collective_errors():
            if world.rank == 0:
                monitor = TrainingMonitor.of(run.metrics())
                log = TrainingLog(run.path, recipe.name, recipe.train.steps, recipe.log, quiet=quiet, monitor=monitor)
                opened.enter_context(log)
        step = max(world.broadcast(run.steps()), default=0)
        for text in warnings:
            log.warn(step, text)
        doing = f"resuming at step {step}" if step else "training"
        several = f" with {world.size} processes" if world.size > 1 else ""
        log.say(f"{doing} in {run.path} on {settings.device}{several}, {settings.precision} ({settings.reason})")
        with world.collective_errors():
            if step:
                model = build_model(recipe, job.vocab_size, settings.device, groups, init_weights=False)
            else:
                model = initial_model(job, settings, groups, start)
        if recipe.train.compile:
            log.say("the first step compiles attention and FFNs, which can take minutes")
        state = build_state(job, model, settings, groups)
        validate = validator(state, job.tokenizer, log.say) if "valid" in job.corpus.splits else None
        return Training(run, state, job, validate, log, stop).train()


def initial_model(job: Job, settings: DeviceSettings, groups: ProcessGroups, start: int | None) -> Transformer:
    """The model with the weights that a new run starts from.

    Args:
        start: the step of the checkpoint of `train.init_from`; None: draw the weights from the seed.
    """
    model = build_model(job.recipe, job.vocab_size, settings.device, groups, init_weights=start is None)
    new = model.state_dict().keys() if start is None else load_init_from(job, model, start)
    for ids, ids_V in job.token_ids.items():
        if f"{IDS}{ids}.ids_V" in new:
            model.token_ids.get_submodule(ids).get_buffer("ids_V").copy_(torch.from_numpy(ids_V))
    return model


def build_state(job: Job, model: Transformer, settings: DeviceSettings, groups: ProcessGroups) -> TrainState:
    return TrainState(job.recipe, model, Batches.of(job.corpus, job.recipe), settings.precision, groups, job.background)


@contextmanager
def explaining_failure(job: Job, settings: DeviceSettings, world: World) -> Iterator[None]:
    """Where memory runs out, say what to lower; where the network fails, which rank noticed."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise out_of_memory_error(job, settings.precision, world.size) from None
        if is_network_error(error):
            raise world.network_error(error) from None
        raise


@contextmanager
def noting_failure(run: RunDirectory, world: World) -> Iterator[None]:
    """Note a failure in run.json (rank 0 does): its exit code, the step of the last checkpoint and, where known, the
    rank whose error it was and the message.
    """
    try:
        yield
    except BaseException as failure:
        status, exit_code, message = "failed", 1, None
        if isinstance(failure, UserError):
            status, exit_code = ("diverged" if failure.exit_code == 3 else "failed"), failure.exit_code
            message = failure.message
        elif isinstance(failure, KeyboardInterrupt):  # a second signal: the user does not wait for a checkpoint
            status, exit_code = "interrupted", 130
        elif isinstance(failure, SystemExit):  # another rank has said why
            exit_code = int(failure.code or 0)
        if world.rank == 0:
            with suppress(UserError):  # if this cannot be written either, the failure itself matters more
                facts = {"status": status, "exit_code": exit_code, "rank": world.comm_state.failed, "message": message}
                run.write_facts(**facts, step=max(run.steps(), default=0))
        raise
