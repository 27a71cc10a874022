"""`pkmlm usage-report`: how evenly a trained model reads its memories."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pkmlm.cli.options import COUNT, PATH, base_option, force_option, given, quiet_option, several, text_options
from pkmlm.cli.outputs import free_file
from pkmlm.cli.show import DRAW, Output, report_options
from pkmlm.environment import launched_processes
from pkmlm.errors import UserError, printable

if TYPE_CHECKING:
    from pkmlm.distributed import World
    from pkmlm.evaluate.documents import TextChoice
    from pkmlm.report.plots import Look


@click.command()
@click.argument("run_paths", type=PATH, metavar="RUN...", nargs=-1, required=True)
@text_options
@click.option(
    "--step",
    "steps",
    default="latest",
    metavar="S,...",
    callback=several(click.STRING),
    help="Which checkpoint of each run: latest, best or a number; or several, side by side.",
)
@report_options(plots=DRAW)
@click.option(
    "--html", type=PATH, metavar="FILE", help="Also write an HTML page that shows it all, down to single slots."
)
@click.option(
    "--export",
    "export_file",
    type=PATH,
    metavar="FILE",
    help="Also write counts and masses of every head and slot (.npz; one run).",
)
@click.option(
    "--background",
    "background_file",
    type=PATH,
    metavar="FILE",
    help="Instead of a report, count in how many batches of a text each slot is read, for slot-wise fine-tuning (.npz; "
    "one run). Default text: train.",
)
@click.option(
    "--batches",
    default=1000,
    **COUNT,
    help="With --background: batches to count, evenly spread over the text; all, if it has fewer.",
)
@click.option(
    "--batch-tokens", **COUNT, help="With --background: tokens of a batch. Default: as in a step of the run's training."
)
@base_option
@force_option
@quiet_option
def command(
    run_paths: tuple[str, ...],
    choice: "TextChoice",
    steps: tuple[str, ...],
    out: Output,
    html: str | None,
    export_file: str | None,
    background_file: str | None,
    batches: int,
    batch_tokens: int | None,
    base: str | None,
    force: bool,
    quiet: bool,
) -> None:
    """Show how the slots of each RUN's memories are used on a text.

    Usage is the share of slots read at all; KL is the distance from uniform reading, in nats; both are shown with the
    values for the same reads at random slots. Mass sums the weights of reads, count counts them. Results are kept in
    RUN/usage/, so that the same report needs no pass over the text the next time. Under torchrun, processes share the
    pass (except that of --html); the numbers are those of a single process.

    \b
    Examples:
      pkmlm usage-report runs/demo
      pkmlm usage-report runs/a runs/b --split valid --plots pictures
      pkmlm usage-report runs/demo --text my.txt --json | jq
      pkmlm usage-report runs/demo --step 200,400 --html memory.html
      pkmlm usage-report runs/demo --split train --export counts.npz
      pkmlm usage-report runs/demo --background background.npz --batches 200
      pkmlm usage-report attached --base gpt2 --text my.txt
      torchrun --nproc-per-node 4 -m pkmlm usage-report runs/demo
    """
    from pkmlm.export.config import is_attached
    from pkmlm.report.compare import open_runs
    from pkmlm.report.tables import usage_rows, usage_tables
    from pkmlm.report.usage_report import Reading, export_usage, run_or_export, usage_reports

    world: World | None = None  # None without a launcher: a stored report needs no torch
    with ExitStack() as stack:
        if launched_processes() > 1:
            from pkmlm.launched import init_distributed

            world = stack.enter_context(init_distributed())
            stack.enter_context(world.errors_on_rank_zero())
        runs = open_runs(run_paths, run_or_export)
        one = len(runs) * len(steps) == 1
        if export_file is not None and not one:
            raise UserError("--export takes one run at one step", "write a file for each")
        if base is not None and (others := [name for name, run in runs.items() if not is_attached(run.path)]):
            raise UserError(f"--base requires an attached memory, and {others[0]} is not one", "leave it out")
        out.refuse_plots(force)
        background = free_file("--background", background_file, force)
        if background is not None:
            if not one or out.plots or html or export_file:
                raise UserError("--background takes one run at one step, and no --plots, --html or --export")
            show_background(run_paths[0], steps[0], choice, batches, batch_tokens, background, out, quiet, world)
            return
        for name in ("batches", "batch_tokens"):
            if given(click.get_current_context(), name):
                raise UserError(f"--{name.replace('_', '-')} requires --background", "add --background FILE")
        page, arrays = free_file("--html", html, force), free_file("--export", export_file, force)
        if page is not None and page == arrays:
            raise UserError(f"--html and --export name the same file, {page}", "name two files")
        choice.refuse_standard_input("a text is read more than once")
        reports = usage_reports(runs, steps, Reading(choice, quiet, world, details=page is not None, base=base))
    if world and world.rank > 0:
        return
    entries = [report.entry for report in reports]

    def draw(folder: Path, look: "Look") -> list[Path]:
        from pkmlm.report.plots import draw_usage

        each = ((r.entry["run"], r.memories, list(r.run.metrics())) for r in reports)
        return [file for facts in each for file in draw_usage(folder, *facts, look)]

    def write() -> None:
        if page is not None:
            from pkmlm.files import write_text
            from pkmlm.report.page import usage_page

            write_text(page, usage_page(reports))
            click.echo(f"the page is {printable(str(page))} ({page.stat().st_size / 1e6:.1f} MB)", err=True)
        if arrays is not None:
            export_usage(arrays, reports[0])

    warnings = [warning for entry in entries for warning in entry.get("warnings") or []]
    out.show(
        {"runs": entries}, usage_tables(entries), csv=usage_rows(entries), draw=draw, write=write, warnings=warnings
    )


def show_background(
    path: str,
    step: str,
    choice: "TextChoice",
    batches: int,
    batch_tokens: int | None,
    file: Path,
    out: Output,
    quiet: bool,
    world: "World | None",
) -> None:
    """Count in how many batches of a text the slots of a run are read, show a table of it, and write the file."""
    from pkmlm.measure.background import count_background
    from pkmlm.report.tables import background_table
    from pkmlm.runs.directory import RunDirectory

    counted = count_background(RunDirectory.existing(path), step, choice, batches, batch_tokens, quiet, world)
    if world is None or world.rank == 0:
        record = counted.as_json()
        table = background_table(record)
        out.show(record, [table], csv=table, write=partial(counted.write, file))
