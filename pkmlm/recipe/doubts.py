"""What a recipe may say and hardly means: worth a warning, no error."""

from pkmlm.recipe.schema import Recipe


def doubts(recipe: Recipe) -> list[str]:
    """What to warn of, a line each: learning rates that still rise when training ends."""
    optim, steps = recipe.optim, recipe.train.steps
    warmups: dict[str, int | None] = {"optim.warmup_steps": optim.warmup_steps}
    if recipe.model.memory.kind != "none":
        warmups["optim.values.warmup_steps"] = optim.values.warmup_steps
    if recipe.model.projections == "hash":
        warmups["optim.tables.warmup_steps"] = optim.tables.warmup_steps
    return [
        f"{key}: {warmup:,} for {steps:,} steps of training: the rate ends at {steps / warmup:.0%} of its peak"
        for key, warmup in warmups.items()
        if warmup is not None and warmup > steps
    ]
