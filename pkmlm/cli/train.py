"""`pkmlm train`: from a recipe and tokens to a run directory."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from pkmlm.cli.launch import launch, launches
from pkmlm.cli.options import PATH, quiet_option, set_option
from pkmlm.environment import launched_processes
from pkmlm.errors import UserError, printable

if TYPE_CHECKING:
    from pkmlm.device import DeviceSettings
    from pkmlm.distributed import World
    from pkmlm.recipe.schema import Recipe
    from pkmlm.runs.directory import RunDirectory
    from pkmlm.signals import StopRequest
    from pkmlm.train.job import Job
    from pkmlm.train.log import RunLog
    from pkmlm.train.loop import Outcome


@click.command()
@click.argument("recipe_file", type=PATH, metavar="RECIPE")
@click.option(
    "-o", "--output", type=PATH, metavar="RUN", help="The run directory to write (not needed with --dry-run)."
)
@set_option
@click.option(
    "--resume",
    type=click.Choice(["auto", "must", "never"]),
    default="auto",
    show_default=True,
    help="Go on from RUN's latest checkpoint: if there is one, or fail, or refuse to.",
)
@click.option("--dry-run", is_flag=True, help="Resolve, count, estimate memory, run one batch; write nothing.")
@click.option(
    "--verify",
    is_flag=True,
    help="Check every byte of the tokens first, not each block when it is first read.",
)
@click.option("--nproc", type=click.IntRange(1, 1024), metavar="N", help="Train in N processes on this machine.")
@quiet_option
def command(
    recipe_file: str,
    output: str | None,
    overrides: tuple[str, ...],
    resume: str,
    dry_run: bool,
    verify: bool,
    nproc: int | None,
    quiet: bool,
) -> int:
    """Train the model of RECIPE on tokens that `pkmlm tokenize` wrote.

    The same command again goes on where the run stopped; Ctrl-C and SIGTERM save a checkpoint first. Several
    processes, by --nproc or torchrun, share each batch; on several machines, see the README.

    \b
    Examples:
      pkmlm train recipes/demo.yaml -o runs/demo
      pkmlm train my.yaml -o runs/a -s data.dir=data/mine -s train.steps=2000
      pkmlm train my.yaml --dry-run
      pkmlm train my.yaml -o runs/b --nproc 4 -s parallel.memory=2
      torchrun --nproc-per-node 4 -m pkmlm train my.yaml -o runs/b
    """
    alone, several, processes = launched_processes() == 1, launches(nproc), nproc or 1
    # What is wrong shows before torch comes, and before other processes are started.
    job = open_job(recipe_file, overrides, processes, verify and not several) if alone else None
    if not output and not dry_run:
        raise UserError("Missing option '-o': the run directory to write", "add -o RUN, or --dry-run")
    if several:
        return launch(processes, output)
    from pkmlm.distributed import init_distributed

    with init_distributed() as world:
        with world.collective_errors():
            job = job or open_job(recipe_file, overrides, world.size, verify and world.rank == 0)
        if dry_run:
            from pkmlm.cli.dry_run import refuse_output, report

            with world.collective_errors():
                if output and world.rank == 0:
                    refuse_output(output, job, resume)
            return report(job, world)
        return train_in(str(output), job, resume, quiet, world)


def open_job(recipe_file: str, overrides: tuple[str, ...], ranks: int, verify: bool) -> "Job":
    """The recipe, and the tokens and the tokenizer that it names; they fit together, and so many processes."""
    from pkmlm.data.corpus import Corpus, open_tokenizer
    from pkmlm.recipe.check import check_ranks, warnings
    from pkmlm.recipe.load import load_recipe
    from pkmlm.train.job import Job, no_validation, rereading

    recipe = load_recipe(recipe_file, overrides)
    if recipe.data.dir is None:
        raise UserError(
            f"{recipe_file}: data.dir is not set", "add -s data.dir=DIR, a folder that `pkmlm tokenize` wrote"
        )
    corpus, tokenizer = Corpus(recipe.data.dir, "train"), open_tokenizer(recipe.data.dir)
    for each in [corpus, Corpus(recipe.data.dir, "valid")] if "valid" in corpus.splits else [corpus]:
        if verify:
            each.verify()
    if recipe.model.vocab_size is not None and recipe.model.vocab_size < tokenizer.size:
        raise UserError(
            f"model.vocab_size: {recipe.model.vocab_size} (expected at least the tokenizer's {tokenizer.size})",
            "leave it null, or tokenize with a smaller --vocab-size",
        )
    check_ranks(recipe, ranks, recipe_file)
    told = tuple(warnings(recipe, recipe_file, overrides))
    told += (*rereading(recipe, corpus), *no_validation(recipe, corpus))
    told += ("parallel.shard: without effect in one process",) * (recipe.parallel.shard and ranks == 1)
    return Job(recipe, corpus, tokenizer, told)


def train_in(output: str, job: "Job", resume: str, quiet: bool, world: "World") -> int:
    """Train in the run directory `output`, and note in its run.json how it ended; rank 0 alone writes there."""
    from pkmlm.runs.directory import RunDirectory
    from pkmlm.signals import stop_on_signals
    from pkmlm.train.out_of_memory import too_large
    from pkmlm.train.resume import ended_already

    run, lead, warnings, complete = RunDirectory(output), world.rank == 0, [], False
    answer = "stopping after this step (again: at once)" if lead and not quiet else ""
    with ExitStack() as held, stop_on_signals(world.all_max, answer) as stop:
        with world.collective_errors():
            settings = device_settings_of(job.recipe)
            if lead:
                warnings = refuse(run, job, resume)
                held.enter_context(run.locked())
                warnings += mend(run, job)
                complete = ended_already(run, job.recipe)
        if world.broadcast(complete):
            if lead:
                click.echo(already_complete(run))
            return 0
        with world.collective_errors():
            if lead:
                warnings += begin(run, job, settings, world.size) + too_large(job, settings, world.size)
        with noting_failure(run, world), explained(job, settings, world):
            outcome = run_loop(run, job, settings, warnings, stop, quiet, world)
        with world.collective_errors():
            if lead:
                end(run, outcome)
    return outcome.exit_code


def device_settings_of(recipe: "Recipe") -> "DeviceSettings":
    """The device to train on and the precision there.

    Raises:
        UserError: the device has not what the recipe asks for, or `parallel.shard` cannot be had in that precision.
    """
    from pkmlm.device import select_device

    settings = select_device(recipe.train.precision)
    if settings.precision == "fp16" and recipe.parallel.shard:
        message = f"parallel.shard: found true, with fp16 as the precision ({settings.reason})"
        raise UserError(f"{message} (expected bf16 or fp32)", "add -s train.precision=fp32")
    return settings


def refuse(run: "RunDirectory", job: "Job", resume: str) -> list[str]:
    """Refuse what can be seen to be wrong before anything is written, not even a folder; what to warn of."""
    from pkmlm.train.init_from import check_initial
    from pkmlm.train.resume import refuse_resume

    refuse_resume(run, resume)
    run.refuse_foreign()
    run.refuse_orphans()
    return [] if run.steps() else check_initial(job)


def mend(run: "RunDirectory", job: "Job") -> list[str]:
    """Go back to the last whole checkpoint of a run that has been begun, if it is this job's; what to warn of."""
    from pkmlm.train.integrity import fall_back
    from pkmlm.train.resume import refuse_changes, refuse_other_data

    if not run.steps():
        return []
    refuse_changes(run, job.recipe)
    warnings = fall_back(run)
    refuse_other_data(run, job)
    return warnings


def already_complete(run: "RunDirectory") -> str:
    """What is said of a run that has nothing left to do."""
    more = "eval.patience" if run.facts().get("status") == "patience" else "train.steps"
    step = run.steps()[-1]
    return f"run {printable(str(run.path))} is complete already at step {step}; more {more} would train it longer"


def begin(run: "RunDirectory", job: "Job", settings: "DeviceSettings", ranks: int) -> list[str]:
    """Make the run's folder, clear what an earlier process left of work that is to be done again, and note in run.json
    that this one trains; what to warn of."""
    from pkmlm.runs.files import remove_file, writing
    from pkmlm.train.job import no_validation
    from pkmlm.train.provenance import changes, circumstances, lost_metrics, with_earlier
    from pkmlm.train.resume import with_own_start

    recipe, step = job.recipe, max(run.steps(), default=0)
    facts, before = circumstances(job, settings, ranks), run.facts()
    warnings = changes(before, facts, run.recipe(), recipe) if step else list(job.doubts)
    remove_file(run.path / "done")  # before the recipe changes, by which `ended_already` knows whether all is done
    run.create(with_own_start(run, recipe) if step else recipe)
    run.clean()
    run.cut_metrics(step)  # before the log opens the file, which this replaces
    with writing(run.tokenizer_file) as file:
        file.write(job.tokenizer.model_bytes)
    if step:
        warnings += no_validation(recipe, job.corpus) + lost_metrics(run)
        facts = with_earlier(before, facts, step)
    hashes = {"data_sha256": job.corpus.sha256, "tokenizer_sha256": job.tokenizer.sha256}
    run.note(**hashes, **facts, status="running", exit_code=None, seconds=None, rank=None, message=None)
    return warnings


def end(run: "RunDirectory", outcome: "Outcome") -> None:
    """Note how training ended; where there is nothing left to do, the file `done` says so, last of all."""
    from pkmlm.runs.files import write_text

    run.note(**asdict(outcome))
    if outcome.exit_code == 0:
        run.refuse_replaced()
        write_text(run.path / "done", f"{outcome.status} at step {outcome.step}\n")


@contextmanager
def explained(job: "Job", settings: "DeviceSettings", world: "World") -> Iterator[None]:
    """Where memory runs out, say what to lower; where the network fails, which rank noticed."""
    from pkmlm.device import is_out_of_memory
    from pkmlm.distributed import is_network_error
    from pkmlm.train.out_of_memory import out_of_memory

    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise out_of_memory(job, settings.precision, world.size) from None
        if is_network_error(error):
            raise world.network_error(error) from None
        raise


@contextmanager
def noting_failure(run: "RunDirectory", world: "World") -> Iterator[None]:
    """Note a failure, the step of the last checkpoint, whose error it was and what it said (where that is known) in
    run.json, by rank 0."""

    def note(status: str, exit_code: int, message: str | None = None) -> None:
        if world.rank > 0:
            return
        facts = {"status": status, "exit_code": exit_code, "rank": world.comm_stats.failed, "message": message}
        with suppress(UserError):  # no room for that either: the failure itself is what must be told
            run.note(**facts, step=max(run.steps(), default=0))

    try:
        yield
    except UserError as error:
        note("diverged" if error.exit_code == 3 else "failed", error.exit_code, error.message)
        raise
    except KeyboardInterrupt:  # a second signal: the user does not want to wait for a checkpoint
        note("interrupted", 130)
        raise
    except SystemExit as error:  # another rank has told why
        note("failed", int(error.code or 0))
        raise
    except BaseException:
        note("failed", 1)
        raise


def run_loop(
    run: "RunDirectory",
    job: "Job",
    settings: "DeviceSettings",
    warnings: list[str],
    stop: "StopRequest",
    quiet: bool,
    world: "World",
) -> "Outcome":
    """Build the model and train it; the log begins with `warnings` and the arithmetic."""
    from pkmlm.analysis.validation import validation
    from pkmlm.data.batches import Batches
    from pkmlm.distributed import build_process_groups
    from pkmlm.train.init_from import check_shapes, starting_model
    from pkmlm.train.log import SilentLog, TrainingLog
    from pkmlm.train.loop import Training
    from pkmlm.train.monitor import TrainingMonitor
    from pkmlm.train.state import TrainState

    recipe, device, precision = job.recipe, settings.device, settings.precision
    ranks = build_process_groups(world, recipe.parallel.memory)
    log: RunLog = SilentLog()
    with ExitStack() as opened:
        with world.collective_errors():
            if world.rank == 0:
                judge = TrainingMonitor.of(run.metrics()).warnings
                heard = TrainingLog(run.path, recipe.name, recipe.train.steps, recipe.log, quiet=quiet, judge=judge)
                log = opened.enter_context(heard)
        steps = world.broadcast(run.steps())
        for text in warnings:
            log.warn(steps[-1] if steps else 0, text)
        doing = f"resuming at step {steps[-1]}" if steps else "training"
        several = f" with {world.size} processes" if world.size > 1 else ""
        log.say(f"{doing} in {run.path} on {device}{several}, {precision}: {settings.reason}")
        with world.collective_errors():
            if steps:
                check_shapes(run.checkpoint(steps[-1]), job)
            model = starting_model(job, device, ranks, fresh=not steps)
        validate = None
        if "valid" in job.corpus.splits:
            validate = validation(recipe, model, job.tokenizer, precision, log.say, ranks)
        if recipe.train.compile:
            log.say("the first step compiles attention and FFNs, which can take minutes")
        state = TrainState(recipe, model, Batches.of(job.corpus, recipe), precision, ranks)
        return Training(run, state, validate, log, stop).train()
