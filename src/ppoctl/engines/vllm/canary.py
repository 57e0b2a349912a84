"""One fixed token sequence that both sides score after every weight update.

The read-back of `weights` proves that the engine holds the trainer's numbers, bit by bit. The canary proves that both
compute the same function of them: layer order, rotary tables, norms, attention, compiled graphs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ppoctl.errors import WeightSyncError

CANARY_TOKENS = 48
_FLOAT32_MAX = 1e-3
_BFLOAT16_MEAN = 0.5


def canary_tokens(vocab_size: int, max_model_len: int) -> tuple[int, ...]:
    """Ids all over the vocabulary, the same in every process; one position of the window stays free, because the
    engine scores a prompt only while drawing a token after it."""
    length = min(CANARY_TOKENS, max_model_len - 1)
    return tuple(((i + 1) * 2654435761 >> 7) % vocab_size for i in range(length))


@dataclass(frozen=True)
class Tolerance:
    """How far apart two honest engines may be.

    In float32 the largest gap is bounded: rounding stays near 1e-4. In bfloat16 single tokens of peaked distributions
    differ by nats between correct implementations, so there the mean gap is bounded.
    """

    statistic: str
    """"max" or "mean" of the absolute gaps."""
    limit: float
    """In nats."""

    @staticmethod
    def of(dtype: str, override: float | None) -> "Tolerance":
        """`override` is the recipe's `generator.canary_tolerance`."""
        statistic, limit = ("max", _FLOAT32_MAX) if dtype == "float32" else ("mean", _BFLOAT16_MEAN)
        return Tolerance(statistic, limit if override is None else override)

    def check(self, generator: Sequence[float], trainer: Sequence[float]) -> float:
        """The gap of two lists of log-probs; raises WeightSyncError where it is too large or not a number."""
        if len(generator) != len(trainer):
            raise WeightSyncError(
                f"the canary has {len(generator)} scored tokens in the generator and {len(trainer)} in the trainer"
            )
        gaps = [abs(left - right) for left, right in zip(generator, trainer, strict=True)]
        gap = max(gaps) if self.statistic == "max" else sum(gaps) / len(gaps)
        if not all(map(math.isfinite, gaps)) or gap > self.limit:
            worst = max(range(len(gaps)), key=lambda i: gaps[i] if math.isfinite(gaps[i]) else math.inf)
            raise WeightSyncError(
                f"canary log-probs of generator and trainer differ by {gap:.3g} nats ({self.statistic} over "
                f"{len(gaps)} tokens; allowed {self.limit:g}; worst at token {worst + 1}: generator "
                f"{generator[worst]:.4f}, trainer {trainer[worst]:.4f}), although both hold the same weights",
                hint="the two engines compute different functions: check the model's config.json (rope, norms, tied "
                "embeddings); if the gap is rounding, raise `generator.canary_tolerance`",
            )
        return gap
