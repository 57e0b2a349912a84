"""The learning rate as a function of the update: no scheduler has a state to save. Light: `plan` reads it too."""

import math
from typing import Literal

ScheduleKind = Literal["constant", "linear", "cosine"]


def learning_rate(
    update: int,
    *,
    peak: float,
    warmup_updates: int,
    total_updates: int,
    kind: ScheduleKind,
    min_frac: float,
) -> float:
    """The learning rate of one optimizer step; updates count from 0.

        warm-up:  peak (update + 1) / warmup_updates
        linear:   peak (1 - (1 - min_frac) p)          p = (update - warmup) / (total - warmup), at most 1
        cosine:   peak (min_frac + (1 - min_frac) (1 + cos(pi p)) / 2)

    The first update is above 0 (a schedule that starts at 0 throws a rollout away), the decay reaches
    peak * min_frac at total_updates and stays there; "constant" keeps peak after the warm-up.
    Raises ValueError for a negative update or warm-up, or min_frac outside 0 to 1.
    """
    if update < 0 or warmup_updates < 0:
        raise ValueError(f"update is {update}, warmup_updates is {warmup_updates}: neither may be negative")
    if not 0.0 <= min_frac <= 1.0:
        raise ValueError(f"min_frac is {min_frac}: it must lie between 0 and 1")
    if update < warmup_updates:
        return peak * (update + 1) / warmup_updates
    if kind == "constant":
        return peak
    # A warm-up as long as the run leaves nothing to decay over: the floor at once.
    progress = min(1.0, (update - warmup_updates) / max(total_updates - warmup_updates, 1))
    remaining = 1.0 - progress if kind == "linear" else (1.0 + math.cos(math.pi * progress)) / 2.0
    return peak * (min_frac + (1.0 - min_frac) * remaining)
