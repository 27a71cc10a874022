"""Runs side by side, from the files that training, `eval` and `usage-report` left in them."""

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median
from typing import Any

from pkmlm.console import NATS, SHARE, Column, Table, number
from pkmlm.recipe.schema import Recipe
from pkmlm.runs.directory import RunDirectory
from pkmlm.runs.files import read_json
from pkmlm.runs.results import STATE, CheckpointState, partial_tasks, task_scores, test_perplexity, test_usage

Facts = dict[str, Any]
NAMED = 3  # runs of a kind, and kinds, that a warning names before it counts


def open_runs(paths: Iterable[str], opened: Callable[[str], RunDirectory]) -> dict[str, RunDirectory]:
    """Run directories, as `opened` gives them, by name, or by path where two have the same name; one given twice is
    taken once.
    """
    runs = {run.path.resolve(): run for run in map(opened, paths)}.values()
    names = [run.name for run in runs]
    return {run.name if names.count(run.name) == 1 else str(run.path): run for run in runs}


def facts_of(label: str, run: RunDirectory) -> Facts:
    """What is known of a run; None where a measurement is missing.

    Keys: run, kind, dim, layers, lr (the peak), init_from (the run whose weights it started from), dense, memory,
    read_per_token (parameters), status, step, tokens (trained so far), tokens_per_second (median over steps), seconds
    (in training steps, up to the latest checkpoint, or, where that is gone, to the end), valid_step, valid_loss (nats a
    token), valid_token_ppl, valid_bits_per_byte (of the best validation), test_step, test_token_ppl, test_word_ppl,
    test_bits_per_byte (of the newest evaluation of the test split), tasks_step, tasks ({name: {"acc", ...}}, see
    `task_scores`), average_acc (over these), usage_step, usage (memories of the newest usage report of the test
    split).
    """
    recorded, metrics, recipe = run.facts(), run.metrics(), run.recipe()
    parameters = recorded.get("parameters") or {}
    train = [event for event in metrics if event["event"] == "train"]
    speeds = [speed for event in train if (speed := event.get("tokens_per_second")) is not None]
    valid = [event for event in metrics if event["event"] == "valid" and event.get("loss") is not None]
    best = min(valid, key=lambda event: float(event["loss"]), default={})
    test_step, test = test_perplexity(run.path)
    tasks_step, tasks = task_scores(run.path)
    usage_step, usage = test_usage(run.path)
    scored = test.get("perplexity") or {}
    return {
        "run": label,
        "kind": kind_of(recipe),
        "dim": recipe.model.dim,
        "layers": recipe.model.layers,
        "lr": recipe.optim.lr,
        "init_from": recipe.train.init_from,
        **{key: parameters.get(key) for key in ("dense", "memory", "read_per_token")},
        "status": run.status(),
        "step": max((event["step"] for event in train), default=None),
        "tokens": max((event.get("tokens") or 0 for event in train), default=None),
        "tokens_per_second": median(speeds) if speeds else None,
        "seconds": latest_state(run).get("seconds", recorded.get("seconds")),
        "valid_step": best.get("step"),
        **{f"valid_{key}": best.get(key) for key in ("loss", "token_ppl", "bits_per_byte")},
        "test_step": test_step,
        **{f"test_{key}": scored.get(key) for key in ("token_ppl", "word_ppl", "bits_per_byte")},
        "tasks_step": tasks_step,
        "tasks": tasks,
        "average_acc": mean(task.get("acc") for task in tasks.values()),
        "usage_step": usage_step,
        "usage": usage.get("memories") or [],
    }


def kind_of(recipe: Recipe) -> str:
    """dense, hash, product-key, flat-key, or two of them."""
    model = recipe.model
    parts = ["hash"] if model.projections == "hash" else []
    parts += [model.memory.kind] if model.memory.kind != "none" else []
    return " + ".join(parts) or "dense"


def latest_state(run: RunDirectory) -> Facts:
    """The state.json of the latest checkpoint; nothing where there is none."""
    steps = run.steps()
    state = run.checkpoint(steps[-1]) / STATE if steps else None
    hint = "the checkpoint is damaged: `pkmlm train` goes on from the one before it"
    found: Facts = {}
    if state and state.exists():
        found = read_json(state, "the checkpoint's state", hint, exit_code=1, schema=CheckpointState)
    return found


def cut_short(facts: Sequence[Facts], trained: Sequence[int]) -> list[str]:
    """A line for each run whose metrics.jsonl has lost its end.

    Args:
        trained: the step of each run's newest checkpoint.
    """
    return [
        f"{run['run']}: metrics.jsonl ends at step {run['step'] or 0:,} of {last:,}: its totals and curves end there"
        for run, last in zip(facts, trained, strict=True)
        if (run["step"] or 0) < last
    ]


def partly_measured(runs: dict[str, RunDirectory]) -> list[str]:
    """A line for each run that has results of some tasks from `eval --limit` alone."""
    told = []
    for label, run in runs.items():
        if partial := partial_tasks(run.path):
            told.append(f"{label}: left out {', '.join(sorted(partial))}: of each a part was measured, with --limit")
    return told


def differences(runs: dict[str, RunDirectory]) -> list[str]:
    """A line for each reason why numbers of these runs cannot be held against each other: weights that have seen more
    than the run's tokens, several tokenizers, several texts, or tasks asked in several ways. A run of which that is not
    known is taken to be like the others; so is one with another tokenizer, which has other tokens of the same text.
    """
    data = {label: latest_state(run).get("data") or {} for label, run in runs.items()}
    parts = {label: run.recipe().eval.tokens for label, run in runs.items()}
    tasks = {label: task_scores(run.path)[1] for label, run in runs.items()}
    tokenizers = {label: of.get("tokenizer") for label, of in data.items()}
    measures: dict[str, dict[str, Any]] = {"several tokenizers: compare bits a byte, not tokens": tokenizers}
    texts: dict[str, dict[str, Any]] = {
        "several texts to train on": {label: of.get("train") for label, of in data.items()},
        "several texts, or shares of one, to validate on": {
            label: None if of.get("valid") is None else (of["valid"], parts[label]) for label, of in data.items()
        },
        "several texts to test on": {label: tested_on(run) for label, run in runs.items()},
    }
    for what, text_of in texts.items():
        tokens = {label: (tokenizers[label], text) for label, text in text_of.items() if text is not None}
        if len(set(tokens.values())) > len({tokenizer for tokenizer, _ in tokens.values()}):
            measures[what] = tokens
    for name in dict.fromkeys(name for of in tasks.values() for name in of):
        asked = {label: of[name] for label, of in tasks.items() if name in of}
        shots = {label: task.get("num_fewshot") for label, task in asked.items()}
        measures[f"several numbers of examples before a question of {name}"] = shots
        measures[f"several files of rows of {name}"] = {
            label: (task.get("data") or {}).get("sha256") for label, task in asked.items()
        }
    groups = {what: alike(values) for what, values in measures.items()}
    told = [
        f"{what} ({first_of([first_of(labels, ', ') for labels in several.values()], '; ')})"
        for what, several in groups.items()
        if len(several) > 1
    ]
    started = alike({label: run.recipe().train.init_from for label, run in runs.items()})
    if started:
        sources = [f"{first_of(labels, ', ')} from {source}" for source, labels in started.items()]
        what = "started from another run's weights, whose steps and tokens are not counted"
        told.append(f"{what} ({first_of(sources, '; ')})")
    return told


def alike(values: dict[str, Any]) -> dict[Any, list[str]]:
    """The labels of each value that is known."""
    groups: dict[Any, list[str]] = {}
    for label, value in values.items():
        if value is not None:
            groups.setdefault(value, []).append(label)
    return groups


def first_of(texts: Sequence[str], separator: str) -> str:
    """The first few of several texts, and how many more there are."""
    rest = len(texts) - NAMED
    named = separator.join(texts[:NAMED] if rest > 1 else texts)
    return f"{named} and {rest} more" if rest > 1 else named


def tested_on(run: RunDirectory) -> str | None:
    """The sha256 of the test split that the newest result is of; None where it is not known."""
    _, results = test_perplexity(run.path)
    found: str | None = (results.get("source") or {}).get("sha256")
    return found


def compare_tables(runs: Sequence[Facts]) -> list[Table]:
    """What people read; tables without a number in them are left out."""
    return [
        table
        for table in (_models(runs), _quality(runs), _tasks(runs), _usage(runs))
        if any(value is not None for row in table.rows for value in row[1:])
    ]


def flat_table(runs: Sequence[Facts]) -> Table:
    """One row a run, for CSV: the facts, each task's accuracy, and the mean usage and KL over memories."""
    plain = [key for key in (runs[0] if runs else {}) if key not in ("tasks", "usage")]
    tasks = _task_names(runs)
    rows = [
        [run[key] for key in plain]
        + [run["tasks"].get(task, {}).get("acc") for task in tasks]
        + [mean(memory["mass"][key] for memory in run["usage"]) for key in ("usage", "kl")]
        for run in runs
    ]
    return Table("", [Column(name) for name in (*plain, *tasks, "mean_usage", "mean_kl")], rows)


def _models(runs: Sequence[Facts]) -> Table:
    columns = {
        "run": Column("Run"),
        "kind": Column("Kind"),
        "dense": number("Dense"),
        "memory": number("Memory"),
        "step": number("Steps"),
        "tokens": number("Tokens"),
        "tokens_per_second": number("Tokens/s", "{:,.0f}"),
        "seconds": number("sec", "{:,.0f}"),
    }
    if any(run["status"] not in (None, "finished") for run in runs):
        columns["status"] = Column("Status")
    return _of_keys("Weights and training", columns, runs)


def _quality(runs: Sequence[Facts]) -> Table:
    columns = {
        "run": Column("Run"),
        "valid_loss": number("Valid (nats)", NATS),
        "valid_step": number("at step"),
        "valid_token_ppl": number("Valid ppl", "{:,.2f}"),
        "test_token_ppl": number("Test ppl", "{:,.2f}"),
        "test_word_ppl": number("word ppl", "{:,.1f}"),
        "test_bits_per_byte": number("bits a byte", NATS),
        "test_step": number("at step"),
    }
    return _of_keys("Best validation, and perplexity of the test split", columns, runs)


def _of_keys(title: str, columns: dict[str, Column], runs: Sequence[Facts]) -> Table:
    return Table(title, list(columns.values()), [[run[key] for key in columns] for run in runs])


def _tasks(runs: Sequence[Facts]) -> Table:
    """Accuracies, and their average over the tasks that all runs with any have: over others it would say nothing."""
    names, at_step = _task_names(runs), _at_step(runs, "tasks_step")
    shared = [name for name in names if all(name in run["tasks"] for run in runs if run["tasks"])]
    rows = [
        [
            run["run"],
            *(run["tasks"].get(name, {}).get("acc") for name in names),
            mean(run["tasks"].get(name, {}).get("acc") for name in shared),
            *(run["tasks_step"] for _ in at_step),
        ]
        for run in runs
    ]
    average = number("average" if shared == names else f"average of {len(shared)}", "{:.3f}")
    columns = [Column("Run"), *(number(name, "{:.3f}") for name in names), average, *at_step]
    return Table("Zero-shot accuracy", columns, rows)


def _usage(runs: Sequence[Facts]) -> Table:
    at_step = _at_step(runs, "usage_step")
    columns = [
        Column("Run"),
        Column("Layer"),
        number("Slots"),
        number("Usage", SHARE),
        number("random", SHARE),
        number("KL (nats)", NATS),
        number("random", NATS),
        number("Gini", "{:.3f}"),
        *at_step,
    ]
    rows = []
    for run in runs:
        for memory in run["usage"]:
            mass, floor = memory["mass"], memory.get("uniform_mass") or {}  # older reports have none
            numbers = [mass["usage"], memory["uniform"]["usage"], mass["kl"], floor.get("kl"), mass["gini"]]
            numbers += [run["usage_step"] for _ in at_step]
            rows.append([run["run"], f"{memory['layer']} {memory['name']}", memory["slots"], *numbers])
    return Table("Memory use on the test split, by mass", columns, rows)


def _at_step(runs: Sequence[Facts], key: str) -> list[Column]:
    """The column that says when something was measured, where that was not at the last step of every run."""
    return [number("at step")] if any(run[key] not in (None, run["step"]) for run in runs) else []


def _task_names(runs: Sequence[Facts]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run["tasks"]))


def mean(values: Iterable[float | None]) -> float | None:
    """Of the values that are known; None where none is."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
