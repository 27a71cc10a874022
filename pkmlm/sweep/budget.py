"""Equal budgets: for how many steps each model of a grid is trained, where `equal` is set.

`train.steps` are those of the grid's first model; what they take of tokens, seconds or operations is what each other
model may take. So every run has a whole schedule, and none is read in the middle of it.
"""

from collections.abc import Mapping
from pathlib import Path
from statistics import median

from typing_extensions import TypedDict

from pkmlm.bench.rounds import Say
from pkmlm.bench.steps import BUSY, ESTIMATE_ROUNDS, ROUNDS, time_steps, timed_part
from pkmlm.console import warn
from pkmlm.cost import cost_of
from pkmlm.data.batches import mean_read
from pkmlm.errors import UserError
from pkmlm.files import read_json, write_json
from pkmlm.recipe.schema import Recipe, recipe_sha256
from pkmlm.runs.results import Number
from pkmlm.sweep.cells import Place
from pkmlm.sweep.grid import Grid

FILE = "budget.json"


class Paces(TypedDict):
    """DIR/budget.json: how long a step of each model takes, as a multiple of the first's, by the sha256 of the part of
    a recipe on which that time depends. What a sweep began with stays, so that a resumed one trains for as many steps.
    """

    timed_on: dict[str, str]
    busy_cores: Number
    first: str
    relative: dict[str, Number]


def busy_note(folder: Path) -> str:
    """A line about a sweep's equal seconds, if other programs ran while steps were timed; empty: none did."""
    file = folder / FILE
    busy = read_json(file, "the times of steps", exit_code=1, schema=Paces)["busy_cores"] if file.exists() else 0
    if busy <= BUSY:
        return ""
    return f"equal seconds: steps were timed while other programs used {busy:.1f} cores"


def relative_steps(
    recipes: Mapping[Place, Recipe],
    grid: Grid,
    folder: Path | None,
    say: Say,
    *,
    keep: bool = True,
    retime: bool = False,
    table_only: bool = False,
) -> dict[Place, float]:
    """How many steps each model takes for one of the grid's first, at an equal amount of what its place says.

    Args:
        recipes: with `model.vocab_size` set.
        folder: of the sweep, which has the times of steps after the first timing; None: there is none.
        say: called with a line on which round of a timing runs.
        keep: write what is timed into the folder.
        retime: time steps again, although the folder has their times.
        table_only: time nothing.

    Raises:
        UserError: the folder's times are damaged, those of another first model, or with `table_only` not there; (exit
            code 1) memory does not hold all models at once.
    """
    takes: dict[str, dict[Place, float]] = {"tokens": {}, "operations": {}, "seconds": {}}
    takes["tokens"] = {place: mean_read(recipe) for place, recipe in recipes.items()}
    parts = {
        place: timed_part(recipe, recipe.model.vocab_size or 0, takes["tokens"][place])
        for place, recipe in recipes.items()
    }
    for place, part in parts.items():
        per_token = cost_of(part, part.model.vocab_size or 0).flops_per_token
        takes["operations"][place] = per_token * part.train.batch_tokens
    first = next(iter(recipes))
    if "seconds" in grid.equal:
        keys = {place: recipe_sha256(part) for place, part in parts.items()}
        timed = {keys[place]: parts[place] for place in parts}
        relative = relative_seconds(timed, keys[first], folder, say, keep, retime, table_only)
        takes["seconds"] = {place: relative[key] for place, key in keys.items()}
    return {place: takes[place[0][-1]][first] / takes[place[0][-1]][place] for place in recipes}


def relative_seconds(
    recipes: Mapping[str, Recipe], first: str, folder: Path | None, say: Say, keep: bool, retime: bool, table_only: bool
) -> dict[str, float]:
    """The seconds of a step of each of `recipes` (by sha256) over those of `first`, timed in turn in one process.
    Models that were added to a grid are timed beside the first.
    """
    file = folder / FILE if folder else None
    known: dict[str, float] = {}
    busy = 0.0
    if file and file.exists() and not retime:
        kept = read_json(file, "the times of steps", exit_code=1, schema=Paces)
        if kept["first"] != first:
            message = f"{file}: the grid's first model is another now (expected the one from which steps were counted)"
            raise UserError(message, "set it back, or name another folder with -o")
        known, busy = kept["relative"], kept["busy_cores"]
    missing = {key: recipe for key, recipe in recipes.items() if key not in known}
    if missing and table_only:
        message = f"{file} lacks the steps of {len(missing)} of the grid's {len(recipes)} models"
        raise UserError(message, "leave --table out to time them")
    if missing:
        times = time_steps({first: recipes[first]} | missing, say, ROUNDS if keep else ESTIMATE_ROUNDS)
        if times["busy_cores"] > BUSY:
            again = "begin the sweep in another folder when the machine is idle"
            warn(f"steps were timed while other programs used {times['busy_cores']:.1f} cores: {again}")
        seconds = {key: median(found) for key, found in times["steps"].items()}
        known = {key: each / seconds[first] for key, each in seconds.items()} | known
        if file and keep:
            if file.exists() and not retime:  # another call may have timed them meanwhile, and its cells go by that
                known |= read_json(file, "the times of steps", exit_code=1, schema=Paces)["relative"]
            timed = {"timed_on": times["timed_on"], "busy_cores": max(busy, times["busy_cores"])}
            write_json(file, timed | {"first": first, "relative": known})
    return known
