"""`pkmlm compare`: runs side by side."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pkmlm.cli.options import PATH, force_option, format_option
from pkmlm.cli.outputs import free_folder
from pkmlm.console import warn
from pkmlm.errors import printable

if TYPE_CHECKING:
    from pkmlm.console import Format


@click.command()
@click.argument("run_paths", type=PATH, metavar="RUN...", nargs=-1, required=True)
@format_option
@click.option(
    "--plots", type=PATH, metavar="DIR", help="Also draw the training and validation curves into this folder."
)
@force_option
def command(run_paths: tuple[str, ...], format: "Format", plots: str | None, force: bool) -> None:
    """RUNs side by side: size, training, perplexity, tasks, memory use, speed.

    Only what is in the run directories is shown, nothing is measured: run `pkmlm eval` and
    `pkmlm usage-report` first for the test split's numbers. What is missing shows as "-".

    \b
    Examples:
      pkmlm compare runs/dense runs/pkm
      pkmlm compare runs/* --plots pictures
      pkmlm compare runs/* --format csv > runs.csv
    """
    from pkmlm.analysis.compare import (
        compare_tables,
        cut_short,
        differences,
        facts_of,
        flat_table,
        open_runs,
        partly_measured,
    )
    from pkmlm.runs.directory import RunDirectory

    folder = free_folder(plots, force)
    runs = open_runs(without_strays(run_paths), RunDirectory.existing)
    trained = [max(run.steps(), default=0) for run in runs.values()]  # before the metrics: some may be training
    facts = [facts_of(label, run) for label, run in runs.items()]
    if format == "json":
        click.echo(json.dumps({"runs": facts}, indent=2, allow_nan=False))
    else:
        tables = [flat_table(facts)] if format == "csv" else compare_tables(facts)
        click.echo("\n".join(table.render(format) for table in tables), nl=False)
    for text in (*cut_short(facts, trained), *partly_measured(runs), *differences(runs)):
        warn(text)
    if folder is not None:
        from pkmlm.analysis.plots import learning_curves, save

        figure = learning_curves({label: run.metrics() for label, run in runs.items()})
        if figure is None:
            click.echo("nothing to draw: no run has logged a loss yet", err=True)
        else:
            click.echo(f"drew {printable(str(save(folder / 'learning-curves.png', figure)))}", err=True)


def without_strays(paths: Sequence[str]) -> Sequence[str]:
    """What of several paths, as a shell's glob gives them, may be a run; warns of what is there and is none.

    Where nothing is left, all of them: the error is that of the first.
    """
    from pkmlm.export.config import is_export
    from pkmlm.runs.directory import RunDirectory

    strays = {path for path in paths if Path(path).exists() and not RunDirectory(path).recipe_file.is_file()}
    runs = [path for path in paths if path not in strays]
    if not runs:
        return paths
    for path in sorted(strays):
        why = "an export" if is_export(Path(path)) else "no recipe.yaml in it"
        warn(f"left out {path}: it is no run ({why})")
    return runs
