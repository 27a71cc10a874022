"""What run.json says of the process that trains, and what a run that goes on in another process should know of it."""

import math
import platform
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pkmlm.device import DeviceSettings
    from pkmlm.recipe.schema import Recipe
    from pkmlm.runs.directory import RunDirectory
    from pkmlm.train.job import Job

DIVISION = ("train.micro_batch", "train.recompute", "parallel.")  # how a step is divided: the order of its additions
MEASURES = ("eval.tokens", "eval.recalibrate")
KEPT = ("versions", "commit", "device", "precision", "precision_reason", "ranks")


def circumstances(job: "Job", settings: "DeviceSettings", ranks: int) -> dict[str, Any]:
    """What run.json says of how this process was started."""
    import numpy as np
    import torch

    from pkmlm import __version__
    from pkmlm.device import name_of
    from pkmlm.model.cost import cost_of
    from pkmlm.runs.commit import source_commit

    cost = cost_of(job.recipe, job.vocab_size)
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
        "parameters": cost.as_json()["parameters"],
    }


def with_earlier(before: dict[str, Any], now: dict[str, Any], step: int) -> dict[str, Any]:
    """The circumstances to write, which keep those of the process that trained up to `step` where they were others."""
    changed = "versions" in before and any(before.get(key) != now[key] for key in KEPT)
    entry = {"until_step": step, **{key: before.get(key) for key in KEPT}}
    return {**now, "earlier": [*(before.get("earlier") or ()), *([entry] if changed else [])]}


def changes(before: dict[str, Any], now: dict[str, Any], earlier: "Recipe", recipe: "Recipe") -> list[str]:
    """What to warn of where a run, until now of the recipe `earlier`, goes on under circumstances in which arithmetic
    gives other bits, or validation another measure, or asks for what a resume does not do.
    """
    from pkmlm.recipe.dump import flatten, scalar_text

    libraries = ("torch", "numpy")  # numpy draws the order of the data
    known = {name: (before.get("versions") or {}).get(name) for name in libraries} | before
    changed = {name: now["versions"][name] for name in libraries}
    changed |= {key: now[key] for key in ("device", "precision", "ranks")}
    machine = [change(key, known[key], new) for key, new in changed.items() if known.get(key) not in (None, new)]
    old, asked = flatten(earlier), flatten(recipe)
    keys = {key: change(key, scalar_text(old[key]), scalar_text(new)) for key, new in asked.items() if new != old[key]}
    division = [text for key, text in keys.items() if key.startswith(DIVISION)]
    measures = [text for key, text in keys.items() if key in MEASURES]
    warnings = []
    if machine or division:
        more = sensitive(earlier, known.get("ranks") or now["ranks"], recipe, now["ranks"])
        text = "from here on numbers are not those of one undisturbed run, to the bit"
        warnings.append(f"{', '.join(machine + division)}: {text}{more}")
    if measures:
        warnings.append(f"{', '.join(measures)}: the best checkpoint and eval.patience go by both measures")
    falling = sorted(recipe.schedules & {"cosine", "linear"})
    if "train.steps" in keys and falling:
        text = (
            f"{' and '.join(falling)} rates follow the new length from here on, as no run of one length would have it"
        )
        warnings.append(f"{keys['train.steps']}: {text}")
    if "train.init_from" in keys:
        warnings.append(f"{keys['train.init_from']}: without effect, as the run goes on from its own checkpoint")
    return warnings


def change(key: str, old: Any, new: Any) -> str:
    return f"{key} was {old} and is now {new}"


def sensitive(earlier: "Recipe", ranks_before: int, recipe: "Recipe", ranks: int) -> str:
    """What of a recipe gives other numbers by more than rounding: the statistics of a batch norm are those of one
    forward on all ranks, and each forward of a rank draws its own dropout.
    """
    memory = recipe.model.memory
    before, now = (earlier.train.micro_batch, ranks_before), (recipe.train.micro_batch, ranks)
    batch = memory.kind != "none" and memory.query_norm == "batch" and math.prod(before) != math.prod(now)
    names = ["query_norm: batch"] * batch + ["dropout"] * (recipe.model.dropout > 0 and before != now)
    return f", and for {' and '.join(names)} by more than rounding" if names else ""


def lost_metrics(run: "RunDirectory") -> list[str]:
    """What to warn of where metrics.jsonl lacks steps that the latest checkpoint has taken."""
    steps = run.steps()
    last = steps[-1] if steps else 0
    logged = {line["step"] for line in run.metrics() if line["event"] == "train" and 0 < line["step"] <= last}
    if len(logged) == last:
        return []
    rest = "curves have a gap, and the best checkpoint and eval.patience go by what is left"
    return [f"metrics.jsonl lacks {last - len(logged):,} of {last:,} steps: {rest}"]
