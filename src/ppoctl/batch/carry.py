"""What goes from step to step."""

import json
from dataclasses import dataclass, fields

from ppoctl.batch import codec


@dataclass(frozen=True)
class Carry:
    """What truly adapts from step to step, and what is counted over all of them: computed from committed data only,
    and copied into every saved state.

    Every field has a default, which is what a run had that was made before the field was.
    """

    kl_coef: float = 0.0
    """Coefficient of the KL penalty of the next step, where one adapts or is fixed; 0: there is none yet."""
    trained_seqs: float = 0.0
    """Responses that have trained so far."""
    trained_tokens: float = 0.0
    """Response tokens that have counted in a loss so far, each once however many epochs there are."""
    reward_count: float = 0.0
    """Rewards that the running moments have seen; mean and sum of squared deviations of them follow."""
    reward_mean: float = 0.0
    reward_m2: float = 0.0
    reward_reference_mean: float = 0.0
    reward_reference_std: float = 0.0
    """Standard deviation of the rewards of the first step in which they differed; 0: there was none yet."""
    kl_first_coef: float = 0.0
    """The recipe's coefficient from which that of the KL penalty has adapted; 0: none adapts, or it was not kept."""

    def as_dict(self) -> dict[str, float]:
        """The fields that have not their default."""
        told = {f.name: (getattr(self, f.name), f.default) for f in fields(self)}
        return {name: value for name, (value, usual) in told.items() if value != usual}

    @property
    def identity(self) -> str:
        """Digest of the fields that have not their default."""
        return codec.digest(json.dumps(self.as_dict(), sort_keys=True).encode())
