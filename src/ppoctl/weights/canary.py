"""The canary: one fixed prompt that trainer and engine both score after every transfer, and a few tokens that the
engine draws after it, greedily, and both score.

Checksums prove that both hold the same numbers. The canary proves that both compute the same function of them: layer
order, rotary tables, norms, attention, compiled graphs. An engine scores a prompt in one pass; it draws from its
paged cache of keys and values, with other kernels and graphs, so the one says nothing of the other.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from ppoctl.errors import WeightSyncError

PROMPT_TOKENS = 48
DRAWN_TOKENS = 8
_FLOAT32_MAX = 1e-3
_BFLOAT16_MEAN = 0.5


@dataclass(frozen=True)
class CanaryScores:
    """What one side says of the canary; log-probs in nats, at temperature 1."""

    prompt: tuple[float, ...]
    """Log-probs of tokens 1.. of the prompt."""
    sampled: tuple[int, ...]
    """Ids of the tokens that an engine drew after it."""
    logprobs: tuple[float, ...]
    """Log-probs of those."""


@dataclass(frozen=True)
class Canary:
    """The prompt that both sides score, and how far apart two honest engines may be.

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

    @property
    def num_drawn(self) -> int:
        """Tokens that an engine draws: fewer where its window is small."""
        return min(DRAWN_TOKENS, self.max_model_len - self._num_prompt)

    @property
    def _num_prompt(self) -> int:
        return min(PROMPT_TOKENS, max(1, self.max_model_len - DRAWN_TOKENS))

    def tokens(self, vocab_size: int) -> tuple[int, ...]:
        """Ids of the prompt: all over the vocabulary, the same in every process."""
        return tuple(((i + 1) * 2654435761 >> 7) % vocab_size for i in range(self._num_prompt))

    def check(self, generator: CanaryScores, trainer: CanaryScores) -> None:
        """Raise WeightSyncError where log-probs of the prompt, or of the drawn tokens, are too far apart, or no
        numbers. Where the sides have other drawn tokens, as an engine that was started again may where two are
        nearly equally likely, the last ones compared are the first that differ, as both are the most likely; and the
        prompt's are compared with them once more, since a mean over few tokens says little."""
        self._compare(generator.prompt, trainer.prompt, "tokens", _OF_THE_PROMPT)
        pairs = zip(generator.sampled, trainer.sampled, strict=False)
        same = 1 + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        drawn, scored, what = generator.logprobs[:same], trainer.logprobs[:same], "tokens that the generator drew"
        if same < len(generator.sampled):
            drawn, scored = generator.prompt + drawn, trainer.prompt + scored
            what = "tokens of the prompt and the first that the generator drew"
        self._compare(drawn, scored, what, _OF_DRAWING)

    def _compare(self, generator: Sequence[float], trainer: Sequence[float], what: str, hint: str) -> None:
        if len(generator) != len(trainer):
            raise WeightSyncError(
                f"the canary has {len(generator)} scored {what} in the generator and {len(trainer)} in the trainer"
            )
        if not generator:  # a prompt of one token, in a window of few
            return
        gaps = [abs(left - right) for left, right in zip(generator, trainer, strict=True)]
        gap = max(gaps) if self.statistic == "max" else sum(gaps) / len(gaps)
        if not all(map(math.isfinite, gaps)) or gap > self.tolerance:
            worst = max(range(len(gaps)), key=lambda i: gaps[i] if math.isfinite(gaps[i]) else math.inf)
            raise WeightSyncError(
                f"canary log-probs of generator and trainer differ by {gap:.3g} nats ({self.statistic} over "
                f"{len(gaps)} {what}; allowed {self.tolerance:g}; worst at token {worst + 1}: generator "
                f"{generator[worst]:.4f}, trainer {trainer[worst]:.4f}), although both hold the same weights",
                hint=hint,
            )


_OF_THE_PROMPT = (
    "the two engines compute different functions: check the model's config.json (rope, norms, tied embeddings); if "
    "the gap is rounding, raise `generator.canary_tolerance`"
)
_OF_DRAWING = (
    "they agree on a prompt, and not on what is decoded after it: try `--set generator.compile=false`, then "
    '`--set generator.model_runner="v1"`; if the gap is rounding, raise `generator.canary_tolerance`'
)
