"""70-actor_update: the actor follows the advantages, clipped."""

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor

from ppoctl import metrics
from ppoctl.batch import codec
from ppoctl.batch.lineage import next_lineage
from ppoctl.batch.records import Advantages, Logprobs, Record, Rollouts, State, Update
from ppoctl.ports import Models
from ppoctl.ppo.diagnostics import policy_diagnostics
from ppoctl.ppo.kl import KlKind, kl_estimate
from ppoctl.ppo.masking import masked_mean, masked_token_mean
from ppoctl.ppo.policy_loss import PolicyClip, clipped_policy_loss, truncated_importance_weights
from ppoctl.stages.logprobs import KlPenalty, reference_of
from ppoctl.stages.updates import MinibatchPlan, Trained


@dataclass(frozen=True)
class KlTerm:
    """The penalty for leaving the reference, where it is in the loss."""

    reference: Float[Tensor, "B R"]
    """Log-probs of the reference."""
    estimator: KlKind
    coef: float


@dataclass(frozen=True)
class PolicyObjective:
    """Clipped surrogate - entropy bonus + KL to the reference, of some rows."""

    old_logprobs: Float[Tensor, "B R"]
    advantages: Float[Tensor, "B R"]
    """Times the weights of the rollout correction, where one is on."""
    mask: Bool[Tensor, "B R"]
    clip: PolicyClip
    kl: KlTerm | None
    entropy_coef: float

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_coef > 0

    def __call__(
        self,
        rows: Int[Tensor, " m"],
        outputs: Float[Tensor, "m R"],
        entropy: Float[Tensor, "m R"] | None,
        num_tokens_global: int,
    ) -> Float[Tensor, ""]:
        device = outputs.device
        mask = self.mask[rows].to(device)
        loss = clipped_policy_loss(
            outputs,
            self.old_logprobs[rows].to(device),
            self.advantages[rows].to(device),
            mask,
            clip=self.clip,
            num_tokens_global=num_tokens_global,
        )
        if self.needs_entropy:
            assert entropy is not None, "an entropy bonus is on, and the entropies were not computed"
            bonus = masked_token_mean(entropy, mask, num_tokens_global=num_tokens_global)
            loss = loss - self.entropy_coef * bonus
        if self.kl is not None:
            kl = kl_estimate(outputs, self.kl.reference[rows].to(device), kind=self.kl.estimator, mask=mask)
            loss = loss + self.kl.coef * masked_token_mean(kl, mask, num_tokens_global=num_tokens_global)
        return loss


@dataclass(frozen=True)
class ActorUpdateStage:
    """Every epoch of the actor."""

    models: Models
    plan: MinibatchPlan
    clip: PolicyClip
    entropy_coef: float
    penalty: KlPenalty | None
    max_ratio: float | None
    """Of truncated importance sampling; None: no rollout correction."""
    fingerprint: str
    name: str = "actor_update"

    def run(self, actor: State, rollouts: Rollouts, logprobs: Logprobs, advantages: Advantages) -> Update:
        step = actor.step + 1
        inputs = [rollouts.identity, logprobs.identity, advantages.identity]
        if self.max_ratio is not None:  # only here does a sampler's log-prob enter a loss
            inputs.append(codec.digest(rollouts.sampler_logprobs.numpy().tobytes()))
        minibatches = self.plan.minibatches(actor, step=step, mask=advantages.mask)
        after = State(
            role="actor",
            step=step,
            updates=actor.updates + len(minibatches),
            lineage=next_lineage(actor, inputs, self.fingerprint),
        )
        with self.models.advancing(actor, to=after) as engine:
            results = engine.update(rollouts.sequences, minibatches, self._objective(rollouts, logprobs, advantages))
        diagnostics = [
            policy_diagnostics(
                result.outputs,
                logprobs.actor[minibatch.rows],
                advantages.advantages[minibatch.rows],
                advantages.mask[minibatch.rows],
                clip=self.clip,
            )
            for minibatch, result in zip(minibatches, results, strict=True)
        ]
        of_the_step = {metrics.POLICY_ENTROPY_MEAN.name: float(masked_mean(logprobs.entropy, advantages.mask))}
        trained = Trained(actor, after, minibatches, results, diagnostics)
        return trained.record(prefix="policy", of_the_step=of_the_step)

    def result(self, record: Record) -> State:
        assert isinstance(record, Update)
        return record.state

    def _objective(self, rollouts: Rollouts, logprobs: Logprobs, advantages: Advantages) -> PolicyObjective:
        weighted = advantages.advantages
        if self.max_ratio is not None:
            weighted = weighted * truncated_importance_weights(
                logprobs.actor, rollouts.sampler_logprobs, advantages.mask, max_ratio=self.max_ratio
            )
        return PolicyObjective(
            old_logprobs=logprobs.actor,
            advantages=weighted,
            mask=advantages.mask,
            clip=self.clip,
            kl=self._kl(logprobs, advantages),
            entropy_coef=self.entropy_coef,
        )

    def _kl(self, logprobs: Logprobs, advantages: Advantages) -> KlTerm | None:
        if self.penalty is None or self.penalty.place != "loss":
            return None
        return KlTerm(reference_of(logprobs), self.penalty.estimator, advantages.carry.kl_coef)
