"""Dynamic sampling (DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.2): rounds of generation until a step has
enough groups to learn from.

`KeptGroups` is a way of getting samples, so every step function can have it. If the critic trains on the dropped
responses too, the step functions are those of this module: values and log-probs are computed once for all generated
responses, and the actor trains on the kept rows of these records. Each model then has advantages of its own rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from ppoctl.algorithms.advantages_spec import ADVANTAGES, AdvantagesSpec
from ppoctl.algorithms.forward_specs import CORRECTIONS, LOGPROBS, VALUES, Correct
from ppoctl.algorithms.generation_specs import (
    NEXT_ROLLOUT,
    REWARD,
    ROLLOUT,
    ROLLOUT_METRICS,
    SCORE_METRICS,
    TAKEN_OR_GENERATED,
)
from ppoctl.algorithms.get_samples import Samples
from ppoctl.algorithms.sizes import fewest_rounds, sequences_per_round
from ppoctl.algorithms.stage_spec import SHAPING_KEYS, ReportedMetric, StageParts, StageSpec
from ppoctl.algorithms.stages.groups_table import GroupsTable
from ppoctl.algorithms.step_recipe import StepRecipe
from ppoctl.algorithms.trace import RunStage, StepFunction, StepInputs, StepOutputs
from ppoctl.algorithms.update_specs import ACTOR_UPDATE, CRITIC_UPDATE
from ppoctl.core import metric_registry as metrics
from ppoctl.core.key_path import dotted
from ppoctl.core.speed_metrics import GROUPS_CANCELLED_TOKENS, TIME_CANCELLED_S

if TYPE_CHECKING:
    from ppoctl.algorithms.stages.keep_groups import Keeps, NumberOf
    from ppoctl.core.batch.records import Logprobs, Rewards, Rollouts, Selection, Values
    from ppoctl.store.stage_runner import Stage

_TABLE = ("rollout", "groups")
_OVERLAP = (*_TABLE, "overlap_rounds")
_PASSES = 1.0
"""Lowest score that passes if `eval.pass_score` is not set."""


@dataclass(frozen=True)
class KeepGroupsSpec(StageSpec["Selection"]):
    """keep_groups: the groups that the step continues with, from all rounds so far."""

    kind: ClassVar[str] = "selection"
    keys: ClassVar[tuple[str, ...]] = (
        "rollout.prompts_per_step", "rollout.groups.keep", "rollout.groups.by", "eval.pass_score",
    )  # fmt: skip
    defines_rows: ClassVar[bool] = True

    def fingerprint_texts(self, recipe: StepRecipe) -> Iterator[str]:
        groups = _groups(recipe)
        if groups.by == "shaped":
            yield recipe.fingerprint(SHAPING_KEYS)
            yield from ADVANTAGES.fingerprint_texts(recipe)
        # Only the last round may be short. A round that was the last one is not reused as another one.
        if int(self.name.partition(".")[2] or 1) == groups.max_rounds:
            yield "last round"

    def metrics(self, recipe: StepRecipe) -> tuple[ReportedMetric, ...]:
        of_groups = (
            metrics.GROUPS_KEPT, metrics.GROUPS_ROUNDS, metrics.GROUPS_PROMPTS_PER_KEPT,
            metrics.GROUPS_ALL_RIGHT_FRAC, metrics.GROUPS_ALL_WRONG_FRAC, metrics.GROUPS_DROPPED_TOKENS,
        )  # fmt: skip
        groups = recipe.rollout.groups
        is_on, needs = groups is not None, "requires `rollout.groups`, which is not set"
        overlaps = groups is not None and groups.overlap_rounds
        return (
            *(
                ReportedMetric(metric, is_on, needs, (_TABLE,), "--set rollout.groups={}")
                for metric in (*ROLLOUT_METRICS, *SCORE_METRICS, *of_groups)
            ),
            *(
                ReportedMetric(
                    metric, overlaps, "requires rounds that overlap", (_OVERLAP,), f"--set {dotted(_OVERLAP)}=true"
                )
                for metric in (GROUPS_CANCELLED_TOKENS, TIME_CANCELLED_S)
            ),
        )

    def build(self, recipe: StepRecipe, parts: StageParts) -> "Stage[Selection]":
        from ppoctl.algorithms.stages.keep_groups import KeepGroupsStage, PassesAt

        groups, pass_score = _groups(recipe), recipe.eval.pass_score
        return KeepGroupsStage(
            num_groups=recipe.rollout.prompts_per_step,
            keeps=_keeps(groups),
            number_of=_number_of(recipe, groups),
            passes=PassesAt(_PASSES if pass_score is None else pass_score),
            max_rounds=groups.max_rounds,
            may_be_short=groups.when_short == "use_fewer",
            rounds_overlap=groups.overlap_rounds,
            fingerprint=self.fingerprint(recipe),
            name=self.name,
        )


def _groups(recipe: StepRecipe) -> GroupsTable:
    groups = recipe.rollout.groups
    assert groups is not None, "only a recipe with `rollout.groups` has this stage"
    return groups


def _keeps(groups: GroupsTable) -> "Keeps":
    from ppoctl.algorithms.stages.keep_groups import MeanWithin, is_mixed

    return is_mixed if groups.keep is None else MeanWithin(groups.keep.min, groups.keep.max)


def _number_of(recipe: StepRecipe, groups: GroupsTable) -> "NumberOf":
    from ppoctl.algorithms.stages.keep_groups import ComponentsOf, PassesAt, ShapedBy, scores_of
    from ppoctl.algorithms.stages.shaping import shaping_steps

    if groups.by == "pass":
        assert recipe.eval.pass_score is not None, "a rule requires `eval.pass_score`"
        return PassesAt(recipe.eval.pass_score)
    if groups.by == "shaped":
        return ShapedBy(shaping_steps(recipe.reward, max_new_tokens=recipe.rollout.max_new_tokens))
    if groups.by == "components":
        return ComponentsOf(tuple(recipe.reward.component_weights))
    return scores_of


@dataclass(frozen=True)
class AllRowsSpec(StageSpec["Selection"]):
    """all_rows: every sample of every round."""

    kind: ClassVar[str] = "selection"
    defines_rows: ClassVar[bool] = True

    def row_bounds(self, recipe: StepRecipe) -> tuple[int, int]:
        per_round = sequences_per_round(recipe)
        return fewest_rounds(recipe) * per_round, _groups(recipe).max_rounds * per_round

    def build(self, recipe: StepRecipe, parts: StageParts) -> "Stage[Selection]":
        from ppoctl.algorithms.stages.keep_groups import AllRowsStage

        return AllRowsStage(self.fingerprint(recipe), self.name)


KEEP_GROUPS = KeepGroupsSpec("keep_groups")
ALL_ROWS = AllRowsSpec("all_rows")
CRITIC_ADVANTAGES = AdvantagesSpec("critic_advantages", reports_metrics=False)
"""Advantages of all rows, whose returns the critic learns. The metrics are those of the rows of the actor."""


@dataclass(frozen=True)
class KeptGroups:
    """Rounds of generation until there are enough groups, of which the step uses the first."""

    at_most: int
    """Maximum number of rounds."""
    is_ahead: bool = False
    """Whether the step before generated the responses of the first round (`rollout.ahead`)."""
    is_first: bool = False
    """Whether no step before has generated responses."""
    overlaps: bool = False
    """Whether a round is generated while the scores of the round before are computed."""

    @property
    def suffix(self) -> str:
        return "_dynamic_sampling" + ("_ahead" + "_first" * self.is_first) * self.is_ahead

    def __call__(self, run_stage: RunStage, inputs: StepInputs) -> Samples:
        kept, generated = self.rounds(run_stage, inputs)
        rollouts, rewards = zip(*generated, strict=True)
        return Samples(run_stage.take(kept, rollouts), run_stage.take(kept, rewards), generated)

    def rounds(
        self, run_stage: RunStage, inputs: StepInputs
    ) -> "tuple[Selection, tuple[tuple[Rollouts, Rewards], ...]]":
        """Run the rounds. Return the kept rows, and all rollouts and rewards of each round."""
        generated: list[tuple[Rollouts, Rewards]] = []
        actor, reads_before = inputs.states["actor"], self.is_ahead and not self.is_first
        for each in run_stage.rounds(at_most=self.at_most):
            prompts = inputs.prompts_of(each.number)
            if reads_before:
                before = inputs.previous(NEXT_ROLLOUT) if each.number == 1 else None
                rollouts = each(TAKEN_OR_GENERATED, actor, prompts, before)
            else:
                rollouts = each(ROLLOUT, actor, prompts)
            if self.overlaps and each.number < self.at_most:
                each.begin_next(ROLLOUT, actor, inputs.prompts_of(each.number + 1), beside=REWARD)
            generated.append((rollouts, each(REWARD, prompts, rollouts)))
            kept = each(KEEP_GROUPS, *(record for pair in generated for record in pair))
            each.end_if(kept.is_full)
        if self.is_ahead:  # not earlier: the prompts of the next step follow those of the last round
            run_stage.meanwhile(NEXT_ROLLOUT, actor, inputs.prompts_of(len(generated) + 1))
        return kept, tuple(generated)


class RowRecords(NamedTuple):
    """Records of the same rows, in the order of the inputs of the advantages."""

    rollouts: "Rollouts"
    rewards: "Rewards"
    values: "Values"
    logprobs: "Logprobs"


def _all_and_kept(
    run_stage: RunStage, inputs: StepInputs, groups: KeptGroups
) -> "tuple[RowRecords, RowRecords, tuple[tuple[Rollouts, Rewards], ...]]":
    """Generate, and compute values and log-probs of all rows. Return all rows, the kept ones, and those of each
    round."""
    kept, generated = groups.rounds(run_stage, inputs)
    of_rounds = tuple(zip(*generated, strict=True))
    every = run_stage(ALL_ROWS, *of_rounds[0])
    rollouts, rewards = (run_stage.take(every, records) for records in of_rounds)
    values = run_stage(VALUES, inputs.states["critic"], rollouts)
    logprobs = run_stage(LOGPROBS, inputs.states["actor"], rollouts)
    rows = RowRecords(rollouts, rewards, values, logprobs)
    of_actor = RowRecords(
        run_stage.take(kept, [rollouts], among=every),
        run_stage.take(kept, [rewards], among=every),
        run_stage.take(kept, [values], among=every),
        run_stage.take(kept, [logprobs], among=every),
    )
    return rows, of_actor, generated


def _critic_sees_all(run_stage: RunStage, inputs: StepInputs, groups: KeptGroups, correct: Correct) -> StepOutputs:
    """Run PPO in which the critic trains on every generated response, and the actor on the kept ones, with or without
    rollout correction (see `ppo`)."""
    actor, critic = inputs.states["actor"], inputs.states["critic"]
    every, kept, generated = _all_and_kept(run_stage, inputs, groups)
    correction = correct(run_stage, kept.rollouts, kept.logprobs)
    of_every = run_stage(CRITIC_ADVANTAGES, *every, inputs.carry)
    advantages = run_stage(ADVANTAGES, *kept, inputs.carry)
    critic = run_stage(CRITIC_UPDATE, critic, every.rollouts, every.values, of_every)
    actor = run_stage(ACTOR_UPDATE, actor, kept.rollouts, kept.logprobs, advantages, *correction)
    return StepOutputs({"critic": critic, "actor": actor}, advantages.carry, generated)


@cache
def critic_sees_all(groups: KeptGroups, *, corrects: bool = False) -> StepFunction:
    """Return PPO in which the critic trains on all responses of these rounds, with or without rollout correction."""
    name = "critic_sees_all_corrected" if corrects else "critic_sees_all"
    run = partial(_critic_sees_all, groups=groups, correct=CORRECTIONS[corrects])
    return StepFunction(name + groups.suffix, run)
