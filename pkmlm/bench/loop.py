"""What the training loop costs beside the arithmetic that it runs."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from pkmlm.bench.rounds import Overhead, in_rounds, synchronize
from pkmlm.data.batches import Batches
from pkmlm.device import DeviceSettings, autocast
from pkmlm.model.transformer import Transformer, build_model
from pkmlm.recipe.schema import Log, Recipe
from pkmlm.runs.directory import RunDirectory
from pkmlm.signals import StopRequest
from pkmlm.train.job import Job
from pkmlm.train.log import TrainingLog
from pkmlm.train.loop import Training
from pkmlm.train.optim import parameter_groups
from pkmlm.train.state import TrainState


def loop_cost(job: Job, settings: DeviceSettings, rounds: int, steps: int, say: Callable[[str], None]) -> Overhead:
    """Time a step of the loop of `pkmlm train` and of a bare one over the same batches; each round of each starts from
    a new model.

    The loop of `pkmlm train` runs with its checks, metrics and log file, without validation; the one checkpoint that it
    saves, at the end, is not timed. The bare one is forward, loss, backward, optimizer step, with the same optimizers
    at a constant rate and no clipping.
    """
    # Two more steps than are timed: the first allocates, and the last is only begun.
    recipe = replace(
        job.recipe,
        train=replace(job.recipe.train, steps=steps + 2),
        eval=replace(job.recipe.eval, every=0),
        checkpoint=replace(job.recipe.checkpoint, every=0),
        log=Log(),  # to no service
    )
    batches = Batches.of(job.corpus, recipe)
    first, last = recipe.micro_batches(), -recipe.micro_batches()

    def seconds_a_step(loop: Callable[[Transformer, Batches, Recipe, str], None]) -> float:
        model = build_model(recipe, job.vocab_size, settings.device)
        begun = note_forwards(model, settings.device)
        loop(model, batches, recipe, settings.precision)
        return (begun[last] - begun[first]) / steps

    times = in_rounds({loop: partial(seconds_a_step, loop) for loop in (full_loop, bare_loop)}, rounds, say)
    return Overhead(times[full_loop], times[bare_loop], recipe.train.batch_tokens)


def note_forwards(model: Transformer, device: torch.device) -> list[float]:
    """A list that gets the time at which each forward of the model begins, the device's earlier work being done."""
    begun: list[float] = []

    def note(*_: object) -> None:
        synchronize(device)
        begun.append(time.perf_counter())

    model.embedding.register_forward_pre_hook(note)  # the first of its modules to run
    return begun


def full_loop(model: Transformer, batches: Batches, recipe: Recipe, precision: str) -> None:
    """`Training`, in a run directory that is thrown away."""
    with TemporaryDirectory() as folder:
        run = RunDirectory(folder)
        run.create(recipe)
        with TrainingLog(Path(folder), "bench", recipe.train.steps, recipe.log, quiet=True) as log:
            Training(run, TrainState(recipe, model, batches, precision), None, log, StopRequest()).train()


def bare_loop(model: Transformer, batches: Batches, recipe: Recipe, precision: str) -> None:
    """The training loop of a tutorial."""
    device = next(model.parameters()).device
    optimizers = [group.optimizer for group in parameter_groups(model, recipe)]
    model.train()
    for step in range(1, recipe.train.steps + 1):
        for index in range(recipe.micro_batches()):
            batch = batches.micro_batch(step, index, recipe.train.micro_batch)
            tokens_BT, targets_BT = (part.to(device) for part in batch)
            with autocast(device, precision):
                loss = model.loss(tokens_BT, targets_BT, 1 / (targets_BT.numel() * recipe.micro_batches()))
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
