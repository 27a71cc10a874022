"""`pkmlm train`: from a recipe and tokens to a run directory."""

import click

from pkmlm.cli.launch import launch, launches
from pkmlm.cli.options import PATH, RECIPE, quiet_option, set_option
from pkmlm.environment import keep_freed_memory, launched_processes
from pkmlm.errors import UserError


@click.command()
@click.argument("recipe_file", type=RECIPE, metavar="RECIPE")
@click.option(
    "-o", "--output", type=PATH, metavar="RUN", help="The run directory to write (not needed with --dry-run)."
)
@set_option
@click.option(
    "--resume",
    type=click.Choice(["auto", "must", "never"]),
    default="auto",
    help="Resume from RUN's latest checkpoint: auto, if there is one; must: fail without one; never: fail with one.",
)
@click.option(
    "--allow-change",
    "allowed",
    multiple=True,
    metavar="KEY",
    help="Let a resumed run change this key, such as optim.lr; a warning in metrics.jsonl records it.",
)
@click.option(
    "--dry-run", "dry", is_flag=True, help="Count parameters, estimate memory and run one batch; write nothing."
)
@click.option(
    "--verify",
    is_flag=True,
    help="Check every byte of the tokens at the start, instead of each file when it is first read.",
)
@click.option("--nproc", type=click.IntRange(1, 1024), metavar="N", help="Train in N processes on this machine.")
@quiet_option
def command(
    recipe_file: str,
    output: str | None,
    overrides: tuple[str, ...],
    resume: str,
    allowed: tuple[str, ...],
    dry: bool,
    verify: bool,
    nproc: int | None,
    quiet: bool,
) -> int:
    """Train the model of RECIPE on tokens that `pkmlm tokenize` wrote.

    RECIPE is a file, or a name that `pkmlm recipe list` lists. The same command resumes a run that was stopped; Ctrl-C
    and SIGTERM first save a checkpoint. Several processes, started by --nproc or torchrun, share each batch: see `pkmlm
    help processes`.

    \b
    Examples:
      pkmlm train demo -o runs/demo
      pkmlm train my.yaml -o runs/a -s data.dir=data/mine -s train.steps=2000
      pkmlm train my.yaml -o runs/a -s optim.lr=1e-3 --allow-change optim.lr
      pkmlm train my.yaml --dry-run
      pkmlm train my.yaml -o runs/b --nproc 4 -s parallel.memory=2
      torchrun --nproc-per-node 4 -m pkmlm train my.yaml -o runs/b
    """
    from pkmlm.train.job import open_job

    launching, job = launches(nproc), None
    if launched_processes() == 1:  # mistakes show before torch is imported, and before other processes are started
        job = open_job(recipe_file, overrides, nproc or 1, verify=verify and not launching)
    if not output and not dry:
        raise UserError("Missing option '-o': the run directory to write", "add -o RUN, or --dry-run")
    if not output and resume != "auto":
        raise UserError(f"--resume {resume} is given without a run directory", "add -o RUN")
    if launching:
        return launch(nproc or 1)

    from pkmlm.launched import init_distributed
    from pkmlm.train.dry_run import dry_run
    from pkmlm.train.run import train

    keep_freed_memory()
    with init_distributed() as world:
        with world.collective_errors():
            job = job or open_job(recipe_file, overrides, world.size, verify=verify and world.rank == 0)
        if dry:
            dry_run(job, output, world, resume=resume, allowed=allowed)
            return 0
        return train(job, str(output), world, resume=resume, allowed=allowed, quiet=quiet)
