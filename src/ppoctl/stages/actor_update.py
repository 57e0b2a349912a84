"""70-actor_update: the actor follows the advantages, clipped."""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from ppoctl import metrics
from ppoctl.batch.records import Advantages, Correction, Logprobs, Rollouts, State, Update
from ppoctl.ports import Asked
from ppoctl.ppo.diagnostics import policy_diagnostics
from ppoctl.ppo.kl import KlKind, kl_estimate
from ppoctl.ppo.masking import masked_mean
from ppoctl.ppo.policy_loss import PolicyClip, clipped_policy_losses
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
    """An estimate of the KL divergence from the reference, in nats."""

    reference: Float[Tensor, "B R"]
    """Log-probs under the reference."""
    estimator: KlKind
    needs_entropy: bool = False

    def __call__(self, outputs: Outputs, mask: Bool[Tensor, "m R"]) -> Float[Tensor, "m R"]:
        return kl_estimate(outputs.values, outputs.of(self.reference), kind=self.estimator, mask=mask)


@dataclass(frozen=True, kw_only=True)
class ActorUpdateStage(UpdateStage):
    """Every epoch of the actor. A correction says what tokens weigh, and which do not count."""

    scored: Asked
    """How its log-probs are taken: as the generator drew."""
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
            mask, weighted = mask & correction.mask, weighted * correction.weights
        read = (rollouts, logprobs, advantages, *(() if correction is None else (correction,)))
        objective = Terms(tuple(self._terms(logprobs, weighted, mask, advantages.carry.kl_coef)), self.scored)
        trained = self.train(actor, rollouts, objective, read=read)
        diagnostics = [
            policy_diagnostics(
                result.said.outputs,
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
            kl = KlToReference(reference_of(logprobs), self.penalty.estimator)
            terms.append(Term(kl, mask, coef=kl_coef))
        return terms
