"""40-logprobs: what the trainer says of the drawn tokens, and how far that is from what the generator said.

Here also are what other stages share with it: the guard that keeps NaN out of everything later, and the penalty that
reads the reference's log-probs.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ppoctl.batch.records import Carry, Logprobs, Rollouts, State
from ppoctl.errors import NonFiniteError
from ppoctl.ports import Models
from ppoctl.ppo.diagnostics import sampler_gap
from ppoctl.ppo.kl import KlGradient, KlKind, kl_estimate
from ppoctl.ppo.kl_coefficient import KlTarget


@dataclass(frozen=True)
class KlPenalty:
    """Where and how leaving the reference is penalised."""

    place: Literal["reward", "loss"]
    estimator: KlKind
    coef: float
    """The fixed coefficient, or the first of one that follows a target."""
    input_clamp: float | None = None
    output_clamp: float | None = None
    gradient: KlGradient = "estimator"
    """Of the penalty in the loss."""
    target: KlTarget | None = None
    """None: the coefficient is fixed."""

    def estimates(
        self,
        logprobs: Float[Tensor, "B R"],
        reference: Float[Tensor, "B R"],
        mask: Bool[Tensor, "B R"],
    ) -> Float[Tensor, "B R"]:
        """Estimates of KL(actor || reference) per token in nats; 0 under the mask, and so is their gradient."""
        clamps = {"input_clamp": self.input_clamp, "output_clamp": self.output_clamp}
        return kl_estimate(logprobs, reference, kind=self.estimator, mask=mask, **clamps)

    def coef_at(self, carry: Carry) -> float:
        """The coefficient of a step that begins with this carry: a target's goes on from the one before."""
        return self.coef if self.target is None else carry.kl_coef or self.coef


@dataclass(frozen=True)
class LogprobsStage:
    """The actor's log-probs and entropies, and the reference's log-probs where a KL penalty reads them."""

    models: Models
    temperature: float
    with_reference: bool
    fingerprint: str
    name: str = "logprobs"

    def run(self, actor: State, rollouts: Rollouts) -> Logprobs:
        engine = self.models.actor_at(actor)
        logprobs, entropy = engine.logprobs(rollouts.sequences, temperature=self.temperature)
        require_finite(logprobs, rollouts.mask, "a log-prob of the actor")
        reference = None
        if self.with_reference:
            reference = engine.reference_logprobs(rollouts.sequences, temperature=self.temperature)
            require_finite(reference, rollouts.mask, "a log-prob of the reference")
            reference = reference.where(rollouts.mask, 0.0)
        return Logprobs(
            actor=logprobs.where(rollouts.mask, 0.0),
            entropy=entropy.where(rollouts.mask, 0.0),
            reference=reference,
            stamp=actor.stamp,
            gap=sampler_gap(logprobs, rollouts.sampler_logprobs, rollouts.mask),
        )


def reference_of(logprobs: Logprobs) -> Float[Tensor, "B R"]:
    """The reference's log-probs, which a penalty that is on cannot do without. A missing one is a fault of the
    wiring; leaving the penalty out would train something else."""
    assert logprobs.reference is not None, "a KL penalty is on, and the reference's log-probs were not taken"
    return logprobs.reference


def require_finite(x: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"], what: str) -> None:
    """Raise NonFiniteError naming the first counted position that is NaN or infinite."""
    bad = mask & ~torch.isfinite(x)
    if bool(bad.any()):
        row, column = (int(i) for i in bad.nonzero()[0])
        raise NonFiniteError(
            f"{what} is `{float(x[row, column])}` (sequence {row}, response token {column})",
            hint="ppoctl status RUN  # nothing was trained on it; see its figures, lower a learning rate and resume",
        )
