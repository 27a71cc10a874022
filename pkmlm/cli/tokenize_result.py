"""What `pkmlm tokenize` says of the tokens that it has written."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from pkmlm.console import Table
    from pkmlm.data.index import Index, Split

LEARNING = "tokenizer"  # a stage beside the splits


def print_result(
    output: str, index: "Index", seconds: Mapping[str, float], as_json: bool, shard: tuple[int, int] | None = None
) -> None:
    """Print what was written, split by split, as JSON or as a table.

    Args:
        seconds: that each split took, and `LEARNING`, where a tokenizer was learnt.
        shard: which part was written, of how many; None: the whole.
    """
    splits = {name: facts_of(split, seconds[name]) for name, split in index.splits.items()}
    if not as_json:
        learnt = f", learnt in {seconds[LEARNING]:.1f} s" if LEARNING in seconds else ""
        part = f"part {shard[0]} of {shard[1]}, " if shard else ""
        title = f"{output}: {part}vocabulary of {index.vocab_size:,}{learnt}"
        click.echo(split_table(title, splits).render(), nl=False)
        return
    result = {
        "directory": output,
        "vocab_size": index.vocab_size,
        "tokenizer_sha256": index.tokenizer_sha256,
        "sha256": index.sha256,
        "learning_seconds": seconds.get(LEARNING),
        "splits": splits,
    }
    if shard:
        result |= {"part": shard[0], "parts": shard[1]}
    click.echo(json.dumps(result, indent=2))


def facts_of(split: "Split", seconds: float) -> dict[str, float]:
    """The counts of a split, and how fast it was encoded; both rates are of the text's bytes."""
    return {
        "documents": split.documents,
        "empty": split.empty,
        "words": split.words,
        "bytes": split.bytes,
        "tokens": split.tokens,
        "bytes_per_token": split.bytes / max(split.tokens - split.documents, 1),
        "seconds": seconds,
        "mb_per_second": split.bytes / 1e6 / max(seconds, 1e-9),
    }


def split_table(title: str, splits: Mapping[str, dict[str, float]]) -> "Table":
    """A line for each split."""
    from pkmlm.console import Column, Table, number

    columns = [Column("split"), *map(number, ("documents", "empty", "words", "bytes", "tokens"))]
    columns += [number("B/token", "{:.2f}"), number("s", "{:.1f}"), number("MB/s", "{:.1f}")]
    return Table(title, columns, [[name, *facts.values()] for name, facts in splits.items()])
