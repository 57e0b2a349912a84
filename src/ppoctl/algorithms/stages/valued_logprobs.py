"""40-logprobs with a value head on the actor's model: the same forward pass computes log-probs and values."""

from dataclasses import dataclass, replace

from ppoctl.algorithms.stages.logprobs import LogprobsStage
from ppoctl.algorithms.stages.values import Truncated, values_record, with_bootstrap
from ppoctl.core.batch.records import Logprobs, Rollouts, State


@dataclass(frozen=True)
class ValuedLogprobsStage(LogprobsStage):
    """Stage that computes old log-probs and values. The extra token of a truncated response, which makes the model
    output a bootstrap value, has no log-prob in the record."""

    truncated: Truncated = "terminal"

    def _by_trainer(self, actor: State, rollouts: Rollouts) -> Logprobs:
        request = replace(self._request, values=True)
        outputs = self.models.actor_at(actor).logprobs(with_bootstrap(rollouts, self.truncated), request)
        assert outputs.values is not None, "values were requested"
        values = values_record(outputs.values, rollouts, self.truncated, actor)
        width = rollouts.tokens.shape[1]
        record = self._record(outputs.map(lambda grid: grid[:, :width]), actor, rollouts)
        return replace(record, values=values.values, behind=values.behind)
