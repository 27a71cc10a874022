"""`pkmlm compare`: runs side by side."""

import json

import click

from pkmlm.cli.options import PATH, force_option, format_option
from pkmlm.console import Format, warn_each
from pkmlm.errors import printable


@click.command()
@click.argument("run_paths", type=PATH, metavar="RUN...", nargs=-1, required=True)
@format_option
@click.option(
    "--plots", type=PATH, metavar="DIR", help="Also draw the training and validation curves into this folder."
)
@force_option
def command(run_paths: tuple[str, ...], format: Format, plots: str | None, force: bool) -> None:
    """RUNs side by side: size, training, perplexity, tasks, memory use, speed.

    Only what is in the run directories is shown, nothing is measured: run `pkmlm eval` and
    `pkmlm usage-report` first for the test split's numbers. What is missing shows as "-".

    \b
    Examples:
      pkmlm compare runs/dense runs/pkm
      pkmlm compare runs/* --plots pictures
      pkmlm compare runs/* --format csv > runs.csv
    """
    from pkmlm.analysis.compare import compare_runs
    from pkmlm.analysis.tables import compare_rows, compare_tables
    from pkmlm.cli.outputs import free_folder

    folder = free_folder(plots, force)
    comparison = compare_runs(run_paths)
    if format == "json":
        click.echo(json.dumps({"runs": comparison.facts}, indent=2, allow_nan=False))
    else:
        tables = [compare_rows(comparison.facts)] if format == "csv" else compare_tables(comparison.facts)
        click.echo("\n".join(table.render(format) for table in tables), nl=False)
    warn_each(comparison.warnings)
    if folder is not None:
        from pkmlm.analysis.plots import learning_curves, save

        figure = learning_curves({label: run.metrics() for label, run in comparison.runs.items()})
        if figure is None:
            click.echo("nothing to draw: no run has logged a loss yet", err=True)
        else:
            click.echo(f"drew {printable(str(save(folder / 'learning-curves.png', figure)))}", err=True)
