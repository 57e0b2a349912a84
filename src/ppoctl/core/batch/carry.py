"""Carry: the small values that are passed from step to step."""

import json
from dataclasses import dataclass, fields

from ppoctl.core.batch import codec


@dataclass(frozen=True)
class Carry:
    """Values that adapt from step to step, and counters over all steps.

    The values are computed only from committed data and copied into every saved state. The default of a field is the
    value for a run that is older than the field.
    """

    kl_coef: float = 0.0
    """Coefficient of the KL penalty for the next step, fixed or adaptive; 0: no coefficient yet."""
    trained_seqs: float = 0.0
    """Number of responses that were trained on so far."""
    trained_tokens: float = 0.0
    """Number of response tokens in a loss so far, each counted once for all epochs."""
    reward_count: float = 0.0
    """Number of rewards in the running moments; their mean and sum of squared deviations follow."""
    reward_mean: float = 0.0
    reward_m2: float = 0.0
    reward_reference_mean: float = 0.0
    reward_reference_std: float = 0.0
    """Standard deviation of the rewards of the first step in which they differed; 0: no such step yet."""
    kl_first_coef: float = 0.0
    """The recipe's `coef` in the previous step: a fixed coefficient, or the first value of an adaptive one; 0: no KL
    penalty, or `coef` was not stored."""
    further_rounds: float = 0.0
    """Number of batches of prompts that all steps so far used in addition to one per step."""
    waited_steps: float = 0.0
    """Number of steps at the start of the run in which only the critic trained, because `ppo.critic_only_until` was
    not met."""

    def as_dict(self) -> dict[str, float]:
        """Return the fields that differ from their defaults."""
        with_defaults = {f.name: (getattr(self, f.name), f.default) for f in fields(self)}
        return {name: value for name, (value, default) in with_defaults.items() if value != default}

    def batch(self, step: int, number: int = 1) -> int:
        """Return the batch of prompts of a round of the next step: its number over the run, from 0.

        `step` is the step after this carry, and `number` is the round, both counted from 1.
        """
        return step - 1 + int(self.further_rounds) + number - 1

    @property
    def identity(self) -> str:
        """Digest of the fields that differ from their defaults."""
        return codec.digest(json.dumps(self.as_dict(), sort_keys=True).encode())
