"""`pkmlm usage-report`: how evenly a trained model reads its memories."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from pkmlm.cli.eval import refuse_contradictions
from pkmlm.cli.options import field_option, force_option, format_option, quiet_option, separator_option, step_option
from pkmlm.errors import UserError, printable

if TYPE_CHECKING:
    from pkmlm.report.tables import Format
    from pkmlm.report.usage import MemoryUsage
    from pkmlm.runtime.rundir import RunDirectory


@click.command()
@click.argument("run_paths", metavar="RUN...", nargs=-1, required=True)
@click.option("--split", metavar="NAME", help="A split of the run's tokens. Default: test.")
@click.option("--text", metavar="FILE", help="Any text file instead of a split (.txt, .jsonl, .parquet, .gz, .zst).")
@separator_option
@field_option
@step_option
@format_option
@click.option("--plots", metavar="DIR", help="Also draw pictures into this folder.")
@force_option
@quiet_option
def command(
    run_paths: tuple[str, ...],
    split: str | None,
    text: str | None,
    separator: str | None,
    field: str,
    step: str,
    format: "Format",
    plots: str | None,
    force: bool,
    quiet: bool,
) -> None:
    """How the slots of each RUN's memories and hash tables are used on a text.

    Usage is the share of slots read at all; KL is the distance from uniform reading, in nats; both stand
    beside what as many random reads would give. Reads are weighed by their weight (mass) and counted (count).
    Results are kept in RUN/usage/, so that the same report comes without a pass over the text the next time.

    \b
    Examples:
      pkmlm usage-report runs/demo
      pkmlm usage-report runs/a runs/b --split valid --plots pictures
      pkmlm usage-report runs/demo --text my.txt --format json | jq
    """
    from pkmlm.report.compare import open_runs
    from pkmlm.report.usage_tables import flat_table, usage_tables

    refuse_contradictions(split, text, separator)
    text_of = TextChoice(split or "test", text, separator, field)
    runs = open_runs(run_paths, run_or_export)
    folder = free_folder(plots, force)
    reports = [report_on(label, run, text_of, step, quiet) for label, run in runs.items()]
    entries = [entry for entry, _ in reports]
    if format == "json":
        click.echo(json.dumps({"runs": entries}, indent=2, allow_nan=False))
    else:
        tables = [flat_table(entries)] if format == "csv" else usage_tables(entries)
        click.echo("\n".join(table.render(format) for table in tables), nl=False)
    if folder is not None:
        from pkmlm.report.plots import draw_usage

        drawn = [
            draw_usage(folder, label, memories, run.metrics())
            for (label, run), (_, memories) in zip(runs.items(), reports, strict=True)
        ]
        click.echo(f"{sum(map(len, drawn))} pictures in {printable(str(folder))}", err=True)


def free_folder(path: str | None, force: bool) -> Path | None:
    """A folder for pictures.

    Raises:
        UserError: there is something in it, and `force` was not given.
    """
    if path is None:
        return None
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--plots {path} is a file (expected a folder)")
    if folder.exists() and any(folder.iterdir()) and not force:
        raise UserError(f"--plots {path} is not empty", "choose another folder, or add --force to overwrite")
    return folder


def run_or_export(path: str) -> "RunDirectory":
    """A run, or an exported folder, of which only name and path are used."""
    from pkmlm.export.config import is_export
    from pkmlm.runtime.rundir import RunDirectory

    return RunDirectory(path) if is_export(Path(path)) else RunDirectory.existing(path)


class TextChoice(NamedTuple):
    """What a report reads: a split, or (with `text`) a file, cut by `separator`, its text in `field`."""

    split: str
    text: str | None
    separator: str | None
    field: str


def report_on(
    label: str, run: "RunDirectory", choice: TextChoice, step: str, quiet: bool
) -> tuple[dict[str, Any], "list[MemoryUsage]"]:
    """One run's entry of the report and its counts: as kept in RUN/usage/, or measured and kept there."""
    from pkmlm.export.config import is_export
    from pkmlm.report.usage_files import load_usage, save_usage

    if is_export(run.path):  # a product: nothing is written into it
        entry, memories = measure(run, choice, step, quiet)
        return {**entry, "run": label}, memories
    number = run.resolve(step)
    source = source_of(run, number, choice)
    name = choice.split if choice.text is None else f"text-{Path(choice.text).name[:100]}"
    stem = run.path / "usage" / f"{name}-step-{number}"
    found = load_usage(stem, source)
    if found is not None:
        return {**found[0], "run": label}, found[1]
    entry, memories = measure(run, choice, str(number), quiet)
    try:
        save_usage(stem, {**entry, "source": source}, memories)
    except UserError as error:  # another's run, say: the report is no worse for it
        click.echo(f"warning: not kept for the next time: {printable(error.message)}", err=True)
    return {**entry, "run": label, "source": source}, memories


def source_of(run: "RunDirectory", step: int, choice: TextChoice) -> dict[str, str | None]:
    """What a report depends on: hashes of the checkpoint and of the text or the tokens, and how the text is read."""
    from pkmlm.data.index import read_index
    from pkmlm.runtime.files import sha256_of

    source: dict[str, str | None] = {"checkpoint": sha256_of(run.checkpoint(step) / "manifest.json")}
    if choice.text is not None:
        if not Path(choice.text).is_file():
            raise UserError(f"--text {choice.text} is not a file")
        return source | {"text": sha256_of(Path(choice.text)), "separator": choice.separator, "field": choice.field}
    folder = run.recipe().data.dir
    if folder is None:
        raise UserError(f"run {run.path} names no data.dir", "give a text with --text FILE")
    return source | {"tokens": read_index(Path(folder)).sha256}


def measure(
    run: "RunDirectory", choice: TextChoice, step: str, quiet: bool
) -> tuple[dict[str, Any], "list[MemoryUsage]"]:
    """Pass over the text and count."""
    from pkmlm.cli.eval import documents_for
    from pkmlm.cli.progress import token_progress
    from pkmlm.evaluate.load import load_run
    from pkmlm.evaluate.usage import measure_usage

    loaded = load_run(run.path, step)
    documents = documents_for(loaded, *choice)
    with token_progress(f"reading {printable(run.name)}", documents.tokens, quiet) as advance:
        memories = measure_usage(loaded, documents, advance)
    found = [memory.as_json() for memory in memories]
    return {"run": run.name, "step": loaded.step, "split": documents.name, "memories": found}, memories
