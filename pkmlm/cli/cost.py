"""`pkmlm cost`: parameters, operations, bytes and memory of a recipe, by arithmetic."""

import json
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pkmlm.cli.cost_ranks import byte_size, ranks_report
from pkmlm.cli.options import PATH, json_option, set_option
from pkmlm.console import warn
from pkmlm.errors import UserError

if TYPE_CHECKING:
    from pkmlm.console import Table
    from pkmlm.model.block_cost import Block
    from pkmlm.model.cost import Cost
    from pkmlm.recipe.schema import Recipe

MEGA, GIGA = 10**6, 10**9
SIZE = click.IntRange(1, 1 << 40)  # beyond it, counts would not fit into floating point


@click.command(short_help="Parameters, operations, bytes and memory of a recipe.")
@click.argument("recipe_file", required=False, type=PATH, metavar="RECIPE")
@set_option
@click.option(
    "--entry-bytes",
    type=click.Choice(["2", "4"]),
    default="2",
    show_default=True,
    help="Bytes an entry of values and tables: 2 as the papers count (fp16), 4 for fp32.",
)
@click.option(
    "--hash-layer",
    nargs=3,
    type=SIZE,
    metavar="BITS TABLES WIDTH",
    help="Cost of one MemoryFormer layer instead of a recipe: bits of a code, tables, width out.",
)
@click.option(
    "--tokens",
    metavar="N",
    type=SIZE,
    help="Tokens of the sequence, for --hash-layer. Default: 2048.",
)
@click.option(
    "--world", type=click.IntRange(1, 1 << 16), metavar="W", help="Also what each of W ranks needs and sends."
)
@click.option(
    "--device-memory",
    metavar="SIZE",
    callback=byte_size,
    help="With --world: memory of a device, as 80GB; says the largest memory that fits.",
)
@json_option
def command(
    recipe_file: str | None,
    overrides: tuple[str, ...],
    entry_bytes: str,
    hash_layer: tuple[int, int, int] | None,
    tokens: int | None,
    world: int | None,
    device_memory: int | None,
    as_json: bool,
) -> None:
    """Parameters, operations, bytes and memory of RECIPE's model, without building it.

    A multiply-add is counted once, over one sequence of model.context tokens. "built" sums the layers;
    "paper" is the block formula of MemoryFormer, for the blocks that it describes. Training memory is an
    estimate: fp32 weights, gradients and Adam moments, and one micro-batch of activations; train.precision=auto
    is counted as fp32 (on a GPU it may be bf16: -s train.precision=bf16). --world counts what each rank holds
    and sends in a step, for every parallel.memory that is possible.

    \b
    Examples:
      pkmlm cost recipes/memoryformer/tiny.yaml
      pkmlm cost recipes/demo.yaml -s model.vocab_size=4096 --json
      pkmlm cost recipes/pkm/16-layers.yaml -s model.memory.num_keys=1024
      pkmlm cost recipes/pkm/16-layers.yaml --world 8 --device-memory 80GB
      pkmlm cost --hash-layer 8 64 512
    """
    from pkmlm.recipe.check import unused_key_warnings
    from pkmlm.recipe.load import load_recipe

    if (recipe_file is None) == (hash_layer is None):
        raise click.UsageError("Give either a RECIPE or --hash-layer BITS TABLES WIDTH.")
    if world is None and device_memory is not None:
        raise click.UsageError("--device-memory goes with --world (1 for one device).")
    if hash_layer is not None and (overrides or world is not None):
        raise click.UsageError(f"{'-s' if overrides else '--world'} is for a RECIPE.")
    if recipe_file is not None and tokens is not None:
        raise click.UsageError("--tokens is for --hash-layer; a RECIPE's sequences have model.context tokens.")
    width = int(entry_bytes)
    if hash_layer is not None:
        result, text = one_layer(hash_layer, tokens or 2048, width)
    else:
        assert recipe_file is not None
        recipe = load_recipe(recipe_file, overrides)
        result, text = whole_model(recipe, recipe_file, width, world, device_memory)
        for warning in unused_key_warnings(recipe, recipe_file, overrides):
            warn(warning)
    click.echo(json.dumps(result, indent=2) if as_json else text)


def one_layer(shape: tuple[int, int, int], tokens: int, entry_bytes: int) -> tuple[dict[str, object], str]:
    """One Memory Layer as JSON and as text."""
    from pkmlm.model.block_cost import hash_layer_cost

    bits, tables, width = shape
    if bits > 16:
        raise UserError(f"--hash-layer: found {bits} bits (expected at most 16)", "a table has 2^bits rows")
    layer = hash_layer_cost(bits, tables, width, tokens)
    size = layer.memory * entry_bytes
    text = (
        f"{tables} tables of {2**bits:,} rows, {bits * tables} wide in, {width} out\n"
        f"parameters  {layer.memory:,}\n"
        f"tables      {size / MEGA:,.1f} MB at {entry_bytes} bytes an entry\n"
        f"operations  {layer.flops / GIGA:.3g} GFLOP for {tokens:,} tokens\n"
        f"gathered    {tables * width * entry_bytes:,} bytes a token"
    )
    return {"parameters": layer.memory, "flops": layer.flops, "table_bytes": size}, text


def whole_model(
    recipe: "Recipe",
    file: str,
    entry_bytes: int,
    world: int | None,
    device_memory: int | None,
) -> tuple[dict[str, object], str]:
    """A recipe's cost as JSON and as text."""
    from pkmlm.model.cost import cost_of

    rows = vocabulary(recipe)
    cost = cost_of(recipe, rows, entry_bytes)
    tables = [layer_table(recipe, cost), total_table(cost, rows), training_table(recipe, cost)]
    result = cost.as_json()
    if world is not None:
        result["world"], more = ranks_report(file, recipe, cost, rows, world, device_memory)
        tables += more
    return result, "\n".join(table.render() for table in tables).rstrip()


def vocabulary(recipe: "Recipe") -> int:
    """Rows of the embedding: as the recipe says, or as its tokens have them."""
    from pkmlm.data.index import FILE, read_index

    if recipe.model.vocab_size is not None:
        return recipe.model.vocab_size
    folder = Path(recipe.data.dir) if recipe.data.dir else None
    if folder and (folder / FILE).exists():
        return read_index(folder).vocab_size
    where = f"and data.dir {folder} holds no tokens" if folder else "and data.dir is not set"
    raise UserError(f"model.vocab_size is open {where}", "add -s data.dir=DIR or -s model.vocab_size=8192")


def layer_table(recipe: "Recipe", cost: "Cost") -> "Table":
    """What each layer costs; equal layers share a line."""
    from pkmlm.console import Column, Table, number

    with_paper = any(block.paper_flops is not None for block in cost.blocks)
    operations = ["GFLOP built", "w/o attn", *(["GFLOP paper", "w/o attn"] if with_paper else [])]
    columns = [Column("layers"), Column("made of"), number("dense"), number("memory")]
    columns += [number(name, "{:.3g}") for name in operations]
    runs = groupby(cost.blocks, key=lambda block: (block.parts, block.paper_flops))
    rows = [layer_row(list(equal), with_paper) for _, equal in runs]
    model = recipe.model
    title = f"{recipe.name}: {model.layers} layers of {model.dim:,}, a sequence of {model.context:,} tokens"
    return Table(title, columns, rows)


def layer_row(blocks: "list[Block]", with_paper: bool) -> list[object]:
    """The line of a run of equal layers; every number is that of one of them."""
    first, last = blocks[0], blocks[-1]
    layers = str(first.layer) if first is last else f"{first.layer}-{last.layer}"
    own, attention = first.flops_without_attention / GIGA, first.attention_flops / GIGA
    row = [
        layers,
        " ".join(part.name for part in first.parts),
        first.dense,
        first.memory,
        own + attention,
        own,
    ]
    if with_paper:
        paper = None if first.paper_flops is None else first.paper_flops / GIGA
        row += [None, None] if paper is None else [paper + attention, paper]
    return row


def total_table(cost: "Cost", vocab_size: int) -> "Table":
    """What the whole model costs."""
    from pkmlm.console import Column, Table, number

    table_bytes = cost.memory * cost.entry_bytes
    rows = [
        ("parameters, dense (embeddings with them)", cost.dense),
        ("parameters, memory values and tables", cost.memory),
        ("parameters read per token", cost.read_per_token),
        (f"operations per token, with the head of {vocab_size:,}", cost.flops_per_token),
        (f"bytes of values and tables, at {cost.entry_bytes} an entry", table_bytes),
        ("bytes gathered from them per token", cost.gather_bytes_per_token),
    ]
    return Table("The whole model", [Column("what"), number("number")], rows)


def training_table(recipe: "Recipe", cost: "Cost") -> "Table":
    """What training holds, part by part."""
    from pkmlm.console import Column, Table, number

    rows = [(name, size / MEGA) for name, size in cost.training.items() if size]
    rows.append(("total", sum(cost.training.values()) / MEGA))
    precision = recipe.train.precision
    counted = "auto taken as fp32" if precision == "auto" else f"in {precision}"
    title = f"Memory to train, estimated: {recipe.train.micro_batch} sequences a forward, {counted}"
    return Table(title, [Column("for"), number("MB", "{:,.1f}")], rows)
