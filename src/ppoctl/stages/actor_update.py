"""70-actor_update: the actor follows the advantages, clipped."""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from ppoctl import metrics
from ppoctl.batch.records import Advantages, Correction, Logprobs, Rollouts, State, Update
from ppoctl.ppo.diagnostics import policy_diagnostics
from ppoctl.ppo.kl import kl_losses
from ppoctl.ppo.masking import masked_mean
from ppoctl.ppo.policy_loss import PolicyClip, clipped_policy_losses
from ppoctl.stages.correction import counted_after
from ppoctl.stages.logprobs import KlPenalty, reference_of
from ppoctl.stages.objective import Outputs, Term, Terms
from ppoctl.stages.updates import UpdateStage


@dataclass(frozen=True)
class Surrogate:
    """The clipped surrogate: what a token gains by its advantage, as a loss."""

    old_logprobs: Float[Tensor, "B R"]
    advantages: Float[Tensor, "B R"]
    clip: PolicyClip
    needs_entropy: bool = False

    def __call__(self, outputs: Outputs, mask: Bool[Tensor, "m R"]) -> Float[Tensor, "m R"]:
        old_logprobs, advantages = outputs.of(self.old_logprobs), outputs.of(self.advantages)
        return clipped_policy_losses(outputs.values, old_logprobs, advantages, mask, clip=self.clip)


@dataclass(frozen=True)
class Entropy:
    """The entropy of each token's distribution, in nats; its term has a negative coefficient."""

    needs_entropy: bool = True

    def __call__(self, outputs: Outputs, mask: Bool[Tensor, "m R"]) -> Float[Tensor, "m R"]:
        assert outputs.entropy is not None, "an entropy bonus is on, and the entropies were not computed"
        return outputs.entropy.where(mask, 0.0)


@dataclass(frozen=True)
class KlToReference:
    """An estimate of the KL divergence from the reference, in nats, with the gradient that the penalty asks for."""

    reference: Float[Tensor, "B R"]
    """Log-probs under the reference."""
    old_logprobs: Float[Tensor, "B R"]
    penalty: KlPenalty
    needs_entropy: bool = False

    def __call__(self, outputs: Outputs, mask: Bool[Tensor, "m R"]) -> Float[Tensor, "m R"]:
        reference, old_logprobs = outputs.of(self.reference), outputs.of(self.old_logprobs)
        estimates = self.penalty.estimates(outputs.values, reference, mask)
        return kl_losses(estimates, outputs.values, reference, old_logprobs, mask, gradient=self.penalty.gradient)


@dataclass(frozen=True, kw_only=True)
class ActorUpdateStage(UpdateStage):
    """Every epoch of the actor. A correction says what tokens weigh, and which do not count."""

    clip: PolicyClip
    entropy_coef: float
    penalty: KlPenalty | None
    name: str = "actor_update"

    def run(
        self,
        actor: State,
        rollouts: Rollouts,
        logprobs: Logprobs,
        advantages: Advantages,
        correction: Correction | None = None,
    ) -> Update:
        mask, weighted = advantages.mask, advantages.advantages
        if correction is not None:
            mask, weighted = counted_after(correction, mask), weighted * correction.weights
        read = (rollouts, logprobs, advantages, *(() if correction is None else (correction,)))
        objective = Terms(tuple(self._terms(logprobs, weighted, mask, advantages.penalty_coef)))
        trained = self.train(actor, rollouts, objective, read=read)
        diagnostics = [
            policy_diagnostics(
                result.outputs,
                logprobs.actor[minibatch.rows],
                advantages.advantages[minibatch.rows],
                mask[minibatch.rows],
                clip=self.clip,
            )
            for minibatch, result in trained.steps
        ]
        of_the_step = {metrics.POLICY_ENTROPY_MEAN.name: float(masked_mean(logprobs.entropy, mask))}
        return trained.record("policy", diagnostics, of_the_step=of_the_step)

    def _terms(
        self, logprobs: Logprobs, weighted: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"], kl_coef: float
    ) -> list[Term]:
        terms = [Term(Surrogate(logprobs.actor, weighted, self.clip), mask)]
        if self.entropy_coef > 0:
            terms.append(Term(Entropy(), mask, coef=-self.entropy_coef))
        if self.penalty is not None and self.penalty.place == "loss":
            kl = KlToReference(reference_of(logprobs), logprobs.actor, self.penalty)
            terms.append(Term(kl, mask, coef=kl_coef))
        return terms
