"""Advantages of responses relative to the other responses to the same prompt (a group), as in GRPO."""

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

# Number that is added to a standard deviation before the division, as in verl and NeMo-RL.
STD_EPS = 1e-6


def group_advantages(
    scores: Float[Tensor, " B"],
    valid: Bool[Tensor, " B"],
    groups: Int[Tensor, " B"],
    mask: Bool[Tensor, "B R"],
    *,
    scaled: bool,
) -> tuple[Float[Tensor, "B R"], float]:
    """Return the advantage of each unmasked token (exactly 0 elsewhere), and the fraction of equal groups.

        A = s - mean of the scores of the group                              not scaled (Dr. GRPO)
        A = (s - mean) / (std + 1e-6)        std with the divisor n - 1      scaled (GRPO)

    Only the n valid responses of a group are in mean and std; a response that is not valid has advantage 0. A group
    is equal, and all its advantages are exactly 0, if n < 2 or if its scores are equal. Scores are compared with each
    other: the rounded mean of equal scores may differ from them, and their std may then be above 0.

    The numbers do not depend on the order of the rows, nor on other groups: sums are computed in float64 and rounded
    once (`math.fsum`). Sources: GRPO, arXiv:2402.03300, section 4.1.2; Dr. GRPO, arXiv:2503.20783, section 3.2.
    """
    members: dict[int, list[int]] = defaultdict(list)
    for row, (group, is_valid) in enumerate(zip(groups.tolist(), valid.tolist(), strict=True)):
        members[group] += [row] if is_valid else []
    by_row, num_equal = torch.zeros_like(scores), 0
    for rows in members.values():
        of_group = scores[rows].tolist()
        if len(set(of_group)) < 2:
            num_equal += 1
        else:
            by_row[rows] = scores.new_tensor(_relative(of_group, scaled=scaled))
    return torch.where(mask, by_row[:, None], 0), num_equal / len(members)


def _relative(scores: Sequence[float], *, scaled: bool) -> list[float]:
    mean = math.fsum(scores) / len(scores)
    deviations = [score - mean for score in scores]
    if not scaled:
        return deviations
    std = math.sqrt(math.fsum(deviation**2 for deviation in deviations) / (len(scores) - 1))
    return [deviation / (std + STD_EPS) for deviation in deviations]
