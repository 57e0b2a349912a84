"""Where and how leaving the reference is penalised."""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from ppoctl.batch.records import Logprobs


@dataclass(frozen=True)
class KlPenalty:
    """A penalty that is on."""

    place: Literal["reward", "loss"]
    estimator: Literal["k1", "k2", "k3"]
    coef: float


def reference_of(logprobs: Logprobs) -> Float[Tensor, "B R"]:
    """The reference's log-probs, which a penalty that is on cannot do without. A missing one is a fault of the
    wiring; leaving the penalty out would train something else."""
    assert logprobs.reference is not None, "a KL penalty is on, and the reference's log-probs were not taken"
    return logprobs.reference
