"""Parameter groups: which parameters move together, how fast, and how far at most."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from pkmlm.distributed import Ranks
from pkmlm.kernels.row_gradient import RowGradient
from pkmlm.model.memory.key_memory import KeyMemory
from pkmlm.model.memory.values import Values, tables_of
from pkmlm.recipe.schema import Recipe, TablesOptim, ValuesOptim
from pkmlm.train.row_adam import RowAdam
from pkmlm.train.shard import is_shard, local_part


@dataclass(frozen=True)
class Group:
    """Parameters with one optimizer, one learning rate over time, and one clipping norm.

    Attributes:
        name: "dense", "values" (of memories) or "tables" (of hash layers).
        parameters: by their path in the model.
        row_gradients: of those parameters that are tables of rows.
        rate: the learning rate of a step (from 1).
        clip: largest norm of the group's gradient; 0: no clipping.
    """

    name: str
    parameters: dict[str, nn.Parameter]
    row_gradients: list[RowGradient]
    optimizer: torch.optim.Optimizer
    rate: Callable[[int], float]
    clip: float

    def own_square(self, ranks: Ranks) -> Tensor:
        """This rank's share of the squared 2-norm of the group's gradient, 0-d, float64: what all ranks hold counts on
        the first, a rank's shards and columns of tables on that rank (of the first of the groups that hold the same).
        """
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        own = [local_part(grad) for grad in grads if is_shard(grad) or ranks.world.rank == 0]
        norms = [torch.stack(torch._foreach_norm(own))] if own else []
        norms += [gradient.norm() for gradient in self.row_gradients if gradient and ranks.data.rank == 0]
        device = next(iter(self.parameters.values())).device
        return sum((norm.double().square().sum() for norm in norms), torch.zeros((), device=device).double())

    def scale_gradient(self, factor: float) -> None:
        grads = [local_part(p.grad) for p in self.parameters.values() if p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, factor)
        for gradient in self.row_gradients:
            gradient.scale *= factor

    def unscale(self, scaler: torch.amp.GradScaler) -> None:
        """Undo the loss scale of an enabled scaler."""
        scaler.unscale_(self.optimizer)
        for gradient in self.row_gradients:
            gradient.scale /= scaler.get_scale()

    def step(self, step: int) -> None:
        """Take one optimizer step at the rate of `step`."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(step) * group.get("lr_scale", 1.0)
        self.optimizer.step()


def learning_rate(step: int, *, peak: float, schedule: str, warmup_steps: int, steps: int, final: float) -> float:
    """The learning rate of a step (from 1), after a linear warm-up from 0.

    inverse-sqrt: peak * min(t/w, sqrt(w/t)) (Vaswani et al. 2017, with the peak as scale); cosine and linear: from the
    peak to `final` * peak at the last step; constant: the peak.

    Args:
        peak: the rate after the warm-up of `warmup_steps` steps (0: none).
        schedule: "inverse-sqrt" (which needs a warm-up), "cosine", "linear" or "constant".
        steps: of the whole run.
        final: the last rate, as a share of the peak.
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
    tables = tables_of(model)
    dense = {name: parameter for name, parameter in model.named_parameters() if name not in tables}
    groups = [dense_group(dense, keys_of(model), recipe)]
    for name, build in (("values", values_group), ("tables", tables_group)):
        chosen = {path: module for path, module in tables.items() if module.group == name}
        if chosen:
            groups.append(build(chosen, recipe))
    return groups


def keys_of(model: nn.Module) -> set[nn.Parameter]:
    """The sub-keys and flat keys: what a memory with keys has of its own."""
    memories = [module for module in model.modules() if isinstance(module, KeyMemory)]
    return {key for memory in memories for key in memory.parameters(recurse=False)}


def dense_group(parameters: dict[str, nn.Parameter], keys: set[nn.Parameter], recipe: Recipe) -> Group:
    """All but values and tables: AdamW, with decay on matrices alone (not on biases, norms or sub-keys), and sub-keys
    at a rate of their own."""
    optim = recipe.optim
    alike: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
    for parameter in parameters.values():
        decay = optim.weight_decay if parameter.ndim == 2 else 0.0
        scale = optim.keys.lr_scale if parameter in keys else 1.0
        alike.setdefault((decay, scale, is_shard(parameter)), []).append(parameter)  # no fused step takes both kinds
    split = [{"params": some, "weight_decay": decay, "lr_scale": scale} for (decay, scale, _), some in alike.items()]
    optimizer = torch.optim.AdamW(split, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
    rate = rate_of(recipe, optim.lr, optim.schedule, optim.warmup_steps)
    return Group("dense", parameters, [], optimizer, rate, optim.clip)


def values_group(tables: dict[str, Values], recipe: Recipe) -> Group:
    """Memory values: their own rate and schedule (Lample et al. 2019, sec. 4.3: 1e-3, constant)."""
    values = recipe.optim.values
    rate = rate_of(recipe, values.lr, values.schedule, values.warmup_steps)
    return row_group("values", tables, recipe, values, values.lr, values.betas, rate)


def tables_group(tables: dict[str, Values], recipe: Recipe) -> Group:
    """Hash tables, at a multiple of the dense rate; nearly all of their rows are read in a step."""
    optim, spec = recipe.optim, recipe.optim.tables
    peak = optim.lr * spec.lr_scale
    warmup_steps = optim.warmup_steps if spec.warmup_steps is None else spec.warmup_steps
    rate = rate_of(recipe, peak, spec.schedule or optim.schedule, warmup_steps)
    return row_group("tables", tables, recipe, spec, peak, spec.betas or optim.betas, rate)


def row_group(
    name: str,
    tables: dict[str, Values],
    recipe: Recipe,
    spec: ValuesOptim | TablesOptim,
    lr: float,
    betas: tuple[float, float],
    rate: Callable[[int], float],
) -> Group:
    """Tables of rows, updated straight from their reads."""
    optimizer = RowAdam(
        tables.values(),
        lr,
        betas,
        recipe.optim.eps,
        spec.weight_decay,
        every_row=spec.optimizer == "adam",
    )
    parameters = {path: table.weight_KD for path, table in tables.items()}
    gradients = [table.gradient for table in tables.values() if table.gradient is not None]
    return Group(name, parameters, gradients, optimizer, rate, spec.clip)


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
