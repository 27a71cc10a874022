"""Adam on tables of rows, straight from the reads of a step."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from pkmlm.kernels import backend
from pkmlm.model.memory.values import Values


class RowAdam(torch.optim.Optimizer):
    """Adam over the rows that a step has read: moments and weights of all other rows stay as they are.

    Each row's reads are summed on the way into its update, so that the gradient never exists as a whole; the cost of a
    step is proportional to the rows read, not to the table.

    It differs from dense Adam (which the paper's authors ran) in rows that a step does not read. There, dense Adam
    goes on decaying both moments and goes on moving the row by its momentum; row Adam does neither, so a slot that is
    read again after a pause meets the moments of its last read. Where every row is read in every step the two are the
    same. `every_row` gives dense Adam, at its cost of reading and writing the whole table and both moments in each
    step, still without a dense gradient.

    The bias correction uses the step count of the whole table, as torch's SparseAdam does. The moments of a slot first
    read late are corrected for gradients that they have not seen: at the default betas its first read moves it by 1.00
    of `lr` at step 106, by 2.5 at step 1,000 and by 3.15 at step 5,000. The second moment fills more slowly than the
    first, so that the following reads move it farther, under a gradient that stays the same up to 6.6 of `lr` (the
    twelfth). A correction by each row's own count of updates was no better (`recipes/pkm/README.md`).

    A step uses up the gradients: a network's own `zero_grad` would not reach them.

    Args:
        tables: the `values` of memories and of hash layers. From now on their backward passes leave the gradients in
            their `gradient`, not in `.grad`; a table has one such optimizer.
        lr, betas, eps: as in Adam.
        weight_decay: decoupled, as in AdamW, on the rows that a step updates.
        every_row: update the rows too that were not read.

    Raises:
        ValueError: a table has a row Adam already.

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
        self.tables = list(tables)
        for table in self.tables:
            table.keep_reads(every_row=every_row)
        parameters = [table.weight_KD for table in self.tables]
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every table that has had a backward pass since the last step."""
        if closure is not None:
            raise ValueError("RowAdam takes no closure")
        (group,) = self.param_groups
        for table in self.tables:
            if table.gradient:
                update_rows(table, self, group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for table in self.tables:
            if table.gradient is not None:
                table.gradient.clear()


def update_rows(table: Values, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Update the rows of a table that backward passes have read, and use up its gradient.

    Args:
        optimizer: whose state of the table this reads and changes.
        group: that of its groups which the table is in: lr, betas, eps and weight_decay.
    """
    gradient, values_KD, copy_KD = table.gradient, table.weight_KD, table.fresh_copy()
    assert gradient is not None
    state = optimizer.state[values_KD]
    if not state:
        state.update(empty_state(optimizer, values_KD))
    state["step"] += 1
    x_ND, segments = gradient.joined()
    backend.of(x_ND).segment_row_adam_(
        values_KD,
        state["exp_avg"],
        state["exp_avg_sq"],
        x_ND,
        segments,
        scale=gradient.scale,
        step=int(state["step"]),
        lr=group["lr"],
        betas=group["betas"],
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        copy_KD=copy_KD,
    )
    table.rows_updated(copy_KD)
    gradient.clear()


def empty_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """What Adam (torch's own, or by rows) knows of a parameter before its first step."""
    fused = optimizer.defaults.get("fused", False)
    step = torch.zeros((), device=parameter.device) if fused else torch.zeros((), dtype=torch.int64)
    return {"step": step, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
