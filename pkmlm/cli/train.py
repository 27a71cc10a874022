"""`pkmlm train`: from a recipe and tokens to a run directory."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

import click

from pkmlm.cli.launch import launch, launches
from pkmlm.cli.options import quiet_option, set_option
from pkmlm.errors import UserError, printable
from pkmlm.runtime.launcher import started

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from pkmlm.data.corpus import Corpus
    from pkmlm.data.tokenizer import Tokenizer
    from pkmlm.model.transformer import Transformer
    from pkmlm.recipe.schema import Recipe
    from pkmlm.runtime.distributed import Ranks, World
    from pkmlm.runtime.log import RunLog
    from pkmlm.runtime.rundir import RunDirectory
    from pkmlm.runtime.signals import StopRequest
    from pkmlm.train.loop import Outcome


@click.command()
@click.argument("recipe_file", metavar="RECIPE")
@click.option("-o", "--output", metavar="RUN", help="The run directory to write (not needed with --dry-run).")
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
    alone, several, processes = started() == 1, launches(nproc), nproc or 1
    # What is wrong shows before torch comes, and before other processes are started.
    opened = open_all(recipe_file, overrides, processes, verify and not several) if alone else None
    if not output and not dry_run:
        raise UserError("Missing option '-o': the run directory to write", "add -o RUN, or --dry-run")
    if several:
        return launch(processes, output)
    from pkmlm.runtime.distributed import joined

    with joined() as world:
        with world.together():
            opened = opened or open_all(recipe_file, overrides, world.size, verify and world.rank == 0)
        if dry_run:
            from pkmlm.cli.dry_run import report

            return report(*opened, world)
        return train_in(str(output), *opened, resume, quiet, world)


def open_all(
    recipe_file: str, overrides: tuple[str, ...], ranks: int, verify: bool
) -> "tuple[Recipe, Corpus, Tokenizer]":
    """The recipe, and the tokens and the tokenizer that it names; they fit together, and so many processes."""
    from pkmlm.data.corpus import Corpus, open_tokenizer
    from pkmlm.recipe.load import load_recipe
    from pkmlm.recipe.ranks import check_ranks

    recipe = load_recipe(recipe_file, overrides)
    if recipe.data.dir is None:
        raise UserError(
            f"{recipe_file}: data.dir is not set", "add -s data.dir=DIR, a folder that `pkmlm tokenize` wrote"
        )
    corpus, tokenizer = Corpus.open(recipe.data.dir, "train", verify=verify), open_tokenizer(recipe.data.dir)
    if "valid" in corpus.splits:
        Corpus.open(recipe.data.dir, "valid", verify=verify)
    if recipe.model.vocab_size is not None and recipe.model.vocab_size < tokenizer.size:
        raise UserError(
            f"model.vocab_size: {recipe.model.vocab_size} (expected at least the tokenizer's {tokenizer.size})",
            "leave it null, or tokenize with a smaller --vocab-size",
        )
    check_ranks(recipe, ranks, recipe_file)
    return recipe, corpus, tokenizer


def train_in(
    output: str, recipe: "Recipe", corpus: "Corpus", tokenizer: "Tokenizer", resume: str, quiet: bool, world: "World"
) -> int:
    """Train in the run directory `output`, and note in its run.json how it ended; rank 0 alone writes there."""
    from pkmlm.cli.circumstances import changes, circumstances, lost_metrics, with_earlier
    from pkmlm.cli.resume import ended_already, refuse_changes, refuse_other_data, refuse_resume
    from pkmlm.recipe.doubts import doubts
    from pkmlm.runtime.files import write_text
    from pkmlm.runtime.rundir import RunDirectory
    from pkmlm.runtime.signals import stop_on_signals
    from pkmlm.train.integrity import fall_back

    run, lead, warnings, complete = RunDirectory(output), world.rank == 0, [], False
    with ExitStack() as held, stop_on_signals(world.largest) as stop:
        with world.together():
            device, precision, reason = arithmetic(recipe)
            if lead:
                refuse_resume(run, resume)
                run.refuse_foreign()
                held.enter_context(run.locked())
                if run.steps():
                    refuse_changes(run, recipe)
                    warnings = fall_back(run)
                    refuse_other_data(run, recipe, corpus)
                complete = ended_already(run, recipe)
        if world.broadcast(complete):
            if lead:
                more = "eval.patience" if run.facts().get("status") == "patience" else "train.steps"
                step = run.steps()[-1]
                click.echo(
                    f"run {printable(output)} is complete already at step {step}; more {more} would train it longer"
                )
            return 0
        with world.together():
            if lead:
                if recipe.train.init_from is not None and not run.steps():
                    check_shapes(initial_checkpoint(recipe, tokenizer), recipe, tokenizer)
                before, earlier = run.facts(), run.recipe() if run.steps() else recipe
                begin(run, recipe, corpus, tokenizer)
                facts = circumstances(recipe, tokenizer, device, precision, reason, world.size)
                if run.steps():
                    warnings += changes(before, facts, earlier, recipe) + lost_metrics(run)
                    facts = with_earlier(before, facts, run.steps()[-1])
                else:
                    warnings += doubts(recipe)
                run.note(**facts, status="running", exit_code=None, rank=None)
        with noting_failure(run, recipe, tokenizer, world):
            outcome = run_loop(run, recipe, corpus, tokenizer, device, precision, reason, warnings, stop, quiet, world)
        with world.together():
            if lead:
                run.note(status=outcome.status, exit_code=outcome.exit_code, step=outcome.step)
            if lead and outcome.exit_code == 0:  # last of all: nothing is left to do where it stands
                run.refuse_replaced()
                write_text(run.path / "done", f"{outcome.status} at step {outcome.step}\n")
    return outcome.exit_code


def arithmetic(recipe: "Recipe") -> "tuple[torch.device, str, str]":
    """The device to train on, the precision there, and why it is this one.

    Raises:
        UserError: the device has not what the recipe asks for, or `parallel.shard` cannot be had in that precision.
    """
    from pkmlm.runtime.device import choose_device, choose_precision

    device = choose_device()
    precision, reason = choose_precision(recipe.train.precision, device)
    if precision == "fp16" and recipe.parallel.shard:
        raise UserError("parallel.shard: found fp16 (expected bf16 or fp32)", "add -s train.precision=fp32")
    return device, precision, reason


@contextmanager
def noting_failure(run: "RunDirectory", recipe: "Recipe", tokenizer: "Tokenizer", world: "World") -> Iterator[None]:
    """Note a failure, the step of the last checkpoint and whose error it was (where that is known) in run.json, by
    rank 0; where memory ran out, say what to lower; where the network failed, which rank noticed."""
    from pkmlm.runtime.device import is_shortage
    from pkmlm.runtime.distributed import is_network
    from pkmlm.train.shortage import out_of_memory

    def note(status: str, exit_code: int) -> None:
        if world.rank > 0:
            return
        with suppress(UserError):  # no room for that either: the failure itself is what must be told
            run.note(status=status, exit_code=exit_code, step=max(run.steps(), default=0), rank=world.tally.failed)

    try:
        yield
    except UserError as error:
        note("diverged" if error.exit_code == 3 else "failed", error.exit_code)
        raise
    except KeyboardInterrupt:  # a second signal: the user does not want to wait for a checkpoint
        note("interrupted", 130)
        raise
    except SystemExit as error:  # another rank has told why
        note("failed", int(error.code or 0))
        raise
    except BaseException as error:
        note("failed", 1)
        if is_shortage(error):
            raise out_of_memory(recipe, recipe.model.vocab_size or tokenizer.size, world.size) from None
        if is_network(error):
            raise world.lost(error) from None
        raise


def begin(run: "RunDirectory", recipe: "Recipe", corpus: "Corpus", tokenizer: "Tokenizer") -> None:
    """Make the run's folder, and clear what an earlier process left of work that is to be done again."""
    from pkmlm.runtime.files import remove_file, writing

    run.create(recipe)
    run.clean()
    remove_file(run.path / "done")
    run.cut_metrics(max(run.steps(), default=0))  # before the log opens the file, which this replaces
    with writing(run.tokenizer_file) as file:
        file.write(tokenizer.model_bytes)
    run.note(data_sha256=corpus.sha256, tokenizer_sha256=tokenizer.sha256)


def run_loop(
    run: "RunDirectory",
    recipe: "Recipe",
    corpus: "Corpus",
    tokenizer: "Tokenizer",
    device: "torch.device",
    precision: str,
    reason: str,
    warnings: list[str],
    stop: "StopRequest",
    quiet: bool,
    world: "World",
) -> "Outcome":
    """Build the model and train it; the log begins with `warnings` and the `reason` for the precision."""
    from pkmlm.data.batches import Batches
    from pkmlm.evaluate.validation import validation
    from pkmlm.runtime.distributed import ranks_of
    from pkmlm.runtime.log import TrainingLog, Unheard
    from pkmlm.train.health import Health
    from pkmlm.train.loop import train

    ranks = ranks_of(world, recipe.parallel.memory)
    log: RunLog = Unheard()
    with ExitStack() as opened:
        with world.together():
            if world.rank == 0:
                judge = Health.of(run.metrics()).warnings
                heard = TrainingLog(run.path, recipe.name, recipe.train.steps, recipe.log, quiet=quiet, judge=judge)
                log = opened.enter_context(heard)
        steps = world.broadcast(run.steps())
        for text in warnings:
            log.warn(steps[-1] if steps else 0, text)
        doing = f"resuming at step {steps[-1]}" if steps else "training"
        several = f" with {world.size} processes" if world.size > 1 else ""
        log.say(f"{doing} in {run.path} on {device}{several}, {precision}: {reason}")
        with world.together():
            if steps:
                check_shapes(run.checkpoint(steps[-1]), recipe, tokenizer)
            model = starting_model(recipe, tokenizer, device, ranks, fresh=not steps)
        batches = Batches(corpus, recipe.model.context, recipe.sequences, recipe.train.seed)
        validate = None
        if "valid" in corpus.splits:
            validate = validation(recipe, model, tokenizer, precision, log.say, ranks)
        else:
            log.say(f"{recipe.data.dir} has no valid split: there will be no validation and no best checkpoint")
        outcome = train(run, recipe, model, batches, precision, validate, log, stop, ranks)
    return outcome


def check_shapes(path: "Path", recipe: "Recipe", tokenizer: "Tokenizer") -> None:
    """Refuse a checkpoint of other shapes than the recipe's, before anything of their size is allocated."""
    from pkmlm.model.transformer import build_model
    from pkmlm.train.checkpoint import check_weights

    check_weights(path, build_model(recipe, recipe.model.vocab_size or tokenizer.size, "meta"))


def starting_model(
    recipe: "Recipe", tokenizer: "Tokenizer", device: "torch.device", ranks: "Ranks", *, fresh: bool
) -> "Transformer":
    """The model with its initial weights: drawn from the seed, or those of `train.init_from`. If not `fresh`, without
    any: they are to be read from the run's checkpoint.
    """
    from pkmlm.model.transformer import build_model

    draw = fresh and recipe.train.init_from is None
    model = build_model(recipe, recipe.model.vocab_size or tokenizer.size, device, ranks, draw=draw)
    if fresh and not draw:
        from pkmlm.train.checkpoint import load_weights

        load_weights(initial_checkpoint(recipe, tokenizer), model)
    return model


def initial_checkpoint(recipe: "Recipe", tokenizer: "Tokenizer") -> "Path":
    """The checkpoint of `train.init_from`: the best, else the latest.

    Raises:
        UserError: there is no such run, it has another tokenizer (exit code 2), or the checkpoint is damaged (1).
    """
    from pkmlm.runtime.files import sha256_of
    from pkmlm.runtime.rundir import RunDirectory
    from pkmlm.train.integrity import damage_of

    source = RunDirectory.existing(str(recipe.train.init_from))
    if sha256_of(source.tokenizer_file) != tokenizer.sha256:
        raise UserError(
            f"train.init_from: run {source.path} has another tokenizer than {recipe.data.dir}",
            f"tokenize again with --tokenizer {source.tokenizer_file}",
        )
    path = source.checkpoint(source.resolve("best" if source.best() is not None else "latest"))
    if problem := damage_of(path):
        raise UserError(f"train.init_from: {problem}", "start from another run, or copy that one again", exit_code=1)
    return path
