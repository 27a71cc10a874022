"""Adam on the rows that a step has read.

U: rows touched; D: width.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class RowAdam(torch.optim.Optimizer):
    """Adam over the rows of a sparse gradient: moments and weights of all other rows stay as they are.

    It differs from dense Adam (which the paper's authors ran) in rows that a step does not read. There, dense Adam
    goes on decaying both moments and goes on moving the row by its momentum; row Adam does neither, so a slot that is
    read again after a pause meets the moments of its last read. The bias correction uses the step count of the whole
    table, as torch's SparseAdam does: a slot first read late is corrected little, and moves by a smaller first step.
    Where every row is read in every step the two are the same. The cost of a step is proportional to the rows read,
    not to the table.

    Args:
        params: value tables (rows, width) whose gradients are sparse in the first dimension.
        lr, betas, eps: as in Adam.
        weight_decay: decoupled, as in AdamW, on the rows that a step updates.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the touched rows of every parameter that has a gradient.

        Raises:
            ValueError: a gradient is dense.
        """
        if closure is not None:
            raise ValueError("RowAdam takes no closure")
        for group in self.param_groups:
            for values_KD in group["params"]:
                if values_KD.grad is None:
                    continue
                if not values_KD.grad.is_sparse:
                    raise ValueError("RowAdam needs sparse gradients; build the memory with optimizer row-adam")
                state = self.state[values_KD] or self._begin(values_KD)
                state["step"] += 1
                gradient = values_KD.grad.coalesce()
                row_adam_(
                    values_KD,
                    state["exp_avg"],
                    state["exp_avg_sq"],
                    gradient.indices()[0],
                    gradient.values(),
                    step=int(state["step"]),
                    lr=group["lr"],
                    betas=group["betas"],
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                )

    def _begin(self, values_KD: Tensor) -> dict[str, Tensor]:
        self.state[values_KD] = {
            "step": torch.zeros((), dtype=torch.int64),
            "exp_avg": torch.zeros_like(values_KD),
            "exp_avg_sq": torch.zeros_like(values_KD),
        }
        return self.state[values_KD]


def row_adam_(
    values_KD: Tensor,
    mean_KD: Tensor,
    square_KD: Tensor,
    rows_U: Tensor,
    grad_UD: Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One Adam update of the rows `rows_U` (distinct), in place (Kingma and Ba 2015, algorithm 1; decay decoupled)."""
    beta1, beta2 = betas
    mean_UD = mean_KD.index_select(0, rows_U).lerp_(grad_UD, 1 - beta1)
    square_UD = square_KD.index_select(0, rows_U).mul_(beta2).addcmul_(grad_UD, grad_UD, value=1 - beta2)
    mean_KD.index_copy_(0, rows_U, mean_UD)
    square_KD.index_copy_(0, rows_U, square_UD)
    if weight_decay:
        values_KD.index_add_(0, rows_U, values_KD.index_select(0, rows_U), alpha=-lr * weight_decay)
    scale_UD = square_UD.div_(1 - beta2**step).sqrt_().add_(eps)
    values_KD.index_add_(0, rows_U, mean_UD.div_(scale_UD), alpha=-lr / (1 - beta1**step))
