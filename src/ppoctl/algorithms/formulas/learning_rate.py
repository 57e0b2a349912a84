"""Learning rate as a pure function of the tick, so that no scheduler state must be saved. This module imports only
the standard library."""

import math
from dataclasses import dataclass
from typing import Literal

ScheduleKind = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class LearningRate:
    """Learning rate of each tick, counted from 0. A tick is an optimizer step, or a PPO step with all its optimizer
    steps.

        warm-up:  peak (tick + 1) / warmup                                    without warmup_init_frac
                  peak (init_frac + (1 - init_frac) tick / warmup)            with it
        linear:   peak (1 - (1 - min_frac) p)          p = (tick - warmup) / (total - warmup), at most 1
        cosine:   peak (min_frac + (1 - min_frac) (1 + cos(pi p)) / 2)

    The rate of the first tick is above 0, unless warmup_init_frac is 0: a rate of 0 would waste a rollout. The decay
    reaches peak * min_frac at total_ticks, and the rate then stays constant. "constant" stays at peak after the
    warm-up.
    """

    peak: float
    kind: ScheduleKind
    warmup_ticks: int
    total_ticks: int
    min_frac: float
    warmup_init_frac: float | None = None

    def at(self, tick: int) -> float:
        """Return the rate of one tick. Raises ValueError if the tick or warm-up is negative, or a fraction is not
        between 0 and 1."""
        if tick < 0 or self.warmup_ticks < 0:
            raise ValueError(f"tick is {tick}, warmup_ticks is {self.warmup_ticks}: neither may be negative")
        for name, fraction in (("min_frac", self.min_frac), ("warmup_init_frac", self.warmup_init_frac or 0.0)):
            if not 0.0 <= fraction <= 1.0:
                raise ValueError(f"{name} is {fraction}: it must be between 0 and 1")
        if tick < self.warmup_ticks:
            if self.warmup_init_frac is None:
                return self.peak * (tick + 1) / self.warmup_ticks
            return self.peak * (self.warmup_init_frac + (1.0 - self.warmup_init_frac) * tick / self.warmup_ticks)
        if self.kind == "constant":
            return self.peak
        # If the warm-up is as long as the run, no ticks remain for the decay: use the minimum rate at once.
        progress = min(1.0, (tick - self.warmup_ticks) / max(self.total_ticks - self.warmup_ticks, 1))
        remaining = 1.0 - progress if self.kind == "linear" else (1.0 + math.cos(math.pi * progress)) / 2.0
        return self.peak * (self.min_frac + (1.0 - self.min_frac) * remaining)
