"""`pkmlm tokenize`: text in, a tokenizer and memory-mapped tokens out."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pkmlm.cli.options import PATH, field_option, given, quiet_option, separator_option
from pkmlm.cli.outputs import free_tokens
from pkmlm.cli.show import Output, report_options
from pkmlm.console import Column, Table, number, stage_progress, warn
from pkmlm.environment import usable_cores

if TYPE_CHECKING:
    from pkmlm.data.corpus import Index

TAKE_ALL = ("--valid", "--test")
PERCENTAGE = re.compile(r"(\d+\.?\d*|\.\d+)\s*(%?)", re.ASCII)


class TokenizeCommand(click.Command):
    """Lets `--valid` and `--test` take all files up to the next option, as a shell's glob gives them, so that no file
    that is meant to measure a model is trained on."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        spread: list[str] = []
        option, files = "", 0
        for word in [*args, "--end"]:
            if not word.startswith("-") or word == "-":
                spread += [option, word] if option else [word]
                files += 1
                continue
            if option and not files and not ctx.resilient_parsing:  # not while a shell completes the line
                raise click.UsageError(f"Option '{option}' requires a file.", ctx)
            name, _, value = word.partition("=")
            option, files = (name if name in TAKE_ALL else ""), int(bool(value))
            spread += [] if option and not value else [word]
        return super().parse_args(ctx, spread[:-1])


def held_out(context: click.Context) -> dict[str, float]:
    """The percentages of TRAIN's documents that --valid and --test give instead of files, by split."""
    found: dict[str, float] = {}
    for split in ("valid", "test"):
        for word in context.params[split]:
            match = PERCENTAGE.fullmatch(word)
            if not match or (not match[2] and os.path.lexists(word)):
                continue
            if len(context.params[split]) > 1:
                raise click.UsageError(f"--{split} takes files or one percentage, not both.")
            if not match[2] or not 0 < float(match[1]) < 100:
                raise click.UsageError(f"--{split} {word}: expected files, or a percentage such as 5%.")
            found[split] = float(match[1])
    if sum(found.values()) >= 100:
        raise click.UsageError("--valid and --test leave no document for training (expected less than 100%).")
    return found


@click.command(cls=TokenizeCommand)
@click.argument("train", nargs=-1, required=True, type=PATH, metavar="TRAIN...")
@click.option(
    "--valid",
    multiple=True,
    type=PATH,
    metavar="FILE...|P%",
    help="Text to validate on: all files up to the next option, or P percent of the documents of TRAIN.",
)
@click.option("--test", multiple=True, type=PATH, metavar="FILE...|P%", help="Text to test on, likewise.")
@click.option("-o", "--output", required=True, type=PATH, metavar="DIR", help="Folder to write, new or empty.")
@click.option(
    "--vocab-size", type=click.IntRange(1, 1 << 24), metavar="N", help="Size of the vocabulary to learn. Default: 8192."
)
@click.option(
    "--model-type", type=click.Choice(["bpe", "unigram"]), default="bpe", help="Kind of SentencePiece model to learn."
)
@click.option(
    "--tokenizer",
    "model",
    type=click.Path(readable=False, path_type=Path),
    metavar="FILE|DIR",
    help="Use an existing tokenizer instead of learning one: a SentencePiece model, the tokenizer.json of a byte-level "
    "BPE, or a folder with either.",
)
@click.option(
    "--format",
    type=click.Choice(["txt", "jsonl", "parquet", "arrow"]),
    help="Format of all input. Default: by extension.",
)
@field_option
@click.option(
    "--prompt", metavar="FIELD", help="Field that holds the prompt, which is read but not learnt. Requires --answer."
)
@click.option("--answer", metavar="FIELD", help="Field of the text that follows the prompt and is learnt.")
@separator_option
@click.option("--jobs", type=click.IntRange(1, 1024), metavar="N", help="Threads that encode. Default: all cores.")
@click.option("--force", is_flag=True, help="Replace DIR if it holds tokens.")
@quiet_option
@report_options(formats=())  # its --format is that of the input
@click.pass_context
def command(
    context: click.Context,
    train: tuple[str, ...],
    valid: tuple[str, ...],
    test: tuple[str, ...],
    output: str,
    vocab_size: int | None,
    model_type: str,
    model: Path | None,
    format: str | None,
    field: str,
    prompt: str | None,
    answer: str | None,
    separator: str | None,
    jobs: int | None,
    force: bool,
    quiet: bool,
    out: Output,
) -> None:
    """Learn a tokenizer from text, and turn the text into tokens without losing a byte.

    Reads .txt, .jsonl, .parquet and .arrow, plain, .gz, .xz, .bz2 or .zst; quoted globs; folders that save_to_disk of
    Hugging Face's datasets wrote; and - for standard input (text, unless --format says otherwise). Files are read in
    the order of their names. The tokenizer is learnt from at most 32 MiB of TRAIN, chosen at random. DIR is the same,
    byte for byte, on every run and for any --jobs.

    With a percentage, --valid and --test hold out documents of TRAIN, chosen by a hash of their text: the choice does
    not depend on other documents, and copies of a document stay together.

    With --prompt and --answer, a document is a row's prompt followed by its answer. Training and evaluation read both,
    but learn and score the answer alone.

    Several machines can share the work: each tokenizes some of the files into a DIR of its own, all with one
    --tokenizer, and a recipe lists the folders: data: {dir: [data/1, data/2]}.

    \b
    Examples:
      pkmlm tokenize book.txt -o data/book
      pkmlm tokenize wiki.jsonl --valid 1% --test 1% -o data/wiki
      pkmlm tokenize train.txt.zst --valid v.txt --test t.txt \\
          --separator '\\n\\n\\n' -o data/novels
      pkmlm tokenize 'web/*.jsonl.gz' --vocab-size 32000 -o data/web
      zcat news.gz | pkmlm tokenize - --tokenizer my.model -o data/news
      pkmlm tokenize book.txt --tokenizer gpt2/tokenizer.json -o data/book
      pkmlm tokenize facts.jsonl --prompt question --answer answer -o data/facts
      pkmlm tokenize saved/train --valid saved/test --field doc.text -o data/saved
    """
    from pkmlm.data.shards import tokenize

    check_options(context)
    percentages = held_out(context)
    files = {"train": train, "valid": valid, "test": test}
    folder = free_tokens(output, force)
    with stage_progress(quiet) as (report, seconds):
        index = tokenize(
            folder,
            {split: names for split, names in files.items() if split not in percentages},
            percentages,
            model=model,
            vocab_size=vocab_size,
            model_type=model_type,
            format=format,
            separator=separator,
            field=field if prompt is None else prompt,
            answer=answer,
            jobs=jobs or usable_cores(),
            replace=force,
            progress=report,
            warn=warn,
        )
    out.show(*result(output, index, seconds))


def check_options(context: click.Context) -> None:
    """Refuse options that exclude each other."""
    if given(context, "prompt") != given(context, "answer"):
        raise click.UsageError("--prompt and --answer go together (expected both, or none).")
    if given(context, "answer") and given(context, "field"):
        raise click.UsageError("--field and --answer exclude each other.")
    learns = [f"--{name}" for name in ("vocab-size", "model-type") if given(context, name.replace("-", "_"))]
    if given(context, "model") and learns:
        raise click.UsageError(f"{learns[0]} is for learning a tokenizer, and --tokenizer gives one.")


def result(output: str, index: "Index", seconds: Mapping[str, float]) -> tuple[dict[str, Any], list[Table]]:
    """What was written, split by split, as JSON and as a table.

    Args:
        output, index: the folder, and the index that was written.
        seconds: the time that each split took, and `LEARNING`, if a tokenizer was learnt.
    """
    from pkmlm.data.corpus import Corpus
    from pkmlm.data.shards import LEARNING

    counts = ("documents", "empty", "words", "bytes", "tokens")
    splits: dict[str, dict[str, float]] = {}
    for name, split in index.splits.items():
        splits[name] = {
            **{count: getattr(split, count) for count in counts},
            "bytes_per_token": split.bytes / max(Corpus(output, name).scored, 1),
            "seconds": seconds[name],
            "mb_per_second": split.bytes / 1e6 / max(seconds[name], 1e-9),
        }
    record = {
        "directory": output,
        "vocab_size": index.vocab_size,
        "tokenizer_sha256": index.tokenizer_sha256,
        "sha256": index.sha256,
        "learning_seconds": seconds.get(LEARNING),
        "splits": splits,
    }
    learnt = f", learnt in {seconds[LEARNING]:.1f} s" if LEARNING in seconds else ""
    columns = [Column("split"), *map(number, counts)]
    columns += [number("B/token", "{:.2f}"), number("s", "{:.1f}"), number("MB/s", "{:.1f}")]
    rows = [[name, *facts.values()] for name, facts in splits.items()]
    return record, [Table(f"{output}: vocabulary of {index.vocab_size:,}{learnt}", columns, rows)]
