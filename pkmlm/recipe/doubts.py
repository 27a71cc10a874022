"""What a recipe may say and hardly means: worth a warning, no error."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from pkmlm.recipe.check import has_ffn
from pkmlm.recipe.dump import flatten, scalar_text
from pkmlm.recipe.load import parse_override
from pkmlm.recipe.nodes import Node, parse, yaml_text
from pkmlm.recipe.schema import Recipe


def doubts(recipe: Recipe) -> list[str]:
    """What to warn of, a line each: learning rates that still rise when training ends."""
    optim, steps = recipe.optim, recipe.train.steps
    warmups: dict[str, int | None] = {"optim.warmup_steps": optim.warmup_steps}
    if recipe.model.memory.kind != "none":
        warmups["optim.values.warmup_steps"] = optim.values.warmup_steps
    if recipe.model.projections == "hash":
        warmups["optim.tables.warmup_steps"] = optim.tables.warmup_steps
    training = f"{steps:,} step{'s' * (steps > 1)} of training"
    return [
        f"{key}: {warmup:,} for {training}: the rate ends at {steps / warmup:.0%} of its peak"
        for key, warmup in warmups.items()
        if warmup is not None and warmup > steps
    ]


def idle_keys(recipe: Recipe, path: str | Path, overrides: Iterable[str] = ()) -> list[str]:
    """What to warn of, a line each: keys that the user has set and that do nothing, as another key has it.

    Those of the file itself and of the overrides count, not what it inherits; nor a key that stands beside the one that
    makes it idle, or before it: `model.memory.kind: none` over a memory's recipe is how its dense twin is written.

    Args:
        recipe: what `load_recipe` has made of this file and these overrides.
    """
    values = flatten(recipe)
    layers = [parse(yaml_text(Path(path)), str(path)), *map(parse_override, overrides)]
    given = {key: number for number, tree in enumerate(layers, 1) for key in keys_of(tree)}
    idle: dict[str, list[str]] = {}
    for key, switch in switches(recipe).items():
        if key != switch and given.get(key, 0) > given.get(switch, 0):
            idle.setdefault(switch, []).append(key)
    return [
        f"{', '.join(keys)}: without effect, as {switch} is {scalar_text(values[switch])}"
        for switch, keys in idle.items()
    ]


def keys_of(tree: Node, prefix: str = "") -> Iterator[str]:
    """The dotted keys of a tree's leaves."""
    if isinstance(tree.value, dict):
        for key, child in tree.value.items():
            yield from keys_of(child, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix


def switches(recipe: Recipe) -> dict[str, str]:
    """The keys that do nothing in a recipe, and the key whose value makes them idle."""
    values = flatten(recipe)
    idle: dict[str, tuple[str, ...]] = {}
    if values["model.memory.kind"] == "none":
        idle["model.memory.kind"] = ("model.memory.", "optim.keys.", "optim.values.", "eval.recalibrate")
    elif values["model.memory.query_norm"] != "batch":
        idle["model.memory.query_norm"] = ("eval.recalibrate",)
    dense = ("model.hash.", "optim.tables.")
    hashed = ("model.ffn_dim", "model.activation", "model.bias")
    idle["model.projections"] = hashed if values["model.projections"] == "hash" else dense
    if not has_ffn(recipe.model):
        of_ffn = ("model.ffn_dim", "model.activation", "model.hash.extra_bits", "model.hash.activation")
        idle["model.memory.layers"] = of_ffn
    if values["model.positions"] != "rotary":
        idle["model.positions"] = ("model.rotary_fraction",)
    sizes = {"performer": ("features",), "linformer": ("block", "rank")}
    others = [name for kind, names in sizes.items() if kind != values["model.attention"] for name in names]
    idle["model.attention"] = tuple(f"model.attention_options.{name}" for name in others)
    if not {"cosine", "linear"} & recipe.schedules:
        idle["optim.schedule"] = ("optim.final_lr",)
    if values["eval.every"] == 0:
        idle["eval.every"] = ("eval.patience",)
    return {key: switch for switch, keys in idle.items() for key in values if key.startswith(keys)}
