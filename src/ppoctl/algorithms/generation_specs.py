"""Specs of generation and scoring: 10-rollout and 20-reward."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, Any, ClassVar

from ppoctl.algorithms.distribution import episode_settings, rollout_sampling
from ppoctl.algorithms.sizes import segments_per_response, sequences_per_round, sequences_per_step
from ppoctl.algorithms.stage_spec import ModelPass, ReportedMetric, StageParts, StageSpec, always
from ppoctl.algorithms.step_recipe import StepRecipe
from ppoctl.core import metric_registry as metrics
from ppoctl.core.errors import quoted
from ppoctl.core.key_path import dotted
from ppoctl.core.metric import Metric
from ppoctl.rewards.scorer_table import RewardTable

if TYPE_CHECKING:
    from ppoctl.core.batch.records import Rewards, Rollouts
    from ppoctl.store.stage_runner import Stage

ROLLOUT_METRICS = (
    metrics.ROLLOUT_RESPONSE_TOKENS_MEAN, metrics.ROLLOUT_RESPONSE_TOKENS_MAX, metrics.ROLLOUT_TRUNCATED_FRAC,
    metrics.ROLLOUT_RESENT_SEQS, metrics.ROLLOUT_TOKENS,
)  # fmt: skip
"""Metrics of the responses of one or several rounds."""
GENERATION_METRICS = (metrics.THROUGHPUT_GENERATED, metrics.TIME_GENERATION_S, metrics.TIME_TRANSFER_S)
"""Metrics of how long the transfer and the generation took."""
EPISODE_METRICS = (
    metrics.ENVIRONMENT_TURNS_MEAN, metrics.ENVIRONMENT_OBSERVED_TOKENS_MEAN, metrics.ENVIRONMENT_CALLS_MEAN,
    metrics.ENVIRONMENT_MALFORMED_FRAC, metrics.ENVIRONMENT_TURN_LIMIT_FRAC, metrics.ENVIRONMENT_FAILED_FRAC,
    metrics.ENVIRONMENT_METRIC_MEAN,
)  # fmt: skip
"""Metrics of responses of several turns."""
SCORE_METRICS = (
    metrics.REWARD_SCORE_MEAN, metrics.REWARD_SCORE_STD, metrics.REWARD_ERROR_FRAC, metrics.REWARD_TIMEOUT_FRAC,
)  # fmt: skip
"""Metrics of the scores of one or several rounds."""

_FEWEST = 8
"""A step trains on at least one group for each 8 that it begins. If it waited for more, each step would wait for long
responses, because few groups end in their first step if most need several."""
_OF_SEGMENTS = {"segment_stamps": True, "segment_tokens": True}
"""Fields of responses that several steps generate."""


def _of_episodes(recipe: StepRecipe, *of_turns: Metric) -> Iterator[ReportedMetric]:
    """Yield metrics of responses of several turns."""
    for metric in of_turns:
        yield ReportedMetric(metric, recipe.environment is not None, "requires `[environment]`", (("environment",),))


@dataclass(frozen=True)
class RolloutSpec(StageSpec["Rollouts"]):
    """10-rollout: generation of responses."""

    kind: ClassVar[str] = "rollouts"
    keys: ClassVar[tuple[str, ...]] = ("seed", "model", "data.train", "rollout", "environment")
    excluded_keys: ClassVar[tuple[str, ...]] = (
        *StageSpec.excluded_keys, "rollout.groups", "rollout.ahead", "rollout.accept_stale", "environment.on_failure",
    )  # fmt: skip
    defines_rows: ClassVar[bool] = True
    is_of_later_step: ClassVar[bool] = False
    """Whether a later step trains on the responses, and reports their metrics."""
    role: str = "actor"

    def fingerprint_texts(self, recipe: StepRecipe) -> Iterator[str]:
        if recipe.actor.router_replay == "generator":
            yield "experts"

    def passes(self, recipe: StepRecipe) -> tuple[ModelPass, ...]:
        return (ModelPass("generate", self.role),)

    def metrics(self, recipe: StepRecipe) -> tuple[ReportedMetric, ...]:
        own = always(*ROLLOUT_METRICS, *GENERATION_METRICS)
        return (*own, *_of_episodes(recipe, *EPISODE_METRICS, metrics.THROUGHPUT_ENGINE_IDLE_FRAC))

    def present_fields(self, recipe: StepRecipe) -> dict[str, bool]:
        return {
            "episodes": recipe.environment is not None,
            "experts": recipe.actor.router_replay == "generator",
        }

    def row_bounds(self, recipe: StepRecipe) -> tuple[int, int]:
        rows = sequences_per_round(recipe)
        return rows, rows

    def build(self, recipe: StepRecipe, parts: StageParts) -> "Stage[Rollouts]":
        from ppoctl.algorithms.stages.overlapped_scoring import OverlappedScorer
        from ppoctl.algorithms.stages.rollout import RolloutStage

        scorer = parts.scorer if isinstance(parts.scorer, OverlappedScorer) else None
        return RolloutStage(
            **self.stage_settings(recipe, parts),
            episodes=episode_settings(recipe.environment, parts.environments, parts.dialogue),
            on_sample=None if scorer is None else scorer.start,
            next_scores=scorer,
            is_of_later_step=self.is_of_later_step,
        )

    def stage_settings(self, recipe: StepRecipe, parts: StageParts) -> dict[str, Any]:
        """Return the settings by name that every stage of generation has."""
        return {
            "models": parts.models,
            "generation": parts.generation,
            "params": rollout_sampling(recipe),
            "samples_per_prompt": recipe.rollout.samples_per_prompt,
            "seed": recipe.seed,
            "fingerprint": self.fingerprint(recipe),
            "name": self.name,
        }


@dataclass(frozen=True)
class NextRolloutSpec(RolloutSpec):
    """75-next_rollout: generation of the responses that the next step trains on, while this step trains."""

    is_of_later_step: ClassVar[bool] = True

    def metrics(self, recipe: StepRecipe) -> tuple[ReportedMetric, ...]:
        return (*always(*GENERATION_METRICS), *_of_episodes(recipe, metrics.THROUGHPUT_ENGINE_IDLE_FRAC))


@dataclass(frozen=True)
class LaterRolloutSpec(NextRolloutSpec):
    """75-next_rollout with `rollout.ahead = 2`: generation of the responses that the step after the next trains on,
    while this step and the next train."""

    may_end_later: ClassVar[bool] = True


@dataclass(frozen=True)
class TakenOrGeneratedSpec(RolloutSpec):
    """10-rollout of dynamic sampling with `rollout.ahead`: in round 1 the responses that the step before generated,
    in each further round generation."""

    def row_bounds(self, recipe: StepRecipe) -> tuple[int, int]:
        return 0, sequences_per_round(recipe)

    def build(self, recipe: StepRecipe, parts: StageParts) -> "Stage[Rollouts]":
        from ppoctl.algorithms.stages.rollout import RolloutStage, TakenOrGeneratedStage

        stage = super().build(recipe, parts)
        assert isinstance(stage, RolloutStage)
        return TakenOrGeneratedStage(stage)


@dataclass(frozen=True)
class PartialRolloutSpec(RolloutSpec):
    """09-partial_rollout or 75-next_rollout: generation of at most `rollout.tokens_per_step` tokens of each response
    that has not ended, and of each response of this step's prompts."""

    kind: ClassVar[str] = "partial_rollouts"

    def metrics(self, recipe: StepRecipe) -> tuple[ReportedMetric, ...]:
        return always(metrics.ROLLOUT_UNFINISHED_SEQS, *GENERATION_METRICS)

    def present_fields(self, recipe: StepRecipe) -> dict[str, bool]:
        return _OF_SEGMENTS

    def row_bounds(self, recipe: StepRecipe) -> tuple[int, int]:
        rows = sequences_per_step(recipe)
        return rows, rows * segments_per_response(recipe)

    def build(self, recipe: StepRecipe, parts: StageParts) -> "Stage[Rollouts]":
        from ppoctl.algorithms.stages.partial_rollout import PartialRolloutStage

        assert recipe.rollout.tokens_per_step is not None, "only a recipe with `tokens_per_step` has this stage"
        return PartialRolloutStage(
            **self.stage_settings(recipe, parts),
            tokens=recipe.rollout.tokens_per_step,
            fewest=ceil(recipe.rollout.prompts_per_step / _FEWEST),
        )


@dataclass(frozen=True)
class EndedGroupsSpec(StageSpec["Rollouts"]):
    """10-rollout: the groups of a partial rollout that have ended, on which the step trains."""

    kind: ClassVar[str] = "rollouts"
    keys: ClassVar[tuple[str, ...]] = ("rollout.samples_per_prompt",)
    defines_rows: ClassVar[bool] = True

    def metrics(self, recipe: StepRecipe) -> tuple[ReportedMetric, ...]:
        return always(*ROLLOUT_METRICS)

    def present_fields(self, recipe: StepRecipe) -> dict[str, bool]:
        return _OF_SEGMENTS

    def row_bounds(self, recipe: StepRecipe) -> tuple[int, int]:
        # On average, as many responses end as begin. More than twice as many end only by chance.
        return recipe.rollout.samples_per_prompt, 2 * sequences_per_step(recipe)

    def build(self, recipe: StepRecipe, parts: StageParts) -> "Stage[Rollouts]":
        from ppoctl.algorithms.stages.partial_rollout import EndedGroupsStage

        return EndedGroupsStage(recipe.rollout.samples_per_prompt, self.fingerprint(recipe), self.name)


@dataclass(frozen=True)
class RewardSpec(StageSpec["Rewards"]):
    """20-reward: a score of each response."""

    kind: ClassVar[str] = "rewards"
    keys: ClassVar[tuple[str, ...]] = ("reward", "environment.on_failure")

    def passes(self, recipe: StepRecipe) -> tuple[ModelPass, ...]:
        return (ModelPass("score"),)

    def metrics(self, recipe: StepRecipe) -> tuple[ReportedMetric, ...]:
        return always(*SCORE_METRICS, metrics.REWARD_SECONDS_MEAN, metrics.REWARD_SECONDS_MAX)

    def reports(self, recipe: StepRecipe, name: str) -> bool:
        # Every name of a metric of a scorer counts here; `recipe.loading.rules.metrics_rules` checks the scorer.
        from_scorer = metrics.reward_part(name) is not None
        readings = (metrics.REWARD_STRICT_MEAN.name, metrics.REWARD_LENIENT_MEAN.name)
        return from_scorer or name in readings or super().reports(recipe, name)

    def build(self, recipe: StepRecipe, parts: StageParts) -> "Stage[Rewards]":
        from ppoctl.algorithms.stages.reward import RewardStage

        return RewardStage(
            scorer=parts.scorer,
            max_error_frac=recipe.reward.max_error_frac,
            fingerprint=self.fingerprint(recipe, parts.reward_digest),
            between=parts.generation.gate.between,
            notify=parts.notify,
            name=self.name,
            failed_score=None if recipe.environment is None else recipe.environment.on_failure.score,
            accept=_accept(recipe.reward),
        )


@dataclass(frozen=True)
class OldRewardSpec(RewardSpec):
    """20-reward of responses that the step before generated; their metrics are those of this step."""

    def metrics(self, recipe: StepRecipe) -> tuple[ReportedMetric, ...]:
        return (*super().metrics(recipe), *always(*ROLLOUT_METRICS), *_of_episodes(recipe, *EPISODE_METRICS))

    def build(self, recipe: StepRecipe, parts: StageParts) -> "Stage[Rewards]":
        from ppoctl.algorithms.stages.reward import RewardStage

        stage = super().build(recipe, parts)
        assert isinstance(stage, RewardStage)
        return replace(stage, are_old=True)


def _accept(reward: RewardTable) -> str:
    """Return the options with which a resume accepts the changed files of a reward, as they follow a command."""
    settings = (scorer.accepted_by(dotted(("reward", *below))) for below, scorer in reward.scorers.items())
    return "".join(f" --set {quoted(setting)}" for setting in settings if setting is not None)


ROLLOUT = RolloutSpec("rollout")
NEXT_ROLLOUT = NextRolloutSpec("next_rollout")
LATER_ROLLOUT = LaterRolloutSpec("next_rollout")
TAKEN_OR_GENERATED = TakenOrGeneratedSpec("rollout")
PARTIAL_ROLLOUT = PartialRolloutSpec("partial_rollout")
NEXT_PARTIAL_ROLLOUT = PartialRolloutSpec("next_rollout")
ENDED_GROUPS = EndedGroupsSpec("rollout")
REWARD = RewardSpec("reward")
OLD_REWARD = OldRewardSpec("reward")
