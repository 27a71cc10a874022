"""`pkmlm eval`: how well a trained model predicts text."""

import sys
from typing import TYPE_CHECKING, Any

import click

from pkmlm.cli.options import field_option, json_option, quiet_option, separator_option, step_option
from pkmlm.errors import UserError, printable

if TYPE_CHECKING:
    from pkmlm.evaluate.load import LoadedRun
    from pkmlm.evaluate.perplexity import Documents


@click.command()
@click.argument("run_path", metavar="RUN")
@click.option("--split", metavar="NAME", help="A split of the run's tokens. Default: test.")
@click.option(
    "--text",
    metavar="FILE",
    help="Any text file instead (.txt, .jsonl, .parquet, .gz, .zst; - for standard input).",
)
@separator_option
@field_option
@click.option(
    "--stride",
    type=click.IntRange(min=1),
    help="Tokens scored by a window, at most the context; fewer see more before them. Default: the context.",
)
@step_option
@json_option
@quiet_option
def command(
    run_path: str,
    split: str | None,
    text: str | None,
    separator: str | None,
    field: str,
    stride: int | None,
    step: str,
    as_json: bool,
    quiet: bool,
) -> None:
    """Perplexity of RUN's model on a split, or on any text.

    Defined as lm-evaluation-harness does for rolling tasks: documents never share context, words are split by white
    space, bytes are those of UTF-8. The result is also written to RUN/eval/.

    \b
    Examples:
      pkmlm eval runs/demo
      pkmlm eval runs/demo --text my.txt --stride 64
      pkmlm eval runs/demo --step best --json
    """
    from pkmlm.cli.progress import token_progress
    from pkmlm.evaluate.load import load_run
    from pkmlm.evaluate.perplexity import score

    refuse_contradictions(split, text, separator)
    run = load_run(run_path, step)
    documents = documents_for(run, split, text, separator, field)
    with token_progress("scoring", documents.tokens, quiet) as advance:
        result = score(run.model, documents, run.tokenizer.eos, stride=stride, advance=advance)
    assert result is not None
    record: dict[str, Any] = {
        "run": run.name,
        "step": run.step,
        "stride": stride or run.recipe.model.context,
        "perplexity": result.as_dict(),
        "tasks": {},
        "average_acc": None,
    }
    print_result(record, as_json)
    try:
        store(run, record, text is not None, stride)
    except UserError as error:  # another's run, say: the result is no worse for it
        click.echo(f"warning: not kept in the run: {printable(error.message)}", err=True)


def refuse_contradictions(split: str | None, text: str | None, separator: str | None) -> None:
    """Refuse options of which one would be ignored."""
    if text is not None and split is not None:
        raise UserError("--split and --text exclude each other", "leave one of them out")
    if separator is not None and text is None:
        raise UserError("--separator goes with --text (a split's documents are separated already)")


def documents_for(
    run: "LoadedRun", split: str | None, text: str | None, separator: str | None, field: str
) -> "Documents":
    """The documents that --split or --text names."""
    from pkmlm.evaluate.perplexity import documents_of_split, documents_of_text

    if text is not None:
        return documents_of_text(text, run.tokenizer, separator, field)
    if run.recipe.data.dir is None:
        raise UserError(f"run {run.path} names no data.dir", "give a text with --text FILE")
    return documents_of_split(run.recipe.data.dir, split or "test", run.tokenizer)


def store(run: "LoadedRun", record: dict[str, Any], of_text: bool, stride: int | None) -> None:
    """Keep the result with the run, under the split or text and the step (and stride, where one was given)."""
    from pkmlm.runtime.files import disk_errors, write_json

    folder = run.path / "eval"
    with disk_errors(folder):
        folder.mkdir(exist_ok=True)
    kind = "text-" if of_text else ""
    name = f"{kind}{record['perplexity']['split'][:100]}-step-{run.step}" + (f"-stride-{stride}" if stride else "")
    write_json(folder / f"{name}.json", record)


def print_result(record: dict[str, Any], as_json: bool) -> None:
    import json

    from pkmlm.report.tables import Column, Table

    if as_json:
        click.echo(json.dumps(record, indent=2))
        return
    found = record["perplexity"]
    rows = [[unit, found[f"{unit}s"], found[f"{unit}_ppl"]] for unit in ("token", "word", "byte")]
    table = Table(
        f"{record['run']} at step {record['step']}, {found['split']}",
        [Column("unit"), Column("count", "right", "{:,}"), Column("perplexity", "right", "{:,.3f}")],
        rows,
    )
    nats = found["nll"] / found["tokens"]
    sys.stdout.write(table.render() + f"{nats:.4f} nats a token, {found['bits_per_byte']:.4f} bits a byte\n")
