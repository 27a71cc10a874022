"""What `pkmlm cost` prints, as JSON and as tables."""

from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from pkmlm.console import Column, Table, number
from pkmlm.cost import BlockCost, Cost, bytes_held, cost_of, divisions, largest_memory
from pkmlm.data.corpus import FILE, read_index
from pkmlm.errors import UserError
from pkmlm.recipe.constraints import check_ranks
from pkmlm.recipe.schema import Parallel, Recipe

MEGA, GIGA = 10**6, 10**9


def recipe_report(
    recipe: Recipe, file: str, entry_bytes: int, ranks: int | None, device_bytes: int | None
) -> tuple[dict[str, Any], list[Table]]:
    """A recipe's cost, as JSON and as tables.

    Args:
        file: the recipe's file, for errors.
        entry_bytes: bytes per entry of values and tables.
        ranks: if given, the report also says what each of so many ranks holds, for each division of tables.
        device_bytes: with ranks: the report also says how large a memory fits into so many bytes on each of them.

    Raises:
        UserError: the vocabulary size is not known, or a step does not divide into whole micro-batches on the ranks.
    """
    vocab_size = vocab_size_of(recipe)
    cost = cost_of(recipe, vocab_size, entry_bytes)
    result = cost.as_json()
    whole = [
        ("parameters, dense (embeddings with them)", cost.dense),
        ("parameters, memory values and tables", cost.memory),
        ("parameters read per token", cost.read_per_token),
        (f"operations per token, with the head of {vocab_size:,}", cost.flops_per_token),
        (f"bytes of values and tables, at {cost.entry_bytes} an entry", cost.memory * cost.entry_bytes),
        ("bytes gathered from them per token", cost.gather_bytes_per_token),
    ]
    training = [(name, size / MEGA) for name, size in result["training_bytes"].items() if size]
    precision = "auto taken as fp32" if recipe.train.precision == "auto" else f"in {recipe.train.precision}"
    title = f"Memory to train, estimated: {recipe.train.micro_batch} sequences a forward, {precision}"
    tables = [
        layer_table(recipe, cost),
        Table("The whole model", [Column("what"), number("number")], whole),
        Table(title, [Column("for"), number("MB", "{:,.1f}")], training),
    ]
    if ranks is None:
        return result, tables
    check_ranks(replace(recipe, parallel=Parallel()), ranks, file)
    entries: list[dict[str, Any]] = []
    for memory in divisions(cost, ranks):
        held = bytes_held(recipe, cost, ranks, memory)
        entry: dict[str, Any] = {
            "memory": memory,
            "training_bytes": {**held, "total": sum(held.values())},
        }
        if device_bytes is not None:
            entry["largest"] = largest_memory(recipe, vocab_size, ranks, memory, device_bytes)
        entries.append(entry)
    result["world"] = {"ranks": ranks, "device_bytes": device_bytes, "divisions": entries}
    return result, tables + rank_tables(result["world"])


def vocab_size_of(recipe: Recipe) -> int:
    """Rows of the embedding, from the recipe or from its tokens.

    Raises:
        UserError: neither the recipe nor its tokens give it.
    """
    if recipe.model.vocab_size is not None:
        return recipe.model.vocab_size
    folder = Path(recipe.data.folders[0]) if recipe.data.folders else None
    if folder and (folder / FILE).exists():
        return read_index(folder).vocab_size
    where = f"and there are no tokens in data.dir {folder}" if folder else "and neither is data.dir"
    raise UserError(f"model.vocab_size is not set, {where}", "add -s data.dir=DIR or -s model.vocab_size=8192")


def layer_table(recipe: Recipe, cost: Cost) -> Table:
    """What each layer costs; equal consecutive layers share a line, which gives the numbers of one of them."""
    with_paper = any(block.paper_flops is not None for block in cost.blocks)
    operations = ["GFLOP built", "w/o attn", *(["GFLOP paper", "w/o attn"] if with_paper else [])]
    columns = [Column("layers"), Column("made of"), number("dense"), number("memory")]
    columns += [number(name, "{:.3g}") for name in operations]
    rows = []
    for _, equal in groupby(cost.blocks, key=lambda block: replace(block, layer=0)):
        blocks: list[BlockCost] = list(equal)
        first, last = blocks[0], blocks[-1]
        layers = str(first.layer) if first is last else f"{first.layer}-{last.layer}"
        own, attention = first.flops_without_attention / GIGA, first.attention_flops / GIGA
        row = [layers, " ".join(first.parts), first.dense, first.memory, own + attention, own]
        if with_paper:
            paper = None if first.paper_flops is None else first.paper_flops / GIGA
            row += [None, None] if paper is None else [paper + attention, paper]
        rows.append(row)
    model = recipe.model
    title = f"{recipe.name}: {model.layers} layers of {model.dim:,}, a sequence of {model.context:,} tokens"
    if any(table.layers > 1 for table in cost.tables):
        title += "; layers share a table"
    return Table(title, columns, rows)


def rank_tables(world: dict[str, Any]) -> list[Table]:
    """What a rank holds, and the largest memory that fits, for each division of the tables.

    Args:
        world: the entry "world" of the JSON of `recipe_report`.
    """
    divisions = world["divisions"]
    held = [(each["memory"], *(size / GIGA for size in each["training_bytes"].values())) for each in divisions]
    held_names = divisions[0]["training_bytes"]
    tables = [
        Table(
            f"Memory of each of {world['ranks']} ranks (GB), by parallel.memory (M)",
            [number("M"), *(number(name, "{:,.2f}") for name in held_names)],
            held,
        ),
    ]
    if world["device_bytes"] is not None and all(each["largest"] for each in divisions):
        rows = [[each["memory"], *([*each["largest"].values()][1:])] for each in divisions]
        columns = [number(name) for name in ("M", "num_keys", "slots", "entries of tables")]
        name = divisions[0]["largest"]["memory"]
        title = f"Largest {name} that fits, with {world['device_bytes'] / GIGA:,.4g} GB for each rank"
        tables.append(Table(title, columns, rows))
    return tables
