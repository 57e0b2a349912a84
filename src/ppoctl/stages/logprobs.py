"""40-logprobs: what the drawn tokens' ratios are taken to, and how far the trainer is from what the generator said.

Here also are what other stages share with it: the guard that keeps NaN out of everything later, and the penalty that
reads the reference's log-probs.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ppoctl import metric_registry
from ppoctl.batch.records import Carry, Logprobs, Rollouts, State
from ppoctl.errors import NonFiniteError
from ppoctl.ports import Models, OutputRequest, TokenOutputs
from ppoctl.ppo.diagnostics import sampler_gap
from ppoctl.ppo.kl import KlEstimator, KlGradient, KlKind
from ppoctl.ppo.kl_coefficient import KlTarget
from ppoctl.ppo.masking import masked_mean


@dataclass(frozen=True)
class TokenKl:
    """KL(actor || reference) of each token, estimated or exact."""

    nats: Float[Tensor, "B R"]
    """0 under the mask, and so is its gradient."""
    held: Bool[Tensor, "B R"]
    """The tokens whose number a clamp changed."""


@dataclass(frozen=True)
class KlPenalty:
    """Where and how leaving the reference is penalised."""

    place: Literal["reward", "loss"]
    estimator: KlKind | Literal["full"]
    """full: no estimate, but the sum over the vocabulary that the trainer says (`exact`)."""
    coef: float
    """The fixed coefficient, or the first of one that follows a target."""
    input_clamp: float | None = None
    output_clamp: float | None = None
    gradient: KlGradient = "estimator"
    """Form of the gradient that the penalty has in the loss."""
    target: KlTarget | None = None
    """None: the coefficient is fixed."""

    @property
    def _estimator(self) -> KlEstimator:
        assert self.estimator != "full", "the whole divergence is not estimated"
        return KlEstimator(self.estimator, self.input_clamp, self.output_clamp)

    def estimates(
        self, logprobs: Float[Tensor, "B R"], reference: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]
    ) -> TokenKl:
        """Estimates of KL(actor || reference)."""
        estimator = self._estimator
        return TokenKl(estimator.estimates(logprobs, reference, mask), estimator.held(logprobs, reference, mask))

    def losses(
        self,
        logprobs: Float[Tensor, "B R"],
        reference: Float[Tensor, "B R"],
        old_logprobs: Float[Tensor, "B R"],
        mask: Bool[Tensor, "B R"],
    ) -> Float[Tensor, "B R"]:
        """The estimates as a loss with the gradient that the penalty asks for; 0 under the mask, and so is that."""
        return self._estimator.losses(logprobs, reference, old_logprobs, mask, gradient=self.gradient)

    def exact(self, full_kl: Float[Tensor, "B R"] | None, mask: Bool[Tensor, "B R"]) -> TokenKl:
        """The whole divergence, up to the output clamp."""
        assert full_kl is not None, "the whole divergence from the reference is penalised, and was not computed"
        bound = math.inf if self.output_clamp is None else self.output_clamp
        return TokenKl(full_kl.clamp(max=bound).where(mask, 0.0), mask & (full_kl > bound))

    @property
    def reads_full_kl_first(self) -> bool:
        """Whether the whole divergence is read before the update: by rewards, or by a coefficient that follows it."""
        return self.estimator == "full" and (self.place == "reward" or self.target is not None)

    def before_update(self, logprobs: Logprobs, mask: Bool[Tensor, "B R"]) -> TokenKl | None:
        """The step's KL per token, of the actor that drew it; None where the update is the first to say it."""
        if self.estimator == "full":
            return None if logprobs.full_kl is None else self.exact(logprobs.full_kl, mask)
        return None if logprobs.actor is None else self.estimates(logprobs.actor, reference_of(logprobs), mask)

    def in_update(
        self, said: TokenOutputs, logprobs: Logprobs, rows: Int[Tensor, " m"], mask: Bool[Tensor, "m R"]
    ) -> TokenKl:
        """The KL per token of m rows, as the update computed it of them."""
        if self.estimator == "full":
            return self.exact(said.full_kl, mask)
        return self.estimates(said.primary, reference_of(logprobs)[rows], mask)

    def coef_at(self, carry: Carry) -> float:
        """The coefficient of a step that begins with this carry: one that adapts goes on from the step before, unless
        the recipe's has been changed since it began."""
        begins = self.target is None or carry.kl_first_coef not in (0.0, self.coef)
        return self.coef if begins else carry.kl_coef or self.coef

    @property
    def first_coef(self) -> float:
        """What a coefficient that adapts has begun from; 0: it is fixed."""
        return 0.0 if self.target is None else self.coef


@dataclass(frozen=True)
class LogprobsStage:
    """The old log-probs (by a forward pass: with entropies), and the reference's where a KL penalty reads them."""

    models: Models
    scored: OutputRequest
    """How log-probs are taken: as the generator drew. The reference is taken at that temperature, with all ids."""
    with_reference: bool
    fingerprint: str
    with_full_kl: bool = False
    """Whether the actor's forward pass also says how far its distributions are from the reference's."""
    source: Literal["trainer", "sampler", "current"] = "trainer"
    """Who says the old log-probs: a forward pass of the trainer, the sampler, or the update itself."""
    name: str = "logprobs"

    def run(self, actor: State, rollouts: Rollouts) -> Logprobs:
        said = self._by_trainer(actor, rollouts) if self.source == "trainer" else self._without(actor, rollouts)
        if not self.with_reference:
            return said
        engine, whole = self.models.actor_at(actor), OutputRequest(temperature=self.scored.temperature)
        reference = engine.reference_logprobs(rollouts.sequences, whole)
        require_finite(reference, rollouts.mask, "a log-prob of the reference")
        return replace(said, reference=reference.where(rollouts.mask, 0.0))

    @property
    def _asked(self) -> OutputRequest:
        return replace(self.scored, entropy=True, full_kl=self.with_full_kl)

    def _by_trainer(self, actor: State, rollouts: Rollouts) -> Logprobs:
        said = self.models.actor_at(actor).logprobs(rollouts.sequences, self._asked)
        logprobs, entropy = said.primary, said.entropy
        assert entropy is not None, "entropies were asked for"
        require_finite(logprobs, rollouts.mask, "a log-prob of the actor")
        full_kl = said.full_kl
        if full_kl is not None:
            require_finite(full_kl, rollouts.mask, "a divergence from the reference")
            full_kl = full_kl.where(rollouts.mask, 0.0)
        return Logprobs(
            actor=logprobs.where(rollouts.mask, 0.0),
            entropy=entropy.where(rollouts.mask, 0.0),
            stamp=actor.stamp,
            gap=sampler_gap(logprobs, rollouts.sampler_logprobs, rollouts.mask),
            full_kl=full_kl,
        )

    def _without(self, actor: State, rollouts: Rollouts) -> Logprobs:
        sampler = rollouts.sampler_logprobs if self.source == "sampler" else None
        if sampler is not None:
            require_finite(sampler, rollouts.mask, "a log-prob of the sampler")
        return Logprobs(actor.stamp, {}, sampler)


def reference_of(logprobs: Logprobs) -> Float[Tensor, "B R"]:
    """The reference's log-probs, which a penalty that is on cannot do without. A missing one is a fault of the
    wiring; leaving the penalty out would train something else."""
    assert logprobs.reference is not None, "a KL penalty is on, and the reference's log-probs were not taken"
    return logprobs.reference


def kl_metrics(kl: TokenKl, mask: Bool[Tensor, "B R"], coef: float) -> dict[str, float]:
    """The figures of a penalty: metric name -> number."""
    mean = float(masked_mean(kl.nats, mask))
    return {
        metric_registry.KL_REFERENCE_MEAN.name: mean,
        metric_registry.KL_CLAMPED_FRAC.name: float(masked_mean(kl.held.float(), mask)),
        metric_registry.KL_COEF.name: coef,
        metric_registry.KL_PENALTY_MEAN.name: coef * mean,
    }


def require_finite(x: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"], what: str) -> None:
    """Raise NonFiniteError naming the first counted position that is NaN or infinite."""
    bad = mask & ~torch.isfinite(x)
    if bool(bad.any()):
        row, column = (int(i) for i in bad.nonzero()[0])
        raise NonFiniteError(
            f"{what} is `{float(x[row, column])}` (sequence {row}, response token {column})",
            hint="ppoctl status RUN  # nothing was trained on it; see its figures, lower a learning rate and resume",
        )
