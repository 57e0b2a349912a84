"""Proof that an engine computes with the trainer's weights: two, after every transfer.

1. Numbers. Each tensor is checksummed as it leaves the trainer and again where the engine computes with it;
   `require_equal` wants the two lists equal, name by name: nothing lost, nothing extra, nothing changed.
2. Function. Trainer and engine both score one fixed token sequence, the canary: layer order, rotary tables, norms,
   attention and compiled graphs must agree too, within a tolerance.

Numbers are compared bit by bit, except that -0.0 and denormals count as 0: reading back a packed matrix through its
own kernel loses the sign of a zero, and kernels may flush denormals. How an engine reads its weights back is its own
knowledge (`engines.vllm.weights`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ppoctl.errors import WeightSyncError
from ppoctl.weights.checksum import TensorChecksum

CANARY_TOKENS = 48
_FLOAT32_MAX = 1e-3
_BFLOAT16_MEAN = 0.5


@dataclass(frozen=True)
class LoadedWeight:
    """One weight as an engine holds it, under its Hugging Face name."""

    name: str
    checksum: TensorChecksum
    tied_to: str | None
    """Name of the weight that this one shares, which the trainer must have sent if it did not send `name` itself."""


class SentChecksums(dict[str, TensorChecksum]):
    """Checksums of what has left the trainer in one transfer, by name."""

    def add(self, checksums: Mapping[str, TensorChecksum]) -> None:
        """Raises WeightSyncError when a name comes twice."""
        for name, checksum in checksums.items():
            if name in self:
                raise _gap(name, "left the trainer twice")
            self[name] = checksum


def require_equal(announced: Sequence[str], sent: SentChecksums, loaded: Sequence[LoadedWeight]) -> None:
    """Raise WeightSyncError, naming the tensor, unless the engine has loaded exactly what the trainer announced."""
    places = {weight.name for weight in loaded}
    for name in announced:
        if name not in sent:
            raise _gap(name, f"was announced and never left the trainer ({len(sent)} of {len(announced)} did)")
        if name not in places:
            raise _gap(name, "was sent and has no place in the engine")
    names = set(announced)
    for name in sent:
        if name not in names:
            raise _gap(name, "was sent and is not among the announced names")
    for weight in loaded:
        _require_one_equal(weight, sent)


def _require_one_equal(weight: LoadedWeight, sent: Mapping[str, TensorChecksum]) -> None:
    source = weight.name if weight.name in sent else weight.tied_to
    if source is None or source not in sent:
        raise _gap(weight.name, f"is held by the engine ({weight.checksum}) and was not sent")
    if weight.checksum != sent[source]:
        via = "" if source == weight.name else f" with `{source}`, to which it is tied,"
        raise _gap(weight.name, f"was sent{via} as {sent[source]}, and the engine holds {weight.checksum}")


def _gap(name: str, what: str) -> WeightSyncError:
    return WeightSyncError(
        f"weight `{name}` {what}",
        hint="the generator would sample from other weights than the trainer's: resume the run, which loads them "
        "anew; if it fails again, report it with the model's config.json",
    )


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
