"""30-values: what the critic expects, before it learns from this step."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from ppoctl.batch.records import TRUNCATED, Rollouts, State, Values
from ppoctl.batch.sequences import Sequences
from ppoctl.ports import Models
from ppoctl.stages.logprobs import require_finite

Truncated = Literal["terminal", "bootstrap", "filter"]
"""How a response that reached the length limit counts."""


@dataclass(frozen=True)
class ValuesStage:
    """V of the state before every response token; and behind the last one of truncated responses, where their returns
    go on with it."""

    models: Models
    truncated: Truncated
    fingerprint: str
    name: str = "values"

    def run(self, critic: State, rollouts: Rollouts) -> Values:
        engine = self.models.critic_at(critic)
        if self.truncated != "bootstrap":
            values = engine.values(rollouts.sequences)
            require_finite(values, rollouts.mask, "a value of the critic")
            return Values(values=values.where(rollouts.mask, 0.0), stamp=critic.stamp)
        cut = rollouts.finish == TRUNCATED
        values = engine.values(with_extra_token(rollouts.sequences, cut))
        width = rollouts.tokens.shape[1]
        # In the column behind a row's last token stands the value of the state in front of the token that was added.
        is_behind = cut[:, None] & (torch.arange(values.shape[1]) == rollouts.lengths[:, None])
        require_finite(values, pad(rollouts.mask, (0, values.shape[1] - width)) | is_behind, "a value of the critic")
        return Values(
            values=values[:, :width].where(rollouts.mask, 0.0),
            behind=values.where(is_behind, 0.0).sum(dim=1),
            stamp=critic.stamp,
        )


def with_extra_token(sequences: Sequences, rows: Bool[Tensor, " B"]) -> Sequences:
    """Sequences in which these rows have one response token more, of id 0. No model reads it, as it is the last: it
    makes the model say something of the state in front of it."""
    lengths = sequences.lengths + rows.to(sequences.lengths.dtype)
    more = int(lengths.max()) - sequences.tokens.shape[1]
    tokens = pad(sequences.tokens, (0, max(more, 0)))
    return Sequences(sequences.prompt_tokens, sequences.prompt_lengths, tokens, lengths)


def bootstrap_values(values: Values) -> Float[Tensor, " B"]:
    """Values of the states behind truncated responses, which a return that goes on cannot do without. Missing ones
    are a fault of the wiring."""
    assert values.behind is not None, "returns go on with values behind the last token, and they were not taken"
    return values.behind
