"""What `pkmlm cost` prints: each report as JSON and as tables or text."""

from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from pkmlm.console import Column, Table, number
from pkmlm.cost import BlockCost, Cost, RankCost, cost_of, divisions, hash_layer_cost, most_keys, rank_cost
from pkmlm.data.index import FILE, read_index
from pkmlm.errors import UserError
from pkmlm.recipe.check import check_ranks
from pkmlm.recipe.schema import Parallel, Recipe

MEGA, GIGA = 10**6, 10**9


def hash_layer_report(bits: int, tables: int, width: int, tokens: int, entry_bytes: int) -> tuple[dict[str, int], str]:
    """One Memory Layer of MemoryFormer (the arguments of `hash_layer_cost`), as JSON and as text.

    Raises:
        UserError: a code of more than 16 bits.
    """
    if bits > 16:
        raise UserError(f"--hash-layer: found {bits} bits (expected at most 16)", "a table has 2^bits rows")
    parameters, flops = hash_layer_cost(bits, tables, width, tokens)
    size = parameters * entry_bytes
    text = (
        f"{tables} tables of {2**bits:,} rows, {bits * tables} wide in, {width} out\n"
        f"parameters  {parameters:,}\n"
        f"tables      {size / MEGA:,.1f} MB at {entry_bytes} bytes an entry\n"
        f"operations  {flops / GIGA:.3g} GFLOP for {tokens:,} tokens\n"
        f"gathered    {tables * width * entry_bytes:,} bytes a token"
    )
    return {"parameters": parameters, "flops": flops, "table_bytes": size}, text


def recipe_report(
    recipe: Recipe, file: str, entry_bytes: int, ranks: int | None, device_bytes: int | None
) -> tuple[dict[str, Any], list[Table]]:
    """A recipe's cost, as JSON and as tables.

    Args:
        file: the recipe's, for errors.
        entry_bytes: bytes an entry of values and tables.
        ranks: also what each of so many ranks holds and sends, for each way to divide the tables.
        device_bytes: with ranks: also the largest memory that fits into so much on each.

    Raises:
        UserError: the vocabulary is not known, or the steps do not fall into whole micro-batches on so many ranks.
    """
    rows = vocab_size_of(recipe)
    cost = cost_of(recipe, rows, entry_bytes)
    result = cost.as_json()
    tables = [layer_table(recipe, cost), total_table(cost, rows), training_table(recipe, cost)]
    if ranks is None:
        return result, tables
    check_ranks(replace(recipe, parallel=Parallel()), ranks, file)
    costs = [rank_cost(recipe, cost, ranks, memory) for memory in divisions(cost, ranks)]
    entries: list[dict[str, Any]] = [
        {
            "memory": each.memory,
            "training_bytes": {**each.training, "total": each.bytes},
            "sent_bytes_per_step": {**each.sent, "total": sum(each.sent.values())},
        }
        for each in costs
    ]
    tables += [held_table(costs, ranks), sent_table(costs, recipe)]
    if device_bytes is not None:
        keys = [most_keys(recipe, rows, ranks, each.memory, device_bytes) for each in costs]
        for entry, num_keys in zip(entries, keys, strict=True):
            entry["largest"] = None if num_keys is None else {"num_keys": num_keys, "slots": num_keys**2}
        tables.append(largest_table(costs, keys, recipe, device_bytes))
    result["world"] = {"ranks": ranks, "device_bytes": device_bytes, "divisions": entries}
    return result, tables


def vocab_size_of(recipe: Recipe) -> int:
    """Rows of the embedding: as the recipe says, or as its tokens have them.

    Raises:
        UserError: neither says.
    """
    if recipe.model.vocab_size is not None:
        return recipe.model.vocab_size
    folder = Path(recipe.data.dir) if recipe.data.dir else None
    if folder and (folder / FILE).exists():
        return read_index(folder).vocab_size
    where = f"and data.dir {folder} holds no tokens" if folder else "and data.dir is not set"
    raise UserError(f"model.vocab_size is open {where}", "add -s data.dir=DIR or -s model.vocab_size=8192")


def layer_table(recipe: Recipe, cost: Cost) -> Table:
    """What each layer costs; equal layers in a row share a line, whose numbers are those of one of them."""
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
    return Table(title, columns, rows)


def total_table(cost: Cost, vocab_size: int) -> Table:
    """What the whole model costs."""
    rows = [
        ("parameters, dense (embeddings with them)", cost.dense),
        ("parameters, memory values and tables", cost.memory),
        ("parameters read per token", cost.read_per_token),
        (f"operations per token, with the head of {vocab_size:,}", cost.flops_per_token),
        (f"bytes of values and tables, at {cost.entry_bytes} an entry", cost.memory * cost.entry_bytes),
        ("bytes gathered from them per token", cost.gather_bytes_per_token),
    ]
    return Table("The whole model", [Column("what"), number("number")], rows)


def training_table(recipe: Recipe, cost: Cost) -> Table:
    """What training holds, part by part."""
    rows = [(name, size / MEGA) for name, size in cost.training.items() if size]
    rows.append(("total", sum(cost.training.values()) / MEGA))
    precision = recipe.train.precision
    counted = "auto taken as fp32" if precision == "auto" else f"in {precision}"
    title = f"Memory to train, estimated: {recipe.train.micro_batch} sequences a forward, {counted}"
    return Table(title, [Column("for"), number("MB", "{:,.1f}")], rows)


def held_table(costs: list[RankCost], ranks: int) -> Table:
    """What a rank holds, for each division of the tables."""
    names = list(costs[0].training)
    rows = [(each.memory, *(each.training[name] / GIGA for name in names), each.bytes / GIGA) for each in costs]
    columns = [number("memory"), *(number(name, "{:,.2f}") for name in [*names, "total"])]
    return Table(f"Memory of each of {ranks} ranks (GB), by how many divide a table", columns, rows)


def sent_table(costs: list[RankCost], recipe: Recipe) -> Table:
    """What a rank sends in a step, for each division of the tables."""
    rows = [
        (each.memory, *(size / MEGA for size in each.sent.values()), sum(each.sent.values()) / MEGA) for each in costs
    ]
    names = ["dense gradients", "reads, outputs", "table gradients", "statistics", "total"]
    columns = [number("memory"), *(number(name, "{:,.1f}") for name in names)]
    return Table(f"Sent by each in a step of {recipe.train.batch_tokens:,} tokens (MB)", columns, rows)


def largest_table(costs: list[RankCost], keys: list[int | None], recipe: Recipe, device_bytes: int) -> Table:
    """The largest memory that fits, for each division of the tables."""
    rows = []
    for each, num_keys in zip(costs, keys, strict=True):
        slots = None if num_keys is None else num_keys**2
        rows.append((each.memory, num_keys, slots, None if slots is None else slots * recipe.model.dim))
    columns = [number(name) for name in ("memory", "num_keys", "slots a layer", "values a layer")]
    return Table(f"Largest memory that fits, with {device_bytes / 1e9:,.4g} GB for each rank", columns, rows)
