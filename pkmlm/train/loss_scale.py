"""The factor of the loss in fp16, which keeps small gradients from vanishing."""

from dataclasses import dataclass

FLOOR = 1.0


@dataclass
class LossScale:
    """The factor of the loss. It is halved after a step whose gradient overflows, down to `FLOOR`, and doubled after
    `interval` others in a row.

    `torch.amp.GradScaler`, whose defaults these are, judges each optimizer by itself and does not see the gradients of
    tables; a step here has one verdict, for all parameters on all ranks.

    Attributes:
        scale: the factor, a power of two: what is scaled and unscaled keeps its bits.
        steps: without an overflow, since the factor last changed.
        interval: so many of these double it.
    """

    scale: float = 2.0**16
    steps: int = 0
    interval: int = 2000

    def update(self, overflow: bool) -> None:
        """Follow the verdict on a step."""
        self.steps = 0 if overflow else self.steps + 1
        if overflow:
            self.scale = max(FLOOR, self.scale / 2)
        elif self.steps == self.interval:
            self.scale, self.steps = self.scale * 2, 0
