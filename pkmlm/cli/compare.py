"""`pkmlm compare`: runs side by side."""

import json
from typing import TYPE_CHECKING

import click

from pkmlm.cli.options import PATH, force_option, format_option, plot_options
from pkmlm.console import Format, warn_each
from pkmlm.errors import printable

if TYPE_CHECKING:
    from pkmlm.analysis.plots import Over


@click.command()
@click.argument("run_paths", type=PATH, metavar="RUN...", nargs=-1, required=True)
@format_option
@click.option("--plots", type=PATH, metavar="DIR", help="Also draw the learning curves into this folder.")
@plot_options
@click.option(
    "--plot-over",
    type=click.Choice(["steps", "tokens", "seconds"]),
    default="steps",
    show_default=True,
    help="What learning curves are drawn over; seconds are those in training steps.",
)
@force_option
def command(
    run_paths: tuple[str, ...],
    format: Format,
    plots: str | None,
    plot_format: tuple[str, ...],
    plot_width: float | None,
    plot_over: "Over",
    force: bool,
) -> None:
    """RUNs side by side: size, training, perplexity, tasks, memory use, speed.

    Only what is in the run directories is shown, nothing is measured: run `pkmlm eval` and
    `pkmlm usage-report` first for the test split's numbers. What is missing shows as "-". Finished runs of one recipe
    that differ in their seed only are one row: the mean, +- half the range from the least to the greatest.

    \b
    Examples:
      pkmlm compare runs/dense runs/pkm
      pkmlm compare runs/* --plots pictures --plot-format pdf --plot-width 3.3
      pkmlm compare runs/* --format latex > table.tex
      pkmlm compare runs/* --format csv > runs.csv
    """
    from pkmlm.analysis.compare import compare_runs
    from pkmlm.analysis.tables import compare_rows, compare_tables
    from pkmlm.cli.outputs import free_folder

    folder = free_folder(plots, force)
    comparison = compare_runs(run_paths)
    if format == "json":
        groups = [group.as_json() for group in comparison.groups]
        click.echo(json.dumps({"runs": comparison.facts, "groups": groups}, indent=2, allow_nan=False))
    else:
        tables = [compare_rows(comparison.groups)] if format == "csv" else compare_tables(comparison.groups)
        click.echo("\n".join(table.render(format) for table in tables), nl=False)
    warn_each(comparison.warnings)
    if folder is not None:
        from pkmlm.analysis.plots import Look, draw_curves

        runs = {group.name: [comparison.runs[run["run"]] for run in group.runs] for group in comparison.groups}
        curves = {name: [run.sound_metrics() for run in seeds] for name, seeds in runs.items()}
        for path in (drawn := draw_curves(folder, curves, plot_over, Look(plot_format, plot_width))):
            click.echo(f"drew {printable(str(path))}", err=True)
        if not drawn:
            click.echo("nothing to draw: no run has logged a loss yet", err=True)
