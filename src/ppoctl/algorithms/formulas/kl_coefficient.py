"""Adaptive coefficient of a KL penalty (Ziegler et al. 2019, arXiv:1909.08593, section 2.2)."""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Bool, Float
from torch import Tensor

# Bound of the relative error, as in the paper's code, trlX and verl.
MAX_ERROR = 0.2


@dataclass(frozen=True)
class KlTarget:
    """Target of the KL of a step, and how fast the coefficient adapts to it."""

    nats: float
    per: Literal["token", "sequence"]
    horizon_seqs: int

    def measured(self, kl: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]) -> float:
        """Return the KL that is compared with the target, in nats, as a mean over sequences with an unmasked token.

        per "sequence": the mean of each sequence's sum (trlX). per "token": the mean of each sequence's mean over
        tokens (verl). Raises ValueError if all tokens are masked out.
        """
        lengths = mask.sum(1)
        has_tokens = lengths > 0
        if not bool(has_tokens.any()):
            raise ValueError(f"0 unmasked tokens: every position of the {tuple(mask.shape)} mask is False")
        sums = kl.double().where(mask, 0.0).sum(1)[has_tokens]
        return float((sums if self.per == "sequence" else sums / lengths[has_tokens]).mean())

    def next_coef(self, coef: float, measured: float, *, num_seqs: int) -> float:
        """Return the coefficient of the next step.

            e = clip(measured / target - 1, -0.2, 0.2)          coef x (1 + e num_seqs / horizon_seqs)

        The coefficient stays above 0 while 0.2 num_seqs is below the horizon. The paper has a fixed gain of 0.1
        instead of num_seqs / horizon_seqs. As in trlX and verl, the gain here grows with the batch, so the change per
        sequence does not depend on the batch size.
        """
        error = min(max(measured / self.nats - 1.0, -MAX_ERROR), MAX_ERROR)
        return coef * (1.0 + error * num_seqs / self.horizon_seqs)
