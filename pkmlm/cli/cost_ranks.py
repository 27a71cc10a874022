"""The part of `pkmlm cost` that tells what several ranks need and send."""

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from pkmlm.errors import printable

if TYPE_CHECKING:
    from pkmlm.console import Table
    from pkmlm.model.cost import Cost
    from pkmlm.model.ranks_cost import RankCost
    from pkmlm.recipe.schema import Recipe

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def byte_size(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """A number of bytes such as 80GB or 79.1GiB."""
    if value is None:
        return None
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?) ?([KMGT]?I?B|)", value.strip().upper(), re.ASCII)
    if not found or found[2] not in UNITS or not float(found[1]):
        raise click.BadParameter(f"found {printable(value)!r} (expected bytes, as 80GB or 79.1GiB)")
    return int(float(found[1]) * UNITS[found[2]])


def ranks_report(
    file: str, recipe: "Recipe", cost: "Cost", vocab_size: int, ranks: int, device_bytes: int | None
) -> "tuple[dict[str, Any], list[Table]]":
    """What one of `ranks` ranks holds and sends, for each way to divide the tables: as JSON and as tables.

    Raises:
        UserError: the recipe's steps do not fall into whole micro-batches on so many ranks.
    """
    from pkmlm.model.ranks_cost import divisions, most_keys, rank_cost
    from pkmlm.recipe.check import check_ranks
    from pkmlm.recipe.schema import Parallel

    check_ranks(replace(recipe, parallel=Parallel()), ranks, file)
    costs = [rank_cost(recipe, cost, ranks, memory) for memory in divisions(cost, ranks)]
    entries = [
        {
            "memory": each.memory,
            "training_bytes": {**each.training, "total": each.bytes},
            "sent_bytes_per_step": {**each.sent, "total": sum(each.sent.values())},
        }
        for each in costs
    ]
    tables = [held_table(costs, ranks), sent_table(costs, recipe)]
    if device_bytes is not None:
        keys = [most_keys(recipe, vocab_size, ranks, each.memory, device_bytes) for each in costs]
        for entry, num_keys in zip(entries, keys, strict=True):
            entry["largest"] = None if num_keys is None else {"num_keys": num_keys, "slots": num_keys**2}
        tables.append(largest_table(costs, keys, recipe, device_bytes))
    return {"ranks": ranks, "device_bytes": device_bytes, "divisions": entries}, tables


def held_table(costs: "list[RankCost]", ranks: int) -> "Table":
    """What a rank holds, for each division of the tables."""
    from pkmlm.console import Table, number

    names = list(costs[0].training)
    rows = [(each.memory, *(each.training[name] / 1e9 for name in names), each.bytes / 1e9) for each in costs]
    columns = [number("memory"), *(number(name, "{:,.2f}") for name in [*names, "total"])]
    return Table(f"Memory of each of {ranks} ranks (GB), by how many divide a table", columns, rows)


def sent_table(costs: "list[RankCost]", recipe: "Recipe") -> "Table":
    """What a rank sends in a step, for each division of the tables."""
    from pkmlm.console import Table, number

    rows = [
        (each.memory, *(size / 1e6 for size in each.sent.values()), sum(each.sent.values()) / 1e6) for each in costs
    ]
    names = ["dense gradients", "reads, outputs", "table gradients", "statistics", "total"]
    columns = [number("memory"), *(number(name, "{:,.1f}") for name in names)]
    return Table(f"Sent by each in a step of {recipe.train.batch_tokens:,} tokens (MB)", columns, rows)


def largest_table(costs: "list[RankCost]", keys: list[int | None], recipe: "Recipe", device_bytes: int) -> "Table":
    """The largest memory that fits, for each division of the tables."""
    from pkmlm.console import Table, number

    rows = []
    for each, num_keys in zip(costs, keys, strict=True):
        slots = None if num_keys is None else num_keys**2
        rows.append((each.memory, num_keys, slots, None if slots is None else slots * recipe.model.dim))
    columns = [number("memory")]
    columns += [number(name) for name in ("num_keys", "slots a layer", "values a layer")]
    return Table(f"Largest memory that fits, with {device_bytes / 1e9:,.4g} GB for each rank", columns, rows)
