"""Two measurements of the same things, held against each other: how far apart, and whether by chance.

A difference is tested by exchanging the signs of the pairs' differences (Fisher 1935): were both alike, each would be
as likely the other way round. Where all differences are of one size, as with right and wrong answers, that is
McNemar's exact test. Pairs, not both sides by themselves: what questions have in common is no noise (Miller 2024,
arXiv:2411.00640).
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, sqrt
from statistics import NormalDist, fmean, stdev

_FLIPS = 10_000
"""Draws of signs where not all choices can be counted; a p-value below one in so many is not told apart from it."""
_TIE = 1e-9


@dataclass(frozen=True)
class PairedDifference:
    """The second measurement less the first, over all pairs."""

    pairs: int
    mean: float
    low: float | None
    high: float | None
    """Bounds of the 95 % confidence interval of the mean (Student's t); None: one pair has no spread."""
    effect: float | None
    """Mean in standard deviations of the pairs' differences (Cohen's d_z); 0 where these are all 0, None where all
    are another one, which has no spread to be measured in."""
    better: int
    worse: int
    p_value: float
    """Chance of a mean at least so far from 0, either way, were both alike."""


def paired(differences: Sequence[float]) -> PairedDifference:
    """The difference over these pairs, of which there is at least one."""
    mean, count = fmean(differences), len(differences)
    spread = stdev(differences) if count > 1 else 0.0
    low, high = None, None
    if count > 1:
        half = _student_975(count - 1) * spread / sqrt(count)
        low, high = mean - half, mean + half
    effect = mean / spread if spread > _TIE else 0.0 if abs(mean) <= _TIE else None
    better, worse = (sum(sign * each > _TIE for each in differences) for sign in (1, -1))
    return PairedDifference(count, mean, low, high, effect, better, worse, p_value(differences, better, worse))


def p_value(differences: Sequence[float], better: int, worse: int) -> float:
    """Share of all choices of signs whose sum is at least as far from 0; counted where all differences are of one
    size, else estimated from the same ten thousand choices each time."""
    sizes = [abs(each) for each in differences if abs(each) > _TIE]
    if not sizes:
        return 1.0
    if max(sizes) - min(sizes) <= _TIE:
        fewer, all_of_them = min(better, worse), better + worse
        return min(1.0, 2 * _share(sum(comb(all_of_them, k) for k in range(fewer + 1)), 2**all_of_them))
    reached = abs(sum(differences)) - _TIE * len(sizes)
    tables = [_sums(sizes[start : start + 8]) for start in range(0, len(sizes), 8)]
    drawn = random.Random(0)
    beyond = sum(
        abs(sum(table[byte % len(table)] for table, byte in zip(tables, drawn.randbytes(len(tables)), strict=True)))
        >= reached
        for _ in range(_FLIPS)
    )
    return (beyond + 1) / (_FLIPS + 1)


def _share(some: int, of_all: int) -> float:
    """A quotient of numbers that may be too large for floats."""
    return some / of_all


def _sums(sizes: Sequence[float]) -> list[float]:
    """Sums of the sizes under all choices of their signs."""
    found = [0.0]
    for size in sizes:
        found = [each + sign * size for sign in (1, -1) for each in found]
    return found


def _student_975(degrees: int) -> float:
    """The 97.5 % quantile of Student's t, to a hundredth from 3 degrees of freedom on (Cornish and Fisher)."""
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
