"""Spec of the evaluation, which follows a step of any step function: 80-eval."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from ppoctl.algorithms.distribution import episode_settings, plain_sampling
from ppoctl.algorithms.stage_spec import ModelPass, ScoringParts, StageSpec
from ppoctl.algorithms.step_recipe import StepRecipe
from ppoctl.core.errors import RewardError
from ppoctl.rewards.metric_function import MetricFunction
from ppoctl.store.outline import EVAL

if TYPE_CHECKING:
    from ppoctl.core.batch.records import Evaluation
    from ppoctl.store.stage_runner import Stage


@dataclass(frozen=True)
class EvaluationSpec(StageSpec["Evaluation"]):
    """80-eval: responses of the policy to the evaluation sets, and their scores."""

    kind: ClassVar[str] = "evaluation"
    keys: ClassVar[tuple[str, ...]] = (
        "seed", "model", "eval", "reward", "rollout.stop_strings", "rollout.stop_token_ids", "rollout.special_tokens",
        "rollout.max_window_tokens", "environment",
    )  # fmt: skip
    role: str = "actor"

    def passes(self, recipe: StepRecipe) -> tuple[ModelPass, ...]:
        return (ModelPass("generate", self.role), ModelPass("score"))

    def build(self, recipe: StepRecipe, parts: ScoringParts) -> "Stage[Evaluation]":
        """Return the stage. There must be at least one evaluation set."""
        from ppoctl.algorithms.stages.eval_metrics import Estimates
        from ppoctl.algorithms.stages.evaluation import EvaluateStage

        table, environment = recipe.eval, recipe.eval_environment
        length = table.max_new_tokens or recipe.rollout.max_new_tokens
        sampled = replace(
            plain_sampling(recipe, table.temperature, length),
            top_p=table.top_p, top_k=table.top_k, min_p=table.min_p,
        )  # fmt: skip
        identities = "".join(prompts.identity for prompts in parts.evaluation_sets.values())
        read = (self.fingerprint(recipe, parts.reward_digest), str(length), identities)
        return EvaluateStage(
            generation=parts.generation,
            scorer=parts.scorer,
            sets=parts.evaluation_sets,
            sampled=sampled,
            samples_per_prompt=table.samples_per_prompt,
            seed=recipe.seed,
            fingerprint=hashlib.sha256("\n".join(read).encode()).hexdigest(),
            episodes=episode_settings(environment, parts.eval_environments, parts.dialogue),
            failed_score=None if environment is None else environment.on_failure.score,
            modes=table.modes,
            estimates=Estimates(table.pass_at, table.maj_at, table.pass_score),
            needs_truth=lambda prompt: recipe.reward.of_row(prompt.fields).reads_truth,
            measured=_measured(table.metrics, parts.notify),
            printed=table.print_samples,
            notify=parts.notify,
        )


def _measured(
    function: MetricFunction | None, notify: Callable[[str], None]
) -> Callable[[Sequence[dict[str, Any]]], Mapping[str, float]]:
    """Return a function for user-defined metrics. It returns no metrics if the recipe has no metric function.

    If the metric function fails, the returned function sends a warning instead of raising: the samples of an
    evaluation that took hours are worth more than these metrics.
    """

    def compute(rows: Sequence[dict[str, Any]]) -> Mapping[str, float]:
        if function is None:
            return {}
        try:
            return function.compute(rows)
        except RewardError as error:
            notify(f"warning: {error.message}; its metrics of `{rows[0]['set']}` {rows[0]['mode']} are left out")
            return {}

    return compute


EVALUATION = EvaluationSpec(EVAL)
