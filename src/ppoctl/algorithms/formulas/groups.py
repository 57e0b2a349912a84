"""Advantages of responses relative to the other responses to the same prompt (a group), without a critic.

A formula works on the scores of one group: its responses that have a score, also those that are truncated and not
trained on. Sums are computed in float64 and rounded once (`math.fsum`), so a result depends neither on the order of
the rows nor on other groups.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from ppoctl.algorithms.formulas.estimator import EstimatorInputs

# Number that is added to a standard deviation before the division, as in verl and NeMo-RL.
STD_EPS = 1e-6


@dataclass(frozen=True)
class Group:
    """The n responses to one prompt that have a score. At least two scores differ."""

    scores: Sequence[float]
    tokens: Sequence[int]
    """Number of unmasked tokens of each response; 0: the response is not trained on."""


Formula = Callable[[Group], Sequence[float]]
"""Group -> advantage of each of its responses."""


def group_advantages(
    inputs: EstimatorInputs, formula: Formula, *, scaled_by_step: bool = False
) -> tuple[Float[Tensor, "B R"], float]:
    """Return the advantage of each unmasked token (exactly 0 elsewhere), and the fraction of equal groups.

    All tokens of a response have the same advantage. A response without a score has advantage 0. A group is equal,
    and all its advantages are exactly 0, if it has fewer than two scores or if its scores are equal. Scores are
    compared with each other: the rounded mean of equal scores may differ from them, and their std may then be above
    0.

    `scaled_by_step` divides by the standard deviation of all scores of the step + 1e-6.
    """
    by_row, equal = _advantages_of_rows(inputs.scores, inputs, formula)
    if scaled_by_step:
        divisor = sample_std(inputs.scores[inputs.valid].tolist()) + STD_EPS
        by_row = [advantage / divisor for advantage in by_row]
    return _spread(by_row, inputs), _fraction(equal, inputs)


def decoupled_advantages(inputs: EstimatorInputs) -> tuple[Float[Tensor, "B R"], float]:
    """Return the weighted sum of the standardized scores of each component of the reward (exactly 0 where masked
    out), and the fraction of groups that are equal in all components.

        A = sum over components k of weight_k (s_k - mean(s_k)) / (std(s_k) + 1e-6)

    A response that has a score s but no components (`environment.on_failure.score`) is left out of every s_k, and is
    compared by its score with all scores of the group instead:

        A = sum over components k of |weight_k| (s - mean(s)) / (std(s) + 1e-6)

    Source: GDPO, arXiv:2601.05242. The caller whitens the result.
    """
    missing = [None] * len(inputs.scores)
    components = {name: inputs.extras.get(name, missing) for name in inputs.weights}
    has_all = [all(value is not None for value in values) for values in zip(*components.values(), strict=True)]
    with_all = replace(inputs, valid=inputs.valid & torch.tensor(has_all))
    columns, equal = [], set(inputs.groups.tolist())
    for name, weight in inputs.weights.items():
        scores = inputs.scores.new_tensor([value or 0.0 for value in components[name]])
        by_row, equal_in_component = _advantages_of_rows(scores, with_all, standardized)
        columns.append([weight * advantage for advantage in by_row])
        equal &= equal_in_component
    size = math.fsum(abs(weight) for weight in inputs.weights.values())
    whole, equal_in_score = _advantages_of_rows(inputs.scores, inputs, standardized)
    columns.append([0.0 if has else size * advantage for has, advantage in zip(has_all, whole, strict=True)])
    groups_of_failed = {group for group, has in zip(inputs.groups.tolist(), has_all, strict=True) if not has}
    equal -= groups_of_failed - equal_in_score
    return _spread([math.fsum(of_row) for of_row in zip(*columns, strict=True)], inputs), _fraction(equal, inputs)


def from_mean(group: Group) -> list[float]:
    """Return A = s - mean(s). Source: Dr. GRPO, arXiv:2503.20783, section 3.2."""
    mean = math.fsum(group.scores) / len(group.scores)
    return [score - mean for score in group.scores]


def standardized(group: Group) -> list[float]:
    """Return A = (s - mean(s)) / (std(s) + 1e-6). Source: GRPO, arXiv:2402.03300, section 4.1.2."""
    divisor = sample_std(group.scores) + STD_EPS
    return [deviation / divisor for deviation in from_mean(group)]


def from_mean_of_others(group: Group) -> list[float]:
    """Return A = s - mean of the other scores. Source: RLOO, arXiv:2402.14740."""
    # The sum of the others is rounded once: the own score is subtracted inside the exact sum.
    num_others = len(group.scores) - 1
    return [score - math.fsum((*group.scores, -score)) / num_others for score in group.scores]


def standardized_by_others(group: Group) -> list[float]:
    """Return A = (s - mean(others)) / (std(others) + 1e-6), without the division where the other scores are equal or
    there is only one. Source: NeMo-RL (`use_leave_one_out_baseline`), which finds equal scores by their rounded std.
    """
    advantages = from_mean_of_others(group)
    for index, advantage in enumerate(advantages):
        if std := sample_std((*group.scores[:index], *group.scores[index + 1 :])):
            advantages[index] = advantage / (std + STD_EPS)
    return advantages


def from_weighted_mean(group: Group) -> list[float]:
    """Return A = s - sum(tokens s) / sum(tokens). Source: OPO, arXiv:2505.23585."""
    weighted = math.fsum(tokens * score for tokens, score in zip(group.tokens, group.scores, strict=True))
    mean = weighted / max(1, sum(group.tokens))
    return [score - mean for score in group.scores]


def best_only(group: Group) -> list[float]:
    """Return A = best - second best for the best response and 0 for the others; all 0 if two responses are best.
    Source: arXiv:2503.19595, as in verl (`grpo_passk`)."""
    best, second = heapq.nlargest(2, group.scores)
    return [best - second if score == best else 0.0 for score in group.scores]


def best_only_scaled(group: Group) -> list[float]:
    """Return `best_only` / (std(s) + 1e-6). Source: verl (`grpo_passk`)."""
    divisor = sample_std(group.scores) + STD_EPS
    return [advantage / divisor for advantage in best_only(group)]


def sample_std(scores: Sequence[float]) -> float:
    """Return the standard deviation of n scores with the divisor n - 1; 0 if n < 2 or if they are equal."""
    if len(set(scores)) < 2:
        return 0.0
    mean = math.fsum(scores) / len(scores)
    return math.sqrt(math.fsum((score - mean) ** 2 for score in scores) / (len(scores) - 1))


def _advantages_of_rows(
    scores: Float[Tensor, " B"], inputs: EstimatorInputs, formula: Formula
) -> tuple[list[float], set[int]]:
    """Return the advantage of each response for these scores, and the indices of the equal groups."""
    members: dict[int, list[int]] = defaultdict(list)
    for row, (index, is_valid) in enumerate(zip(inputs.groups.tolist(), inputs.valid.tolist(), strict=True)):
        members[index] += [row] if is_valid else []
    tokens = inputs.mask.sum(dim=1)
    by_row, equal = [0.0] * len(scores), set()
    for index, rows in members.items():
        group = Group(scores[rows].tolist(), tokens[rows].tolist())
        if len(set(group.scores)) < 2:
            equal.add(index)
            continue
        for row, advantage in zip(rows, formula(group), strict=True):
            by_row[row] = advantage
    return by_row, equal


def _spread(by_row: Sequence[float], inputs: EstimatorInputs) -> Float[Tensor, "B R"]:
    return torch.where(inputs.mask, inputs.scores.new_tensor(by_row)[:, None], 0)


def _fraction(groups: set[int], inputs: EstimatorInputs) -> float:
    return len(groups) / len(set(inputs.groups.tolist()))
