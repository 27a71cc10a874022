"""`pkmlm sweep`: every run of a grid, and its table beside the paper's."""

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import floor, log10
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pkmlm.cli.options import PATH, quiet_option, set_option
from pkmlm.console import warn
from pkmlm.errors import UserError, printable

if TYPE_CHECKING:
    from rich.progress import TaskID

    from pkmlm.console import Column, Table
    from pkmlm.sweep.cells import Cell, Cells
    from pkmlm.sweep.folder import SweepFolder
    from pkmlm.sweep.grid import Grid
    from pkmlm.sweep.results import Results

GPU = re.compile(r"[0-9]+|(GPU|MIG)-[\w/-]+", re.ASCII)  # as CUDA_VISIBLE_DEVICES has it


@click.command()
@click.argument("grid_file", type=PATH, metavar="GRID")
@click.option("-o", "--output", type=PATH, metavar="DIR", help="The folder for runs, table, plots and results.json.")
@click.option("--scale", metavar="NAME", help="One of the grid's scales, e.g. cpu, gpu or paper. Default: its first.")
@set_option
@click.option("--jobs", metavar="N", type=click.IntRange(min=1), help="Cells at a time. Default: 1, or one a --device.")
@click.option("--device", "devices", metavar="N,...", help="GPUs to use, a cell on each. Default: the first.")
@click.option("--task-data", type=PATH, metavar="DIR", help="Where DIR/TASK.jsonl holds the rows of zero-shot tasks.")
@click.option("--dry-run", is_flag=True, help="List the cells with their parameters and operations; train nothing.")
@click.option("--table", "table_only", is_flag=True, help="Train nothing: the table of what DIR holds, with its -s.")
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
    quiet: bool,
) -> int:
    """Train and measure every cell of GRID, and print the table beside the paper's numbers.

    The same command again goes on where it stopped: cells that are done or diverged are skipped. What is tuned is
    chosen by the validation at the last step. Means are over seeds, +- half of what lies between the least and the
    greatest.

    \b
    Examples:
      pkmlm sweep recipes/pkm/grids/table-2.yaml -o sizes -s data.dir=data/my
      pkmlm sweep recipes/pkm/grids/table-2.yaml --scale paper --dry-run
      pkmlm sweep my-grid.yaml -o sweeps/mine --device 0,1,2,3
      pkmlm sweep my-grid.yaml -o sweeps/mine --table
    """
    from pkmlm.sweep.cells import Cells
    from pkmlm.sweep.folder import SweepFolder
    from pkmlm.sweep.grid import read_grid

    path = Path(grid_file)
    grid, scale = read_grid(path, scale)
    folder = SweepFolder(Path(output), path.stem, scale) if output else None
    if folder and table_only and not overrides:
        overrides = folder.settings()
    cells = Cells(grid, path.parent / grid.base, overrides)
    results = with_costs(grid, cells)
    if dry_run:
        tell_doubts(cells)
        sys.stdout.write(plan(results).render())
        return 0
    if folder is None:
        raise UserError("Missing option '-o': the folder to write", "add -o DIR, or --dry-run")
    own = devices_of(devices, jobs)
    folder.recall(results)
    code = 0
    if table_only:
        folder.collect(results)
    else:
        if own:
            refuse_missing_devices(own)
        code = run_all(results, folder, jobs or len(own) or 1, own, task_data, quiet)
        if not code and results.lack_speeds:
            folder.write(results)  # now: the timing may fail
            code = time_models(results, folder, quiet)
    if results.ended or not results.trains:  # an empty table must not replace one that is there
        publish(results, folder)
    return code or tell_failures(results)


def devices_of(names: str | None, jobs: int | None = None) -> list[str]:
    """The GPUs of --device.

    Raises:
        UserError: one is no name of a GPU, with which torch would train on the CPU without a word; or named twice; or
            there are fewer than jobs.
    """
    found = [] if names is None else names.split(",")
    for place, name in enumerate(found):
        if not GPU.fullmatch(name) or name in found[:place]:
            what = f"{name} twice" if name in found[:place] else name or "nothing"
            raise UserError(f"--device {names}: found {what} (expected GPUs, each once)", "for example --device 0,1")
    if found and (jobs or 0) > len(found):
        raise UserError(f"--jobs {jobs}: found {len(found)} devices (expected one a job)", "name more, or lower it")
    return found


def refuse_missing_devices(devices: list[str]) -> None:
    """See to it that this process, which times the models on the first of them, and its children have these GPUs. Of
    MIG instances only the first is looked for: CUDA shows a process no more than one.

    Raises:
        UserError: one is not there; torch would train on the CPU without a word.
    """
    import torch

    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    found = torch.cuda.device_count()
    if found < (1 if devices[0].startswith("MIG-") else len(devices)):
        message = f"--device {','.join(devices)}: there is no GPU {devices[found]} here"
        raise UserError(message, "pkmlm doctor lists the devices")


def with_costs(grid: "Grid", cells: "Cells") -> "Results":
    """Results without a run yet: what arithmetic says of every point."""
    from pkmlm.cost_tables import vocab_size_of
    from pkmlm.sweep.measures import facts_of_cost
    from pkmlm.sweep.results import Results

    recipes = {point: cells.tuning(point)[0].recipe for point in grid.points()}
    return Results(grid, cells, {p: facts_of_cost(recipe, vocab_size_of(recipe)) for p, recipe in recipes.items()})


def tell_doubts(cells: "Cells") -> None:
    for text in cells.doubts():
        warn(text)


def plan(results: "Results") -> "Table":
    """What a sweep would run; of a grid of arithmetic alone, what it would count."""
    from pkmlm.console import Column, Table, number

    grid, runs = results.grid, len(results.cells) if results.trains else "no"
    tried = len(grid.tune.values) if grid.tune else 1
    rows = []
    for point in grid.points():
        cost, train = results.costs[point], results.cells.tuning(point)[0].recipe.train
        sizes = [cost["dense"], cost["memory"], cost["operations"] / 1e6]
        tokens = train.steps * train.batch_tokens / 1e6
        rows.append([*point, *sizes, train.steps, tokens, tried + len(grid.seeds) - 1])
    *_, all_operations, _, all_tokens, _ = zip(*rows, strict=True)
    columns = [Column(axis) for axis in grid.axes]
    columns += [number("dense"), number("in memory"), millions("M ops/token", all_operations)]
    if results.trains:
        columns += [number("steps"), millions("M tokens", all_tokens), number("runs")]
    return Table(f"{grid.title}: {runs} runs", columns, [row[: len(columns)] for row in rows])


def millions(name: str, values: Sequence[float]) -> "Column":
    """A column of millions: one decimal, and as many more as the least of them needs to show two digits."""
    from pkmlm.console import number

    places = 1 - floor(log10(min(values)))
    return number(name, f"{{:,.{max(1, places)}f}}")


def run_all(
    results: "Results", folder: "SweepFolder", jobs: int, devices: list[str], task_data: str | None, quiet: bool
) -> int:
    """Run the cells; the exit code: 0, or what a signal stands for."""
    from pkmlm.evaluate.lm_eval import load_tasks
    from pkmlm.runs.files import make_folder
    from pkmlm.runs.lock import locked
    from pkmlm.signals import stop_on_signals
    from pkmlm.sweep.measures import MEASURES, tasks_of
    from pkmlm.sweep.results import progress_line
    from pkmlm.sweep.runner import Outcome, Runner

    if not results.trains:
        return 0
    grid, cells, total, runs = results.grid, results.cells, len(results.cells), folder.runs
    cells.refuse_missing_data()
    tell_doubts(cells)
    if any(MEASURES[name].source == "tasks" for name in grid.measure):
        folder_of_rows = None if task_data is None else Path(task_data)
        load_tasks(",".join(tasks_of(grid.measure)), folder_of_rows, None)  # refuses bad tasks before hours of training
    make_folder(runs)
    held = locked(runs / ".lock", f"the sweep {folder.path}")
    with held, stop_on_signals() as stop, cell_progress(runs, quiet) as (say, tick):

        def done(outcome: Outcome) -> None:
            again = outcome.cell.name in results.outcomes  # it has trained, was chosen, and is measured now
            results.add(outcome)
            if outcome.status != "stopped":
                place = "chosen" if again else f"{len(results.outcomes)}/{total}"
                say(f"{place} {progress_line(outcome, grid.measure)}")

        folder.begin(results)
        say(f"{total} runs in {folder.path}, {jobs} at a time")
        Runner(runs, grid.measure, jobs, devices, task_data, stop).run(cells, done, tick)
        if stop.exit_code is not None:
            click.echo("stopped on request; the same command goes on", err=True)
    return stop.exit_code or 0


@contextmanager
def cell_progress(folder: Path, quiet: bool) -> "Iterator[tuple[Callable[[str], None], Callable[[list[Cell]], None]]]":
    """Yield a function that prints a line and one that is told which cells run: on a terminal each has a bar."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from pkmlm.sweep.runner import steps_taken

    console = Console(stderr=True, markup=False, emoji=False, highlight=False)  # text as it is
    console.soft_wrap = not console.is_terminal  # a terminal would break a long line within a word
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal, transient=True) as progress:
        bars: dict[str, TaskID] = {}

        def tick(running: "list[Cell]") -> None:
            for name in bars.keys() - {cell.name for cell in running}:
                progress.remove_task(bars.pop(name))
            for cell in running:
                if cell.name not in bars:
                    bars[cell.name] = progress.add_task(escape(cell.name), total=cell.recipe.train.steps)
                progress.update(bars[cell.name], completed=steps_taken(cell, folder))

        def say(text: str) -> None:
            if not quiet:
                console.print(printable(text))

        yield say, tick


def time_models(results: "Results", folder: "SweepFolder", quiet: bool) -> int:
    """Time the models of all points in turn; the exit code: 1 where that fails."""
    from pkmlm.device import machine
    from pkmlm.sweep.results import Speed
    from pkmlm.sweep.speed import time_scoring

    cells = {point: chosen[0].cell for point in results.grid.points() if (chosen := results.chosen(point))}
    runs = {point: (folder.runs / cell.name, cell.recipe.data.dir or "") for point, cell in cells.items()}
    try:
        timed = time_scoring(runs, lambda text: None if quiet else click.echo(f"timing: {text}", err=True))
    except UserError as error:
        click.echo(f"error: nothing was timed: {printable(error.message)}", err=True)
        return 1
    results.speeds = {point: Speed(cells[point].recipe_sha256, rounds, machine()) for point, rounds in timed.items()}
    return 0


def tell_failures(results: "Results") -> int:
    """Say which runs failed, and why; the exit code: 2 where all that failed were asked for what cannot be, else 1."""
    failed = [outcome for outcome in results.outcomes.values() if outcome.status == "failed"]
    for outcome in failed:
        click.echo(f"error: {printable(outcome.cell.name)}: {printable(outcome.message)}", err=True)
    return min((outcome.exit_code for outcome in failed), default=0)


def publish(results: "Results", folder: "SweepFolder") -> None:
    """Write the tables, results.json and the plots, print the tables, and warn where runs in them differ in more than
    the grid says."""
    from pkmlm.analysis.compare import differences
    from pkmlm.runs.directory import RunDirectory
    from pkmlm.sweep.plots import draw

    names = [outcome.cell.name for point in results.grid.points() for outcome in results.chosen(point)]
    for text in differences({name: RunDirectory(folder.runs / name) for name in names}):
        warn(text)
    tables, drawn = folder.write(results), draw(results, folder.path)
    sys.stdout.write("\n".join(table.render() for table in tables))
    if drawn:
        click.echo(f"{len(drawn)} plot{'s' if len(drawn) > 1 else ''} in {printable(str(folder.path))}", err=True)
