"""30-values: values of the critic before it is updated in this step."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from ppoctl.algorithms.stages.logprobs import require_finite
from ppoctl.core.batch.records import TRUNCATED, Logprobs, Rollouts, State, Values
from ppoctl.core.batch.sequences import Sequences
from ppoctl.core.ports import Models

Truncated = Literal["terminal", "bootstrap", "filter"]
"""Treatment of a response that reached the length limit."""


@dataclass(frozen=True)
class ValuesStage:
    """Stage that computes the value of the state before every response token, and bootstrap values of truncated
    responses if returns use them."""

    models: Models
    truncated: Truncated
    fingerprint: str
    name: str = "values"

    def run(self, critic: State, rollouts: Rollouts) -> Values:
        trainer = self.models.critic_at(critic)
        values = trainer.values(with_bootstrap(rollouts.sequences, rollouts, self.truncated))
        return values_record(values, rollouts, self.truncated, critic)


def with_bootstrap(sequences: Sequences, rollouts: Rollouts, truncated: Truncated) -> Sequences:
    """Return the input of the forward pass that computes values, given that of the rollouts: with an extra token
    after each truncated response if returns use bootstrap values."""
    return with_extra_token(sequences, rollouts.finish == TRUNCATED) if truncated == "bootstrap" else sequences


def values_record(values: Float[Tensor, "B X"], rollouts: Rollouts, truncated: Truncated, state: State) -> Values:
    """Return the record of the values of `with_bootstrap` under a state. Raises NonFiniteError."""
    if truncated != "bootstrap":
        require_finite(values, rollouts.mask, "a value of the critic")
        return Values(values=values.where(rollouts.mask, 0.0), stamp=state.stamp)
    width = rollouts.tokens.shape[1]
    # The column after a row's last token contains the value of the state before the extra token: the bootstrap value.
    is_last = torch.arange(values.shape[1]) == rollouts.lengths[:, None]
    is_bootstrap = (rollouts.finish == TRUNCATED)[:, None] & is_last
    require_finite(values, pad(rollouts.mask, (0, values.shape[1] - width)) | is_bootstrap, "a value of the critic")
    return Values(
        values=values[:, :width].where(rollouts.mask, 0.0),
        behind=values.where(is_bootstrap, 0.0).sum(dim=1),
        stamp=state.stamp,
    )


def values_of(logprobs: Logprobs) -> Values:
    """Return the values that the forward pass of the log-probs computed, by a value head on the actor's model."""
    assert logprobs.values is not None, "the value head learns, but its values were not computed"
    return Values(values=logprobs.values, stamp=logprobs.stamp, behind=logprobs.behind)


def with_extra_token(sequences: Sequences, rows: Bool[Tensor, " B"]) -> Sequences:
    """Return sequences in which these rows have one more response token, of id 0.

    The extra token makes the model output a value for the state before it. No other token attends to the extra token,
    because it is the last. The token before it then becomes an input, for which routers choose experts.
    """
    lengths = sequences.lengths + rows.to(sequences.lengths.dtype)
    more = int(lengths.max()) - sequences.tokens.shape[1]
    tokens = pad(sequences.tokens, (0, max(more, 0)))
    experts = sequences.experts
    if experts is not None:
        free = experts.new_full((1, experts.shape[1]), -1)
        parts = zip(torch.split(experts, sequences.input_lengths.tolist()), rows.tolist(), strict=True)
        experts = torch.cat([part for of_row, is_longer in parts for part in (of_row, free[: int(is_longer)])])
    return Sequences(sequences.prompt_tokens, sequences.prompt_lengths, tokens, lengths, experts)


def bootstrap_values(values: Values) -> Float[Tensor, " B"]:
    """Return the bootstrap values of truncated responses. Returns are computed from them. If they are missing, `wire`
    has a bug."""
    assert values.behind is not None, (
        "returns of truncated responses require bootstrap values, which were not computed"
    )
    return values.behind
