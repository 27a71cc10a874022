"""`pkmlm usage-report`: how evenly a trained model reads its memories."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pkmlm.cli.options import PATH, force_option, format_option, quiet_option, text_options
from pkmlm.cli.outputs import free_file, free_folder
from pkmlm.cli.usage_subject import Report, Subject, run_or_export, subject_of
from pkmlm.console import warn_each
from pkmlm.environment import launched_processes
from pkmlm.errors import UserError, printable

if TYPE_CHECKING:
    from pkmlm.console import Format
    from pkmlm.distributed import World
    from pkmlm.evaluate.text_choice import TextChoice
    from pkmlm.runs.directory import RunDirectory


@click.command()
@click.argument("run_paths", type=PATH, metavar="RUN...", nargs=-1, required=True)
@text_options
@click.option(
    "--step",
    default="latest",
    show_default=True,
    metavar="S,...",
    help="Which checkpoint of each run, latest, best or a number; or several side by side.",
)
@format_option
@click.option("--plots", type=PATH, metavar="DIR", help="Also draw pictures into this folder.")
@click.option("--html", type=PATH, metavar="FILE", help="Also write one page to look at it all, down to single slots.")
@click.option(
    "--export",
    "export_file",
    type=PATH,
    metavar="FILE",
    help="Also write counts and masses of every head and slot (.npz; one run).",
)
@force_option
@quiet_option
def command(
    run_paths: tuple[str, ...],
    choice: "TextChoice",
    step: str,
    format: "Format",
    plots: str | None,
    html: str | None,
    export_file: str | None,
    force: bool,
    quiet: bool,
) -> None:
    """How the slots of each RUN's memories and hash tables are used on a text.

    Usage is the share of slots read at all; KL is the distance from uniform reading, in nats; both stand
    beside what the same reads give at random slots. Reads are weighed by their weight (mass) and counted (count).
    Results are kept in RUN/usage/, so that the same report comes without a pass over the text the next time. Under
    torchrun, processes share the pass (not that of --html); the numbers are those of one.

    \b
    Examples:
      pkmlm usage-report runs/demo
      pkmlm usage-report runs/a runs/b --split valid --plots pictures
      pkmlm usage-report runs/demo --text my.txt --format json | jq
      pkmlm usage-report runs/demo --step 200,400 --html memory.html
      pkmlm usage-report runs/demo --split train --export background.npz
      torchrun --nproc-per-node 4 -m pkmlm usage-report runs/demo
    """
    from pkmlm.analysis.compare import open_runs

    with launched() as world:
        runs, steps = open_runs(run_paths, run_or_export), list(dict.fromkeys(step.split(",")))
        if export_file is not None and len(runs) * len(steps) > 1:
            raise UserError("--export takes one run at one step", "write a file for each")
        folder, page = free_folder(plots, force), free_file("--html", html, force)
        background = free_file("--export", export_file, force)
        if page is not None and page == background:
            raise UserError(f"--html and --export name one file, {page}", "name two")
        choice.refuse_standard_input("a text is read more than once")
        named = [(f"{name}@{s}" if len(steps) > 1 else name, run, s) for name, run in runs.items() for s in steps]
        found = reports_on(named, choice, quiet, world, look_into=page is not None)
    if world and world.rank > 0:
        return
    entries = [{**report.entry, "run": subject.label} for subject, report in found]
    try:  # first: they are not lost with an output that nobody reads any more
        if any((folder, page, background)) and not any(entry["memories"] for entry in entries):
            raise UserError("no model here has a memory to draw or export", "leave out --plots, --html and --export")
        if folder is not None:
            draw(folder, found)
        if page is not None:
            write_page(page, entries, found)
        if background is not None:
            export(background, entries, found)
    finally:  # nor is the report with a disk that is full
        print_report(entries, format)
        warn_each(warning for entry in entries for warning in entry.get("warnings") or [])


def print_report(entries: list[dict[str, Any]], format: "Format") -> None:
    """Print what was found of each run, in one of the formats of a table."""
    from pkmlm.analysis.tables import flat_table, usage_tables

    if format == "json":
        click.echo(json.dumps({"runs": entries}, indent=2, allow_nan=False))
        return
    tables = [flat_table(entries)] if format == "csv" else usage_tables(entries)
    click.echo("\n".join(table.render(format) for table in tables), nl=False)


@contextmanager
def launched() -> "Iterator[World | None]":
    """The processes of a launcher; None without one: a report that is kept needs no torch."""
    if launched_processes() == 1:
        yield None
        return
    from pkmlm.distributed import init_distributed

    with init_distributed() as world, world.errors_on_rank_zero():
        yield world


def reports_on(
    named: "list[tuple[str, RunDirectory, str]]",
    choice: "TextChoice",
    quiet: bool,
    world: "World | None",
    *,
    look_into: bool,
) -> list[tuple[Subject, Report]]:
    """A report of each run at each step. Rank 0 alone looks into slots: their strongest readers are not merged."""
    from pkmlm.export.config import is_export

    if look_into and world and world.rank > 0:
        return []
    world = None if look_into else world
    for _, run, step in named:
        if not is_export(run.path):
            run.resolve(step)  # refuses a missing one before the first pass

    def reported(label: str, run: "RunDirectory", step: str) -> tuple[Subject, Report]:
        while True:
            subject = subject_of(label, run, step, choice, world)
            try:
                if look_into:
                    return subject, subject.keep(measured(subject, choice, quiet, None, look_into=True))
                return subject, report_on(subject, choice, quiet, world)
            except UserError:
                if step.isdecimal() or subject.is_there:
                    raise
                # a training process has replaced the checkpoint since: look again

    return [reported(*each) for each in named]


def report_on(subject: Subject, choice: "TextChoice", quiet: bool, world: "World | None") -> Report:
    """What is kept, or measured and then kept. All processes call it; the report of all but rank 0 is of no use."""
    first = world is None or world.rank == 0
    report = subject.kept()
    if not (world.broadcast(report is not None) if world else report):
        report = measured(subject, choice, quiet or not first, world)
        report = subject.keep(report) if first else report
    return report or Report({}, [], [])


def measured(
    subject: Subject, choice: "TextChoice", quiet: bool, world: "World | None", *, look_into: bool = False
) -> Report:
    """Pass over the text and count; to look into slots, note who reads them as well, and what."""
    from pkmlm.analysis.counters import measure_usage
    from pkmlm.analysis.slot_details import hold, index_slots
    from pkmlm.console import token_progress
    from pkmlm.evaluate.documents import chosen_documents
    from pkmlm.evaluate.load import load_same

    loaded = load_same(subject.run.path, subject.step, world)
    documents = chosen_documents(choice, loaded)
    strongest = None
    with token_progress(f"reading {printable(loaded.name)}", documents.tokens, quiet) as advance:
        if look_into:
            memories, strongest = index_slots(loaded, documents, advance)
        else:
            memories = measure_usage(loaded, documents, advance, world)
    found = [memory.as_json() for memory in memories]
    entry = {"run": loaded.name, "step": loaded.step, "split": documents.name, "memories": found}
    entry["warnings"] = list(documents.warnings)  # what is kept has them too
    return Report(
        entry, memories, hold(loaded, memories, strongest, chosen_documents(choice, loaded)) if strongest else []
    )


def draw(folder: Path, found: "list[tuple[Subject, Report]]") -> None:
    """Draw each report's pictures."""
    from pkmlm.analysis.plots import draw_usage

    drawn = [draw_usage(folder, subject.label, report.memories, subject.run.metrics()) for subject, report in found]
    click.echo(f"{sum(map(len, drawn))} pictures in {printable(str(folder))}", err=True)


def write_page(path: Path, entries: list[dict[str, Any]], found: "list[tuple[Subject, Report]]") -> None:
    """Write the page of all reports."""
    from pkmlm.analysis.page import usage_page
    from pkmlm.runs.files import write_text

    memories, holdings = [report.memories for _, report in found], [report.holdings for _, report in found]
    write_text(path, usage_page(entries, memories, holdings, [subject.run.metrics() for subject, _ in found]))
    click.echo(f"the page is {printable(str(path))} ({path.stat().st_size / 1e6:.1f} MB)", err=True)


def export(path: Path, entries: list[dict[str, Any]], found: "list[tuple[Subject, Report]]") -> None:
    """Write the counts of the only report."""
    from pkmlm.analysis.background import export_usage

    ((subject, report),) = found
    export_usage(path, entries[0], subject.fingerprint(), report.memories)
