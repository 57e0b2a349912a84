"""The canary: a fixed prompt, and a few tokens that the engine generates greedily after the prompt. Trainer and
engine both score the prompt and these tokens after every transfer.

Checksums verify that both sides hold the same numbers. The canary verifies that both sides compute the same function
of these numbers: layer order, rotary embeddings, norms, attention, compiled graphs. An engine scores a prompt in one
pass, but decodes from its paged KV cache with other kernels and graphs. The canary therefore checks both prompt and
decoded tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from ppoctl.core.errors import WeightSyncError

PROMPT_TOKENS = 48
GENERATED_TOKENS = 8
_FLOAT32_MAX = 1e-3
_BFLOAT16_MEAN = 0.5


@dataclass(frozen=True)
class CanaryScores:
    """One side's log-probs of the canary, in nats, at temperature 1."""

    prompt: tuple[float, ...]
    """Log-probs of tokens 1.. of the prompt."""
    sampled: tuple[int, ...]
    """Ids of the tokens that the engine generated after the prompt."""
    logprobs: tuple[float, ...]
    """Log-probs of the generated tokens."""


@dataclass(frozen=True)
class Canary:
    """The prompt that both sides score, and how much the log-probs of correct implementations may differ.

    In float32 the largest difference is bounded: rounding stays near 1e-4. In bfloat16 single tokens of peaked
    distributions differ by nats between correct implementations, so the mean difference is bounded instead.
    """

    max_model_len: int
    """Context length of the engine, in tokens."""
    statistic: str
    """"max" or "mean" of the absolute differences."""
    tolerance: float
    """Largest allowed value of the statistic, in nats."""

    @staticmethod
    def of(dtype: str, max_model_len: int, tolerance: float | None) -> "Canary":
        """Return the canary of a model in `dtype`; `tolerance` is the recipe's `generator.canary_tolerance`."""
        statistic, default = ("max", _FLOAT32_MAX) if dtype == "float32" else ("mean", _BFLOAT16_MEAN)
        return Canary(max_model_len, statistic, default if tolerance is None else tolerance)

    @property
    def num_drawn(self) -> int:
        """Number of tokens that an engine generates. It is lower if the engine's context is short."""
        return min(GENERATED_TOKENS, self.max_model_len - self._num_prompt)

    @property
    def _num_prompt(self) -> int:
        return min(PROMPT_TOKENS, max(1, self.max_model_len - GENERATED_TOKENS))

    def tokens(self, vocab_size: int) -> tuple[int, ...]:
        """Return the token ids of the prompt. They are spread over the vocabulary, and are the same in every
        process."""
        # 2654435761 is the constant of Knuth's multiplicative hash, which spreads consecutive numbers.
        return tuple(((i + 1) * 2654435761 >> 7) % vocab_size for i in range(self._num_prompt))

    def check(self, generator: CanaryScores, trainer: CanaryScores) -> None:
        """Raise WeightSyncError if the log-probs of the prompt or of the generated tokens differ too much, or are not
        finite. A restarted engine may generate another token than before if two tokens are nearly equally likely.
        Then the comparison ends with the first token that differs, since each side's token is that side's most likely
        token. The comparison includes the log-probs of the prompt again, because a mean over few tokens is
        unreliable."""
        self._compare(generator.prompt, trainer.prompt, "tokens", _PROMPT_HINT)
        pairs = zip(generator.sampled, trainer.sampled, strict=False)
        same = 1 + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        generated, scored, what = generator.logprobs[:same], trainer.logprobs[:same], "generated tokens"
        if same < len(generator.sampled):
            generated, scored = generator.prompt + generated, trainer.prompt + scored
            what = "tokens of the prompt and the first generated token"
        self._compare(generated, scored, what, _DECODING_HINT)

    def _compare(self, generator: Sequence[float], trainer: Sequence[float], what: str, hint: str) -> None:
        if len(generator) != len(trainer):
            raise WeightSyncError(
                f"the canary has {len(generator)} scored {what} in the generator, but {len(trainer)} in the trainer"
            )
        if not generator:  # a prompt of one token, because the context is so short
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


_PROMPT_HINT = (
    "generator and trainer compute different functions: check the model's config.json (rope, norms, tied embeddings);"
    " if the difference is rounding, raise `generator.canary_tolerance`"
)
_DECODING_HINT = (
    "they agree on a prompt, but not on the tokens decoded after it: try `--set generator.compile=false`, then "
    '`--set generator.model_runner="v1"`; if the difference is rounding, raise `generator.canary_tolerance`'
)
