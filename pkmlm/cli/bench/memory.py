"""`pkmlm bench memory`: the memory layer beside the same layer in plain torch."""

import json
import sys
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import click

from pkmlm.bench import LAYER_PHASES, LAYERS, short
from pkmlm.cli.bench.lists import numbers_of_keys, some_of
from pkmlm.cli.bench.waiting import waiting
from pkmlm.cli.options import json_option, quiet_option
from pkmlm.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pkmlm.bench.memory import LayerTimes
    from pkmlm.console import Table

size = click.IntRange(min=1)


@click.command("memory", short_help="The memory layer beside the same in plain torch.")
@click.option(
    "--slots",
    "num_keys",
    metavar="N,N",
    default="16k,65k,262k,1M",
    show_default=True,
    callback=numbers_of_keys,
    help="Sizes of the memory: squares; 16k is 2^14, 1M is 2^20.",
)
@click.option("--dim", default=512, show_default=True, metavar="N", type=size, help="Width of the layer.")
@click.option("--heads", default=4, show_default=True, metavar="N", type=size, help="Memory heads.")
@click.option("--topk", default=32, show_default=True, metavar="N", type=size, help="Slots that a head reads.")
@click.option("--key-dim", default=512, show_default=True, metavar="N", type=size, help="Width of a query.")
@click.option(
    "--tokens", default=1024, show_default=True, metavar="N", type=click.IntRange(min=2), help="Tokens of a step."
)
@click.option("--rounds", default=7, show_default=True, metavar="N", type=size, help="Times that each is timed.")
@click.option("--only", metavar="A,B", callback=some_of(LAYERS), help=f"Some of {', '.join(LAYERS)}.")
@click.option("--peak", is_flag=True, help="Also the peak memory of a step, each layer in a process of its own.")
@json_option
@quiet_option
def command(
    num_keys: tuple[int, ...],
    dim: int,
    heads: int,
    topk: int,
    key_dim: int,
    tokens: int,
    rounds: int,
    only: tuple[str, ...] | None,
    peak: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """A product-key memory beside the same layer in plain torch, and the FFN it replaces.

    The weighted sum of values alone, forward, forward and backward, and whole step with the optimizer's update, in
    fp32 and in turn; this package's layer sums the gradient of its values in the update. Plain torch sorts all k^2
    candidates and sums values by EmbeddingBag: with dense gradients and Adam as it comes or fused, or with sparse
    gradients and SparseAdam. All memories of a round share one value table and its moments. GB/s counts the rows that
    must be read and written, once; the share is of a copy's bandwidth, taken in the same rounds.

    \b
    Examples:
      pkmlm bench memory
      pkmlm bench memory --slots 262k,1M --only pkmlm,plain-fused --peak
      pkmlm bench memory --slots 65k --dim 1024 --tokens 8192 --json
    """
    from pkmlm.bench.memory import time_memory
    from pkmlm.bench.shape import Shape

    if topk > min(num_keys):
        slots = min(num_keys) ** 2
        raise UserError(f"--topk: found {topk} (expected at most {min(num_keys)}, the sub-keys of {slots} slots)")
    if key_dim % 2:
        raise UserError(f"--key-dim: found {key_dim} (expected an even width: a sub-key has half of it)")
    results = []
    with waiting(quiet) as say:
        for keys in num_keys:
            shape = Shape(keys, dim, heads, topk, key_dim, tokens)
            results.append(time_memory(shape, only or LAYERS, rounds, partial(say_of, say, shape.slots), peak=peak))
    if as_json:
        click.echo(json.dumps(as_whole(results), indent=2))
        return
    for result in results:
        sys.stdout.write(times_table(result).render() + "\n")
    if peak:
        sys.stdout.write(peak_table(results).render() + "\n")
    click.echo(closing(results))


def say_of(say: "Callable[[str], None]", slots: int, text: str) -> None:
    say(f"{short(slots)} slots: {text}")


def as_whole(results: "list[LayerTimes]") -> dict[str, Any]:
    """The results of all sizes, as JSON."""
    from pkmlm.device import machine

    shape = {name: value for name, value in asdict(results[0].shape).items() if name != "num_keys"}
    return {"machine": machine(), "shape": shape, "sizes": [result.as_json() for result in results]}


def times_table(result: "LayerTimes") -> "Table":
    """Times of one size: milliseconds, and beside this package's layer and a copy."""
    from pkmlm.console import Column, Table, number

    columns = [Column("layer"), Column("time of"), *(number(name, "{:,.1f}") for name in ("ms", "min", "max"))]
    columns += [number("x pkmlm", "{:.2f}"), number("GB/s", "{:,.1f}"), number("of a copy", "{:.0%}")]
    rows = []
    for (layer, phase), timing in result.times.items():
        speed = result.bytes_per_second(layer, phase)
        speeds = [None, None] if speed is None else [speed / 1e9, speed / result.bandwidth]
        rows.append([layer, LAYER_PHASES[phase], *timing.milliseconds(), result.ratio(layer, phase), *speeds])
    shape = result.shape
    title = (
        f"{shape.slots:,} slots of width {shape.dim}, {shape.tokens:,} tokens reading {shape.heads} x {shape.topk} "
        f"each, {result.touched:,} slots in all"
    )
    return Table(title, columns, rows)


def peak_table(results: "list[LayerTimes]") -> "Table":
    """Peaks of all sizes, beside the values and their moments."""
    from pkmlm.console import Column, Table, number

    columns = [number("slots"), Column("layer"), number("peak (MB)", "{:,.0f}")]
    columns += [number("values + moments", "{:,.0f}"), number("over", "{:+.0%}")]
    rows = []
    for result in results:
        state = 3 * result.shape.table_bytes
        for layer, peak in result.peaks.items():
            rows.append([result.shape.slots, layer, peak / 1e6, state / 1e6, peak / state - 1])
    return Table("Memory of a training step at its highest", columns, rows)


def closing(results: "list[LayerTimes]") -> str:
    """How a step grows from one size to the next, and what the machine is."""
    from pkmlm.device import machine

    lines = []
    for small, large in pairwise(results):
        names = dict.fromkeys(name for name, _ in large.times)
        grown = [f"{name} {large.times[name, 'step'].median / small.times[name, 'step'].median:.2f}" for name in names]
        lines.append(f"Step, {short(large.shape.slots)} over {short(small.shape.slots)} slots: {', '.join(grown)}")
    copy = ", ".join(f"{result.bandwidth / 1e9:.1f}" for result in results)
    facts = machine()
    lines.append(f"A copy moves {copy} GB/s; {facts['device']}, torch {facts['torch']}; medians of rounds")
    return "\n".join(lines)
