"""One torch optimizer for all that trains beside a pretrained model: AdamW, and row Adam for tables of rows."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from pkmlm.memory.row_adam import RowAdam, refuse_scaled_gradients


class Training(Protocol):
    """What is trained: an attachment."""

    step: int

    def check_attached(self) -> None:
        """Raise a UserError if it was detached."""


class AdamWAndRowAdam(torch.optim.Optimizer):
    """An AdamW and a `RowAdam` as one optimizer, which can be scheduled, saved and loaded like any other. They have
    their groups of parameters and their state in common with it.

    Args:
        dense: AdamW; groups that are added later are its own.
        rows: None: there are no tables.
        attachment: its steps are counted, and saved with the optimizer.
    """

    _step_supports_amp_scaling = True  # as in row Adam

    def __init__(self, dense: torch.optim.AdamW, rows: RowAdam | None, attachment: Training):
        self.dense, self.rows, self.attachment = dense, rows, attachment
        self.parts: list[torch.optim.Optimizer] = [dense] if rows is None else [dense, rows]
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Give the parts this optimizer's groups and state."""
        tables = () if self.rows is None else {id(table.weight_KD) for table in self.rows.tables}
        of_rows = [any(id(each) in tables for each in group["params"]) for group in self.param_groups]
        for part in self.parts:
            chosen = [each == (part is self.rows) for each in of_rows]
            part.param_groups = [group for group, own in zip(self.param_groups, chosen, strict=True) if own]
            part.state = self.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, for AdamW."""
        if not any(param_group is group for part in self.parts for group in part.param_groups):
            self.dense.add_param_group(param_group)
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update everything that has a gradient; all ranks of torch.distributed call this.

        Raises:
            UserError: the gradients are scaled by a GradScaler; the attachment was detached.
        """
        self.attachment.check_attached()
        refuse_scaled_gradients(self)
        loss = self.dense.step(closure)
        if self.rows is not None:
            self.rows.step()
        self.attachment.step += 1
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Torch's state, and the steps taken."""
        return {**super().state_dict(), "attached_steps": self.attachment.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load torch's state and the steps taken; the state of another optimizer has none and leaves them unchanged."""
        super().load_state_dict(state_dict)
        self._share()
        self.attachment.step = state_dict.get("attached_steps", self.attachment.step)
