"""Whether a run that exists may be resumed, what has changed since it last trained, and the provenance in run.json."""

import platform
import sys
from typing import Any

import numpy as np
import torch

from pkmlm import __version__
from pkmlm.cost import cost_of
from pkmlm.device import DeviceSettings, name_of
from pkmlm.environment import source_commit
from pkmlm.errors import UserError
from pkmlm.recipe.schema import Recipe, flatten, scalar_text
from pkmlm.runs.checkpoint import read_progress
from pkmlm.runs.directory import RunDirectory
from pkmlm.train.job import Job

# The keys (or sections) that may change when a run is resumed: how long it trains, on how many ranks, what it measures,
# keeps and logs. True: a change is reported, for later numbers are not those of an undisturbed run.
MAY_CHANGE = {
    "name": False,
    "data.dir": False,  # its content is compared
    "train.steps": True,
    "train.micro_batch": True,
    "train.recompute": True,
    "train.init_from": True,
    "parallel.": True,
    "eval.tokens": True,
    "eval.recalibrate": True,
    "eval.": False,
    "checkpoint.": False,
    "log.": False,
}
ENVIRONMENT = ("versions", "commit", "device", "precision", "precision_reason", "ranks")  # of the provenance


def refuse_resume_option(run: RunDirectory, resume: str) -> None:
    """Refuse a run that does not fit `--resume`, or whose checkpoints are gone."""
    if resume == "must" and not run.steps():
        raise UserError(f"--resume must: run {run.path} has no checkpoint to resume", "use --resume auto to start it")
    if resume == "never" and run.steps():
        raise UserError(
            f"--resume never: run {run.path} has checkpoints already", "choose another -o, or delete that folder"
        )
    if run.done() is not None and not run.steps():  # to begin anew would replace its log
        message = f"run {run.path} ended at step {run.done()}, but its checkpoints are gone"
        raise UserError(message, "choose another -o, or delete that folder to train it anew")


def refuse_changed_recipe(run: RunDirectory, recipe: Recipe) -> None:
    """Refuse to resume with another recipe, but for the keys that may change."""
    fixed = [text for key, text in changed_keys(run.recipe(), recipe).items() if not key.startswith(tuple(MAY_CHANGE))]
    if fixed:
        message = f"run {run.path} was started with another recipe: {', '.join(fixed)}"
        raise UserError(message, "train it under another -o")


def refuse_other_data(run: RunDirectory, job: Job) -> None:
    """Refuse to resume with another tokenizer, or on other text to train or to validate on, than the latest checkpoint
    names, which must be whole. A split for validation may come or go.
    """
    before = read_progress(run.checkpoint(run.steps()[-1])).data
    for name, what in (
        ("tokenizer", "trained with another tokenizer than that of"),
        ("train", "trained on other tokens than those in"),
        ("valid", "validated on other text than that in"),
    ):
        expected, found = before.get(name), job.corpus.hashes.get(name)
        if expected and found and found != expected:
            hashes = f"sha256 {found[:16]}... (expected {expected[:16]}...)"
            raise UserError(f"run {run.path} was {what} {job.recipe.data.dir}: {hashes}", "train under another -o")


def is_complete(run: RunDirectory, recipe: Recipe) -> bool:
    """Whether training has finished, or patience has ended it, its last checkpoint is there, and the recipe asks for no
    more.
    """
    if not run.steps() or run.done() != run.steps()[-1]:
        return False
    before = run.recipe()
    unchanged = (before.train.steps, before.eval.patience) == (recipe.train.steps, recipe.eval.patience)
    return unchanged or run.steps()[-1] >= recipe.train.steps


def change_warnings(
    recipe_before: Recipe, recipe: Recipe, facts_before: dict[str, Any], facts: dict[str, Any]
) -> list[str]:
    """A warning that lists what has changed since the run last trained and changes its numbers from here on.

    Args:
        facts_before, facts: run.json as it was (it may lack keys), and the `provenance` of this process.
    """
    changed = []
    versions = facts_before.get("versions") or {}
    before = {"torch": versions.get("torch"), "numpy": versions.get("numpy")} | facts_before
    now = {"torch": facts["versions"]["torch"], "numpy": facts["versions"]["numpy"]} | facts  # numpy orders the data
    for name in ("torch", "numpy", "device", "precision", "ranks"):
        if before.get(name) not in (None, now[name]):
            changed.append(change(name, before[name], now[name]))
    has_length = bool(recipe.schedules & {"cosine", "linear"})  # other schedules do not depend on train.steps
    for key, text in changed_keys(recipe_before, recipe).items():
        reported = next(report for prefix, report in MAY_CHANGE.items() if key.startswith(prefix))
        if key == "train.init_from":
            changed.append(f"{text} (ignored: the run has a checkpoint of its own)")
        elif reported and (has_length or key != "train.steps"):
            changed.append(text)
    return (
        [f"resumed with changes, so numbers may differ from an undisturbed run: {', '.join(changed)}"]
        if changed
        else []
    )


def lost_metrics_warning(run: RunDirectory) -> list[str]:
    """A warning where metrics.jsonl lacks steps that the latest checkpoint has taken."""
    last = max(run.steps(), default=0)
    logged = {line["step"] for line in run.metrics() if line["event"] == "train" and 0 < line["step"] <= last}
    if len(logged) == last:
        return []
    effect = "curves have a gap, and the best checkpoint and eval.patience follow from the rest"
    return [f"metrics.jsonl lacks {last - len(logged):,} of {last:,} steps: {effect}"]


def changed_keys(before: Recipe, now: Recipe) -> dict[str, str]:
    """The keys in which two recipes differ, each with a text that says how."""
    old = flatten(before)
    return {
        key: change(key, scalar_text(old[key]), scalar_text(value))
        for key, value in flatten(now).items()
        if value != old[key]
    }


def change(name: str, old: Any, new: Any) -> str:
    return f"{name} was {old} and is now {new}"


def provenance(job: Job, settings: DeviceSettings, ranks: int) -> dict[str, Any]:
    """The command line, versions, commit, device and parameters of a run that this process trains."""
    return {
        "argv": sys.argv[1:],
        "versions": {
            "pkmlm": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "commit": source_commit(),
        "device": name_of(settings.device),
        "precision": settings.precision,
        "precision_reason": settings.reason,
        "ranks": ranks,
        "parameters": cost_of(job.recipe, job.vocab_size).as_json()["parameters"],
    }


def with_earlier(before: dict[str, Any], now: dict[str, Any], step: int) -> dict[str, Any]:
    """The provenance of a resumed run, which lists under "earlier" that of processes that differed.

    Args:
        before: run.json as the process that trained up to `step` has left it.
        now: the `provenance` of this process.
    """
    earlier = list(before.get("earlier") or ())
    if "versions" in before and any(before.get(key) != now[key] for key in ENVIRONMENT):
        earlier.append({"until_step": step, **{key: before.get(key) for key in ENVIRONMENT}})
    return {**now, "earlier": earlier}
