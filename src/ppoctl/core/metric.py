"""Class of the entries of the metric registry. Imports only the standard library."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Metric:
    """One metric."""

    name: str
    unit: str
    description: str
    healthy: str = ""
    """Value in a healthy run; empty: the value depends on the task."""
    better: Literal["higher", "lower"] | None = None
    """Whether a higher or a lower value means a better actor; None: the metric does not compare actors."""
