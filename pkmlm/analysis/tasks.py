"""The tables of zero-shot results."""

from statistics import fmean
from typing import Any

from pkmlm.console import Column, Table, number

ACCURACY = "{:.4f}"


def task_report(record: dict[str, Any]) -> str:
    """What people read of a record with "run", "step", "tasks" (see `task_facts`), "average_acc" and "harness"."""
    tasks, harness = record["tasks"], record["harness"]
    right = {name: facts for name, facts in tasks.items() if facts["acc"] is not None}
    parts = [
        table.render()
        for table in (
            _accuracies(f"Zero-shot tasks: {record['run']} at step {record['step']}", right, record["average_acc"]),
            _always(tasks),
            _others(tasks),
        )
        if table.rows
    ]
    notes = []
    if any(facts["truncated"] for facts in tasks.values()):
        notes.append(f"cut: share of requests that lost their beginning: the context is {harness['context']} tokens")
    if harness["limit"] is not None:
        notes.append(f"only the first {harness['limit']} documents of each task: not to be compared with others")
    shots = {name: facts["num_fewshot"] for name, facts in tasks.items() if facts["num_fewshot"]}
    notes += [f"{name}: {count} examples before each question" for name, count in shots.items()]
    return "\n".join(parts + ["".join(f"{note}\n" for note in notes)] * bool(notes))


def _accuracies(title: str, tasks: dict[str, Any], average: float | None) -> Table:
    columns = [
        Column("Task"),
        number("n"),
        *(number(name, ACCURACY) for name in ("acc", "stderr", "acc_norm", "stderr", "chance")),
        Column("cut", "right"),
    ]
    keys = ("n", "acc", "acc_stderr", "acc_norm", "acc_norm_stderr", "chance")
    rows = [[name, *(facts[key] for key in keys), _cut(facts)] for name, facts in tasks.items()]
    if len(rows) > 1:
        chances = [facts["chance"] for facts in tasks.values()]
        rows.append(["average", None, average, None, None, None, None if None in chances else fmean(chances), None])
    return Table(title, columns, rows)


def _cut(facts: dict[str, Any]) -> str:
    """The share of a task's requests that were cut; neither all nor none where it is only near to that."""
    cut, requests = facts["truncated"], facts["requests"]
    if cut in (0, requests):
        return "all" if cut else "0"
    return f"{min(max(cut / requests, 0.001), 0.999):.1%}"


def _always(tasks: dict[str, Any]) -> Table:
    rows = [[name, answer, share] for name, facts in tasks.items() for answer, share in (facts["always"] or {}).items()]
    return Table(
        "What the same answer to every question gives",
        [Column("Task"), Column("Answer"), number("acc", ACCURACY)],
        rows,
    )


def _others(tasks: dict[str, Any]) -> Table:
    rows = [
        [name, facts["n"], metric, value, _cut(facts)]
        for name, facts in tasks.items()
        for metric, value in facts["metrics"].items()
    ]
    columns = [
        Column("Task"),
        number("n"),
        Column("Metric"),
        number("value", "{:,.4f}"),
        Column("cut", "right"),
    ]
    return Table("Other metrics", columns, rows)
