"""`pkmlm tokenize`: text in, a tokenizer and memory-mapped tokens out."""

import re
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pkmlm.cli.options import PATH, field_option, given, json_option, quiet_option, separator_option
from pkmlm.cli.outputs import free_tokens
from pkmlm.cli.progress import Stopwatch, stopwatch
from pkmlm.cli.tokenize_doubts import doubt_repeats, doubt_sources, doubt_tokens
from pkmlm.cli.tokenize_result import LEARNING, print_result
from pkmlm.environment import usable_cores
from pkmlm.errors import UserError, printable

if TYPE_CHECKING:
    from pkmlm.data.sources import Source
    from pkmlm.data.tokenizer import Tokenizer

KEPT_BY_JOIN = {"train", "output", "joins", "force", "quiet", "verbose", "as_json"}
TAKE_ALL = ("--valid", "--test")


class TokenizeCommand(click.Command):
    """Lets `--valid` and `--test` take all files up to the next option, as a shell's glob gives them: a file that is to
    measure a model never becomes one that it learns from."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        spread: list[str] = []
        option, files = "", 0
        for word in [*args, "--end"]:
            if not word.startswith("-") or word == "-":
                spread += [option, word] if option else [word]
                files += 1
                continue
            if option and not files and not ctx.resilient_parsing:  # else a shell asks what could follow
                raise click.UsageError(f"Option '{option}' requires a file.", ctx)
            name, _, value = word.partition("=")
            option, files = (name if name in TAKE_ALL else ""), int(bool(value))
            spread += [] if option and not value else [word]
        return super().parse_args(ctx, spread[:-1])


def part_of(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, int] | None:
    """The two numbers of I/N."""
    if value is None:
        return None
    numbers = re.fullmatch(r"0*(\d{1,5})/0*(\d{1,5})", value, re.ASCII)
    if not numbers or not 1 <= int(numbers[1]) <= int(numbers[2]):
        raise click.BadParameter(f"found {printable(value)!r} (expected I/N with 1 <= I <= N, as 2/8)")
    return int(numbers[1]), int(numbers[2])


@click.command(cls=TokenizeCommand)
@click.argument("train", nargs=-1, required=True, type=PATH, metavar="TRAIN...")
@click.option(
    "--valid", multiple=True, type=PATH, metavar="FILE...", help="Text to validate on: all files up to the next option."
)
@click.option("--test", multiple=True, type=PATH, metavar="FILE...", help="Text to test on, likewise.")
@click.option("-o", "--output", required=True, type=PATH, metavar="DIR", help="Folder to write; must not be there yet.")
@click.option(
    "--vocab-size",
    type=click.IntRange(1, 1 << 24),
    metavar="N",
    help="Size of the vocabulary to learn. Default: 8192.",
)
@click.option(
    "--model-type",
    type=click.Choice(["bpe", "unigram"]),
    default="bpe",
    show_default=True,
    help="Kind of SentencePiece model to learn.",
)
@click.option(
    "--tokenizer",
    "model",
    type=click.Path(readable=False, path_type=Path),
    metavar="FILE",
    help="Use this SentencePiece model and learn none.",
)
@click.option("--format", type=click.Choice(["txt", "jsonl", "parquet"]), help="Format of all input. Default: by name.")
@field_option
@separator_option
@click.option("--shard", metavar="I/N", callback=part_of, help="Encode part I of N of the text; needs --tokenizer.")
@click.option("--join", "joins", is_flag=True, help="Join the folders TRAIN, which are all N parts.")
@click.option("--jobs", type=click.IntRange(1, 1024), metavar="N", help="Threads that encode. Default: all cores.")
@click.option("--force", is_flag=True, help="Replace DIR if it holds tokens.")
@quiet_option
@json_option
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
    separator: str | None,
    shard: tuple[int, int] | None,
    joins: bool,
    jobs: int | None,
    force: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Learn a tokenizer from text, and turn the text into tokens without losing a byte.

    Reads .txt, .jsonl and .parquet, plain, .gz or .zst; quoted globs; and - for standard input (text, unless
    --format says otherwise). Files are read in the order of their names. The tokenizer is learnt from at most
    32 MiB of TRAIN, chosen at random. DIR is the same, byte for byte, on every run and for any --jobs.

    \b
    Examples:
      pkmlm tokenize book.txt -o data/book
      pkmlm tokenize train.txt.zst --valid v.txt --test t.txt \\
          --separator '\\n\\n\\n' -o data/novels
      pkmlm tokenize 'wiki/*.jsonl.gz' --vocab-size 32000 -o data/wiki
      zcat news.gz | pkmlm tokenize - --tokenizer my.model -o data/news

    \b
    On three machines (I is 1, 2 or 3), and then on one:
      pkmlm tokenize web.txt --separator '\\n\\n\\n' --tokenizer my.model \\
          --shard I/3 -o parts/I
      pkmlm tokenize --join parts/1 parts/2 parts/3 -o data/web
    """
    from pkmlm.data.parts import write_part
    from pkmlm.data.shards import Encoding, write_corpus
    from pkmlm.data.tokenizer import Tokenizer

    check_options(context)
    folder = free_tokens(output, force)
    if joins:
        join(folder, output, train, force, quiet, as_json)
        return
    sources = find_all({"train": train, "valid": valid, "test": test}, format)
    check_sources(sources, separator, field, shard)
    warned = doubt_sources(sources)
    with stopwatch(sizes_of(sources, shard), quiet) as watch:
        tokenizer = Tokenizer.load(model) if model else learn(sources, separator, field, vocab_size, model_type, watch)
        encoding = Encoding(tokenizer, separator, field, jobs or usable_cores(), watch=watch)
        if shard is None:
            index = write_corpus(folder, sources, encoding, replace=force)
            doubt_tokens(folder, index, tokenizer, warned)  # of parts, --join has the whole
        else:
            index = write_part(folder, sources, encoding, *shard, replace=force)
    print_result(output, index, watch.seconds, as_json, shard)


def check_options(context: click.Context) -> None:
    """Refuse options that exclude each other."""
    options = {each.name: each.opts[-1] for each in context.command.params if given(context, str(each.name))}
    if "joins" in options and (strange := [option for name, option in options.items() if name not in KEPT_BY_JOIN]):
        raise click.UsageError(f"{strange[0]} is for encoding text, and --join reads none.")
    learns = [options[name] for name in ("vocab_size", "model_type") if name in options]
    if "model" in options and learns:
        raise click.UsageError(f"{learns[0]} is for learning a tokenizer, and --tokenizer gives one.")
    if "shard" in options and "model" not in options:
        raise click.UsageError("--shard needs --tokenizer FILE: all parts must be encoded with the same one.")


def join(folder: Path, output: str, names: tuple[str, ...], force: bool, quiet: bool, as_json: bool) -> None:
    """Join parts, and say what came of it."""
    from pkmlm.data.corpus import open_tokenizer
    from pkmlm.data.joining import join_parts

    with stopwatch({}, quiet) as watch:
        index = join_parts(folder, [Path(name) for name in names], replace=force, watch=watch)
        doubt_tokens(folder, index, open_tokenizer(folder), set())
    print_result(output, index, watch.seconds, as_json)


def find_all(files: dict[str, tuple[str, ...]], format: str | None) -> dict[str, list["Source"]]:
    """The sources of each split that has files; what is given twice is read once, and warned of."""
    from pkmlm.data.sources import find_sources

    sources = {split: find_sources(names, format) for split, names in files.items() if names}
    doubt_repeats(files)
    return sources


def check_sources(
    sources: dict[str, list["Source"]], separator: str | None, field: str, shard: tuple[int, int] | None
) -> None:
    """Refuse inputs that contradict each other."""
    from pkmlm.data.text import check_options

    every = [source for inputs in sources.values() for source in inputs]
    if shard and any(source.name == "-" for source in every):
        raise UserError("standard input cannot be divided", "give --shard files that every machine can read")
    if sum(source.name == "-" for source in every) > 1:
        raise UserError("standard input can be read once: - is given for two splits")
    check_options(every, separator, field)


def sizes_of(sources: dict[str, list["Source"]], shard: tuple[int, int] | None) -> dict[str, int | None]:
    """The bytes that each stage reads, of a part about its share; None where standard input is among them."""
    parts = shard[1] if shard else 1
    sizes = {split: [source.size for source in inputs] for split, inputs in sources.items()}
    totals = {split: None if None in each else sum(filter(None, each)) // parts for split, each in sizes.items()}
    return {**totals, LEARNING: totals["train"]}


def learn(
    sources: dict[str, list["Source"]],
    separator: str | None,
    field: str,
    vocab_size: int | None,
    model_type: str,
    watch: Stopwatch,
) -> "Tokenizer":
    """Learn a tokenizer from the training text; in `sources`, standard input is spooled for the next pass."""
    from pkmlm.data.shards import SplitReader, no_text
    from pkmlm.data.sources import spooled
    from pkmlm.data.tokenizer import Tokenizer

    sources["train"] = list(map(spooled, sources["train"]))
    reader = SplitReader("train", sources["train"], separator, field, lambda _, count: watch(LEARNING, count))
    texts = (chunk.text for batch in reader.batches() for chunk in batch)
    first = next(texts, None)
    if first is None:
        raise no_text("train", [source.label for source in reader.sources], reader.tally.empty)
    tokenizer = Tokenizer.learn(chain([first], texts), vocab_size, model_type)
    watch(LEARNING, sum(origin.bytes for origin in reader.origins))
    return tokenizer
