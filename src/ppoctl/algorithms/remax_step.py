"""ReMax (Li et al. 2024, arXiv:2310.10505): policy gradient without a critic, whose baseline is the reward of the
greedy response to the same prompt.

The greedy responses have stages of their own: 22-greedy_rollout and 24-greedy_reward. They are neither trained on nor
in the ledger. A step has one round, whose prompts they answer.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from ppoctl.algorithms.advantages_spec import AdvantagesSpec
from ppoctl.algorithms.distribution import greedy_sampling
from ppoctl.algorithms.forward_specs import CORRECTIONS, LOGPROBS, Correct
from ppoctl.algorithms.generation_specs import RewardSpec, RolloutSpec
from ppoctl.algorithms.get_samples import ONE_ROUND
from ppoctl.algorithms.stage_spec import ReportedMetric, StageParts, StageSpec, always
from ppoctl.algorithms.step_recipe import StepRecipe
from ppoctl.algorithms.trace import RunStage, StepFunction, StepInputs, StepOutputs
from ppoctl.algorithms.update_specs import ACTOR_UPDATE
from ppoctl.core import metric_registry as metrics

if TYPE_CHECKING:
    from ppoctl.core.batch.records import Advantages, Rewards, Rollouts
    from ppoctl.store.stage_runner import Stage


@dataclass(frozen=True)
class GreedyRolloutSpec(RolloutSpec):
    """22-greedy_rollout: generation of one greedy response per prompt."""

    kind: ClassVar[str] = "greedy_rollouts"

    def row_bounds(self, recipe: StepRecipe) -> tuple[int, int]:
        return recipe.rollout.prompts_per_step, recipe.rollout.prompts_per_step

    def metrics(self, recipe: StepRecipe) -> tuple[ReportedMetric, ...]:
        return always(metrics.BASELINE_RESPONSE_TOKENS_MEAN, metrics.BASELINE_TRUNCATED_FRAC, metrics.BASELINE_TOKENS)

    def build(self, recipe: StepRecipe, parts: StageParts) -> "Stage[Rollouts]":
        from ppoctl.algorithms.stages.greedy import GreedyStage
        from ppoctl.algorithms.stages.rollout import RolloutStage
        from ppoctl.core.batch.records import GreedyRollouts

        sampled = super().build(recipe, parts)
        assert isinstance(sampled, RolloutStage)
        return GreedyStage(replace(sampled, params=greedy_sampling(recipe), samples_per_prompt=1), GreedyRollouts)


@dataclass(frozen=True)
class GreedyRewardSpec(RewardSpec):
    """24-greedy_reward: a score of each greedy response."""

    kind: ClassVar[str] = "greedy_rewards"

    def metrics(self, recipe: StepRecipe) -> tuple[ReportedMetric, ...]:
        return always(metrics.BASELINE_SCORE_MEAN, metrics.BASELINE_ERROR_FRAC)

    def reports(self, recipe: StepRecipe, name: str) -> bool:
        return StageSpec.reports(self, recipe, name)

    def build(self, recipe: StepRecipe, parts: StageParts) -> "Stage[Rewards]":
        from ppoctl.algorithms.stages.greedy import GreedyStage
        from ppoctl.algorithms.stages.reward import RewardStage
        from ppoctl.core.batch.records import GreedyRewards

        scoring = super().build(recipe, parts)
        assert isinstance(scoring, RewardStage)
        return GreedyStage(replace(scoring, are_trained=False), GreedyRewards)


@dataclass(frozen=True)
class RemaxAdvantagesSpec(AdvantagesSpec):
    """50-advantages of ReMax: each response is compared with the greedy response to its prompt."""

    joins_by_prompt: ClassVar[bool] = True

    def build(self, recipe: StepRecipe, parts: StageParts) -> "Stage[Advantages]":
        from ppoctl.algorithms.stages.advantages import AdvantagesStage
        from ppoctl.algorithms.stages.greedy import RemaxAdvantagesStage

        advantages = super().build(recipe, parts)
        assert isinstance(advantages, AdvantagesStage)
        return RemaxAdvantagesStage(advantages)


GREEDY_ROLLOUT = GreedyRolloutSpec("greedy_rollout")
GREEDY_REWARD = GreedyRewardSpec("greedy_reward")
REMAX_ADVANTAGES = RemaxAdvantagesSpec("advantages")


def _remax(run_stage: RunStage, inputs: StepInputs, correct: Correct) -> StepOutputs:
    """Generate, score, do the same with greedy responses, compute advantages, and update the actor, with or without
    rollout correction (see `ppo`)."""
    actor = inputs.states["actor"]
    samples = ONE_ROUND(run_stage, inputs)
    rollouts, rewards = samples.rollouts, samples.rewards
    greedy = run_stage(GREEDY_ROLLOUT, actor, inputs.prompts)
    greedy_rewards = run_stage(GREEDY_REWARD, inputs.prompts, greedy)
    logprobs = run_stage(LOGPROBS, actor, rollouts)
    correction = correct(run_stage, rollouts, logprobs)
    advantages = run_stage(REMAX_ADVANTAGES, rollouts, rewards, logprobs, inputs.carry, greedy, greedy_rewards)
    actor = run_stage(ACTOR_UPDATE, actor, rollouts, logprobs, advantages, *correction)
    return StepOutputs({"actor": actor}, advantages.carry, samples.generated)


REMAX = StepFunction("remax", partial(_remax, correct=CORRECTIONS[False]))
REMAX_CORRECTED = StepFunction("remax_corrected", partial(_remax, correct=CORRECTIONS[True]))
