"""Adam, and plain gradient descent, on tables of rows, straight from the reads of a step."""

from collections.abc import Callable, Iterable
from functools import partial
from math import inf
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from pkmlm.distributed import current_world
from pkmlm.errors import UserError
from pkmlm.kernels import backend
from pkmlm.kernels.row_gradient import RowGradient
from pkmlm.memory.row_exchange import average_row_gradients, check_same_table
from pkmlm.memory.table import Values


class RowOptimizer(torch.optim.Optimizer):
    """An optimizer of tables of rows that moves the rows read by a step, and no others (but see `every_row`).

    Args:
        tables: the `values` of memories and of hash layers. From now on their backward passes leave the gradients in
            their `gradient`, not in `.grad`; a table can have only one such optimizer.
        defaults: the settings of the one group of parameters.
        every_row: also move the rows that were not read.

    Raises:
        TypeError: something is not a table.
        ValueError: a setting is invalid; a table already has such an optimizer, or is divided among ranks (FSDP).
    """

    # GradScaler then calls `step` with `grad_scale` set, which is refused there: it cannot unscale the reads.
    _step_supports_amp_scaling = True

    def __init__(self, tables: Iterable[Values], defaults: dict[str, Any], every_row: bool = False):
        self.tables = list(dict.fromkeys(tables))  # several layers may read one
        for table in self.tables:
            if not isinstance(table, Values):
                raise TypeError(f"found a {type(table).__name__} (expected tables: the `values` of a memory)")
            table.refuse_second_optimizer()  # before the first of them is changed
            if hasattr(table.weight_KD, "to_local"):  # a DTensor
                raise ValueError("a table is divided among ranks (expected whole: see `fully_shard(ignored_params=)`)")
        check_settings(**defaults)
        super().__init__([table.weight_KD for table in self.tables], defaults)
        for table in self.tables:
            table.keep_reads(every_row=every_row)
        self._compared = False

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every table that has had a backward pass since the last step. If torch.distributed has several ranks,
        all of them call this, and each takes the mean of their gradients.

        Raises:
            ValueError: a closure is given; the weights of a table were replaced since this optimizer was made.
            UserError: the gradients are scaled by a GradScaler; ranks have begun with different tables.
        """
        if closure is not None:
            raise ValueError(f"{type(self).__name__} takes no closure")
        refuse_scaled_gradients(self)
        (group,) = self.param_groups
        for table, weight_KD in zip(self.tables, group["params"], strict=True):
            if table.weight_KD is not weight_KD:
                raise ValueError("the weights of a table were replaced (expected the optimizer to be made after that)")
        world = current_world()
        for table in self.tables:
            if not self._compared:
                check_same_table(table, world)
            average_row_gradients(table, world)
            update_rows(table, partial(self.move_rows, group))
        self._compared = True

    def move_rows(
        self, group: dict[str, Any], values_KD: Tensor, copy_KD: Tensor | None, gradient: RowGradient
    ) -> None:
        """Move the rows of the gradient and, if there is a copy in half precision, write them into it, rounded."""
        raise NotImplementedError

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for table in self.tables:
            if table.gradient is not None:
                table.gradient.clear()


class RowSGD(RowOptimizer):
    """Gradient descent over the rows that a step has read; no momentum, so that a step moves no other rows, and no
    state.

    Args:
        tables: as for `RowOptimizer`.
        lr: the learning rate. A row moves by `lr` times its gradient, which is small: 2.0 in Lin et al. 2025.
        weight_decay: decoupled, on the rows that a step updates.
    """

    def __init__(self, tables: Iterable[Values], lr: float = 2.0, weight_decay: float = 0.0):
        super().__init__(tables, {"lr": lr, "weight_decay": weight_decay})

    def move_rows(
        self, group: dict[str, Any], values_KD: Tensor, copy_KD: Tensor | None, gradient: RowGradient
    ) -> None:
        x_ND, segments = gradient.joined()
        backend.of(x_ND).segment_row_sgd_(
            values_KD,
            x_ND,
            segments,
            scale=gradient.scale,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            copy_KD=copy_KD,
            skip=found_inf(self),
        )


def empty_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """The state of a parameter in an optimizer (torch's Adam, or one of these) before its first step."""
    if isinstance(optimizer, RowSGD):
        return {}
    fused = optimizer.defaults.get("fused", False)
    # Where the parameter is: whether a step is skipped may be known to the device alone.
    step = torch.zeros((), dtype=torch.float32 if fused else torch.int64, device=parameter.device)
    return {"step": step, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}


def adam_rows(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    values_KD: Tensor,
    copy_KD: Tensor | None,
    gradient: RowGradient,
) -> None:
    """One step of row Adam on the rows of a gradient.

    Args:
        optimizer: its state of the table is read and changed.
        group: the group of its parameters that the table is in: lr, betas, eps and weight_decay.
    """
    state = optimizer.state[values_KD]
    if not state:
        state.update(empty_state(optimizer, values_KD))
    state["step"] = state["step"].to(values_KD.device)  # where `load_state_dict` may not have put it
    skip = found_inf(optimizer)
    state["step"] += 1 if skip is None else skip == 0
    x_ND, segments = gradient.joined()
    backend.of(x_ND).segment_row_adam_(
        values_KD,
        state["exp_avg"],
        state["exp_avg_sq"],
        x_ND,
        segments,
        scale=gradient.scale,
        step=state["step"],
        lr=group["lr"],
        betas=group["betas"],
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        copy_KD=copy_KD,
        skip=skip,
    )


def found_inf(optimizer: torch.optim.Optimizer) -> Tensor | None:
    """What the optimizers call by this name that torch's GradScaler knows: 0-d; above 0, the next step changes nothing.
    None: nobody has set it.
    """
    return getattr(optimizer, "found_inf", None)


class RowAdam(RowOptimizer):
    """Adam over the rows that a step has read: moments and weights of all other rows stay as they are. A row that only
    tokens without a loss have read (padding, for example) counts as read: it moves along its momentum.

    Each row's reads are summed on the way into its update, so that the gradient never exists as a whole; the cost of a
    step is proportional to the rows read, not to the table.

    It differs from dense Adam (the default in the code of Lample et al. 2019) in rows that a step does not read. There,
    dense Adam goes on decaying both moments and goes on moving the row by its momentum; row Adam does neither, so a
    slot that is read again after a pause meets the moments of its last read. Where every row is read in every step the
    two are the same. `every_row` gives dense Adam, at its cost of reading and writing the whole table and both moments
    in each step, still without a dense gradient.

    The bias correction uses the step count of the whole table, as torch's SparseAdam does. The moments of a slot first
    read late are corrected for gradients that they have not seen: at the default betas its first read moves it by 1.00
    times `lr` at step 106, by 2.5 times at step 1,000 and by 3.15 times at step 5,000. The second moment fills more
    slowly than the first, so the following reads move it farther: under a constant gradient, by up to 6.6 times `lr`
    (the twelfth). A correction by each row's own count of updates was no better (`recipes/pkm/README.md`).

    Copies of the optimizer (deepcopy, pickle) lose the tables; copy its `state_dict()`.

    A step clears the gradients: a network's own `zero_grad` would not reach them.

    Args:
        tables: the `values` of memories and of hash layers. From now on their backward passes leave the gradients in
            their `gradient`, not in `.grad`; a table can have only one such optimizer.
        lr, betas, eps: as in Adam.
        weight_decay: decoupled, as in AdamW, on the rows that a step updates.
        every_row: also update the rows that were not read.

    Raises:
        TypeError, ValueError: as for `RowOptimizer`.

    The state of each table, as torch's Adam names it: step (0-d, int64), exp_avg and exp_avg_sq (K, D), in the table's
    dtype.
    """

    def __init__(
        self,
        tables: Iterable[Values],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        every_row: bool = False,
    ):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(tables, defaults, every_row)

    move_rows = adam_rows


def refuse_scaled_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Raise a UserError if a GradScaler has called the step of an optimizer, which marks it."""
    if hasattr(optimizer, "grad_scale"):
        raise UserError(
            "the loss is scaled (fp16), but row Adam keeps the gradients of tables where GradScaler does not see them",
            "train in bf16 or fp32: memories compute in fp32 anyway",
        )


def check_settings(
    lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0
) -> None:
    """Refuse what torch's Adam refuses.

    Raises:
        ValueError: a setting is not a number, or is out of its range.
    """
    found = [("lr", lr, inf), ("eps", eps, inf), ("weight_decay", weight_decay, inf)]
    found += [(f"betas[{index}]", beta, 1.0) for index, beta in enumerate(betas)]
    for name, value, end in found:
        if not (isinstance(value, Real) and 0 <= value < end):
            expected = "of 0 or more" if end == inf else "from 0 to below 1"
            raise ValueError(f"{name} is {value!r} (expected a number {expected})")


def update_rows(table: Values, move: Callable[[Tensor, Tensor | None, RowGradient], None]) -> None:
    """Update the rows of a table that backward passes have read, if any, and clear its gradient.

    Args:
        move: moves the rows; called with the table, its copy in half precision (or None), and its gradient.
    """
    if table.gradient:
        copy_KD = table.fresh_copy()
        move(table.weight_KD, copy_KD, table.gradient)
        table.rows_updated(copy_KD)
        table.gradient.clear()
