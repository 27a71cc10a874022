"""Parameter groups: which parameters move together, by which optimizer, how fast, and how far at most."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pkmlm.device import is_native_on_cpu
from pkmlm.distributed import ProcessGroups
from pkmlm.kernels.row_gradient import RowGradient
from pkmlm.memory.base import memories
from pkmlm.memory.row_adam import RowAdam, RowOptimizer, RowSGD, empty_state
from pkmlm.memory.table import Values, tables_of
from pkmlm.model.transformer import matrices_of, trained_names
from pkmlm.recipe.schema import Recipe
from pkmlm.train.lr_schedule import LrSchedule
from pkmlm.train.muon import Muon


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with one optimizer, one learning-rate schedule, and one clipping norm.

    Norms and factors are torch's private `_foreach` functions: a loop would launch two kernels for each parameter on a
    GPU. The public ones that call them do not fit: `torch.nn.utils.get_total_norm` sums squares in fp32 and knows no
    rows or ranks, and `clip_grads_with_norm_` adds 1e-6 to the norm.

    Attributes:
        name: "dense"; "muon", the matrices that Muon trains; or that of the memory whose tables these are.
        parameters: by their path in the model.
        row_gradients: the gradients of those parameters that are tables of rows.
        clip: largest norm of the group's gradient; 0: no clipping.
    """

    name: str
    parameters: dict[str, nn.Parameter]
    row_gradients: list[RowGradient]
    optimizer: torch.optim.Optimizer
    schedule: LrSchedule
    clip: float

    def own_square(self, process_groups: ProcessGroups) -> Tensor:
        """This rank's share of the squared 2-norm of the group's gradient, 0-d, float64. What all ranks hold counts on
        the first of them; columns of tables count on the rank that holds them (or the first that does).
        """
        grads = [p.grad for p in self.parameters.values() if p.grad is not None and process_groups.world.rank == 0]
        norms = [torch.stack(torch._foreach_norm(grads))] if grads else []
        norms += [gradient.norm() for gradient in self.row_gradients if gradient and process_groups.data.rank == 0]
        device = next(iter(self.parameters.values())).device
        return sum((norm.double().square().sum() for norm in norms), torch.zeros((), device=device).double())

    def scale_gradient(self, factor: float | Tensor) -> None:
        """Multiply the gradient by a number, perhaps one that the device alone knows (0-d)."""
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        if grads:  # in their dtype: the factor of another one would be multiplied with each gradient by itself
            torch._foreach_mul_(grads, factor.to(grads[0].dtype) if isinstance(factor, Tensor) else factor)
        for gradient in self.row_gradients:
            gradient.scale *= factor

    def clip_gradient(self, norm: Tensor) -> None:
        """Scale the gradient to the norm `clip` if it is larger.

        Args:
            norm: that of all ranks' gradients, 0-d, float64.
        """
        if not self.clip:
            return
        factor = (self.clip / norm).clamp(max=1.0)
        if factor.device.type != "cpu":  # the host does not wait to know it
            self.scale_gradient(factor)
        elif factor < 1:
            self.scale_gradient(float(factor))

    def step(self, step: int, skip: Tensor | None = None) -> None:
        """Take one optimizer step at the learning rate of `step`.

        Args:
            skip: 0-d, fp32; above 0, the step changes nothing. None: it is wanted.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.lr_at(step) * group.get("lr_scale", 1.0)
        if skip is not None:
            self.optimizer.found_inf = skip  # type: ignore[attr-defined]
        self.optimizer.step()


def parameter_groups(model: nn.Module, recipe: Recipe) -> list[ParameterGroup]:
    """The groups of a model: its dense parameters, those of them that Muon trains, then the tables of each memory.
    What `train.only` leaves out is frozen.
    """
    optim, steps, tables = recipe.optim, recipe.train.steps, tables_of(model)
    dense = LrSchedule(optim.lr, optim.schedule, optim.warmup_steps, steps, optim.final_lr, optim.decay_steps)
    groups, moving = [], trained_names(model, recipe.train.only)
    for name, parameter in model.named_parameters():
        if name not in moving:
            parameter.requires_grad_(False)
    rest = {name: parameter for name, parameter in model.named_parameters() if name in moving and name not in tables}
    if rest:
        names = [name for name in matrices_of(model) if name in moving] if optim.matrices == "muon" else []
        if names:  # where hash tables take the place of all maps, there is none
            matrices = {name: rest.pop(name) for name in names}
            on_cpu = next(iter(matrices.values())).device.type == "cpu"
            in_bf16 = not on_cpu or is_native_on_cpu("bf16")
            muon = Muon(
                matrices.values(),
                lr=optim.muon.lr,
                weight_decay=optim.muon.weight_decay,
                momentum=optim.muon.momentum,
                dtype=torch.bfloat16 if in_bf16 else None,
            )
            groups.append(ParameterGroup("muon", matrices, [], muon, replace(dense, peak=optim.muon.lr), optim.clip))
        groups.insert(0, _dense_group(model, rest, recipe, dense))
    read_by: dict[str, set[Values]] = {name: set() for name in recipe.model.memories}
    for memory in memories(model):
        read_by[memory.tap.name].update(memory.read_tables())
    for name, spec in recipe.model.memories.items() if moving & tables.keys() else ():
        learns: Any = optim.filled(spec)
        schedule = replace(dense, times=learns.times)
        if learns.schedule != "relative":
            schedule = LrSchedule(
                learns.lr, learns.schedule, learns.warmup_steps, steps, learns.final_lr, optim.decay_steps
            )
        own = {path: table for path, table in tables.items() if table in read_by[name]}
        groups.append(_row_group(name, own, learns, schedule))
    return groups


def optimizer_state(groups: Iterable[ParameterGroup]) -> dict[str, Tensor]:
    """The state of all optimizers by "path of the parameter|key", to be saved or copied into; the state of a parameter
    that has taken no step yet is made first.
    """
    tensors = {}
    for group in groups:
        for name, parameter in group.parameters.items():
            state = group.optimizer.state[parameter]
            if not state and isinstance(group.optimizer, torch.optim.Muon):
                state["momentum_buffer"] = torch.zeros_like(parameter)
            elif not state:
                state.update(empty_state(group.optimizer, parameter))
            tensors.update({f"{name}|{key}": tensor for key, tensor in state.items()})
    return tensors


def _dense_group(
    model: nn.Module, parameters: dict[str, nn.Parameter], recipe: Recipe, schedule: LrSchedule
) -> ParameterGroup:
    """All but tables: AdamW, with decay on matrices alone (not on biases, norms or keys), and keys at learning rates of
    their own.
    """
    optim = recipe.optim
    key_rates = {
        key: recipe.model.memories[memory.tap.name].key_lr_scale
        for memory in memories(model)
        for key in memory.key_parameters()
    }
    settings: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameter in parameters.values():
        decay = optim.weight_decay if parameter.ndim == 2 else 0.0
        settings.setdefault((decay, key_rates.get(parameter, 1.0)), []).append(parameter)
    split = [
        {"params": chosen, "weight_decay": decay, "lr_scale": lr_scale}
        for (decay, lr_scale), chosen in settings.items()
    ]
    optimizer = torch.optim.AdamW(split, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
    return ParameterGroup("dense", parameters, [], optimizer, schedule, optim.clip)


def _row_group(name: str, tables: dict[str, Values], spec: Any, schedule: LrSchedule) -> ParameterGroup:
    """Tables of rows, updated straight from their reads, as the filled section `spec` says."""
    optimizer: RowOptimizer
    if spec.optimizer == "row-sgd":
        optimizer = RowSGD(tables.values(), schedule.lr_at(1), spec.weight_decay)
    else:
        optimizer = RowAdam(
            tables.values(),
            schedule.lr_at(1),
            spec.betas,
            spec.eps,
            spec.weight_decay,
            every_row=spec.optimizer == "adam",
        )
    parameters = {path: table.weight_KD for path, table in tables.items()}
    gradients = [table.gradient for table in tables.values() if table.gradient is not None]
    return ParameterGroup(name, parameters, gradients, optimizer, schedule, spec.clip)
