"""Whether a run that exists may be resumed, and what has changed since it last trained."""

from collections.abc import Collection
from typing import Any

from pkmlm.errors import UserError
from pkmlm.recipe.load import load_recipe
from pkmlm.recipe.schema import Recipe, differences, flatten
from pkmlm.runs.directory import IMPORTED, RunDirectory
from pkmlm.runs.record import read_progress
from pkmlm.train.job import Job, hashes_of

INIT_FROM = "train.init_from"
# The keys, or beginnings of keys, that may change when a run is resumed. Changes of CHANGES_NUMBERS are reported: later
# numbers are not those of an uninterrupted run.
CHANGES_NUMBERS = (
    *("train.steps", "train.epochs", "optim.decay_steps", "train.micro_batch", "train.recompute", INIT_FROM),
    *("parallel.", "eval.tokens"),
)
LENGTH = ("train.steps", "train.epochs")
# For data.dir and the background, the content is compared instead.
CHANGES_NO_NUMBERS = ("name", "data.dir", "finetune.background", "eval.", "checkpoint.", "log.")
CHOOSES_OPTIMIZER = ("optimizer", "matrices")  # by which its state differs


def changes_rates(key: str) -> bool:
    """Whether a key says how fast parameters learn, so that `--allow-change` may let it change: what the checkpoint
    holds keeps its meaning.
    """
    return ".optim." in f".{key}" and key.rpartition(".")[2] not in CHOOSES_OPTIMIZER


def check_allowed(recipe: Recipe, allowed: Collection[str]) -> None:
    """Refuse keys of `--allow-change` that the recipe does not have, or that may not change in any run."""
    for key in allowed:
        if not changes_rates(key) or key not in flatten(recipe):
            found = f"--allow-change: found {key} (expected a key of this recipe that says how its parameters learn)"
            raise UserError(found, "for example --allow-change optim.lr; `pkmlm recipe show` lists the recipe's keys")


def refuse_output(run: RunDirectory, resume: str) -> None:
    """Refuse a run directory that does not fit `--resume`, has lost its checkpoints, or holds files that no run wrote.
    It need not exist.
    """
    if run.facts().get("status") == IMPORTED:
        message = f"-o {run.path} is a pretrained model that was imported, which stays as it is"
        raise UserError(message, f"choose another -o, and add -s train.init_from={run.path}")
    if resume == "must" and not run.steps():
        raise UserError(f"--resume must: run {run.path} has no checkpoint to resume", "use --resume auto to start it")
    if resume == "never" and run.steps():
        raise UserError(f"--resume never: run {run.path} already has checkpoints", "choose another -o")
    if not run.steps() and (last := run.done() or run.facts().get("step")):  # starting over would replace its log
        message = f"run {run.path} ended at step {last}, but its checkpoints are gone"
        raise UserError(message, "choose another -o, or delete that folder to train it again")
    run.refuse_foreign()


def refuse_changed_recipe(run: RunDirectory, recipe: Recipe, allowed: Collection[str] = ()) -> None:
    """Refuse to resume with another recipe than the latest checkpoint's, except for the keys that may change, and for
    those that the user allows to.
    """
    may_change = CHANGES_NUMBERS + CHANGES_NO_NUMBERS
    changed = changed_keys(run.recipe(), recipe)
    refused = {key: text for key, text in changed.items() if key not in allowed and not key.startswith(may_change)}
    if refused:
        message = f"run {run.path} was started with another recipe: {', '.join(refused.values())}"
        hint = "train it under another -o"
        if all(map(changes_rates, refused)):
            hint += f", or go on with it so: --allow-change {' --allow-change '.join(refused)}"
        raise UserError(message, hint)


def refuse_other_data(run: RunDirectory, job: Job) -> None:
    """Refuse to resume if the latest checkpoint, which must be intact, is of another tokenizer, other tokens to train
    or validate on, or another background. A split for validation may come or go.
    """
    before = read_progress(run.checkpoint(run.steps()[-1])).data
    folder, hashes = job.corpus.name, hashes_of(job)
    for name, what, where in (
        ("tokenizer", "trained with another tokenizer than that of", folder),
        ("train", "trained on other tokens than those in", folder),
        ("valid", "validated on other text than that in", folder),
        ("background", "trained by another background than", job.recipe.finetune.background),
    ):
        expected, found = before.get(name), hashes.get(name)
        if expected and found and found != expected:
            differ = f"sha256 {found[:16]}... (expected {expected[:16]}...)"
            raise UserError(f"run {run.path} was {what} {where}: {differ}", "train under another -o")


def is_complete(run: RunDirectory, recipe: Recipe) -> bool:
    """Whether training has ended (by its steps or by patience), has kept its last checkpoint, and the recipe asks for
    no more.
    """
    if not run.steps() or run.done() != run.steps()[-1]:
        return False
    try:
        asked = load_recipe(run.recipe_file)  # by the process that finished; the checkpoint may be an older one's
    except UserError:
        asked = run.recipe()
    unchanged = (asked.train.steps, asked.eval.patience) == (recipe.train.steps, recipe.eval.patience)
    return unchanged or run.steps()[-1] >= recipe.train.steps


def change_warnings(
    recipe_before: Recipe, recipe: Recipe, facts_before: dict[str, Any], facts: dict[str, Any]
) -> list[str]:
    """A warning that lists what has changed since the run last trained and changes its numbers from here on.

    Args:
        facts_before, facts: run.json as it was (it may lack keys), and the `provenance` of this process.
    """
    changed = []
    before, now = (facts_before.get("versions") or {}) | facts_before, facts["versions"] | facts
    for name in ("torch", "numpy", "device", "cpu", "precision", "ranks"):  # numpy orders the data
        if before.get(name) not in (None, now[name]):
            changed.append(change(name, before[name], now[name]))
    if before.get("source_sha256") not in (None, now["source_sha256"]):
        changed.append("the code of pkmlm has changed")
    changed += changes_of_numbers(recipe_before, recipe)
    if text := changed_keys(recipe_before, recipe).get(INIT_FROM):
        changed.append(f"{text} (ignored: the run has a checkpoint of its own)")
    if not changed:
        return []
    return [f"resumed with changes, so numbers may differ from an uninterrupted run: {', '.join(changed)}"]


def changes_of_numbers(before: Recipe, now: Recipe) -> list[str]:
    """How a resumed run's recipe has changed so that its numbers change from here on."""
    schedules = {group.schedule for group in now.optim_groups.values()}
    rate_depends_on_steps = bool(schedules & {"cosine", "linear", "relative"} or now.optim.decay_steps)
    without = {INIT_FROM, *(() if rate_depends_on_steps else LENGTH)}
    return [
        text
        for key, text in changed_keys(before, now).items()
        if key not in without and (key.startswith(CHANGES_NUMBERS) or not key.startswith(CHANGES_NO_NUMBERS))
    ]


def changed_keys(before: Recipe, now: Recipe) -> dict[str, str]:
    """The keys in which two recipes differ, each with a text that says how."""
    return {key: change(key, *pair) for key, pair in differences(before, now).items()}


def change(name: str, old: Any, new: Any) -> str:
    return f"{name} was {old} and is now {new}"
