"""What run.json says of the process that trains, and what a run that goes on in another process should know of it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from pkmlm.data.tokenizer import Tokenizer
    from pkmlm.recipe.schema import Recipe
    from pkmlm.runtime.rundir import RunDirectory

KEPT = ("versions", "commit", "device", "precision", "precision_reason", "ranks")


def circumstances(
    recipe: "Recipe", tokenizer: "Tokenizer", device: "torch.device", precision: str, reason: str, ranks: int
) -> dict[str, Any]:
    """What run.json says of how this process was started."""
    import platform
    import sys

    import torch

    from pkmlm import __version__
    from pkmlm.model.cost import cost_of
    from pkmlm.runtime.device import name_of
    from pkmlm.runtime.rundir import source_commit

    cost = cost_of(recipe, recipe.model.vocab_size or tokenizer.size)
    return {
        "argv": sys.argv[1:],
        "versions": {"pkmlm": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "commit": source_commit(),
        "device": name_of(device),
        "precision": precision,
        "precision_reason": reason,
        "ranks": ranks,
        "parameters": cost.as_json()["parameters"],
    }


def with_earlier(before: dict[str, Any], now: dict[str, Any], step: int) -> dict[str, Any]:
    """The circumstances to write, which keep those of the process that trained up to `step` where they were others."""
    changed = "versions" in before and any(before.get(key) != now[key] for key in KEPT)
    entry = {"until_step": step, **{key: before.get(key) for key in KEPT}}
    return {**now, "earlier": [*before.get("earlier", []), *([entry] if changed else [])]}


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What to warn of where a run goes on under circumstances in which arithmetic gives other bits."""
    pairs = {
        "torch": (before.get("versions", {}).get("torch"), now["versions"]["torch"]),
        **{key: (before.get(key), now[key]) for key in ("device", "precision", "ranks")},
    }
    told = [f"{what} was {old} and is now {new}" for what, (old, new) in pairs.items() if old not in (None, new)]
    return [f"{', '.join(told)}: from here on numbers are not those of one undisturbed run, to the bit"] if told else []


def lost_metrics(run: "RunDirectory") -> list[str]:
    """What to warn of where metrics.jsonl lacks steps that the latest checkpoint has taken."""
    steps = run.steps()
    last = steps[-1] if steps else 0
    logged = {line["step"] for line in run.metrics() if line["event"] == "train" and 0 < line["step"] <= last}
    if len(logged) == last:
        return []
    rest = "curves have a gap, and the best checkpoint and eval.patience go by what is left"
    return [f"metrics.jsonl lacks {last - len(logged):,} of {last:,} steps: {rest}"]
