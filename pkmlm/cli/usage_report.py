"""`pkmlm usage-report`: how evenly a trained model reads its memories."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from pkmlm.cli.eval import told_once
from pkmlm.cli.options import force_option, format_option, quiet_option
from pkmlm.cli.outputs import free_file, free_folder
from pkmlm.cli.texts import TextChoice, text_options
from pkmlm.errors import UserError, printable
from pkmlm.runtime.launcher import started

if TYPE_CHECKING:
    from pkmlm.report.slots import Holding
    from pkmlm.report.tables import Format
    from pkmlm.report.usage import MemoryUsage
    from pkmlm.runtime.distributed import World
    from pkmlm.runtime.rundir import RunDirectory


@click.command()
@click.argument("run_paths", metavar="RUN...", nargs=-1, required=True)
@text_options
@click.option(
    "--step",
    default="latest",
    show_default=True,
    metavar="S,...",
    help="Which checkpoint of each run, latest, best or a number; or several side by side.",
)
@format_option
@click.option("--plots", metavar="DIR", help="Also draw pictures into this folder.")
@click.option("--html", metavar="FILE", help="Also write one page to look at it all, down to single slots.")
@click.option("--export", metavar="FILE", help="Also write counts and masses of every head and slot (.npz; one run).")
@force_option
@quiet_option
def command(
    run_paths: tuple[str, ...],
    choice: TextChoice,
    step: str,
    format: "Format",
    plots: str | None,
    html: str | None,
    export: str | None,
    force: bool,
    quiet: bool,
) -> None:
    """How the slots of each RUN's memories and hash tables are used on a text.

    Usage is the share of slots read at all; KL is the distance from uniform reading, in nats; both stand
    beside what as many random reads would give. Reads are weighed by their weight (mass) and counted (count).
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
    from pkmlm.report.compare import open_runs
    from pkmlm.report.usage_tables import flat_table, usage_tables

    with launched() as world:
        runs, steps = open_runs(run_paths, run_or_export), list(dict.fromkeys(step.split(",")))
        if export is not None and len(runs) * len(steps) > 1:
            raise UserError("--export takes one run at one step", "write a file for each")
        folder, page = free_folder(plots, force), free_file("--html", html, force)
        background = free_file("--export", export, force)
        choice.refuse_shared_input(world)
        each = [(f"{name}@{s}" if len(steps) > 1 else name, run, s) for name, run in runs.items() for s in steps]
        pages = page is not None
        reports = [report_on(label, run, choice, s, quiet, world, looked_into=pages) for label, run, s in each]
    if world and world.rank > 0:
        return
    entries = [report.entry for report in reports]
    if format == "json":
        click.echo(json.dumps({"runs": entries}, indent=2, allow_nan=False))
    else:
        tables = [flat_table(entries)] if format == "csv" else usage_tables(entries)
        click.echo("\n".join(table.render(format) for table in tables), nl=False)
    if folder is not None:
        draw(folder, [(label, run) for label, run, _ in each], reports)
    if page is not None:
        write_page(page, reports, [run.metrics() for _, run, _ in each])
    if background is not None:
        from pkmlm.report.background import export_usage

        export_usage(background, entries[0], checkpoint_of(each[0][1], entries[0]["step"]), reports[0].memories)


@contextmanager
def launched() -> "Iterator[World | None]":
    """The processes of a launcher; None without one: a report that is kept needs no torch."""
    if started() == 1:
        yield None
        return
    from pkmlm.runtime.distributed import joined

    with joined() as world, told_once(world):
        yield world


def draw(folder: Path, runs: "list[tuple[str, RunDirectory]]", reports: "list[Report]") -> None:
    from pkmlm.report.plots import draw_usage

    drawn = [
        draw_usage(folder, label, report.memories, run.metrics())
        for (label, run), report in zip(runs, reports, strict=True)
    ]
    click.echo(f"{sum(map(len, drawn))} pictures in {printable(str(folder))}", err=True)


def write_page(path: Path, reports: "list[Report]", metrics: list[list[dict[str, Any]]]) -> None:
    from pkmlm.report.html import usage_page
    from pkmlm.runtime.files import write_text

    holdings = [report.holdings for report in reports]
    memories = [report.memories for report in reports]
    write_text(path, usage_page([report.entry for report in reports], memories, holdings, metrics))
    click.echo(f"the page is {printable(str(path))} ({path.stat().st_size / 1e6:.1f} MB)", err=True)


def run_or_export(path: str) -> "RunDirectory":
    """A run, or an exported folder, of which only name and path are used."""
    from pkmlm.export.config import is_export
    from pkmlm.runtime.rundir import RunDirectory

    return RunDirectory(path) if is_export(Path(path)) else RunDirectory.existing(path)


class Report(NamedTuple):
    """An entry of the report, its counts, and (where they were asked for) what is shown of single slots."""

    entry: dict[str, Any]
    memories: "list[MemoryUsage]"
    holdings: "list[Holding]"


def report_on(
    label: str,
    run: "RunDirectory",
    choice: TextChoice,
    step: str,
    quiet: bool,
    world: "World | None",
    *,
    looked_into: bool = False,
) -> Report:
    """One run's report: as kept in RUN/usage/, or measured (always, if it is to be looked into) and kept there. All
    processes call it; the report of all but rank 0 is of no use.
    """
    from pkmlm.export.config import is_export
    from pkmlm.report.usage_files import load_usage, save_usage

    other_rank = world is not None and world.rank > 0
    quiet = quiet or other_rank
    if looked_into:  # the strongest readers are not merged
        if other_rank:
            return Report({}, [], [])
        world = None
    if is_export(run.path):  # a product: nothing is written into it
        report = measure(run, choice, step, quiet, looked_into, world)
        return report._replace(entry={**report.entry, "run": label})
    number = run.resolve(step)
    number = world.broadcast(number) if world else number
    source = source_of(run, number, choice)
    name = choice.split or "test" if choice.text is None else f"text-{Path(choice.text).name[:100]}"
    stem = run.path / "usage" / f"{name}-step-{number}"
    found = None if looked_into or other_rank else load_usage(stem, source)
    if world.broadcast(found is not None) if world else found is not None:
        return Report({**found[0], "run": label}, found[1], []) if found else Report({}, [], [])
    report = measure(run, choice, str(number), quiet, looked_into, world)
    if other_rank:
        return report
    try:
        save_usage(stem, {**report.entry, "source": source}, report.memories)
    except UserError as error:  # another's run, say: the report is no worse for it
        click.echo(f"warning: not kept for the next time: {printable(error.message)}", err=True)
    return report._replace(entry={**report.entry, "run": label, "source": source})


def checkpoint_of(run: "RunDirectory", step: int) -> str:
    """The sha256 of the manifest of a checkpoint or of an exported folder."""
    from pkmlm.export.config import is_export
    from pkmlm.runtime.files import sha256_of

    return sha256_of((run.path if is_export(run.path) else run.checkpoint(step)) / "manifest.json")


def source_of(run: "RunDirectory", step: int, choice: TextChoice) -> dict[str, str | None]:
    """What a report depends on: hashes of the checkpoint and of the text or the tokens, and how the text is read."""
    from pkmlm.data.index import read_index
    from pkmlm.runtime.files import sha256_of

    source: dict[str, str | None] = {"checkpoint": checkpoint_of(run, step)}
    if choice.text is not None:
        if not Path(choice.text).is_file():
            raise UserError(f"--text {choice.text} is not a file")
        return source | {"text": sha256_of(Path(choice.text)), "separator": choice.separator, "field": choice.field}
    folder = run.recipe().data.dir
    if folder is None:
        raise UserError(f"run {run.path} names no data.dir", "give a text with --text FILE")
    return source | {"tokens": read_index(Path(folder)).sha256}


def measure(
    run: "RunDirectory", choice: TextChoice, step: str, quiet: bool, looked_into: bool, world: "World | None"
) -> Report:
    """Pass over the text and count; to look into slots, note who reads them as well."""
    from pkmlm.cli.progress import token_progress
    from pkmlm.evaluate.load import load_same
    from pkmlm.evaluate.slots import hold, index_slots
    from pkmlm.evaluate.usage import measure_usage

    loaded = load_same(run.path, step, world)
    documents = choice.documents(loaded)
    strongest = None
    with token_progress(f"reading {printable(run.name)}", documents.tokens, quiet) as advance:
        if looked_into:
            memories, strongest = index_slots(loaded, documents, advance)
        else:
            memories = measure_usage(loaded, documents, advance, world)
    found = [memory.as_json() for memory in memories]
    entry = {"run": run.name, "step": loaded.step, "split": documents.name, "memories": found}
    holdings = [] if strongest is None else hold(loaded, memories, strongest, choice.documents(loaded))
    return Report(entry, memories, holdings)
