"""40-logprobs with a value head on the actor's model: the same forward pass computes log-probs and values."""

from dataclasses import dataclass, replace

import torch

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
        sequences = with_bootstrap(rollouts.routed_sequences, rollouts, self.truncated)
        outputs = self.models.actor_at(actor).logprobs(sequences, request)
        assert outputs.values is not None, "values were requested"
        values = values_record(outputs.values, rollouts, self.truncated, actor)
        width = rollouts.tokens.shape[1]
        cut = outputs.map(lambda grid: grid[:, :width])
        if outputs.experts is not None:
            tokens = torch.split(outputs.experts, sequences.input_lengths.tolist())
            lengths = rollouts.sequences.input_lengths.tolist()
            experts = torch.cat([each[:length] for each, length in zip(tokens, lengths, strict=True)])
            cut = replace(cut, experts=experts)
        record = self._record(cut, actor, rollouts)
        return replace(record, values=values.values, behind=values.behind)
