"""The recipe's tables of advantages: how rewards and values become what the updates read."""

from typing import Annotated, Literal

from ppoctl.table import RESULTS, Fraction, Table


class GaeAdvantages(Table):
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16)."""

    kind: Annotated[Literal["gae"], RESULTS]
    """Generalised advantage estimation; the only kind."""
    gamma: Annotated[float, RESULTS, Fraction] = 1.0
    """Discount per token."""
    gae_lambda: Annotated[float, RESULTS, Fraction] = 1.0
    """GAE's lambda. 1: Monte Carlo returns minus values; 0: one-step TD errors."""
    whiten: Annotated[bool, RESULTS] = True
    """Shift and scale advantages to zero mean and unit variance over all counted tokens of the step."""
