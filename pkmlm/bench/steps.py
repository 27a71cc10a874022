"""What one training step of a run takes, in tokens, operations or seconds, for curves and tables over these.

Seconds are timed: a step of each recipe in turn, in one process on an otherwise idle machine. The times that runs have
logged cannot be compared: each run was trained by itself, perhaps beside other work.
"""

from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import psutil

from pkmlm.bench.models import random_training
from pkmlm.bench.rounds import Say, check_room, interleaved
from pkmlm.console import warn
from pkmlm.cost import cost_of
from pkmlm.data.batches import cut_length
from pkmlm.data.tokenizer import Tokenizer
from pkmlm.device import default_device, give_back, machine, select_device
from pkmlm.errors import UserError, memory_errors
from pkmlm.files import read_json, write_json
from pkmlm.recipe.schema import Checkpoint, Data, Eval, Log, Parallel, Recipe, named_values, recipe_sha256
from pkmlm.report.equal import Over
from pkmlm.runs.directory import RunDirectory
from pkmlm.runs.results import STEPS, StepTimes
from pkmlm.train.step import queue_step

ROUNDS = 7
ESTIMATE_ROUNDS = 2  # of a dry run
FEWER = "compare fewer runs, or compare over tokens or operations"  # the hint if memory does not hold all models
BUSY = 0.5  # cores that other programs may use before a timing gets a warning
RATES = ("lr", "lr_scale", "schedule", "times", "warmup_steps", "final_lr", "decay_steps")  # none changes a step's time


def step_amounts(over: Over, runs: Mapping[str, RunDirectory], say: Say, retime: bool = False) -> dict[str, float]:
    """What one step of each run takes.

    Tokens are those that it reads on average. Operations are the multiply-adds of its forward (`pkmlm.cost`). Seconds
    are the median of `time_steps`, or of an earlier call of it that timed all of these recipes together, on this
    machine; its times are kept in each run's steps.json.

    Args:
        runs: by name.
        say: called with a line on which round of a timing runs.
        retime: time steps again.

    Raises:
        UserError: a recipe or tokenizer cannot be read; (exit code 1) memory does not hold all models together.
    """
    if over == "tokens":
        return {name: run.step_tokens() for name, run in runs.items()}
    recipes = {name: timed_part(run.recipe(), vocab_size_in(run), run.step_tokens()) for name, run in runs.items()}
    keys = {name: recipe_sha256(recipe) for name, recipe in recipes.items()}
    distinct = {key: recipes[name] for name, key in keys.items()}
    if over == "operations":
        costs = {key: cost_of(one, one.model.vocab_size or 0) for key, one in distinct.items()}
        return {name: costs[key].flops_per_token * recipes[name].train.batch_tokens for name, key in keys.items()}
    times = None if retime else kept_times(runs, set(distinct))
    if times is None:
        times = time_steps(distinct, say)
        for run in runs.values():
            try:
                write_json(run.path / STEPS, times)
            except UserError as error:  # such as in another user's folder: the times are still valid
                warn(f"the times of steps are not kept: {error.message}")
    if times["busy_cores"] > BUSY:
        again = f"delete {STEPS} in the runs to time them again when the machine is idle"
        warn(f"steps were timed while other programs used {times['busy_cores']:.1f} cores: {again}")
    return {name: median(times["steps"][key]) for name, key in keys.items()}


def vocab_size_in(run: RunDirectory) -> int:
    """That of a run's recipe or, where that is silent, of its tokenizer."""
    return run.recipe().model.vocab_size or Tokenizer.load(run.tokenizer_file).size


def timed_part(recipe: Recipe, vocab_size: int, step_tokens: float) -> Recipe:
    """A recipe with only what a step's time depends on: runs that differ only in the rest are timed once. All steps are
    timed in one process, even those of a run that several ranks trained.

    Args:
        step_tokens: that a step reads on average. Where they are fewer than a batch's, as each sequence ends with its
            document, all sequences are as long as the mean document.
    """
    length = cut_length(step_tokens / recipe.sequences, recipe.model.context)
    memories = {name: at_default_rates(memory) for name, memory in recipe.model.memories.items()}
    return replace(
        recipe,
        name="",
        data=Data(),
        model=replace(recipe.model, vocab_size=vocab_size, memories=memories, context=length),
        optim=at_default_rates(recipe.optim),
        train=replace(
            recipe.train, steps=1, epochs=None, seed=1, init_from=None, batch_tokens=recipe.sequences * length
        ),
        eval=Eval(),
        checkpoint=Checkpoint(),
        log=Log(),
        parallel=Parallel(),
    )


def at_default_rates(section: Any) -> Any:
    """A section with the default learning rates and schedules; so are the sections within it."""
    default, values = type(section)(), dict(named_values(section))
    rates = {name: getattr(default, name) for name in RATES if name in values}
    inner = {name: at_default_rates(value) for name, value in values.items() if is_dataclass(value)}
    return replace(section, **rates, **inner)


def kept_times(runs: Mapping[str, RunDirectory], keys: set[str]) -> StepTimes | None:
    """The times of an earlier call on this machine in which all recipes of `keys` took turns; None: there is none."""
    for run in runs.values():
        if (file := run.path / STEPS).exists():
            try:
                times: StepTimes = read_json(file, "the times of steps", schema=StepTimes)
            except UserError as error:
                warn(f"{error.message}; steps are timed again")
                continue
            if keys <= times["steps"].keys() and times["timed_on"] == machine():
                return times
    return None


def time_steps(recipes: Mapping[str, Recipe], say: Say, rounds: int = ROUNDS) -> StepTimes:
    """Time the steps of recipes, all in turn: whole optimizer steps as `pkmlm train` takes them, from fresh weights, on
    random tokens. The models are gone afterwards, and so is what they held of a GPU, which a sweep's cells need.

    Args:
        recipes: by key, with `model.vocab_size` set.

    Raises:
        UserError: (exit code 1) memory does not hold all models together.
    """
    device = default_device()
    needed = sum(sum(cost_of(one, one.model.vocab_size or 0).training.values()) for one in recipes.values())
    check_room("to time steps in turn, these models", needed, FEWER)
    busy = psutil.cpu_percent(0.5) / 100 * (psutil.cpu_count() or 1)
    with memory_errors("memory does not hold all models at once, which are timed in turn", FEWER):
        states = {
            key: random_training(recipe, select_device(recipe.train.precision).precision)
            for key, recipe in recipes.items()
        }
        times = interleaved({key: partial(queue_step, state, 1) for key, state in states.items()}, rounds, device, say)
    del states
    give_back(device)
    return {
        "timed_on": machine(),
        "busy_cores": round(busy, 2),
        "steps": {key: timing.seconds for key, timing in times.items()},
    }
