"""What k responses to a question would reach, estimated from n of them without bias: over all choices of k.

Scores of 0 and 1 make `best_at` the pass@k of Chen et al. 2021 (arXiv:2107.03374), 1 - C(n - c, k) / C(n, k). Where
verl resamples with replacement (a thousand times), and lm-eval takes the first k, the choices are counted here.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cache
from math import comb, sqrt

import numpy as np
import numpy.typing as npt

_Counts = npt.NDArray[np.float64]


def best_at(scores: Sequence[float], k: int) -> float:
    """The mean, over all choices of k of the scores, of the largest one chosen; k is at most their number."""
    all_choices = comb(len(scores), k)
    # The i-th smallest is the largest chosen where the others are among the i below it.
    return sum((score * (comb(below, k - 1) / all_choices) for below, score in enumerate(sorted(scores))), 0.0)


def majority_at(answers: Sequence[str | None], scores: Sequence[float], k: int) -> float:
    """The mean, over all choices of k responses, of the score of the answer that most of them give; at most 1000
    responses. Of answers that equally many give each is as likely as the others; all responses without an answer
    give the same one. An answer's score is the mean of its responses'."""
    votes = Counter(answers)
    scored: dict[str | None, list[float]] = defaultdict(list)
    for answer, score in zip(answers, scores, strict=True):
        scored[answer].append(score)
    means = {answer: sum(of) / len(of) for answer, of in scored.items()}
    won = sum(_won_with(most, votes, means, k) for most in range(1, min(k, max(votes.values())) + 1))
    return won / comb(len(answers), k)


def _won_with(most: int, votes: Counter[str | None], means: dict[str | None, float], k: int) -> float:
    """The sum, over the choices in which the largest number of votes for one answer is `most`, of the mean score of
    the answers that have it.

    ways[leading][chosen] counts choices of so many responses to the answers gone through, so many of which have
    `most` votes; worth[...] is the sum of the scores of these over the same choices.
    """
    few = sum(count for count in votes.values() if count < most)  # none of these can lead: any choice will do
    ways, worth = {0: np.zeros(k + 1)}, {0: np.zeros(k + 1)}
    ways[0][: few + 1] = _choices(few)[: k + 1]
    for answer, count in votes.items():
        if count < most:
            continue
        behind, ahead = _choices(count)[:most], _choices(count)[most]
        more_ways: defaultdict[int, _Counts] = defaultdict(lambda: np.zeros(k + 1))
        more_worth: defaultdict[int, _Counts] = defaultdict(lambda: np.zeros(k + 1))
        for leading, number in ways.items():
            more_ways[leading] += np.convolve(number, behind)[: k + 1]
            more_worth[leading] += np.convolve(worth[leading], behind)[: k + 1]
            more_ways[leading + 1][most:] += ahead * number[: k + 1 - most]
            led = worth[leading] + means[answer] * number
            more_worth[leading + 1][most:] += ahead * led[: k + 1 - most]
        ways, worth = more_ways, more_worth
    return sum((float(of[k]) / leading for leading, of in worth.items() if leading), 0.0)


@cache
def _choices(n: int) -> _Counts:
    """C(n, 0), ..., C(n, n)."""
    return np.array([float(comb(n, k)) for k in range(n + 1)])


def mean_and_error(of_prompts: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error (0 of one value). Values are of prompts: responses to one are not independent."""
    mean = sum(of_prompts) / len(of_prompts)
    variance = sum((value - mean) ** 2 for value in of_prompts) / max(len(of_prompts) - 1, 1)
    return mean, sqrt(variance / len(of_prompts))
