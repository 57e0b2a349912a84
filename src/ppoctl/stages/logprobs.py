"""40-logprobs: what the trainer says of the drawn tokens, and how far that is from what the generator said."""

from dataclasses import dataclass

from ppoctl.batch.records import Logprobs, Record, Rollouts, State
from ppoctl.ports import Models
from ppoctl.ppo.diagnostics import sampler_gap
from ppoctl.stages.finite import require_finite


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
        logprobs, entropy = engine.logprobs(rollouts, temperature=self.temperature)
        require_finite(logprobs, rollouts.mask, "a log-prob of the actor")
        reference = None
        if self.with_reference:
            reference = engine.reference_logprobs(rollouts, temperature=self.temperature)
            require_finite(reference, rollouts.mask, "a log-prob of the reference")
            reference = reference.where(rollouts.mask, 0.0)
        return Logprobs(
            actor=logprobs.where(rollouts.mask, 0.0),
            entropy=entropy.where(rollouts.mask, 0.0),
            reference=reference,
            stamp=actor.stamp,
            gap=sampler_gap(logprobs, rollouts.sampler_logprobs, rollouts.mask),
        )

    def result(self, record: Record) -> Logprobs:
        assert isinstance(record, Logprobs)
        return record
