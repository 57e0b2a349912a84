"""keep_groups and all_rows: the samples that a step with several rounds of generation continues with."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor, nan, stack

from ppoctl.algorithms.stages.shaping import ShapingStep, apply_shaping
from ppoctl.core import metric_registry
from ppoctl.core.batch.records import Carry, Rewards, Rollouts, Selection
from ppoctl.core.batch.selection import every_row, select, take
from ppoctl.core.errors import DataError, quoted

Keeps = Callable[[Tensor], bool]
"""Whether a group is kept, by the numbers of its n responses that have a score, shape [n] or [n, K]."""
NumberOf = Callable[[Rollouts, Rewards], Tensor]
"""One number for each response, shape [B], or K numbers, shape [B, K], by which groups are kept."""


def is_mixed(numbers: Float[Tensor, " n"] | Float[Tensor, "n K"]) -> bool:
    """Whether any column has two different numbers. NaN does not count."""
    columns = numbers[:, None] if numbers.ndim == 1 else numbers
    return any(len(set(column[~column.isnan()].tolist())) > 1 for column in columns.T)


@dataclass(frozen=True)
class MeanWithin:
    """Whether the mean is within two bounds, which are included; a group without a number has no mean.

    Mean and bounds are compared as float32, because scores are: a score of 0.9 is not below a bound of 0.9.
    """

    low: float
    high: float

    def __call__(self, numbers: Float[Tensor, " n"]) -> bool:
        mean = numbers.double().mean().float()  # NaN without a number, and not within any bounds
        return bool((mean >= self.low) & (mean <= self.high))


def scores_of(_: Rollouts, rewards: Rewards) -> Float[Tensor, " B"]:
    """Return the scores as the scorer returned them."""
    return rewards.scores


@dataclass(frozen=True)
class ShapedBy:
    """Rewards after these steps of reward shaping, none of which reads the carry."""

    steps: tuple[ShapingStep, ...]

    def __call__(self, rollouts: Rollouts, rewards: Rewards) -> Float[Tensor, " B"]:
        return apply_shaping(rewards, rollouts, Carry(), self.steps).per_response


@dataclass(frozen=True)
class ComponentsOf:
    """The score, and these components of the reward; NaN where a response with a score has no components."""

    names: tuple[str, ...]

    def __call__(self, _: Rollouts, rewards: Rewards) -> Float[Tensor, "B K"]:
        columns = [rewards.extras.get(name, [None] * len(rewards.scores)) for name in self.names]
        parts = [rewards.scores.new_tensor([nan if value is None else value for value in each]) for each in columns]
        return stack([rewards.scores, *parts], dim=1)


@dataclass(frozen=True)
class PassesAt:
    """1 for a score of at least this number, else 0."""

    score: float

    def __call__(self, _: Rollouts, rewards: Rewards) -> Float[Tensor, " B"]:
        return (rewards.scores >= self.score).float()


@dataclass(frozen=True)
class GeneratedGroup:
    """The responses to one prompt in one round."""

    round: int
    rows: tuple[int, ...]
    """Rows of the rollouts of the round."""
    is_kept: bool
    passed: tuple[bool, ...]
    """Whether each response that has a score passes."""

    @property
    def is_all_right(self) -> bool:
        return bool(self.passed) and all(self.passed)

    @property
    def is_all_wrong(self) -> bool:
        return bool(self.passed) and not any(self.passed)


@dataclass(frozen=True)
class KeepGroupsStage:
    """Stage that selects the first groups, in the order of their prompts, that `keeps` accepts."""

    num_groups: int
    """Number of groups that a step requires."""
    keeps: Keeps
    number_of: NumberOf
    passes: PassesAt
    max_rounds: int
    may_be_short: bool
    """Whether the last round may leave fewer groups than a step requires; otherwise it raises an error."""
    rounds_overlap: bool
    """Whether the next round may be generated already, and is cancelled if the step has enough groups."""
    fingerprint: str
    name: str = "keep_groups"

    def run(self, *records: Rollouts | Rewards) -> Selection:
        """Select from the rollouts and rewards of all rounds so far, which alternate."""
        rollouts = [each for each in records[::2] if isinstance(each, Rollouts)]
        rewards = [each for each in records[1::2] if isinstance(each, Rewards)]
        rounds = list(zip(rollouts, rewards, strict=True))
        groups = [group for number, pair in enumerate(rounds, start=1) for group in self._groups(number, *pair)]
        kept = [group for group in groups if group.is_kept][: self.num_groups]
        if len(rounds) == self.max_rounds:
            self._require_enough(kept, groups, rollouts[0].step)
        every = every_row(rollouts)
        of_all = {**take(every, rollouts).metrics(), **take(every, rewards).metrics()}
        selection = select(
            rollouts,
            [(group.round, row) for group in kept for row in group.rows],
            is_full=len(kept) == self.num_groups,
            summary={**of_all, **_summary(kept, groups, rollouts)},
        )
        return replace(selection, cancelled=(0, 0.0)) if self.rounds_overlap else selection

    def _groups(self, number: int, rollouts: Rollouts, rewards: Rewards) -> Iterator[GeneratedGroup]:
        """Yield the groups of a round, in the order of their prompts."""
        numbers, passed = self.number_of(rollouts, rewards), self.passes(rollouts, rewards) > 0
        rows_of: dict[str, list[int]] = {}
        for row, prompt in enumerate(rollouts.prompt_ids):
            rows_of.setdefault(prompt, []).append(row)
        for rows in rows_of.values():
            scored = [row for row in rows if rewards.valid[row]]
            yield GeneratedGroup(number, tuple(rows), self.keeps(numbers[scored]), tuple(passed[scored].tolist()))

    def _require_enough(self, kept: Sequence[GeneratedGroup], groups: Sequence[GeneratedGroup], step: int) -> None:
        """Raise DataError if the last round leaves too few groups."""
        if len(kept) >= self.num_groups or (kept and self.may_be_short):
            return
        right, wrong = sum(group.is_all_right for group in groups), sum(group.is_all_wrong for group in groups)
        change = "when_short=use_fewer" if kept else f"max_rounds={2 * self.max_rounds}"
        raise DataError(
            f"step {step} has {len(kept)} of {self.num_groups} groups (`rollout.prompts_per_step`) after "
            f"{self.max_rounds} rounds (`rollout.groups.max_rounds`): of {len(groups)} generated groups, {right} "
            f"have only responses that pass, and {wrong} have none",
            hint=f"the rounds are saved: ppoctl resume RUN --set rollout.groups.{quoted(change)}",
        )


def _summary(
    kept: Sequence[GeneratedGroup], groups: Sequence[GeneratedGroup], rollouts: Sequence[Rollouts]
) -> dict[str, float]:
    tokens = sum(float(each.lengths.sum()) for each in rollouts)
    kept_tokens = sum(float(rollouts[group.round - 1].lengths[list(group.rows)].sum()) for group in kept)
    return {
        metric_registry.GROUPS_KEPT.name: float(len(kept)),
        metric_registry.GROUPS_ROUNDS.name: float(len(rollouts)),
        metric_registry.GROUPS_PROMPTS_PER_KEPT.name: len(groups) / max(len(kept), 1),
        metric_registry.GROUPS_ALL_RIGHT_FRAC.name: sum(group.is_all_right for group in groups) / len(groups),
        metric_registry.GROUPS_ALL_WRONG_FRAC.name: sum(group.is_all_wrong for group in groups) / len(groups),
        metric_registry.GROUPS_DROPPED_TOKENS.name: tokens - kept_tokens,
    }


@dataclass(frozen=True)
class AllRowsStage:
    """Stage that selects every sample of every round."""

    fingerprint: str
    name: str = "all_rows"

    def run(self, *rollouts: Rollouts) -> Selection:
        return every_row(rollouts)
