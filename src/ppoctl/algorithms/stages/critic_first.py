"""Critic warm-up that ends when the critic is good enough; part of 50-advantages."""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from ppoctl.algorithms.formulas.diagnostics import explained_variance
from ppoctl.core.batch.records import Carry, Values


@dataclass(frozen=True)
class CriticFirst:
    """Condition under which a step trains the actor."""

    explained_variance: float
    """Explained variance of the values before the update at which the actor begins to train."""
    at_most: int
    """Maximum number of steps at the start of the run that do not train the actor."""

    def trains_actor(
        self, step: int, carry: Carry, values: Values, returns: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]
    ) -> bool:
        """Return whether this step trains the actor. Once a step has trained it, every later step does."""
        has_trained = carry.waited_steps < step - 1
        if has_trained or step > self.at_most:
            return True
        return float(explained_variance(values.values, returns, mask)) >= self.explained_variance
