"""`pkmlm compare`: runs side by side."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pkmlm.cli.options import PATH, force_option, over_option, quiet_option
from pkmlm.cli.show import Output, report_options
from pkmlm.console import status_line, warn_each
from pkmlm.errors import UserError
from pkmlm.report.equal import Over

if TYPE_CHECKING:
    from pkmlm.report.plots import Look


@click.command()
@click.argument("run_paths", type=PATH, metavar="RUN...", nargs=-1, required=True)
@report_options(plots="Also write plots into this folder: learning curves, and usage of memories over tokens.")
@over_option
@click.option("--plot-log", is_flag=True, help="Draw curves over a logarithmic axis, for long runs.")
@force_option
@quiet_option
def command(
    run_paths: tuple[str, ...],
    out: Output,
    over: tuple[Over, ...],
    plot_log: bool,
    force: bool,
    quiet: bool,
) -> int:
    """Show RUNs side by side: size, training, perplexity, tasks, usage of memories, speed.

    Only what is in the run directories is shown: run `pkmlm eval` and `pkmlm usage-report` first for the test split's
    numbers. What is missing shows as "-". Finished runs of one recipe that differ only in their seed share one row: the
    mean, +- the sample standard deviation. A run whose records are damaged is left out, and the exit code is then 1.
    --over seconds times a step of each recipe on this machine, unless an earlier call did.

    \b
    Examples:
      pkmlm compare runs/dense runs/pkm
      pkmlm compare runs/* --plots pictures --plot-format pdf --plot-width 3.3
      pkmlm compare runs/* --over tokens,seconds --plots pictures
      pkmlm compare runs/a runs/b --format latex > table.tex
      pkmlm compare runs/* --format csv > runs.csv
    """
    from pkmlm.report.compare import compare_runs
    from pkmlm.report.tables import compare_rows, compare_tables

    out.refuse_plots(force)
    comparison = compare_runs(run_paths)
    warn_each(comparison.warnings)  # before misleading numbers are read, or steps are timed
    equals, known, problem = [], [] if over else ["steps"], None
    if over:
        from pkmlm.bench.steps import step_amounts  # needs torch

        for each in over:
            try:
                with status_line(quiet) as say:
                    amounts = step_amounts(each, comparison.runs, say)
            except UserError as error:  # too little memory for all models at once, for example
                problem = UserError(f"no table over {each}: {error.message}", error.hint, exit_code=1)
                continue
            known.append(each)
            if equal := comparison.at_equal(each, amounts):
                equals.append(equal)
    record: dict[str, Any] = {"runs": comparison.facts, "groups": [group.as_json() for group in comparison.groups]}
    if equals:
        record["equal"] = {each.over: each.as_json() for each in equals}

    def draw(folder: Path, look: "Look") -> list[Path]:
        from pkmlm.report.plots import draw_comparison

        return draw_comparison(folder, comparison, known, look, plot_log)

    tables, rows = compare_tables(comparison.groups, equals), compare_rows(comparison.groups)
    out.show(record, tables, csv=rows, draw=draw)
    if problem:
        raise problem
    return 1 if comparison.damaged else 0
