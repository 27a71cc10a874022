"""What deserves a warning in a valid recipe: learning rates that never peak, random weights kept, padding counted."""

from pkmlm.recipe.schema import Recipe


def warnings(recipe: Recipe, *, counted: bool = True) -> list[str]:
    """Warnings about what is valid but probably not meant, one line each.

    Args:
        counted: whether `train.steps` is what training takes; with `train.epochs` it is not until the tokens are known.
    """
    return (warmup_warnings(recipe) if counted else []) + random_weights_warning(recipe) + padding_warning(recipe)


def padding_warning(recipe: Recipe) -> list[str]:
    """A warning if statistics of a batch are those of its padding, too, which evaluation does not have."""
    found = [name for name, memory in recipe.model.memories.items() if memory.keeps_statistics]
    if recipe.data.pack or not found:
        return []
    key = f"model.memories.{found[0]}.query_norm"
    return [f"{key}: batch counts the padding of data.pack: false in its statistics; rms has none"]


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
    steps = recipe.train.steps
    memories = recipe.model.memories.items()
    own = {f"model.memories.{name}.optim" for name, each in memories if each.table_optim.warmup_steps is not None}
    warmups = {
        f"{prefix if prefix in own else 'optim'}.warmup_steps": group.warmup_steps or 0
        for prefix, group in recipe.optim_groups.items()
    }
    training = "1 step" if steps == 1 else f"{steps:,} steps"
    found = [
        f"{key}: {warmup:,} for {training} of training: the learning rate ends at {steps / warmup:.0%} of its peak"
        for key, warmup in warmups.items()
        if warmup > steps
    ]
    decay, longest = recipe.optim.decay_steps, max(warmups.values())
    if longest <= steps < longest + decay and decay:
        what = f"{decay:,} for {training} of training, of which {longest:,} are warm-up"
        found.append(f"optim.decay_steps: {what}: the learning rate falls before it reaches its peak")
    return found
