"""The coefficient of a KL penalty that follows a target (Ziegler et al. 2019, arXiv:1909.08593, section 2.2)."""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Bool, Float
from torch import Tensor

# Largest relative error that moves the coefficient, as in the paper's code, trlX and verl.
MAX_ERROR = 0.2


@dataclass(frozen=True)
class KlTarget:
    """Where the KL of a step is steered to, and how fast."""

    nats: float
    per: Literal["token", "sequence"]
    horizon_seqs: int

    def measured(self, kl: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]) -> float:
        """What is held against the target, in nats: the mean over sequences of a sequence's sum (per sequence: trlX)
        or of its mean over tokens (per token: verl). Sequences without a counted token are left out. Raises
        ValueError when there is no other."""
        lengths = mask.sum(1)
        has_tokens = lengths > 0
        if not bool(has_tokens.any()):
            raise ValueError(f"0 counted tokens: every position of the {tuple(mask.shape)} mask is False")
        sums = kl.double().where(mask, 0.0).sum(1)[has_tokens]
        return float((sums if self.per == "sequence" else sums / lengths[has_tokens]).mean())

    def next_coef(self, coef: float, measured: float, *, num_seqs: int) -> float:
        """The coefficient of the next step:

            e = clip(measured / target - 1, -0.2, 0.2)          coef x (1 + e num_seqs / horizon_seqs)

        It stays above 0 while 0.2 num_seqs is below the horizon.
        """
        error = min(max(measured / self.nats - 1.0, -MAX_ERROR), MAX_ERROR)
        return coef * (1.0 + error * num_seqs / self.horizon_seqs)
