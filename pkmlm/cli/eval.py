"""`pkmlm eval`: how well a trained model predicts text."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pkmlm.cli.options import PATH, force_option, json_option, quiet_option, step_option, text_options
from pkmlm.cli.zero_shot import Asked, prepare, score_tasks, warn_of_cuts, write_samples
from pkmlm.console import warn, warn_each
from pkmlm.errors import UserError

if TYPE_CHECKING:
    from pkmlm.distributed import World
    from pkmlm.evaluate.documents import Documents
    from pkmlm.evaluate.load import LoadedRun
    from pkmlm.evaluate.text_choice import TextChoice

NO_PERPLEXITY: dict[str, Any] = {"stride": None, "source": None, "perplexity": None}
NO_TASKS: dict[str, Any] = {"tasks": {}, "average_acc": None}


@click.command()
@click.argument("run_path", type=PATH, metavar="RUN")
@text_options
@click.option(
    "--stride",
    metavar="N",
    type=click.IntRange(min=1),
    help="Tokens scored by a window, at most the context; fewer see more before them. Default: the context.",
)
@click.option(
    "--tasks",
    metavar="NAME,...",
    help="Zero-shot tasks of lm-eval, or files of your own (.yaml); memoryformer: the six of its paper.",
)
@click.option(
    "--task-data",
    type=PATH,
    metavar="DIR",
    help="Where DIR/TASK.jsonl holds each task's rows. Default: the hub that lm-eval loads them from.",
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N documents of each task.")
@click.option(
    "--num-fewshot",
    type=click.IntRange(min=0),
    metavar="K",
    help="Examples before each question (from DIR/TASK.train.jsonl). Default: the task's, mostly 0.",
)
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    metavar="N",
    help="Questions a forward. Default: by their length; halved where memory runs out.",
)
@click.option(
    "--log-samples", type=PATH, metavar="FILE", help="Write what each document was asked and scored, as JSON lines."
)
@force_option
@step_option
@json_option
@quiet_option
def command(
    run_path: str,
    choice: "TextChoice",
    stride: int | None,
    step: str,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Perplexity of RUN's model on a split or any text, and its accuracy on zero-shot tasks.

    Perplexity is that of lm-evaluation-harness for rolling tasks: documents never share context, words are split by
    white space, bytes are those of UTF-8. With --tasks it is computed only if --split, --text or --data asks for it.
    Results are also written to RUN/eval/. RUN may be an exported folder too: nothing is written into it. Under
    torchrun, processes share the work; the numbers are those of one.

    \b
    Examples:
      pkmlm eval runs/demo
      pkmlm eval runs/demo --text my.txt --stride 64
      zcat news.jsonl.gz | jq -r .body | pkmlm eval runs/demo --text -
      pkmlm eval runs/demo --step best --json
      pkmlm eval copied/demo --data moved/tokens
      pkmlm eval runs/demo --tasks piqa,arc_easy --task-data tasks
      pkmlm eval runs/demo --tasks memoryformer --log-samples samples.jsonl
      torchrun --nproc-per-node 4 -m pkmlm eval runs/demo
    """
    from pkmlm.distributed import init_distributed
    from pkmlm.evaluate.documents import chosen_documents
    from pkmlm.evaluate.load import load_same

    asked = Asked(**options)
    asked.refuse_contradictions()
    measured = asked.tasks is None or choice.explicit
    if stride is not None and not measured:
        raise UserError("--stride goes with a perplexity", "with --tasks, also give --split or --text")
    with init_distributed() as world, world.errors_on_rank_zero():
        prepared = None if asked.tasks is None else prepare(asked.tasks, asked.task_data, asked.num_fewshot)
        if world.size > 1:
            choice.refuse_standard_input("several processes cannot read one standard input")
        run = load_same(run_path, step, world)
        record: dict[str, Any] = {"run": run.name, "step": run.step, **NO_PERPLEXITY, **NO_TASKS}
        if measured:  # first: what is wrong with its text or stride is told before the hours that tasks may take
            documents = chosen_documents(choice, run)
            scores = perplexity(run, documents, stride, quiet, world)
            record |= {"stride": stride or run.model.context, "source": documents.source, "perplexity": scores}
        if prepared is not None:
            found, samples = score_tasks(run, prepared, asked, world, quiet)
            record |= found
    if world.rank > 0:
        return
    try:  # first: hours of tasks are not lost with an output that nobody reads any more
        keep(run, record, stride, choice)
        if asked.log_samples is not None:
            write_samples(Path(asked.log_samples), samples)
    finally:  # nor with a disk that is full
        print_result(record, as_json)
        warn_of_cuts(record)
        warn_each(documents.warnings if measured else ())


def perplexity(
    run: "LoadedRun", documents: "Documents", stride: int | None, quiet: bool, world: "World"
) -> dict[str, Any]:
    """The perplexity of documents."""
    from pkmlm.console import token_progress
    from pkmlm.evaluate.perplexity import score

    with token_progress("scoring", documents.tokens, quiet or world.rank > 0) as advance:
        result = score(run.model, documents, run.tokenizer.eos, stride=stride, advance=advance, world=world)
    assert result is not None
    return asdict(result)


def keep(run: "LoadedRun", record: dict[str, Any], stride: int | None, choice: "TextChoice") -> None:
    """Keep the results with the run, if it can be written: only another user may, say."""
    try:
        store(run, record, stride, choice)
    except UserError as error:
        warn(f"not kept in the run: {error.message}")


def store(run: "LoadedRun", record: dict[str, Any], stride: int | None, choice: "TextChoice") -> None:
    """Keep the results with the run. An exported folder is a product: nothing is written into it."""
    if run.exported:
        return
    from pkmlm.runs.results import EVAL, perplexity_file, split_name, tasks_file, text_name, write_evaluation

    if record["perplexity"] is not None:
        alone = {key: value for key, value in record.items() if key != "harness"}
        name, source = record["perplexity"]["split"], record["source"]
        if choice.text is not None:
            name = text_name(name, source["sha256"], source["separator"], source["field"])
        elif choice.data is not None:
            name = split_name(run.path / EVAL, split := name, "sha256", source["sha256"])
            if name != split:
                warn(f"--data: the run has results of {split} on other tokens: these are kept as {name}")
        write_evaluation(run.path, perplexity_file(name, record["step"], stride), {**alone, **NO_TASKS})
    if record["tasks"]:
        write_evaluation(run.path, tasks_file(record), {**record, **NO_PERPLEXITY})


def print_result(record: dict[str, Any], as_json: bool) -> None:
    """Print the tables, or the JSON."""
    from pkmlm.analysis.tasks import task_report

    if as_json:
        click.echo(json.dumps(record, indent=2))
        return
    parts = [perplexity_report(record)] if record["perplexity"] is not None else []
    sys.stdout.write("\n".join(parts + ([task_report(record)] if record["tasks"] else [])))


def perplexity_report(record: dict[str, Any]) -> str:
    """The table of perplexities that people read."""
    from pkmlm.console import Column, Table

    found = record["perplexity"]
    rows = [[unit, found[f"{unit}s"], found[f"{unit}_ppl"] or "over 1e308"] for unit in ("token", "word", "byte")]
    table = Table(
        f"{record['run']} at step {record['step']}, {found['split']}",
        [Column("unit"), Column("count", "right", "{:,}"), Column("perplexity", "right", "{:,.3f}")],
        rows,
    )
    nats = found["nll"] / found["tokens"]
    return table.render() + f"{nats:.4f} nats a token, {found['bits_per_byte']:.4f} bits a byte\n"
