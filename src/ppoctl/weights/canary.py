"""The canary: one fixed token sequence that trainer and engine both score after every transfer.

Checksums prove that both hold the same numbers. The canary proves that both compute the same function of them: layer
order, rotary tables, norms, attention, compiled graphs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ppoctl.errors import WeightSyncError

CANARY_TOKENS = 48
_FLOAT32_MAX = 1e-3
_BFLOAT16_MEAN = 0.5


@dataclass(frozen=True)
class Canary:
    """The sequence that both sides score, and how far apart two honest engines may be.

    In float32 the largest gap is bounded: rounding stays near 1e-4. In bfloat16 single tokens of peaked distributions
    differ by nats between correct implementations, so there the mean gap is bounded.
    """

    max_model_len: int
    """Window of the engine, in tokens."""
    statistic: str
    """"max" or "mean" of the absolute gaps."""
    tolerance: float
    """Largest allowed value of the statistic, in nats."""

    @staticmethod
    def of(dtype: str, max_model_len: int, tolerance: float | None) -> "Canary":
        """Canary of a model in `dtype`; `tolerance` is the recipe's `generator.canary_tolerance`."""
        statistic, default = ("max", _FLOAT32_MAX) if dtype == "float32" else ("mean", _BFLOAT16_MEAN)
        return Canary(max_model_len, statistic, default if tolerance is None else tolerance)

    def tokens(self, vocab_size: int) -> tuple[int, ...]:
        """Ids all over the vocabulary, the same in every process; one position of the window stays free, because an
        engine scores a prompt only while it draws a token after it."""
        length = min(CANARY_TOKENS, self.max_model_len - 1)
        return tuple(((i + 1) * 2654435761 >> 7) % vocab_size for i in range(length))

    def check(self, generator: Sequence[float], trainer: Sequence[float]) -> float:
        """Gap between the log-probs of both sides, in nats; raises WeightSyncError where it is too large or not a
        number."""
        if len(generator) != len(trainer):
            raise WeightSyncError(
                f"the canary has {len(generator)} scored tokens in the generator and {len(trainer)} in the trainer"
            )
        gaps = [abs(left - right) for left, right in zip(generator, trainer, strict=True)]
        gap = max(gaps) if self.statistic == "max" else sum(gaps) / len(gaps)
        if not all(map(math.isfinite, gaps)) or gap > self.tolerance:
            worst = max(range(len(gaps)), key=lambda i: gaps[i] if math.isfinite(gaps[i]) else math.inf)
            raise WeightSyncError(
                f"canary log-probs of generator and trainer differ by {gap:.3g} nats ({self.statistic} over "
                f"{len(gaps)} tokens; allowed {self.tolerance:g}; worst at token {worst + 1}: generator "
                f"{generator[worst]:.4f}, trainer {trainer[worst]:.4f}), although both hold the same weights",
                hint="the two engines compute different functions: check the model's config.json (rope, norms, tied "
                "embeddings); if the gap is rounding, raise `generator.canary_tolerance`",
            )
        return gap
