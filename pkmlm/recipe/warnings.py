"""What deserves a warning in a valid recipe: a learning rate that still rises at the end, keys without effect."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from pkmlm.recipe.constraints import has_ffn, memory_layers
from pkmlm.recipe.nodes import Node, parse, parse_override, yaml_text
from pkmlm.recipe.schema import Recipe, flatten, scalar_text


def warnings(recipe: Recipe, path: str | Path, overrides: Iterable[str] = ()) -> list[str]:
    """Warnings about what is valid but probably not meant, one line each.

    Args:
        recipe: what `load_recipe` returns for this file and these overrides.
    """
    return warmup_warnings(recipe) + random_weights_warning(recipe) + unused_key_warnings(recipe, path, overrides)


def random_weights_warning(recipe: Recipe) -> list[str]:
    """A warning if fine-tuning begins with a model that was never trained."""
    if recipe.train.init_from is not None:
        return []
    if recipe.train.only != "all":
        found = f"train.only: {recipe.train.only} without train.init_from"
        return [f"{found}: all other weights stay at their random initial values"]
    if recipe.finetune.slots in ("tfidf", "kl"):
        return ["finetune.background without train.init_from: it was counted on another model, with slots of its own"]
    return []


def warmup_warnings(recipe: Recipe) -> list[str]:
    """Warm-ups and decays that are too long for the learning rate to reach its peak."""
    values, steps, unused = flatten(recipe), recipe.train.steps, unused_keys(recipe)
    keys = (f"optim.{group}warmup_steps" for group in ("", "values.", "tables.", "ngram."))
    warmups = {key: values[key] for key in keys if key not in unused}
    training = "1 step" if steps == 1 else f"{steps:,} steps"
    found = [
        f"{key}: {warmup:,} for {training} of training: the learning rate ends at {steps / warmup:.0%} of its peak"
        for key, warmup in warmups.items()
        if warmup is not None and warmup > steps
    ]
    decay, longest = recipe.optim.decay_steps, max(warmup or 0 for warmup in warmups.values())
    if longest <= steps < longest + decay and decay:
        what = f"{decay:,} for {training} of training, of which {longest:,} are warm-up"
        found.append(f"optim.decay_steps: {what}: the learning rate falls before it reaches its peak")
    return found


def unused_key_warnings(recipe: Recipe, path: str | Path, overrides: Iterable[str] = ()) -> list[str]:
    """Warnings about keys that the file or the overrides set, but that the value of another key leaves without effect.

    Keys that the file inherits do not count, nor does a key set together with the one that disables it, or before it:
    `model.memory.kind: none` over a memory's recipe is how its dense twin is written.
    """
    values = flatten(recipe)
    layers = [parse(yaml_text(Path(path)), str(path)), *map(parse_override, overrides)]
    set_in = {key: number for number, tree in enumerate(layers, 1) for key in leaf_keys(tree)}
    unused: dict[str, list[str]] = {}
    for key, switch in unused_keys(recipe).items():
        if key != switch and set_in.get(key, 0) > set_in.get(switch, 0):
            unused.setdefault(switch, []).append(key)
    return [
        f"{', '.join(keys)}: without effect, as {switch} is {scalar_text(values[switch])}"
        for switch, keys in unused.items()
    ]


def leaf_keys(tree: Node, prefix: str = "") -> Iterator[str]:
    """The dotted keys of a tree's leaves."""
    if isinstance(tree.value, dict):
        for key, child in tree.value.items():
            yield from leaf_keys(child, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix


def unused_keys(recipe: Recipe) -> dict[str, str]:
    """The keys that have no effect in a recipe, and the key whose value disables them."""
    model = recipe.model
    disabled: dict[str, list[str]] = {}  # switch -> keys, or beginnings of keys
    if model.memory.kind == "none":
        disabled["model.memory.kind"] = ["model.memory.", "optim.keys.", "optim.values.", "eval.recalibrate"]
    elif model.memory.query_norm != "batch":
        disabled["model.memory.query_norm"] = ["eval.recalibrate"]
    if model.memory.kind not in ("none", "peer"):
        disabled["model.memory.kind"] = ["model.memory.expert"]
    if model.projections == "hash":
        disabled["model.projections"] = ["model.ffn_dim", "model.activation", "model.bias"]
    else:
        disabled["model.projections"] = ["model.hash.", "optim.tables."]
    if not model.ngram.layers:
        rest = [key for key in flatten(recipe) if key.startswith("model.ngram.") and key != "model.ngram.layers"]
        disabled["model.ngram.layers"] = [*rest, "optim.ngram."]
    elif model.ngram.fusion == "add":
        disabled["model.ngram.fusion"] = ["model.ngram.conv"]
    if not has_ffn(model):
        ffn = ["model.ffn_dim", "model.activation", "model.hash.extra_bits", "model.hash.activation"]
        disabled["model.memory.layers"] = ffn
    if len(memory_layers(model)) == 1:
        disabled.setdefault("model.memory.layers", []).append("model.memory.share_values")
    if model.positions != "rotary":
        disabled["model.positions"] = ["model.rotary_fraction"]
    options = {"features": "performer", "block": "linformer", "rank": "linformer"}
    disabled["model.attention"] = [
        f"model.attention_options.{name}" for name, kind in options.items() if kind != model.attention
    ]
    decays = recipe.optim.decay_steps > 0
    if model.memory.kind != "none":
        relative = recipe.optim.values.schedule == "relative"
        idle = ["lr", "warmup_steps"] if relative else ["times"]
        falls = recipe.optim.values.schedule in ("cosine", "linear") or (decays and not relative)
        idle += [] if falls else ["final_lr"]
        disabled["optim.values.schedule"] = [f"optim.values.{name}" for name in idle]
    if not ({"cosine", "linear"} & recipe.schedules or decays):
        switch = "optim.schedule" if "optim" in recipe.optim_groups else "optim.values.schedule"
        disabled.setdefault(switch, []).append("optim.final_lr")
    if recipe.optim.values.optimizer == "row-sgd":
        disabled["optim.values.optimizer"] = ["optim.values.betas", "optim.values.eps"]
    if recipe.train.only == "values":
        frozen = ["betas", "weight_decay", "clip", "keys.", "tables.", "ngram."]
        frozen += [] if recipe.optim.values.schedule == "relative" else ["lr", "schedule", "warmup_steps"]
        disabled["train.only"] = [f"optim.{name}" for name in frozen]
    if recipe.finetune.slots == "all":
        disabled["finetune.slots"] = ["finetune.top", "finetune.background"]
    elif recipe.finetune.slots == "count":
        disabled["finetune.slots"] = ["finetune.background"]
    if recipe.eval.every == 0:
        disabled["eval.every"] = ["eval.patience"]
    return {key: switch for switch, keys in disabled.items() for key in flatten(recipe) if key.startswith(tuple(keys))}
