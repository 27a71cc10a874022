"""What the training loop costs beside the arithmetic that it runs."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.nn.functional import cross_entropy

from pkmlm.data.batches import Batches
from pkmlm.data.corpus import Corpus
from pkmlm.model.transformer import Transformer, build_model
from pkmlm.recipe.schema import Recipe
from pkmlm.runtime.device import autocast
from pkmlm.runtime.log import TrainingLog
from pkmlm.runtime.rundir import RunDirectory
from pkmlm.runtime.signals import StopRequest
from pkmlm.train.loop import train
from pkmlm.train.optim import parameter_groups


@dataclass(frozen=True)
class LoopCost:
    """Seconds a step, one number a round, of the loop of `pkmlm train` and of a bare one over the same batches.

    Attributes:
        tokens: a step's.
    """

    loop: list[float]
    bare: list[float]
    tokens: int

    @property
    def ratio(self) -> float:
        """The median over rounds of loop / bare, each pair run back to back."""
        return statistics.median(a / b for a, b in zip(self.loop, self.bare, strict=True))


def loop_cost(
    recipe: Recipe, corpus: Corpus, device: torch.device, precision: str, rounds: int, steps: int
) -> LoopCost:
    """Time both loops in turn, after one round of each that is not counted.

    The loop of `pkmlm train` runs with its checks, metrics and log file, without validation and checkpoints; the bare
    one is forward, loss, backward, optimizer step, with the same optimizers at a constant rate and no clipping.
    """
    recipe = replace(recipe, eval=replace(recipe.eval, every=0), checkpoint=replace(recipe.checkpoint, every=0))
    batches = Batches(corpus, recipe.model.context, recipe.sequences, recipe.train.seed)
    vocab_size = recipe.model.vocab_size or corpus.vocab_size
    model = build_model(recipe, vocab_size, device)
    groups = parameter_groups(model, recipe)
    timed: dict[str, list[float]] = {"loop": [], "bare": []}
    for _ in range(rounds + 1):
        timed["loop"].append(seconds_of_loop(recipe, vocab_size, batches, device, precision, steps) / steps)
        with stopwatch(device) as seconds:
            bare_steps(model, [group.optimizer for group in groups], batches, recipe, precision, steps)
        timed["bare"].append(seconds() / steps)
    return LoopCost(timed["loop"][1:], timed["bare"][1:], recipe.train.batch_tokens)


def seconds_of_loop(
    recipe: Recipe, vocab_size: int, batches: Batches, device: torch.device, precision: str, steps: int
) -> float:
    """The wall time of `steps` steps of `train` in a temporary run, the last one's checkpoint left out."""
    model = build_model(recipe, vocab_size, device)
    stop = StopRequest()
    times: list[float] = []

    def last_step(*_: object) -> None:
        times.append(time.monotonic())

    model.register_forward_pre_hook(last_step)
    recipe = replace(recipe, train=replace(recipe.train, steps=steps + 1))
    with TemporaryDirectory() as folder:
        run = RunDirectory(folder)
        run.create(recipe)
        with TrainingLog(Path(folder), "bench", steps + 1, recipe.log, quiet=True) as log:
            train(run, recipe, model, batches, precision, None, log, stop)
    return times[-recipe.micro_batches] - times[0]


def bare_steps(
    model: Transformer,
    optimizers: list[torch.optim.Optimizer],
    batches: Batches,
    recipe: Recipe,
    precision: str,
    steps: int,
) -> None:
    """The training loop of a tutorial."""
    device = next(model.parameters()).device
    model.train()
    for step in range(1, steps + 1):
        for index in range(recipe.micro_batches):
            batch = batches.micro_batch(step, index, recipe.train.micro_batch)
            tokens_BT, targets_BT = (part.to(device) for part in batch)
            with autocast(device, precision):
                logits_BTV = model(tokens_BT)
            loss = cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten()) / recipe.micro_batches
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@contextmanager
def stopwatch(device: torch.device) -> Iterator[Callable[[], float]]:
    """Yield a function that gives, after the block, the seconds that it took (all work on the device done)."""
    ends: list[float] = []
    began = time.monotonic()
    yield lambda: ends[0] - began
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    ends.append(time.monotonic())
