"""Inputs and result of advantage estimators. Package `estimators` has the estimators, each with its recipe table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class EstimatorInputs:
    """Values that an estimator may read: B responses of at most R tokens."""

    token_rewards: Float[Tensor, "B R"]
    """Reward of each token after shaping, minus the KL penalty if it is in the reward. The last token of a truncated
    response includes the bootstrap value, if there is one. 0 where masked out."""
    values: Float[Tensor, "B R"] | None
    """The critic's values of the states before each token; None: no critic."""
    mask: Bool[Tensor, "B R"]
    """Tokens to train on: sampled by the actor, in responses that have a score and are not filtered."""
    scores: Float[Tensor, " B"]
    """Score of each response after shaping, before any KL penalty; 0 without a score."""
    valid: Bool[Tensor, " B"]
    """Responses that have a score. `mask` may have no token of such a response: it is truncated and filtered."""
    groups: Int[Tensor, " B"]
    """Index of the prompt of each response in the step, from 0."""
    prompt_ids: Sequence[str]
    """Id of the prompt of each response: its data set, row and digest."""
    lengths: Int[Tensor, " B"]
    """Number of tokens of each response, masked out or not."""
    truths: Sequence[str | None]
    """Ground truth of each response; None: no ground truth."""
    extras: Mapping[str, Sequence[float | None]]
    """Further metrics of the scorer by name, one value for each response; None: not returned."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Name of each component of the reward, which is also a name in `extras`, and its weight. Empty if the estimator
    does not read components."""
    baselines: Float[Tensor, " B"] | None = None
    """Reward of the greedy response to the prompt of each response, after shaping; None: no greedy responses."""


@dataclass(frozen=True)
class AdvantageEstimate:
    """Advantages before whitening, returns, and metrics."""

    advantages: Float[Tensor, "B R"]
    """Advantages; exactly 0 where masked out."""
    returns: Float[Tensor, "B R"] | None
    """Returns that the critic learns; None: no critic learns."""
    metrics: dict[str, float]


@runtime_checkable
class Estimator(Protocol):
    """Function from inputs to advantages."""

    @property
    def gamma(self) -> float:
        """Discount per token, by which a bootstrap value is multiplied."""

    def __call__(self, inputs: EstimatorInputs) -> AdvantageEstimate:
        """Return the estimate of a step."""
