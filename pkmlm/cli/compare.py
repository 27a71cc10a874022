"""`pkmlm compare`: runs side by side."""

import json

import click

from pkmlm.cli.options import PATH, force_option, format_option, over_option, plot_options, quiet_option
from pkmlm.cli.outputs import free_folder
from pkmlm.console import Format, say_drawn, status_line, warn_each
from pkmlm.report.equal import Over


@click.command()
@click.argument("run_paths", type=PATH, metavar="RUN...", nargs=-1, required=True)
@format_option
@click.option(
    "--plots", type=PATH, metavar="DIR", help="Also draw into this folder: learning curves, and memory use over tokens."
)
@plot_options
@over_option
@click.option("--plot-log", is_flag=True, help="Draw curves over a logarithmic axis, for long runs.")
@force_option
@quiet_option
def command(
    run_paths: tuple[str, ...],
    format: Format,
    plots: str | None,
    plot_format: tuple[str, ...],
    plot_width: float | None,
    over: tuple[Over, ...],
    plot_log: bool,
    force: bool,
    quiet: bool,
) -> int:
    """Show RUNs side by side: size, training, perplexity, tasks, memory use, speed.

    Only what is in the run directories is shown: run `pkmlm eval` and `pkmlm usage-report` first for the test split's
    numbers. What is missing shows as "-". Finished runs of one recipe that differ only in their seed share one row: the
    mean, +- half the range from the least to the greatest. A damaged run is left out, and the exit code is then 1.
    --over seconds times a step of each recipe on this machine, unless an earlier call did.

    \b
    Examples:
      pkmlm compare runs/dense runs/pkm
      pkmlm compare runs/* --plots pictures --plot-format pdf --plot-width 3.3
      pkmlm compare runs/* --over tokens,seconds --plots pictures
      pkmlm compare runs/* --format latex > table.tex
      pkmlm compare runs/* --format csv > runs.csv
    """
    from pkmlm.report.compare import compare_runs
    from pkmlm.report.dense_equivalent import dense_equivalents
    from pkmlm.report.tables import compare_rows, compare_tables

    folder = free_folder(plots, force)
    comparison = compare_runs(run_paths)
    warn_each(comparison.warnings)  # before misleading numbers are read, or steps are timed
    equals = []
    if over:
        from pkmlm.bench.steps import step_amounts  # needs torch

        with status_line(quiet) as say:
            for each in over:
                if equal := comparison.at_equal(each, step_amounts(each, comparison.runs, say)):
                    equals.append(equal)
    dense, comparable = comparison.comparable_with_dense()
    try:  # pictures first: they are drawn even if the output has been closed
        if folder is not None:
            from pkmlm.report.plots import Look, draw_curves, over_tokens

            look, branches, drawn = Look(plot_format, plot_width), comparison.branches(), []
            for axis in over or ("steps",):
                curves = comparison.curves(axis)
                lines = {
                    name: [seed for one in (name, *ends) for seed in curves[one]] for name, ends in branches.items()
                }
                drawn += draw_curves(folder, lines, axis, look, plot_log)
            trunk = next((name for name, ends in branches.items() if dense in (name, *ends)), None)
            figure = over_tokens(comparison.curves("tokens"), branches, trunk, comparable, look)
            drawn += look.save(folder, "perplexity-and-use-over-tokens", figure)
            if drawn:
                say_drawn(len(drawn), folder)
            else:
                click.echo("nothing to draw: the logs hold no loss", err=True)
    finally:
        sizes = dense_equivalents([group for group in comparison.groups if group.name in comparable], over)
        if format == "json":
            groups = [
                group.as_json() | {"dense_equivalent": {by: size.as_json() for by, size in sizes[group.name].items()}}
                if group.name in sizes
                else group.as_json()
                for group in comparison.groups
            ]
            shared = {each.over: each.as_json() for each in equals}
            record = {"runs": comparison.facts, "groups": groups} | ({"equal": shared} if shared else {})
            click.echo(json.dumps(record, indent=2, allow_nan=False))
        elif format == "csv":
            click.echo(compare_rows(comparison.groups, sizes).render(format), nl=False)
        else:
            tables = compare_tables(comparison.groups, equals, sizes)
            click.echo("\n".join(table.render(format) for table in tables), nl=False)
    return 1 if comparison.damaged else 0
