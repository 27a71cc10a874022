"""`pkmlm train`: from a recipe and tokens to a run directory."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import click

from pkmlm.cli.options import quiet_option, set_option
from pkmlm.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from pkmlm.data.corpus import Corpus
    from pkmlm.data.tokenizer import Tokenizer
    from pkmlm.model.transformer import Transformer
    from pkmlm.recipe.schema import Recipe
    from pkmlm.runtime.rundir import RunDirectory
    from pkmlm.runtime.signals import StopRequest
    from pkmlm.train.loop import Outcome

# What may change when a run goes on: how long it trains and what is measured, kept and shown.
FREE_KEYS = ("name", "data.dir", "train.steps", "eval.", "checkpoint.", "log.")


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
@quiet_option
def command(
    recipe_file: str,
    output: str | None,
    overrides: tuple[str, ...],
    resume: str,
    dry_run: bool,
    verify: bool,
    quiet: bool,
) -> int:
    """Train the model of RECIPE on tokens that `pkmlm tokenize` wrote.

    The same command again goes on where the run stopped; Ctrl-C and SIGTERM save a checkpoint first.

    \b
    Examples:
      pkmlm train recipes/demo.yaml -o runs/demo
      pkmlm train my.yaml -o runs/a -s data.dir=data/mine -s train.steps=2000
      pkmlm train my.yaml --dry-run
    """
    from pkmlm.data.corpus import Corpus, open_tokenizer
    from pkmlm.recipe.load import load_recipe

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
    if dry_run:
        from pkmlm.cli.dry_run import report

        return report(recipe, corpus, tokenizer)
    if not output:
        raise UserError("Missing option '-o': the run directory to write", "add -o RUN, or --dry-run")
    return train_in(output, recipe, corpus, tokenizer, resume, quiet)


def train_in(output: str, recipe: "Recipe", corpus: "Corpus", tokenizer: "Tokenizer", resume: str, quiet: bool) -> int:
    """Train in the run directory `output`, and note in its run.json how it ended."""
    from pkmlm.runtime.device import choose_device, choose_precision
    from pkmlm.runtime.files import write_text
    from pkmlm.runtime.rundir import RunDirectory
    from pkmlm.runtime.signals import stop_on_signals
    from pkmlm.train.checkpoint import fall_back

    run = RunDirectory(output)
    if resume == "must" and not run.steps():
        raise UserError(f"--resume must: run {output} has no checkpoint to resume", "use --resume auto to start it")
    if resume == "never" and run.steps():
        raise UserError(
            f"--resume never: run {output} has checkpoints already", "choose another -o, or delete that folder"
        )
    device = choose_device()
    precision, reason = choose_precision(recipe.train.precision, device)
    with run.locked():
        if run.steps():
            refuse_changes(run, recipe, corpus, tokenizer)
        if ended_already(run, recipe):
            more = "eval.patience" if run.facts().get("status") == "patience" else "train.steps"
            click.echo(f"run {output} is complete already at step {run.steps()[-1]}; more {more} would train it longer")
            return 0
        with stop_on_signals() as stop:
            damage = fall_back(run)
            begin(run, recipe, corpus, tokenizer)
            run.note(**circumstances(recipe, tokenizer, device, precision, reason), status="running", exit_code=None)
            with noting_failure(run, recipe, tokenizer):
                outcome = run_loop(
                    run, recipe, corpus, tokenizer, device, precision, f"{precision}: {reason}", damage, stop, quiet
                )
            run.note(status=outcome.status, exit_code=outcome.exit_code, step=outcome.step)
            if outcome.exit_code == 0:  # last of all: nothing is left to do where it stands
                write_text(run.path / "done", f"{outcome.status} at step {outcome.step}\n")
    return outcome.exit_code


@contextmanager
def noting_failure(run: "RunDirectory", recipe: "Recipe", tokenizer: "Tokenizer") -> Iterator[None]:
    """Note a failure and the step of the last checkpoint in run.json; where memory ran out, say what to lower."""
    from pkmlm.train.shortage import is_shortage, out_of_memory

    def note(status: str, exit_code: int) -> None:
        with suppress(UserError):  # no room for that either: the failure itself is what must be told
            run.note(status=status, exit_code=exit_code, step=max(run.steps(), default=0))

    try:
        yield
    except UserError as error:
        note("diverged" if error.exit_code == 3 else "failed", error.exit_code)
        raise
    except KeyboardInterrupt:  # a second signal: the user does not want to wait for a checkpoint
        note("interrupted", 130)
        raise
    except BaseException as error:
        note("failed", 1)
        if is_shortage(error):
            raise out_of_memory(recipe, recipe.model.vocab_size or tokenizer.size) from None
        raise


def refuse_changes(run: "RunDirectory", recipe: "Recipe", corpus: "Corpus", tokenizer: "Tokenizer") -> None:
    """Refuse to go on with another recipe (but for keys that do not touch what is trained), tokenizer or tokens."""
    from pkmlm.recipe.load import flatten
    from pkmlm.runtime.files import sha256_of

    before, now = flatten(run.recipe()), flatten(recipe)
    changed = [key for key in now if before[key] != now[key] and not key.startswith(FREE_KEYS)]
    if changed:
        told = ", ".join(f"{key} was {before[key]} and is now {now[key]}" for key in changed)
        raise UserError(f"run {run.path} was started with another recipe: {told}", "train it under another -o")
    facts = run.facts()
    made_with = facts.get("tokenizer_sha256") or sha256_of(run.tokenizer_file)
    trained_on = facts.get("data_sha256", corpus.sha256)
    for what, expected, found in (
        ("with another tokenizer than that of", made_with, tokenizer.sha256),
        ("on other tokens than those in", trained_on, corpus.sha256),
    ):
        if found != expected:
            told = f"sha256 {found[:16]}... (expected {str(expected)[:16]}...)"
            raise UserError(f"run {run.path} was trained {what} {recipe.data.dir}: {told}", "train under another -o")


def ended_already(run: "RunDirectory", recipe: "Recipe") -> bool:
    """Whether training has finished, or stopped for lack of patience, and this recipe asks for no more."""
    if not (run.path / "done").exists() or not run.steps():
        return False
    before = run.recipe()
    same = (before.train.steps, before.eval.patience) == (recipe.train.steps, recipe.eval.patience)
    return same or run.steps()[-1] >= recipe.train.steps


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


def circumstances(
    recipe: "Recipe", tokenizer: "Tokenizer", device: "torch.device", precision: str, reason: str
) -> dict[str, Any]:
    """What run.json says of how this process was started."""
    import platform
    import sys

    import torch

    from pkmlm import __version__
    from pkmlm.model.cost import cost_of
    from pkmlm.runtime.rundir import source_commit

    cost = cost_of(recipe, recipe.model.vocab_size or tokenizer.size)
    return {
        "argv": sys.argv[1:],
        "versions": {"pkmlm": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "commit": source_commit(),
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"cpu, {torch.get_num_threads()} threads",
        "precision": precision,
        "precision_reason": reason,
        "parameters": cost.as_json()["parameters"],
    }


def run_loop(
    run: "RunDirectory",
    recipe: "Recipe",
    corpus: "Corpus",
    tokenizer: "Tokenizer",
    device: "torch.device",
    precision: str,
    precision_line: str,
    damage: list[str],
    stop: "StopRequest",
    quiet: bool,
) -> "Outcome":
    """Build the model and train it; `damage` is what to warn of first."""
    from pkmlm.data.batches import Batches
    from pkmlm.evaluate.validation import validation
    from pkmlm.runtime.log import TrainingLog
    from pkmlm.train.health import Health
    from pkmlm.train.loop import train

    judge = Health.of(run.metrics()).warnings
    with TrainingLog(run.path, recipe.name, recipe.train.steps, recipe.log, quiet=quiet, judge=judge) as log:
        steps = run.steps()
        for text in damage:
            log.warn(steps[-1], text)
        doing = f"resuming at step {steps[-1]}" if steps else "training"
        log.say(f"{doing} in {run.path} on {device}, {precision_line}")
        if steps:
            check_shapes(run.checkpoint(steps[-1]), recipe, tokenizer)
        model = starting_model(recipe, tokenizer, device, fresh=not steps)
        batches = Batches(corpus, recipe.model.context, recipe.sequences, recipe.train.seed)
        validate = None
        if "valid" in corpus.splits:
            validate = validation(recipe, model, tokenizer, precision, log.say)
        else:
            log.say(f"{recipe.data.dir} has no valid split: there will be no validation and no best checkpoint")
        outcome = train(run, recipe, model, batches, precision, validate, log, stop)
    return outcome


def check_shapes(path: "Path", recipe: "Recipe", tokenizer: "Tokenizer") -> None:
    """Refuse a checkpoint of other shapes than the recipe's, before anything of their size is allocated."""
    from pkmlm.model.transformer import build_model
    from pkmlm.train.checkpoint import check_weights

    check_weights(path, build_model(recipe, recipe.model.vocab_size or tokenizer.size, "meta"))


def starting_model(recipe: "Recipe", tokenizer: "Tokenizer", device: "torch.device", *, fresh: bool) -> "Transformer":
    """The model with its initial weights: drawn from the seed, or those of `train.init_from`."""
    from pkmlm.model.transformer import build_model

    model = build_model(recipe, recipe.model.vocab_size or tokenizer.size, device)
    if fresh and recipe.train.init_from is not None:
        from pkmlm.runtime.files import sha256_of
        from pkmlm.runtime.rundir import RunDirectory
        from pkmlm.train import checkpoint

        source = RunDirectory.existing(recipe.train.init_from)
        if sha256_of(source.tokenizer_file) != tokenizer.sha256:
            raise UserError(
                f"train.init_from: run {source.path} has another tokenizer than {recipe.data.dir}",
                f"tokenize again with --tokenizer {source.tokenizer_file}",
            )
        path = source.checkpoint(source.resolve("best" if source.best() is not None else "latest"))
        checkpoint.verify(path)
        checkpoint.load_weights(path, model)
    return model
