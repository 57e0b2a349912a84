"""30-values: what the critic expects, before it learns from this step."""

from dataclasses import dataclass

from ppoctl.batch.records import Rollouts, State, Values
from ppoctl.ports import Models
from ppoctl.stages.logprobs import require_finite


@dataclass(frozen=True)
class ValuesStage:
    """V of the state before every response token."""

    models: Models
    fingerprint: str
    name: str = "values"

    def run(self, critic: State, rollouts: Rollouts) -> Values:
        values = self.models.critic_at(critic).values(rollouts.sequences)
        require_finite(values, rollouts.mask, "a value of the critic")
        return Values(values=values.where(rollouts.mask, 0.0), stamp=critic.stamp)
