"""Parameter groups: which parameters move together, how fast, and how far at most."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from pkmlm.model.memory.values import Values
from pkmlm.recipe.schema import Recipe
from pkmlm.train.row_adam import RowAdam


@dataclass(frozen=True)
class Group:
    """Parameters with one optimizer, one learning rate over time, and one clipping norm.

    Attributes:
        name: "dense", "values" (of memories) or "tables" (of hash layers).
        parameters: by their path in the model.
        rate: the learning rate of a step (from 1).
        clip: largest norm of the group's gradient; 0: no clipping.
    """

    name: str
    parameters: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    rate: Callable[[int], float]
    clip: float

    def gradient_norm(self) -> Tensor:
        """The 2-norm of the group's gradient, 0-d; sparse gradients are coalesced on the way."""
        self.coalesce()
        gradients = [dense_part(p.grad) for p in self.parameters.values() if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients)

    def coalesce(self) -> None:
        """Sum the rows that sparse gradients hold several times, so that each row stands in them once."""
        for parameter in self.parameters.values():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()

    def scale_gradient(self, factor: float) -> None:
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                dense_part(parameter.grad).mul_(factor)

    def step(self, step: int) -> None:
        """Take one optimizer step at the rate of `step`."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(step)
        self.optimizer.step()


def dense_part(gradient: Tensor) -> Tensor:
    """The stored numbers of a gradient: itself, or the rows of a coalesced sparse one (shared, not copied)."""
    return gradient._values() if gradient.is_sparse else gradient


def learning_rate(step: int, *, peak: float, schedule: str, warmup_steps: int, steps: int, final: float) -> float:
    """The learning rate of a step (from 1), after a linear warm-up from 0.

    inverse-sqrt: peak * min(t/w, sqrt(w/t)) (Vaswani et al. 2017, with the peak as scale); cosine and linear: from the
    peak to `final` * peak at the last step; constant: the peak.
    """
    warm = min(1.0, step / warmup_steps) if warmup_steps else 1.0
    if warm < 1 or schedule == "constant":
        return peak * warm
    if schedule == "inverse-sqrt":
        return peak * math.sqrt(warmup_steps / step)
    progress = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    fall = progress if schedule == "linear" else (1 - math.cos(math.pi * progress)) / 2
    return peak * (1 - (1 - final) * fall)


def parameter_groups(model: nn.Module, recipe: Recipe) -> list[Group]:
    """The groups of a model that have parameters, in the order dense, values, tables."""
    tables = {f"{path}.weight_KD": module.group for path, module in model.named_modules() if isinstance(module, Values)}
    named: dict[str, dict[str, nn.Parameter]] = {"dense": {}, "values": {}, "tables": {}}
    for name, parameter in model.named_parameters():
        named[tables.get(name, "dense")][name] = parameter
    builders = {"dense": dense_group, "values": values_group, "tables": tables_group}
    return [builders[group](parameters, recipe) for group, parameters in named.items() if parameters]


def dense_group(parameters: dict[str, nn.Parameter], recipe: Recipe) -> Group:
    """All but values and tables: AdamW, with decay on matrices alone (not on biases, norms or sub-keys)."""
    optim = recipe.optim
    decayed = [p for name, p in parameters.items() if p.ndim == 2]
    others = [p for name, p in parameters.items() if p.ndim != 2]
    split = [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(split, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
    rate = rate_of(recipe, optim.lr, optim.schedule, optim.warmup_steps)
    return Group("dense", parameters, optimizer, rate, optim.clip)


def values_group(parameters: dict[str, nn.Parameter], recipe: Recipe) -> Group:
    """Memory values: their own rate and schedule (Lample et al. 2019, sec. 4.3: 1e-3, constant)."""
    values, eps = recipe.optim.values, recipe.optim.eps
    optimizer: torch.optim.Optimizer
    if values.optimizer == "row-adam":
        optimizer = RowAdam(parameters.values(), values.lr, values.betas, eps, values.weight_decay)
    else:
        decay = values.weight_decay
        optimizer = torch.optim.AdamW(parameters.values(), values.lr, values.betas, eps, decay, fused=True)
    rate = rate_of(recipe, values.lr, values.schedule, values.warmup_steps)
    return Group("values", parameters, optimizer, rate, values.clip)


def tables_group(parameters: dict[str, nn.Parameter], recipe: Recipe) -> Group:
    """Hash tables: dense Adam (nearly all buckets are read in a step), at a multiple of the dense rate."""
    optim, tables = recipe.optim, recipe.optim.tables
    peak, decay = optim.lr * tables.lr_scale, tables.weight_decay
    betas = tables.betas or optim.betas
    optimizer = torch.optim.AdamW(parameters.values(), peak, betas, optim.eps, decay, fused=True)
    warmup_steps = optim.warmup_steps if tables.warmup_steps is None else tables.warmup_steps
    rate = rate_of(recipe, peak, tables.schedule or optim.schedule, warmup_steps)
    return Group("tables", parameters, optimizer, rate, tables.clip)


def rate_of(recipe: Recipe, peak: float, schedule: str, warmup_steps: int) -> Callable[[int], float]:
    """The learning rate of a group as a function of the step."""
    return partial(
        learning_rate,
        peak=peak,
        schedule=schedule,
        warmup_steps=warmup_steps,
        steps=recipe.train.steps,
        final=recipe.optim.final_lr,
    )
