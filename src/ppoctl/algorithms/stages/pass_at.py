"""Unbiased estimates of the result of k responses to a prompt from n responses: the mean over all choices of k.

`best_at` of scores 0 and 1 is the pass@k of Chen et al. 2021 (arXiv:2107.03374): 1 - C(n - c, k) / C(n, k).
verl resamples with replacement (a thousand times), and lm-eval takes the first k responses. This module counts all
choices.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cache
from math import comb, sqrt

import numpy as np
import numpy.typing as npt

_Counts = npt.NDArray[np.float64]


def best_at(scores: Sequence[float], k: int) -> float:
    """Return the mean, over all choices of k scores, of the largest score chosen; k is at most the number of
    scores."""
    all_choices = comb(len(scores), k)
    # The i-th smallest score is the largest score of a choice if the other k - 1 scores are among the i scores below
    # it.
    return sum((score * (comb(below, k - 1) / all_choices) for below, score in enumerate(sorted(scores))), 0.0)


def majority_at(answers: Sequence[str | None], scores: Sequence[float], k: int) -> float:
    """Return the mean, over all choices of k responses, of the score of the most frequent answer; at most 1000
    responses.

    If several answers are the most frequent, each of them is chosen with the same probability. All responses without
    an answer have the same answer. The score of an answer is the mean over its responses.
    """
    votes = Counter(answers)
    scored: dict[str | None, list[float]] = defaultdict(list)
    for answer, score in zip(answers, scores, strict=True):
        scored[answer].append(score)
    means = {answer: sum(of) / len(of) for answer, of in scored.items()}
    won = sum(_won_with(most, votes, means, k) for most in range(1, min(k, max(votes.values())) + 1))
    return won / comb(len(answers), k)


def _won_with(most: int, votes: Counter[str | None], means: dict[str | None, float], k: int) -> float:
    """Return the sum, over the choices whose most frequent answer has `most` votes, of the mean score of the answers
    with `most` votes.

    ways[leading][chosen] counts the choices of `chosen` responses to the answers processed so far, in which `leading`
    answers have `most` votes. worth[leading][chosen] is the sum of the scores of these answers over the same choices.
    """
    few = sum(count for count in votes.values() if count < most)  # these answers cannot lead: any choice is allowed
    ways, worth = {0: np.zeros(k + 1)}, {0: np.zeros(k + 1)}
    ways[0][: few + 1] = _choices(few)[: k + 1]
    for answer, count in votes.items():
        if count < most:
            continue
        below_most, with_most = _choices(count)[:most], _choices(count)[most]
        more_ways: defaultdict[int, _Counts] = defaultdict(lambda: np.zeros(k + 1))
        more_worth: defaultdict[int, _Counts] = defaultdict(lambda: np.zeros(k + 1))
        for leading, number in ways.items():
            more_ways[leading] += np.convolve(number, below_most)[: k + 1]
            more_worth[leading] += np.convolve(worth[leading], below_most)[: k + 1]
            more_ways[leading + 1][most:] += with_most * number[: k + 1 - most]
            leading_worth = worth[leading] + means[answer] * number
            more_worth[leading + 1][most:] += with_most * leading_worth[: k + 1 - most]
        ways, worth = more_ways, more_worth
    return sum((float(of[k]) / leading for leading, of in worth.items() if leading), 0.0)


@cache
def _choices(n: int) -> _Counts:
    """Return C(n, 0), ..., C(n, n)."""
    return np.array([float(comb(n, k)) for k in range(n + 1)])


def mean_and_error(of_prompts: Sequence[float]) -> tuple[float, float]:
    """Return the mean over prompts and the standard error of this mean (0 for one value).

    The values are per prompt, because responses to one prompt are not independent.
    """
    mean = sum(of_prompts) / len(of_prompts)
    variance = sum((value - mean) ** 2 for value in of_prompts) / max(len(of_prompts) - 1, 1)
    return mean, sqrt(variance / len(of_prompts))
