"""Runs side by side, from what training, `eval` and `usage-report` left in their folders; nothing is measured.

Needs no torch. `tables` makes the tables.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os.path import commonprefix
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

from pkmlm.errors import UserError
from pkmlm.recipe.schema import Recipe, recipe_sha256
from pkmlm.report.equal import Equal, Over, at_equal, bits_of_a_nat
from pkmlm.report.metrics import FLOORED, METRICS
from pkmlm.runs.directory import RunDirectory
from pkmlm.runs.record import read_progress
from pkmlm.runs.results import (
    average_accuracy,
    partial_tasks,
    perplexities,
    task_scores,
    validations,
)

Facts = dict[str, Any]


class Group(NamedTuple):
    """Runs of one recipe that differ only in their seed, or a single run.

    Attributes:
        name: such as `pkm-seed-{1,2}`.
        runs: the facts of each.
    """

    name: str
    runs: list[Facts]

    def as_json(self) -> Facts:
        """The names and seeds of the runs; and for each number its mean, its sample standard deviation (None: of a
        single run), and, if some runs lack it, how many have it.
        """
        values: dict[str, list[float]] = {}
        for run in self.runs:
            for key, value in flat_facts(run).items():
                if key != "seed" and isinstance(value, int | float):
                    values.setdefault(key, []).append(value)
        return {
            "name": self.name,
            "runs": [run["run"] for run in self.runs],
            "seeds": [run["seed"] for run in self.runs],
            "mean": {key: fmean(found) for key, found in values.items()},
            "spread": {key: stdev(found) if len(found) > 1 else None for key, found in values.items()},
            "n": {key: len(found) for key, found in values.items() if len(found) < len(self.runs)},
        }


@dataclass(frozen=True)
class Comparison:
    """Runs by name, the facts of each (see `facts_of`), the same in groups, warnings about what cannot be compared, and
    the names of damaged runs, which are left out.
    """

    runs: dict[str, RunDirectory]
    facts: list[Facts]
    groups: list[Group]
    warnings: list[str]
    damaged: Sequence[str] = ()

    @cached_property
    def recipes(self) -> dict[str, Recipe]:
        """The recipe of each run."""
        return {label: run.recipe() for label, run in self.runs.items()}

    @cached_property
    def metrics(self) -> dict[str, list[Facts]]:
        """The events of each run."""
        return {label: list(run.metrics()) for label, run in self.runs.items()}

    def at_equal(self, over: Over, per_step: Mapping[str, float]) -> Equal | None:
        """`at_equal` of these runs. Adds its facts to theirs, and what a step takes as OVER_per_step."""
        equal = at_equal(over, per_step, self.metrics)
        for run in self.facts:
            run[f"{over}_per_step"] = per_step[run["run"]]
            run |= equal.facts[run["run"]] if equal else {}
        return equal

    @property
    def by_byte(self) -> bool:
        """Whether losses can be compared by the byte alone, because the tokenizers differ."""
        return several_tokenizers(self.facts)

    def curves(self, over: str) -> dict[str, list[tuple[float, list[Facts]]]]:
        """By group, for each of its runs: what a step takes, and the run's events, whose losses are in nats per token,
        or, if they are compared by the byte, in bits per byte of the validation text.

        Args:
            over: "steps", "tokens", or what `at_equal` was called with.
        """

        def curve(facts: Facts) -> tuple[float, list[Facts]]:
            if over == "steps":
                taken = 1.0
            elif over == "tokens":
                taken = self.runs[facts["run"]].step_tokens()
            else:
                taken = facts[f"{over}_per_step"]
            events = self.metrics[facts["run"]]
            return taken, in_bits_per_byte(events) if self.by_byte else events

        return {group.name: [curve(run) for run in group.runs] for group in self.groups}

    def branches(self) -> dict[str, list[str]]:
        """Each group that did not branch off another, with those that branched off it. A branch differs only in its
        steps and in the decay with which it ends; it belongs to the longest group without a decay, or, if all have one,
        to the longest.
        """
        families: dict[Any, list[tuple[int, int, str]]] = {}
        for group in self.groups:
            recipe = self.recipes[group.runs[0]["run"]]
            steps, decay = recipe.train.steps, recipe.optim.decay_steps
            train, optim = replace(recipe.train, seed=0, steps=1), replace(recipe.optim, decay_steps=0)
            seeds = tuple(run["seed"] for run in group.runs)
            family = families.setdefault((recipe_sha256(replace(recipe, train=train, optim=optim)), seeds), [])
            family.append((decay, -steps, group.name))
        found: dict[str, list[str]] = {}
        for family in families.values():
            main = min(family, key=lambda member: (member[0] > 0, member[1]))
            trunks = [name for decay, steps, name in family if decay == 0 or (decay, steps) == main[:2]]
            found |= {name: [] for name in trunks}
            found[main[2]] += [name for *_, name in family if name not in trunks]
        return found


def several_tokenizers(runs: Iterable[Mapping[str, Any]]) -> bool:
    """Whether runs are known to have different tokenizers."""
    return len({run["tokenizer"] for run in runs} - {None}) > 1


def in_bits_per_byte(events: Sequence[Facts]) -> list[Facts]:
    """The events of a run with their losses in bits per byte, or without, if no validation says what a nat is."""
    bits = bits_of_a_nat(validations(events))
    known = ((event, event.get("loss")) for event in events)
    return [event | {"loss": loss * bits if loss is not None and bits is not None else None} for event, loss in known]


def comparable_with_dense(groups: Sequence[Group]) -> tuple[Group | None, list[Group]]:
    """The first dense group (None: there is none), and the groups whose losses can be compared with its loss: those
    validated on the same tokens. If a group's tokens are not known, they are taken to be the same.
    """
    dense = next((group for group in groups if group.runs[0]["kind"] == "dense"), None)
    if dense is None:
        return None, []

    def alike(group: Group) -> bool:
        run, other = group.runs[0], dense.runs[0]
        pairs = ((run.get(key), other.get(key)) for key in ("tokenizer", "valid_tokens_sha256"))
        known = all(None in pair or pair[0] == pair[1] for pair in pairs)
        return known and run.get("valid_tokens") == other.get("valid_tokens")

    return dense, [group for group in groups if alike(group)]


def compare_runs(paths: Sequence[str]) -> Comparison:
    """Read some runs. Paths that exist but are not runs, as a shell's glob may give, are left out with a warning, and
    so are runs that are damaged.

    Args:
        paths: of the run directories.

    Raises:
        UserError: a run does not exist, no path is a run, or (exit code 1) all runs are damaged or cannot be read.
    """
    existing = {path: RunDirectory(path) for path in paths if Path(path).exists()}
    strays = {path for path, run in existing.items() if not run.recipe_file.is_file() and not run.steps()}
    if strays.issuperset(paths):
        strays = set()  # opening the first says what is wrong with it
    warnings = [f"left out {path}: it is not a run (it has no recipe.yaml)" for path in sorted(strays)]
    runs = open_runs([path for path in paths if path not in strays], RunDirectory.existing)
    saved = {label: max(run.steps(), default=0) for label, run in runs.items()}  # read first: some may be training
    facts: list[Facts] = []
    evaluations: dict[str, list[Facts]] = {}
    damaged: list[str] = []
    for label, opened in list(runs.items()):
        try:
            evaluations[label] = opened.evaluations()
            facts.append(facts_of(label, opened, list(opened.metrics()), evaluations[label]))
        except UserError as error:
            del runs[label]
            if not (runs or facts):
                raise
            damaged.append(label)
            warnings.append(f"left out {label}: {error.message}")
    for run in facts:
        logged, last = run["step"] or 0, saved[run["run"]]
        if not last and run["status"] in ("finished", "patience"):
            warnings.append(f"{run['run']}: its checkpoints are gone: what is shown is what it logged")
        if logged < last:
            ends = f"metrics.jsonl ends at step {logged:,} of {last:,}"
            warnings.append(f"{run['run']}: {ends}: its totals and curves end there")
    shared = shared_tasks(facts)  # averages over different tasks cannot be compared
    for run in facts:
        run["average_acc"], _ = average_accuracy(run["tasks"].get(name, {}) for name in shared)
        if run["test_step"] not in (None, run["step"], saved[run["run"]], run["valid_step"]):
            what = f"test perplexity is that of step {run['test_step']:,}, which is neither the latest nor the best"
            warnings.append(f"{run['run']}: {what}: run `pkmlm eval` again")
    for label in runs:
        if partial := partial_tasks(evaluations[label]):
            tasks = ", ".join(sorted(partial))
            warnings.append(f"{label}: left out {tasks}: measured only in part, with --limit")
    return Comparison(runs, facts, seed_groups(runs, facts), warnings + differences(facts), damaged)


def shared_tasks(facts: Sequence[Facts]) -> list[str]:
    """The tasks that all runs have, apart from runs that have none."""
    names = dict.fromkeys(name for run in facts for name in run["tasks"])
    return [name for name in names if all(name in run["tasks"] for run in facts if run["tasks"])]


def open_runs(paths: Iterable[str], opener: Callable[[str], RunDirectory]) -> dict[str, RunDirectory]:
    """Runs by name, or all by path where two have the same name; a folder that is given twice counts once.

    Args:
        paths: as the user gives them.
        opener: makes a RunDirectory of a path, or raises a UserError.
    """
    runs = {run.path.resolve(): run for run in map(opener, paths)}.values()
    apart = len({run.name for run in runs}) == len(runs)
    return {run.name if apart else str(run.path): run for run in runs}


def seed_groups(runs: Mapping[str, RunDirectory], facts: Sequence[Facts]) -> list[Group]:
    """Groups of the runs that have the same recipe and text. A run that was stopped or diverged is a group by itself;
    so is each of the runs with the same recipe and text if two of them have the same seed.
    """
    alike: dict[Any, list[Facts]] = {}
    for run in facts:
        text = (run["tokenizer"], run["train_tokens_sha256"], run["valid_tokens_sha256"])
        settings = (seedless(runs[run["run"]].recipe()), text)
        alike.setdefault(settings if run["status"] in ("finished", "patience") else run["run"], []).append(run)
    parts: list[list[Facts]] = []
    for found in alike.values():
        several = len({run["seed"] for run in found}) == len(found)
        parts += [sorted(found, key=lambda run: int(run["seed"]))] if several else [[run] for run in found]
    return [Group(common_name([run["run"] for run in part]), part) for part in parts]


def common_name(names: Sequence[str]) -> str:
    """What names have in common, with their differences in braces; numbers stay in one piece: `pkm-seed-{9,10}`."""
    if len(names) == 1:
        return names[0]
    start = commonprefix(names).rstrip("0123456789")  # noqa: RUF071 (of names, not of paths)
    rests = [name[len(start) :] for name in names]
    end = commonprefix([rest[::-1] for rest in rests])[::-1].lstrip("0123456789")  # noqa: RUF071
    return f"{start}{{{','.join(rest.removesuffix(end) for rest in rests)}}}{end}"


def seedless(recipe: Recipe) -> str:
    """What recipes that differ at most in their seed have in common: a digest."""
    return recipe_sha256(replace(recipe, train=replace(recipe.train, seed=0)))


def facts_of(label: str, run: RunDirectory, metrics: Sequence[Facts], evaluations: Sequence[Facts]) -> Facts:
    """What is known of a run with the events `metrics` and these evaluations; None where a measurement is missing.

    Keys: run, kind, dim, layers, context, lr (the peak), seed, init_from (the run whose weights it started from),
    tokenizer, train_tokens_sha256 and valid_tokens_sha256 (the sha256 of what it was trained with, trained on and
    validated on), valid_tokens (of each validation; None: all), dense, memory, read_per_token, total (parameters),
    status, step, tokens (trained so far), tokens_per_second (median over steps), seconds (in training steps, up to the
    latest checkpoint, or to the end if that is gone), valid_step, valid_loss (nats per token), valid_token_ppl,
    valid_bits_per_byte (of the best validation), test_step, test_token_ppl, test_word_ppl, test_bits_per_byte (of the
    evaluation of the test split at the highest step), test_text_sha256 (of what it read), tasks_step, tasks ({name:
    {"acc", ...}}, see `task_scores`), usage_step, usage (memories of the usage report of the test split at the highest
    step). The kind is dense, or those of its memories, joined by " + ".
    """
    recorded, recipe, latest = run.facts(), run.recipe(), run.of_latest(read_progress)
    parameters = latest.parameters if latest else recorded.get("parameters") or {}
    data = latest.data if latest else {}
    train = [event for event in metrics if event["event"] == "train"]
    speeds = [speed for event in train if (speed := event.get("tokens_per_second")) is not None]
    valid = [event for event in validations(metrics) if event.get("loss") is not None]
    best = min(valid, key=lambda event: float(event["loss"]), default={})
    test = next(iter(perplexities(evaluations, "test", recipe.model.context)), {})
    scores = test.get("perplexity") or {}
    tasks_step, tasks = task_scores(evaluations)
    usage = next((report for report in run.usage_reports() if report["split"] == "test"), {})
    return {
        "run": label,
        "kind": " + ".join(recipe.model.kinds) or "dense",
        "dim": recipe.model.dim,
        "layers": recipe.model.layers,
        "context": recipe.model.context,
        "lr": recipe.optim.lr,
        "seed": recipe.train.seed,
        "init_from": recipe.train.init_from,
        "tokenizer": data.get("tokenizer"),
        "train_tokens_sha256": data.get("train"),
        "valid_tokens_sha256": data.get("valid"),
        "valid_tokens": recipe.eval.tokens,
        **{key: parameters.get(key) for key in ("dense", "memory", "read_per_token")},
        "total": parameters["dense"] + parameters["memory"] if {"dense", "memory"} <= parameters.keys() else None,
        "status": run.status(),
        "step": max((event["step"] for event in train), default=None),
        "tokens": max((event.get("tokens") or 0 for event in train), default=None),
        "tokens_per_second": median(speeds) if speeds else None,
        "seconds": latest.seconds if latest else recorded.get("seconds"),
        "valid_step": best.get("step"),
        **{f"valid_{key}": best.get(key) for key in ("loss", "token_ppl", "bits_per_byte")},
        "test_step": test.get("step"),
        **{f"test_{key}": scores.get(key) for key in ("token_ppl", "word_ppl", "bits_per_byte")},
        "test_text_sha256": (test.get("source") or {}).get("sha256"),
        "tasks_step": tasks_step,
        "tasks": tasks,
        "usage_step": usage.get("step"),
        "usage": usage.get("memories") or [],
    }


def flat_facts(run: Facts) -> Facts:
    """The facts of a run without lists: the mean usage and KL over memories, and each task's accuracy under the task's
    name, or under "NAME_acc" if a fact has that name.
    """
    plain = {key: value for key, value in run.items() if key not in ("tasks", "usage")}
    plain |= {f"mean_{key}": METRICS[key].read(run) for key in FLOORED}
    return plain | {f"{name}_acc" if name in plain else name: task.get("acc") for name, task in run["tasks"].items()}


def differences(facts: Sequence[Facts]) -> list[str]:
    """A warning for each reason why the numbers of these runs cannot be compared: different tokenizers, different
    texts, tasks asked in different ways, different contexts, or weights that have seen more than the run's tokens.

    What is not known of a run is taken to be as in the others. Texts are compared only among runs with the same
    tokenizer, because another one makes other tokens of the same text.
    """

    def of_each(key: str) -> dict[str, Any]:
        return {run["run"]: run[key] for run in facts}

    tokenizers, tasks = of_each("tokenizer"), of_each("tasks")
    values: dict[str, dict[str, Any]] = {"different tokenizers: compare bits per byte": tokenizers}
    texts: dict[str, dict[str, Any]] = {
        "different training texts": of_each("train_tokens_sha256"),
        "different validation texts, or different shares of one": {
            run["run"]: (run["valid_tokens_sha256"], run["valid_tokens"])
            for run in facts
            if run["valid_tokens_sha256"] is not None
        },
        "different test texts": of_each("test_text_sha256"),
    }
    for what, text_of in texts.items():
        tokens = {label: (tokenizers[label], text) for label, text in text_of.items() if text is not None}
        if len(set(tokens.values())) > len({tokenizer for tokenizer, _ in tokens.values()}):
            values[what] = tokens
    for name in dict.fromkeys(name for found in tasks.values() for name in found):
        asked = {label: found[name] for label, found in tasks.items() if name in found}
        shots = {label: task.get("num_fewshot") for label, task in asked.items()}
        rows = {label: (task.get("data") or {}).get("sha256") for label, task in asked.items()}
        values[f"different numbers of examples before a question of {name}"] = shots
        values[f"different files with the rows of {name}"] = rows
    values["different contexts: a longer one alone lowers perplexity"] = of_each("context")
    warnings = [
        f"{what} ({'; '.join(map(', '.join, several.values()))})"
        for what, found in values.items()
        if len(several := labels_by_value(found)) > 1
    ]
    started = labels_by_value(of_each("init_from"))
    if started:
        sources = "; ".join(f"{', '.join(labels)} from {source}" for source, labels in started.items())
        warnings.append(f"started from another run's weights, whose steps and tokens are not counted ({sources})")
    return warnings


def labels_by_value(values: dict[str, Any]) -> dict[Any, list[str]]:
    """The labels of each value, without those whose value is not known (None)."""
    groups: dict[Any, list[str]] = {}
    for label, value in values.items():
        if value is not None:
            groups.setdefault(value, []).append(label)
    return groups
