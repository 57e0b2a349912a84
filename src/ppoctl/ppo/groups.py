"""Advantages of responses relative to the other responses to the same prompt (a group), without a critic.

Formulas work on the scores of one group. Only its responses with a score belong to it. Sums are computed in float64
and rounded once (`math.fsum`), so a result does not depend on the order of the rows.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

# Number that is added to a standard deviation before the division, as in verl and NeMo-RL.
STD_EPS = 1e-6


@dataclass(frozen=True)
class Group:
    """The n responses to one prompt that have a score. At least two scores differ."""

    scores: Sequence[float]
    tokens: Sequence[int]
    """Number of unmasked tokens of each response."""


Formula = Callable[[Group], list[float]]
"""Group -> advantage of each of its responses."""


def group_advantages(
    scores: Float[Tensor, " B"],
    valid: Bool[Tensor, " B"],
    groups: Int[Tensor, " B"],
    mask: Bool[Tensor, "B R"],
    formula: Formula,
) -> tuple[Float[Tensor, "B R"], float]:
    """Return the advantage of each unmasked token (exactly 0 elsewhere), and the fraction of equal groups.

    All tokens of a response have the same advantage. A response that is not valid has advantage 0, and does not
    belong to its group. A group is equal, and all its advantages are exactly 0, if it has fewer than two valid
    responses or if their scores are equal. Scores are compared with each other: the rounded mean of equal scores may
    differ from them, and their std may then be above 0.

    The numbers do not depend on the order of the rows, nor on other groups.
    """
    members: dict[int, list[int]] = defaultdict(list)
    for row, (group, is_valid) in enumerate(zip(groups.tolist(), valid.tolist(), strict=True)):
        members[group] += [row] if is_valid else []
    tokens = mask.sum(dim=1)
    by_row, num_equal = torch.zeros_like(scores), 0
    for rows in members.values():
        group = Group(scores[rows].tolist(), tokens[rows].tolist())
        if len(set(group.scores)) < 2:
            num_equal += 1
        else:
            by_row[rows] = scores.new_tensor(formula(group))
    return torch.where(mask, by_row[:, None], 0), num_equal / len(members)


def from_mean(group: Group) -> list[float]:
    """Return A = s - mean(s). Source: Dr. GRPO, arXiv:2503.20783, section 3.2."""
    mean = math.fsum(group.scores) / len(group.scores)
    return [score - mean for score in group.scores]


def standardized(group: Group) -> list[float]:
    """Return A = (s - mean(s)) / (std(s) + 1e-6). Source: GRPO, arXiv:2402.03300, section 4.1.2."""
    divisor = sample_std(group.scores) + STD_EPS
    return [deviation / divisor for deviation in from_mean(group)]


def from_mean_of_others(group: Group) -> list[float]:
    """Return A = s - mean of the other scores. Source: RLOO, arXiv:2402.14740, eq. 8."""
    # The sum of the others is rounded once: the own score is subtracted inside the exact sum.
    num_others = len(group.scores) - 1
    return [score - math.fsum((*group.scores, -score)) / num_others for score in group.scores]


def sample_std(scores: Sequence[float]) -> float:
    """Return the standard deviation of n scores with the divisor n - 1; 0 if n < 2 or if they are equal."""
    if len(set(scores)) < 2:
        return 0.0
    mean = math.fsum(scores) / len(scores)
    return math.sqrt(math.fsum((score - mean) ** 2 for score in scores) / (len(scores) - 1))
