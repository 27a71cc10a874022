"""What the validations of a run have shown."""

from dataclasses import dataclass
from typing import Any


@dataclass
class History:
    """What validations have shown so far; all of it follows from the "valid" events of metrics.jsonl.

    Attributes:
        step: of the last validation.
        best_loss, best_step: of the best one (nats a token).
        worse: validations since the best one.
    """

    step: int | None = None
    best_loss: float = float("inf")
    best_step: int | None = None
    worse: int = 0

    @classmethod
    def of(cls, events: list[dict[str, Any]]) -> "History":
        history = cls()
        for event in events:
            if event["event"] == "valid" and event.get("loss") is not None:
                history.add(event["step"], event["loss"])
        return history

    def add(self, step: int, loss: float) -> bool:
        """Note a validation; whether it is the best so far."""
        self.step = step
        if loss < self.best_loss:
            self.best_loss, self.best_step, self.worse = loss, step, 0
            return True
        self.worse += 1
        return False
