"""Comparison of two evaluations, prompt by prompt: their difference, and its significance. Reads only the rows of
their samples; imports no torch.

The test flips the signs of the pairs' differences (Fisher 1935): if both measurements had the same distribution,
each sign would be equally likely. If all differences have the same size, as for right and wrong answers, this is
McNemar's exact test. The test is paired because the difficulty of the prompts affects both measurements, and this
shared variance is not noise of their difference (Miller 2024, arXiv:2411.00640).
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, sqrt
from statistics import NormalDist, fmean, stdev

from ppoctl.core.errors import RecipeError
from ppoctl.store.eval_samples import SampleDict

_FLIPS = 10_000
"""Number of sampled sign choices if exact counting is not possible; the smallest p-value is about 1 / this number."""
_TIE = 1e-9


@dataclass(frozen=True)
class PairedDifference:
    """Difference of two measurements over all pairs: the second minus the first."""

    pairs: int
    mean: float
    low: float | None
    high: float | None
    """Bounds of the 95 % confidence interval of the mean (Student's t); None: a single pair has none."""
    effect: float | None
    """Mean divided by the standard deviation of the pairs' differences (Cohen's d_z); 0 if all differences are 0;
    None if all are equal but not 0, since their standard deviation is 0."""
    better: int
    worse: int
    p_value: float
    """Two-sided p-value: probability of a mean at least this far from 0 if both had the same distribution."""


def paired(differences: Sequence[float]) -> PairedDifference:
    """Return the difference over these pairs; `differences` must not be empty."""
    mean, count = fmean(differences), len(differences)
    deviation = stdev(differences) if count > 1 else 0.0
    low, high = None, None
    if count > 1:
        half = _student_975(count - 1) * deviation / sqrt(count)
        low, high = mean - half, mean + half
    effect = mean / deviation if deviation > _TIE else 0.0 if abs(mean) <= _TIE else None
    better, worse = (sum(sign * difference > _TIE for difference in differences) for sign in (1, -1))
    return PairedDifference(count, mean, low, high, effect, better, worse, p_value(differences, better, worse))


def p_value(differences: Sequence[float], better: int, worse: int) -> float:
    """Return the fraction of all sign choices for which the sum of the differences is at least as far from 0.

    The fraction is exact if all differences have the same size; otherwise it is estimated from 10,000 choices, which
    are the same in each call.
    """
    sizes = [abs(difference) for difference in differences if abs(difference) > _TIE]
    if not sizes:
        return 1.0
    if max(sizes) - min(sizes) <= _TIE:
        fewer, total = min(better, worse), better + worse
        return min(1.0, 2 * _fraction(sum(comb(total, k) for k in range(fewer + 1)), 2**total))
    reached = abs(sum(differences)) - _TIE * len(sizes)
    # One random byte chooses the signs of up to eight pairs.
    tables = [_sums(sizes[start : start + 8]) for start in range(0, len(sizes), 8)]
    signs = random.Random(0)
    beyond = sum(
        abs(sum(table[byte % len(table)] for table, byte in zip(tables, signs.randbytes(len(tables)), strict=True)))
        >= reached
        for _ in range(_FLIPS)
    )
    # The observed signs count as one choice, so that the fraction is never 0.
    return (beyond + 1) / (_FLIPS + 1)


def _fraction(part: int, total: int) -> float:
    """Return the quotient of integers that may be too large for floats."""
    return part / total


def _sums(sizes: Sequence[float]) -> list[float]:
    """Return the sums of the sizes for all choices of their signs."""
    sums = [0.0]
    for size in sizes:
        sums = [partial + sign * size for sign in (1, -1) for partial in sums]
    return sums


def _student_975(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t (Cornish-Fisher expansion; error below 0.01 from 3 degrees on)."""
    z = NormalDist().inv_cdf(0.975)
    if degrees < 3:
        return {1: 12.706, 2: 4.303}[degrees]
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term * float(degrees) ** -power for power, term in enumerate(terms, start=1))


@dataclass(frozen=True)
class Changed:
    """A prompt that the two evaluations score differently, with the mean scores of its samples in both."""

    prompt: str
    scores: tuple[float, float]


@dataclass(frozen=True)
class ComparedSet:
    """Comparison of one set in one mode."""

    set: str
    mode: str
    scores: tuple[float, float]
    """Mean score over the prompts that are compared."""
    difference: PairedDifference
    left_out: int
    """Number of prompts without a score in one or both evaluations."""
    changed: tuple[Changed, ...]
    """Prompts whose score changed, the largest changes first."""


def compare_evaluations(left: Sequence[SampleDict], right: Sequence[SampleDict]) -> list[ComparedSet]:
    """Compare two evaluations in the sets and modes that both have. Raises RecipeError if none is in both."""
    scores = [_scores(rows) for rows in (left, right)]
    results = [
        _compared(name, mode, scores[0][name, mode], scores[1][name, mode])
        for name, mode in scores[0]
        if (name, mode) in scores[1]
    ]
    compared = [result for result in results if result is not None]
    if not compared:
        has = [", ".join(sorted({f"`{name}` ({mode})" for name, mode in side})) or "none" for side in scores]
        raise RecipeError(
            f"no prompt has a score in both evaluations; the first has sets {has[0]}, the second {has[1]}",
            hint="ppoctl eval --help  # evaluate both checkpoints with the same recipe, each with its own --out",
        )
    return compared


def not_compared(left: Sequence[SampleDict], right: Sequence[SampleDict], found: Sequence[ComparedSet]) -> list[str]:
    """Return the sets and modes of either evaluation that have no prompt with a score in both evaluations."""
    compared = {(result.set, result.mode) for result in found}
    of_either = sorted({(row["set"], row["mode"]) for row in (*left, *right)})
    return [f"{name} {mode}" for name, mode in of_either if (name, mode) not in compared]


_PromptScores = dict[str, list[float]]


def _scores(rows: Sequence[SampleDict]) -> dict[tuple[str, str], _PromptScores]:
    """Return the scores of each set and mode, by prompt. A prompt whose samples have no score has an empty list."""
    scores: dict[tuple[str, str], _PromptScores] = {}
    for row in rows:
        prompt_scores = scores.setdefault((row["set"], row["mode"]), {}).setdefault(row["prompt_id"], [])
        if row["score"] is not None:
            prompt_scores.append(row["score"])
    return scores


def _compared(name: str, mode: str, left: _PromptScores, right: _PromptScores) -> ComparedSet | None:
    prompts = [prompt for prompt in left if left[prompt] and right.get(prompt)]
    if not prompts:
        return None
    means = [Changed(prompt, (fmean(left[prompt]), fmean(right[prompt]))) for prompt in prompts]
    differences = [mean.scores[1] - mean.scores[0] for mean in means]
    changed = [mean for mean in means if abs(mean.scores[1] - mean.scores[0]) > _TIE]
    return ComparedSet(
        set=name,
        mode=mode,
        scores=(fmean(mean.scores[0] for mean in means), fmean(mean.scores[1] for mean in means)),
        difference=paired(differences),
        left_out=len({*left, *right}) - len(prompts),
        changed=tuple(sorted(changed, key=lambda mean: -abs(mean.scores[1] - mean.scores[0]))),
    )
