"""The usage report as tables, from its JSON entries (`pkmlm.analysis.usage`)."""

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from pkmlm.console import NATS, SHARE, Column, Table, number

Entry = dict[str, Any]

MEASURES = ("usage", "kl", "gini", "top50", "top90", "top99", "effective")


def usage_tables(entries: Sequence[Entry]) -> list[Table]:
    """What people read: the texts, the memories, how evenly their slots are used, and each head or table."""
    run = [Column("Run")] if len(entries) > 1 else []
    tables = [_texts(entries), _memories(entries, run), _evenness(entries, run), _parts(entries, run)]
    return [table for table in tables if table.rows]


def flat_table(entries: Sequence[Entry]) -> Table:
    """One row a memory with every number but the heads', for CSV."""
    facts = ("layer", "name", "kind", "slots", "tokens", "reads")
    overlap = ("head_overlap", "head_overlap_uniform")
    floor = ("usage", "kl")
    groups = {"uniform": floor, "uniform_mass": floor, "mass": MEASURES, "count": MEASURES}
    names = [*facts, *(f"{group}_{key}" for group, keys in groups.items() for key in keys), *overlap]
    rows = [
        [entry["run"], entry["step"], entry["split"]]
        + [memory[key] for key in facts]
        + [memory[group][key] for group, keys in groups.items() for key in keys]
        + [memory.get(key) for key in overlap]
        for entry in entries
        for memory in entry["memories"]
    ]
    return Table("", [Column(name) for name in ("run", "step", "split", *names)], rows)


def _texts(entries: Sequence[Entry]) -> Table:
    columns = [
        Column("Run"),
        number("Step"),
        Column("Text"),
        number("Tokens"),
        number("Memories"),
    ]
    rows = [
        [
            e["run"],
            e["step"],
            e["split"],
            e["memories"][0]["tokens"] if e["memories"] else None,
            len(e["memories"]),
        ]
        for e in entries
    ]
    return Table("How memories are used", columns, rows)


def _memories(entries: Sequence[Entry], run: list[Column]) -> Table:
    columns = [
        Column("Layer"),
        Column("Kind"),
        number("Heads"),
        number("Slots"),
        number("Reads"),
        number("Overlap", "{:.2%}"),
        number("random", "{:.2%}"),
    ]
    rows = [
        [
            *start,
            memory["kind"],
            len(_heads(memory)),
            memory["slots"],
            memory["reads"],
            memory.get("head_overlap"),
            memory.get("head_overlap_uniform"),
        ]
        for start, memory in _each(entries)
    ]
    title = "Reads by heads or tables; overlap: slots that two heads both read for a token"
    return Table(title, run + columns, rows)


def _evenness(entries: Sequence[Entry], run: list[Column]) -> Table:
    columns = [
        Column("Layer"),
        Column("By"),
        number("Usage", SHARE),
        number("KL", NATS),
        number("Gini", "{:.3f}"),
        *(number(f"{percent}%") for percent in (50, 90, 99)),
    ]
    rows = [
        [*start, weighing, *(memory[group].get(key) for key in MEASURES[:-1])]
        for start, memory in _each(entries)
        for group, weighing in (("mass", "mass"), ("uniform_mass", "random"), ("count", "count"), ("uniform", "random"))
    ]
    title = "Slots: share used, KL from uniform (nats), how many hold 50, 90 and 99 %"
    return Table(title, run + columns, rows)


def _parts(entries: Sequence[Entry], run: list[Column]) -> Table:
    usage = [number("Least usage", SHARE), number("mean", SHARE), number("random", SHARE)]
    kl = [number("Largest KL", NATS), number("mean", NATS), number("random", NATS)]
    columns = [Column("Layer"), *usage, *kl]
    rows = []
    for start, memory in _each(entries):
        heads, uniform = _heads(memory), memory["uniform_head"]
        if len(heads) > 1 and memory["mass"]["usage"]:
            row: list[Any] = [*start]
            for key, worst in (("usage", min), ("kl", max)):
                values = [head[key] for head in heads if head[key] is not None]
                row += [worst(values), fmean(values), uniform[key]]
            rows.append(row)
    return Table("Each head or table by itself, by mass (KL in nats)", run + columns, rows)


def _each(entries: Sequence[Entry]) -> Iterator[tuple[list[str], Entry]]:
    """Each memory with the first cells of its row."""
    for entry in entries:
        for memory in entry["memories"]:
            where = f"{memory['layer']} {memory['name']}"
            yield ([entry["run"], where] if len(entries) > 1 else [where]), memory


def _heads(memory: Entry) -> list[Entry]:
    heads: list[Entry] = memory["heads"] if "heads" in memory else memory["tables"]
    return heads
