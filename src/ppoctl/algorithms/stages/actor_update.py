"""70-actor_update: train the actor on the advantages."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ppoctl.algorithms.formulas.aggregation import Aggregation
from ppoctl.algorithms.formulas.diagnostics import policy_diagnostics, sampler_gap
from ppoctl.algorithms.formulas.masking import masked_mean
from ppoctl.algorithms.formulas.policy_loss import PolicyLoss, PolicyLossInputs
from ppoctl.algorithms.stages.correction import mask_after
from ppoctl.algorithms.stages.logprobs import KlPenalty, kl_metrics, reference_of
from ppoctl.algorithms.stages.objective import LossInputs, Term, Terms, TokenLoss, loss_inputs
from ppoctl.algorithms.stages.updates import UpdateStage, UpdateTrace, not_trained
from ppoctl.core import metric_registry
from ppoctl.core.batch.records import Advantages, Correction, Logprobs, Rollouts, State, Update
from ppoctl.core.batch.update import step_of
from ppoctl.core.errors import RecipeError
from ppoctl.core.ports import Minibatch, MinibatchResult, OutputRequest

MinibatchStep = tuple[Minibatch, MinibatchResult]
"""One optimizer step and its result."""


@dataclass(frozen=True)
class Surrogate:
    """Policy loss of each token."""

    old_logprobs: Float[Tensor, "B R"] | None
    """Old log-probs; None: the log-probs of the update itself, so that every ratio is 1 and has the gradient of a
    log-prob."""
    advantages: Float[Tensor, "B R"]
    kind: PolicyLoss
    sampler_logprobs: Float[Tensor, "B R"]

    @property
    def needs_entropy(self) -> bool:
        return self.kind.needs_entropy

    def __call__(self, outputs: LossInputs, mask: Bool[Tensor, "m R"]) -> Float[Tensor, "m R"]:
        return self.kind.losses(self.inputs(outputs, mask))

    def inputs(self, outputs: LossInputs, mask: Bool[Tensor, "m R"]) -> PolicyLossInputs:
        """Return the values that the policy loss reads."""
        return PolicyLossInputs(
            logprobs=outputs.primary,
            old_logprobs=outputs.primary if self.old_logprobs is None else outputs.of(self.old_logprobs),
            advantages=outputs.of(self.advantages),
            mask=mask,
            sampler_logprobs=outputs.of(self.sampler_logprobs),
            entropy=outputs.entropy if self.needs_entropy else None,
        )


@dataclass(frozen=True)
class NegativeLogLikelihood:
    """Negative log-prob of each token."""

    needs_entropy: bool = False

    def __call__(self, outputs: LossInputs, mask: Bool[Tensor, "m R"]) -> Float[Tensor, "m R"]:
        return torch.where(mask, -outputs.primary, 0)


@dataclass(frozen=True)
class Entropy:
    """Entropy of each token's distribution, in nats. The entropy term has a negative coefficient."""

    needs_entropy: bool = True

    def __call__(self, outputs: LossInputs, mask: Bool[Tensor, "m R"]) -> Float[Tensor, "m R"]:
        assert outputs.entropy is not None, "the entropy bonus requires entropies, which were not computed"
        return outputs.entropy.where(mask, 0.0)


@dataclass(frozen=True)
class KlToReference:
    """Estimate of the KL divergence from the reference, in nats, with the gradient form of the penalty."""

    reference: Float[Tensor, "B R"]
    """Log-probs under the reference."""
    old_logprobs: Float[Tensor, "B R"] | None
    """Old log-probs; None: the log-probs of the update itself."""
    penalty: KlPenalty
    needs_entropy: bool = False

    def __call__(self, outputs: LossInputs, mask: Bool[Tensor, "m R"]) -> Float[Tensor, "m R"]:
        old = outputs.primary if self.old_logprobs is None else outputs.of(self.old_logprobs)
        return self.penalty.losses(outputs.primary, outputs.of(self.reference), old, mask)


@dataclass(frozen=True)
class FullKlToReference:
    """KL divergence from the reference over the full vocabulary, in nats."""

    penalty: KlPenalty
    needs_entropy: bool = False

    def __call__(self, outputs: LossInputs, mask: Bool[Tensor, "m R"]) -> Float[Tensor, "m R"]:
        return self.penalty.exact(outputs.full_kl, mask).nats


@dataclass(frozen=True, kw_only=True)
class ActorUpdateStage(UpdateStage):
    """All epochs of the actor. A correction, if present, weights tokens and masks some of them out."""

    scored: OutputRequest
    """How log-probs are computed: under the distribution that the generator (vLLM) sampled from."""
    loss: PolicyLoss
    aggregation: Aggregation
    """Aggregation of token losses, of entropies, and of the KL, each to one number."""
    entropy_coef: float
    positive_nll_coef: float
    penalty: KlPenalty | None
    with_full_kl: bool = False
    """Whether the update computes the full KL from the reference, which the penalty reads."""
    may_be_stale: bool = False
    """Whether earlier weights than those of the actor may have generated the responses."""
    name: str = "actor_update"

    def run(
        self,
        actor: State,
        rollouts: Rollouts,
        logprobs: Logprobs,
        advantages: Advantages,
        correction: Correction | None = None,
    ) -> Update:
        if advantages.trains_actor is False:
            return not_trained(actor)
        mask, weighted = advantages.mask, advantages.advantages
        if correction is not None:
            mask, weighted = mask_after(correction, mask), weighted * correction.weights
        read = (rollouts, logprobs, advantages, *(() if correction is None else (correction,)))
        surrogate = Surrogate(logprobs.actor, weighted, self.loss, rollouts.sampler_logprobs)
        terms = self._terms(surrogate, logprobs, mask, advantages.penalty_coef)
        if self.positive_nll_coef > 0:
            good = mask & _has_positive_reward(advantages)[:, None]
            terms.append(Term(NegativeLogLikelihood(), good, coef=self.positive_nll_coef, name="nll"))
        terms += self.more_terms(logprobs, advantages)
        # Every update reports entropies. If no forward pass computed entropies before the update, the update computes
        # them.
        request = replace(self.scored, entropy=logprobs.entropy is None, full_kl=self.with_full_kl)
        objective = Terms(tuple(terms), request)
        waited = int(advantages.carry.waited_steps)
        # The gap to the sampler is measured on all responses.
        reports_gap = logprobs.entropy is None
        sequences = rollouts.routed_sequences
        if logprobs.experts is not None:
            sequences = replace(sequences, experts=logprobs.experts.short())
        trained = self.train(actor, sequences, objective, read=read, waited=waited, first_has_all_rows=reports_gap)
        # A correction may leave only the terms of a value head in a minibatch.
        has_policy = [bool(mask[minibatch.rows].any()) for minibatch, _ in trained.steps]
        diagnostics = [
            self._diagnostics(step, surrogate, logprobs, advantages, mask) if is_of_policy else {}
            for step, is_of_policy in zip(trained.steps, has_policy, strict=True)
        ]
        policy_steps = [step for step, is_of_policy in zip(trained.steps, has_policy, strict=True) if is_of_policy]
        step_metrics = self._pre_update_metrics(policy_steps[0], logprobs, advantages, mask)
        step_metrics |= _clamped_ratios(policy_steps, surrogate, mask)
        by_term = _loss_by_term(objective, trained.steps)
        step_metrics |= by_term | self.more_metrics(trained, logprobs, advantages, by_term)
        step_metrics |= _merge_error(trained.steps)
        if self.may_be_stale:
            ages = (actor.step - step_of(stamp) for stamp in rollouts.oldest_stamps)
            step_metrics[metric_registry.POLICY_STALENESS_MAX.name] = float(max(ages))
        record = trained.record("policy", diagnostics, of_the_step=step_metrics)
        return replace(record, gap=_sampler_gap(trained.steps[0], rollouts)) if reports_gap else record

    def _diagnostics(
        self,
        step: MinibatchStep,
        surrogate: Surrogate,
        logprobs: Logprobs,
        advantages: Advantages,
        mask: Bool[Tensor, "B R"],
    ) -> dict[str, float]:
        """Return the metrics of the policy in one optimizer step."""
        rows, outputs = step[0].rows, step[1].outputs
        old = outputs.primary if logprobs.actor is None else logprobs.actor[rows]
        found = policy_diagnostics(outputs.primary, old, advantages.advantages[rows], mask[rows], loss=self.loss)
        return found | self.loss.metrics(surrogate.inputs(loss_inputs(rows, outputs), mask[rows]))

    def more_terms(self, logprobs: Logprobs, advantages: Advantages) -> list[Term]:  # noqa: ARG002
        """Return the terms of the loss that train more than the policy."""
        return []

    def more_metrics(
        self,
        trained: UpdateTrace,  # noqa: ARG002
        logprobs: Logprobs,  # noqa: ARG002
        advantages: Advantages,  # noqa: ARG002
        by_term: dict[str, float],  # noqa: ARG002
    ) -> dict[str, float]:
        """Return the metrics of these terms. `by_term` contains each term's contribution to the loss."""
        return {}

    def _terms(
        self, surrogate: Surrogate, logprobs: Logprobs, mask: Bool[Tensor, "B R"], kl_coef: float
    ) -> list[Term]:
        averaged = partial(Term, mask=mask, aggregation=self.aggregation)
        terms = [averaged(surrogate, name="surrogate")]
        if self.entropy_coef > 0:
            terms.append(averaged(Entropy(), coef=-self.entropy_coef, name="entropy"))
        if self.penalty is not None and self.penalty.place == "loss":
            kl: TokenLoss = FullKlToReference(self.penalty)
            if self.penalty.estimator != "full":
                kl = KlToReference(reference_of(logprobs), logprobs.actor, self.penalty)
            terms.append(averaged(kl, coef=kl_coef, name="kl"))
        return terms

    def _pre_update_metrics(
        self, first: MinibatchStep, logprobs: Logprobs, advantages: Advantages, mask: Bool[Tensor, "B R"]
    ) -> dict[str, float]:
        """Return the metrics of the actor before its update.

        If no forward pass computed these metrics, they come from the first minibatch, whose outputs are still those
        of the actor that generated the rollouts.
        """
        rows, outputs = first[0].rows, first[1].outputs
        entropy, entropy_mask = logprobs.entropy, mask
        if entropy is None:
            assert outputs.entropy is not None, "entropies must be reported, but were not computed"
            entropy, entropy_mask = outputs.entropy, mask[rows]
        metrics = {metric_registry.POLICY_ENTROPY_MEAN.name: float(masked_mean(entropy, entropy_mask))}
        if self.penalty is not None and self.penalty.before_update(logprobs, mask) is None:
            kl = self.penalty.in_update(outputs, logprobs, rows, mask[rows])
            metrics |= kl_metrics(kl, mask[rows], advantages.penalty_coef)
        return metrics


def _has_positive_reward(advantages: Advantages) -> Bool[Tensor, " B"]:
    """Return which responses have a reward above 0. Raises RecipeError if the record does not contain shaped
    rewards."""
    if advantages.shaped is None:
        raise RecipeError(
            "`ppo.policy_loss.positive_nll_coef` requires the shaped reward of each response, but an older version, "
            "which did not store it, wrote the advantages of this step",
            hint="ppoctl resume RUN --set ppo.policy_loss.positive_nll_coef=0  # for this step",
        )
    return advantages.shaped > 0


def _loss_by_term(objective: Terms, steps: Sequence[MinibatchStep]) -> dict[str, float]:
    """Return the mean over optimizer steps of each term's contribution to the loss; the terms add up to
    `policy/loss`.

    These metrics are stored for the step and not for each minibatch, because a replay compares the metrics of each
    minibatch with a record that any version may have written.
    """
    sums = {term.name: 0.0 for term in objective.terms}
    for minibatch, result in steps:
        for term, share in objective.shares(minibatch.rows, result.outputs, minibatch.totals):
            sums[term.name] += float(share)
    metrics = {metric_registry.named("policy", f"{name}_loss"): total / len(steps) for name, total in sums.items()}
    for term in objective.terms:
        if term.name == "nll":
            metrics[metric_registry.POLICY_NLL_TOKENS.name] = float(term.mask.sum())
    return metrics


def _clamped_ratios(
    steps: Sequence[MinibatchStep], surrogate: Surrogate, mask: Bool[Tensor, "B R"]
) -> dict[str, float]:
    """Return the smallest and the largest ratio within the clip range, over the tokens of all optimizer steps; empty
    for a loss without a clip. They are stored for the step for the same reason (`_loss_by_term`)."""
    smallest, largest, loss = list[float](), list[float](), surrogate.kind
    for minibatch, result in steps:
        inputs = surrogate.inputs(loss_inputs(minibatch.rows, result.outputs), mask[minibatch.rows])
        clamped = loss.clamped(loss.ratios(inputs.logprobs, inputs.old_logprobs, inputs.mask))
        if clamped is None:
            return {}
        low, high = clamped[inputs.mask].aminmax()
        smallest.append(float(low))
        largest.append(float(high))
    return {
        metric_registry.POLICY_CLAMPED_RATIO_MIN.name: min(smallest),
        metric_registry.POLICY_CLAMPED_RATIO_MAX.name: max(largest),
    }


def _merge_error(steps: Sequence[MinibatchStep]) -> dict[str, float]:
    """Return the merge error after the last optimizer step, if the actor has adapters."""
    error = steps[-1][1].merge_error
    return {} if error is None else {metric_registry.POLICY_MERGE_ERROR.name: error}


def _sampler_gap(first: MinibatchStep, rollouts: Rollouts) -> dict[str, float]:
    """Return the sampler/trainer log-prob difference in the first minibatch."""
    minibatch, result = first
    sampler, mask = (grid[minibatch.rows] for grid in (rollouts.sampler_logprobs, rollouts.mask))
    return sampler_gap(result.outputs.primary, sampler, mask)
