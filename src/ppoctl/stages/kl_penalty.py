"""Where and how leaving the reference is penalised."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class KlPenalty:
    """A penalty that is on."""

    place: Literal["reward", "loss"]
    estimator: Literal["k1", "k2", "k3"]
    coef: float
