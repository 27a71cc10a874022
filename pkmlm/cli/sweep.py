"""`pkmlm sweep`: every run of a grid, and its table beside the paper's."""

import re
from pathlib import Path

import click

from pkmlm.cli.options import COUNT, PATH, RECIPE, over_option, plot_options, quiet_option, set_option
from pkmlm.cli.show import NO_CSV, Output, report_options
from pkmlm.console import warn_each
from pkmlm.errors import UserError
from pkmlm.report.equal import Over

GPU = re.compile(r"[0-9]+|(GPU|MIG)-[\w/-]+", re.ASCII)  # as CUDA_VISIBLE_DEVICES has it


@click.command()
@click.argument("grid_file", type=RECIPE, metavar="GRID")
@click.option("-o", "--output", type=PATH, metavar="DIR", help="The folder for runs, table, plots and results.json.")
@click.option("--scale", metavar="NAME", help="One of the grid's scales, e.g. cpu, gpu or paper. Default: its first.")
@set_option
@click.option("--jobs", **COUNT, help="Cells at a time. Default: 1, or one per --device.")
@click.option("--device", "devices", metavar="N,...", help="GPUs to use, a cell on each. Default: the first.")
@click.option("--task-data", type=PATH, metavar="DIR", help="Where DIR/TASK.jsonl holds the rows of zero-shot tasks.")
@click.option("--dry-run", is_flag=True, help="Show what each point costs and how long it trains here; train nothing.")
@click.option(
    "--table",
    "table_only",
    is_flag=True,
    help="Train nothing: print the table of the runs in DIR, whose overrides are the default of -s.",
)
@over_option
@click.option(
    "--retime", is_flag=True, help="Time steps and scoring again; once a run has begun, the steps of `equal` stay."
)
@report_options(NO_CSV)
@plot_options
@quiet_option
def command(
    grid_file: str,
    output: str | None,
    scale: str | None,
    overrides: tuple[str, ...],
    jobs: int | None,
    devices: str | None,
    task_data: str | None,
    dry_run: bool,
    table_only: bool,
    over: tuple[Over, ...],
    retime: bool,
    out: Output,
    quiet: bool,
) -> int:
    """Train and measure every cell of GRID, and print a table next to the paper's numbers.

    The same command again resumes where it stopped: cells that are done or diverged are skipped. Tuned values are
    chosen by the validation loss of the last step. Means are over seeds; +- is the sample standard deviation.

    \b
    Examples:
      pkmlm sweep pkm/grids/table-2 -o sizes -s data.dir=data/my
      pkmlm sweep pkm/grids/table-2 --scale paper --dry-run
      pkmlm sweep my-grid.yaml -o sweeps/mine --device 0,1,2,3
      pkmlm sweep my-grid.yaml -o sweeps/mine --table --format latex > table.tex
    """
    from pkmlm.report.plots import Look
    from pkmlm.sweep.run import Workers, open_sweep, run_sweep, seconds_of_steps, use_devices

    if output is None and not dry_run:
        raise UserError("Missing option '-o': the folder to write", "add -o DIR, or --dry-run")
    if gpus := parse_devices(devices, jobs):
        use_devices(gpus)
    results, folder = open_sweep(
        Path(grid_file),
        scale,
        overrides,
        output,
        over=over,
        dry_run=dry_run,
        table_only=table_only,
        retime=retime,
        quiet=quiet,
    )
    if dry_run:
        warn_each(results.cells.warnings())
        plan = results.plan(seconds_of_steps(results.cells, quiet) if results.grid.trains else {})
        names = [column.name for column in plan.columns]
        record = {"title": plan.title, "plan": [dict(zip(names, row, strict=True)) for row in plan.rows]}
        out.show(record, [plan])
        return 0
    assert folder is not None  # without -o only a dry run gets here
    return run_sweep(
        results,
        folder,
        show=out.show,
        look=Look(out.plot_format, out.plot_width),
        table_only=table_only,
        retime=retime,
        workers=Workers(jobs or len(gpus) or 1, gpus, task_data),
        quiet=quiet,
    )


def parse_devices(names: str | None, jobs: int | None = None) -> list[str]:
    """The GPUs of --device.

    Raises:
        UserError: a name is not a GPU's (torch would silently train on the CPU) or is given twice; or there are fewer
            GPUs than jobs.
    """
    found = [] if names is None else names.split(",")
    for place, name in enumerate(found):
        if not GPU.fullmatch(name) or name in found[:place]:
            what = f"{name} twice" if name in found[:place] else name or "nothing"
            raise UserError(f"--device {names}: found {what} (expected GPUs, each once)", "for example --device 0,1")
    if found and (jobs or 0) > len(found):
        raise UserError(
            f"--jobs {jobs}: found {len(found)} devices (expected one per job)", "name more devices, or lower --jobs"
        )
    return found
