"""The learning-rate schedule: the learning rate of every step."""

import math
from dataclasses import dataclass

from pkmlm.recipe.schema import Schedule


@dataclass(frozen=True)
class LrSchedule:
    """A linear warm-up from 0 to the peak, then one of four shapes, and perhaps a decay at the end; times a factor that
    changes linearly over the run (UltraMem, Huang et al. 2024: from 4 to 1).

    inverse-sqrt: peak * sqrt(warmup_steps / step) (Vaswani et al. 2017, with the peak as scale); cosine and linear:
    from the peak to `final` * peak at the last step; constant: the peak. In the last `decay_steps`, whatever the shape
    gives is multiplied by a factor that falls linearly to `final`. (With a constant shape, this is warmup-stable-decay:
    Hu et al. 2024, arXiv 2404.06395, sec. 4. One run then gives models of several lengths, each after a decay.)

    Args:
        peak: the learning rate after the warm-up.
        shape: "inverse-sqrt" (which needs a warm-up), "cosine", "linear" or "constant".
        warmup_steps: 0: no warm-up.
        steps: of the whole run.
        final: the last learning rate, as a share of the peak, or of what the shape gives.
        decay_steps: 0: no decay.
        times: the factor before the first step, and at the last one.
    """

    peak: float
    shape: Schedule
    warmup_steps: int
    steps: int
    final: float
    decay_steps: int = 0
    times: tuple[float, float] = (1.0, 1.0)

    def lr_at(self, step: int) -> float:
        """The learning rate of a step (from 1)."""
        decayed = min(1.0, 1 - (self.steps - step) / self.decay_steps) if self.decay_steps else 0.0
        lr = self._shape_at(step) * (1 - (1 - self.final) * max(0.0, decayed))
        first, last = self.times
        return lr * (first + (last - first) * min(1.0, step / self.steps))

    def _shape_at(self, step: int) -> float:
        warm = min(1.0, step / self.warmup_steps) if self.warmup_steps else 1.0
        if warm < 1 or self.shape == "constant":
            return self.peak * warm
        if self.shape == "inverse-sqrt":
            return self.peak * math.sqrt(self.warmup_steps / step)
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        fall = progress if self.shape == "linear" else (1 - math.cos(math.pi * progress)) / 2
        return self.peak * (1 - (1 - self.final) * fall)
