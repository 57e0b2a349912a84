"""40-logprobs: old log-probs for the ratios, and their difference from the sampler's log-probs.

Other stages use two parts of this file: the check for NaN (`require_finite`), and the KL penalty, which reads the
reference's log-probs.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ppoctl.algorithms.formulas.diagnostics import sampler_gap
from ppoctl.algorithms.formulas.kl import KlEstimator, KlGradient, KlKind
from ppoctl.algorithms.formulas.kl_coefficient import KlTarget
from ppoctl.algorithms.formulas.masking import masked_mean
from ppoctl.core import metric_registry
from ppoctl.core.batch.records import Carry, Logprobs, Rollouts, State
from ppoctl.core.errors import NonFiniteError
from ppoctl.core.ports import Models, OutputRequest, TokenOutputs


@dataclass(frozen=True)
class TokenKl:
    """KL(actor || reference) of each token, estimated or exact."""

    nats: Float[Tensor, "B R"]
    """KL in nats. Value and gradient are 0 where masked out."""
    held: Bool[Tensor, "B R"]
    """Tokens whose value a clamp changed."""


@dataclass(frozen=True)
class KlPenalty:
    """Settings of the KL penalty: where and how it is applied."""

    place: Literal["reward", "loss"]
    estimator: KlKind | Literal["full"]
    """Estimator of the KL. "full" is the exact sum over the vocabulary, which the trainer computes (see `exact`)."""
    coef: float
    """Fixed coefficient, or first value of an adaptive coefficient."""
    input_clamp: float | None = None
    output_clamp: float | None = None
    gradient: KlGradient = "estimator"
    """Form of the gradient of a penalty in the loss."""
    target: KlTarget | None = None
    """Target of an adaptive coefficient; None: the coefficient is fixed."""

    @property
    def _estimator(self) -> KlEstimator:
        assert self.estimator != "full", "the full KL is not estimated"
        return KlEstimator(self.estimator, self.input_clamp, self.output_clamp)

    def estimates(
        self, logprobs: Float[Tensor, "B R"], reference: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]
    ) -> TokenKl:
        """Return estimates of KL(actor || reference)."""
        estimator = self._estimator
        return TokenKl(estimator.estimates(logprobs, reference, mask), estimator.held(logprobs, reference, mask))

    def losses(
        self,
        logprobs: Float[Tensor, "B R"],
        reference: Float[Tensor, "B R"],
        old_logprobs: Float[Tensor, "B R"],
        mask: Bool[Tensor, "B R"],
    ) -> Float[Tensor, "B R"]:
        """Return the estimates as a loss with the gradient form of the penalty; loss and gradient are 0 where masked
        out."""
        return self._estimator.losses(logprobs, reference, old_logprobs, mask, gradient=self.gradient)

    def exact(self, full_kl: Float[Tensor, "B R"] | None, mask: Bool[Tensor, "B R"]) -> TokenKl:
        """Return the full KL, up to the output clamp."""
        assert full_kl is not None, "the penalty requires the full KL from the reference, which was not computed"
        bound = math.inf if self.output_clamp is None else self.output_clamp
        return TokenKl(full_kl.clamp(max=bound).where(mask, 0.0), mask & (full_kl > bound))

    def before_update(self, logprobs: Logprobs, mask: Bool[Tensor, "B R"]) -> TokenKl | None:
        """Return the KL per token of the actor that generated the rollouts; None: only the update computes it."""
        if self.estimator == "full":
            return None if logprobs.full_kl is None else self.exact(logprobs.full_kl, mask)
        return None if logprobs.actor is None else self.estimates(logprobs.actor, reference_of(logprobs), mask)

    def in_update(
        self, outputs: TokenOutputs, logprobs: Logprobs, rows: Int[Tensor, " m"], mask: Bool[Tensor, "m R"]
    ) -> TokenKl:
        """Return the KL per token of m rows, from the outputs that the update computed."""
        if self.estimator == "full":
            return self.exact(outputs.full_kl, mask)
        return self.estimates(outputs.primary, reference_of(logprobs)[rows], mask)

    def coef_at(self, carry: Carry) -> float:
        """Return the coefficient of a step that begins with this carry.

        An adaptive coefficient continues from the previous step, unless the recipe's `coef` has changed since then.
        """
        begins = self.target is None or carry.kl_first_coef not in (0.0, self.coef)
        return self.coef if begins else carry.kl_coef or self.coef


@dataclass(frozen=True)
class LogprobsStage:
    """Stage that computes the old log-probs (with entropies, if the trainer computes them), and the reference's
    log-probs if a KL penalty reads them."""

    models: Models
    scored: OutputRequest
    """How log-probs are computed: under the distribution that the generator (vLLM) sampled from. The reference uses
    the same temperature, but no filters."""
    with_reference: bool
    fingerprint: str
    with_full_kl: bool = False
    """Whether the actor's forward pass also computes the full KL from the reference."""
    in_one_pass: bool = False
    """Whether the actor's forward pass also computes the reference's log-probs, because both share a frozen trunk."""
    source: Literal["trainer", "sampler", "current"] = "trainer"
    """Source of the old log-probs: a forward pass of the trainer, the sampler, or the update itself."""
    stores_experts: bool = False
    """Whether the record has the experts that the trainer's routers choose."""
    name: str = "logprobs"

    def run(self, actor: State, rollouts: Rollouts) -> Logprobs:
        logprobs = (
            self._by_trainer(actor, rollouts) if self.source == "trainer" else self._without_trainer(actor, rollouts)
        )
        if not self.with_reference or logprobs.reference is not None:
            return logprobs
        trainer, unfiltered = self.models.actor_at(actor), OutputRequest(temperature=self.scored.temperature)
        reference = trainer.reference_logprobs(rollouts.sequences, unfiltered)
        return replace(logprobs, reference=_checked_reference(reference, rollouts.mask))

    @property
    def _request(self) -> OutputRequest:
        return replace(
            self.scored,
            entropy=True,
            full_kl=self.with_full_kl,
            reference=self.in_one_pass,
            experts=self.stores_experts,
        )

    def _by_trainer(self, actor: State, rollouts: Rollouts) -> Logprobs:
        outputs = self.models.actor_at(actor).logprobs(rollouts.routed_sequences, self._request)
        return self._record(outputs, actor, rollouts)

    def _record(self, outputs: TokenOutputs, actor: State, rollouts: Rollouts) -> Logprobs:
        logprobs, entropy = outputs.primary, outputs.entropy
        assert entropy is not None, "entropies were requested"
        require_finite(logprobs, rollouts.mask, "a log-prob of the actor")
        full_kl = outputs.full_kl
        if full_kl is not None:
            require_finite(full_kl, rollouts.mask, "a divergence from the reference")
            full_kl = full_kl.where(rollouts.mask, 0.0)
        reference = outputs.reference
        return Logprobs(
            actor=logprobs.where(rollouts.mask, 0.0),
            entropy=entropy.where(rollouts.mask, 0.0),
            stamp=actor.stamp,
            gap=sampler_gap(logprobs, rollouts.sampler_logprobs, rollouts.mask),
            reference=None if reference is None else _checked_reference(reference, rollouts.mask),
            full_kl=full_kl,
            experts=None if outputs.experts is None else outputs.experts.to(torch.uint8),
            input_lengths=None if outputs.experts is None else rollouts.sequences.input_lengths,
        )

    def _without_trainer(self, actor: State, rollouts: Rollouts) -> Logprobs:
        sampler = rollouts.sampler_logprobs if self.source == "sampler" else None
        if sampler is not None:
            require_finite(sampler, rollouts.mask, "a log-prob of the sampler")
        return Logprobs(actor.stamp, {}, sampler)


def _checked_reference(logprobs: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]) -> Float[Tensor, "B R"]:
    require_finite(logprobs, mask, "a log-prob of the reference")
    return logprobs.where(mask, 0.0)


def reference_of(logprobs: Logprobs) -> Float[Tensor, "B R"]:
    """Return the reference's log-probs, which every KL penalty requires.

    If they are missing, `wire` has a bug. Training without the penalty would silently change the objective.
    """
    assert logprobs.reference is not None, (
        "the KL penalty requires the reference's log-probs, which were not computed"
    )
    return logprobs.reference


def kl_metrics(kl: TokenKl, mask: Bool[Tensor, "B R"], coef: float) -> dict[str, float]:
    """Return the metrics of a KL penalty: metric name -> value."""
    mean = float(masked_mean(kl.nats, mask))
    return {
        metric_registry.KL_REFERENCE_MEAN.name: mean,
        metric_registry.KL_CLAMPED_FRAC.name: float(masked_mean(kl.held.float(), mask)),
        metric_registry.KL_COEF.name: coef,
        metric_registry.KL_PENALTY_MEAN.name: coef * mean,
    }


def require_finite(x: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"], what: str) -> None:
    """Raise NonFiniteError that names the first unmasked position that is NaN or infinite."""
    bad = mask & ~torch.isfinite(x)
    if bool(bad.any()):
        row, column = (int(i) for i in bad.nonzero()[0])
        raise NonFiniteError(
            f"{what} is `{float(x[row, column])}` (sequence {row}, response token {column})",
            hint="ppoctl status RUN  # not used for training: check the metrics, lower a learning rate and resume",
        )
