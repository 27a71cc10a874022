"""The training monitor: warnings of loss spikes and of memories that are used less and less."""

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pkmlm.memory.address import memory_label
from pkmlm.report.metrics import METRICS

WINDOW = 50  # steps that a loss is compared with
FEWEST = 20
SPIKE = 10.0  # times the median deviation of the window (6.7 standard deviations of normal noise) ...
SPIKE_SHARE = 0.1  # ... and at least this share of its median
COLLAPSE = 0.5  # of the highest usage so far
DEAD = 0.1  # of the usage that uniform reading would give ...
DEAD_FOR = 3  # ... in so many validations in a row


@dataclass
class TrainingMonitor:
    """Watches the events of a run. Its state follows from them alone, so a resumed run gets the same warnings as one
    that was not stopped.
    """

    losses: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    spiking: bool = False
    tokens: int | None = None  # of the last validation: more of them read more slots
    highest: dict[str, float] = field(default_factory=dict)
    low: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, events: Iterable[dict[str, Any]]) -> "TrainingMonitor":
        """The monitor of a run with these events."""
        monitor = cls()
        for event in events:
            monitor.warnings(event)
        return monitor

    def warnings(self, event: dict[str, Any]) -> list[str]:
        """Take the next event into account, and return warnings."""
        if event["event"] == "train" and isinstance(event.get("loss"), float):
            return self._loss(event["loss"])
        if event["event"] == "valid":
            if event.get("tokens") != self.tokens:
                self.tokens, self.highest = event.get("tokens"), {}
            return [text for memory in event.get("usage") or () for text in self._usage(memory)]
        return []

    def _loss(self, loss: float) -> list[str]:
        warnings = []
        if len(self.losses) >= FEWEST:
            median = statistics.median(self.losses)
            deviation = statistics.median(abs(value - median) for value in self.losses)
            above = loss - median > max(SPIKE * deviation, SPIKE_SHARE * median)
            if above and not self.spiking:
                warnings.append(f"loss spike: {loss:.3f}, after a median of {median:.3f} in {len(self.losses)} steps")
            self.spiking = above
        self.losses.append(loss)
        return warnings

    def _usage(self, memory: dict[str, Any]) -> list[str]:
        name, usage = memory_label(memory), memory["usage"]
        uniform, share = memory["uniform"]["usage"], METRICS["usage"].format.format
        warnings = []
        if usage < COLLAPSE * self.highest.get(name, 0.0):
            before = share(self.highest[name])
            warnings.append(f"{name} is used less: {share(usage)} of its slots are read, down from {before}")
            self.highest[name] = usage  # the next warning is for half of this
        self.highest[name] = max(usage, self.highest.get(name, 0.0))
        self.low[name] = self.low.get(name, 0) + 1 if usage < DEAD * uniform else 0
        if self.low[name] == DEAD_FOR:
            warnings.append(
                f"{name} is hardly used: {share(usage)} of its slots are read in {DEAD_FOR} validations in a row "
                f"(uniform reading: {share(uniform)})"
            )
        return warnings
