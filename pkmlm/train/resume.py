"""What `pkmlm train` asks of a run that is there already: may it go on, and is there anything left to do?"""

from dataclasses import replace
from typing import TYPE_CHECKING

from pkmlm.errors import UserError
from pkmlm.train.provenance import change

if TYPE_CHECKING:
    from pkmlm.recipe.schema import Recipe
    from pkmlm.runs.directory import RunDirectory
    from pkmlm.train.job import Job

# What may change when a run goes on: how long it trains, on how many ranks, what is measured, kept and shown, and what
# it no longer needs.
FREE_KEYS = (
    *("name", "data.dir", "train.steps", "train.micro_batch", "train.recompute", "train.init_from"),
    *("eval.", "checkpoint.", "log.", "parallel."),
)


def refuse_resume(run: "RunDirectory", resume: str) -> None:
    """Refuse a run that is not as --resume says."""
    if resume == "must" and not run.steps():
        raise UserError(f"--resume must: run {run.path} has no checkpoint to resume", "use --resume auto to start it")
    if resume == "never" and run.steps():
        raise UserError(
            f"--resume never: run {run.path} has checkpoints already", "choose another -o, or delete that folder"
        )
    if run.done() is not None and not run.steps():  # to begin anew would replace its log
        message = f"run {run.path} ended at step {run.done()}, but its checkpoints are gone"
        raise UserError(message, "choose another -o, or delete that folder to train it anew")


def refuse_changes(run: "RunDirectory", recipe: "Recipe") -> None:
    """Refuse to go on with another recipe, but for keys that do not touch what is trained."""
    from pkmlm.recipe.dump import flatten, scalar_text

    before, now = flatten(run.recipe()), flatten(recipe)
    changed = [
        change(key, scalar_text(before[key]), scalar_text(value))
        for key, value in now.items()
        if before[key] != value and not key.startswith(FREE_KEYS)
    ]
    if changed:
        message = f"run {run.path} was started with another recipe: {', '.join(changed)}"
        raise UserError(message, "train it under another -o")


def with_own_start(run: "RunDirectory", recipe: "Recipe") -> "Recipe":
    """The recipe with the `train.init_from` that the run did start from, which a resume does not change."""
    return replace(recipe, train=replace(recipe.train, init_from=run.recipe().train.init_from))


def refuse_other_data(run: "RunDirectory", job: "Job") -> None:
    """Refuse to go on with another tokenizer, or on other text to train or to validate on, than the newest checkpoint,
    which is whole, says. A split for validation may come or go.
    """
    from pkmlm.train.checkpoint import progress_at

    before = progress_at(run.checkpoint(run.steps()[-1])).data
    for name, what in (
        ("tokenizer", "trained with another tokenizer than that of"),
        ("train", "trained on other tokens than those in"),
        ("valid", "validated on other text than that in"),
    ):
        expected, found = before.get(name), job.corpus.hashes.get(name)
        if expected and found and found != expected:
            hashes = f"sha256 {found[:16]}... (expected {expected[:16]}...)"
            raise UserError(f"run {run.path} was {what} {job.recipe.data.dir}: {hashes}", "train under another -o")


def ended_already(run: "RunDirectory", recipe: "Recipe") -> bool:
    """Whether training has finished, or stopped for lack of patience, its last checkpoint is still there, and this
    recipe asks for no more."""
    if not run.steps() or run.done() != run.steps()[-1]:
        return False
    before = run.recipe()
    same = (before.train.steps, before.eval.patience) == (recipe.train.steps, recipe.eval.patience)
    return same or run.steps()[-1] >= recipe.train.steps
