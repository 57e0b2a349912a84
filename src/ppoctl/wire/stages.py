"""Construction of stages from recipe tables, each with the fingerprint of the keys that it reads."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ppoctl.batch.prompts import Prompts
from ppoctl.errors import RewardError
from ppoctl.loop.step_functions import Stages
from ppoctl.plan.learning_rate import learning_rate_of
from ppoctl.ports import Models, OptimizerStep, OutputRequest, SamplingParams, Scorer
from ppoctl.ppo.aggregation import aggregation
from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.fingerprint import fingerprint
from ppoctl.recipe.schema import Recipe
from ppoctl.recipe.sizes import (
    critic_only_steps,
    epochs,
    minibatch_seqs,
    optimizer_of,
    planned_updates,
    updates_per_tick,
    warmup_updates,
)
from ppoctl.rewards.metric_function import MetricFunction
from ppoctl.rewards.shaping import RewardShaping
from ppoctl.stages.actor_update import ActorUpdateStage
from ppoctl.stages.advantages import AdvantagesStage
from ppoctl.stages.critic_update import CriticUpdateStage
from ppoctl.stages.eval_metrics import Estimates
from ppoctl.stages.evaluate import EvaluateStage, ignore_message
from ppoctl.stages.generation import SampleGeneration
from ppoctl.stages.logprobs import KlPenalty, LogprobsStage
from ppoctl.stages.overlapped_scoring import OverlappedScorer
from ppoctl.stages.reward import RewardStage
from ppoctl.stages.rollout import RolloutStage
from ppoctl.stages.updates import MinibatchPlan, OptimizerSchedule
from ppoctl.stages.values import ValuesStage
from ppoctl.wire.components import Components

SHAPING_KEYS = tuple(f"reward.{key}" for key in tree.of(RewardShaping).keys)
"""Keys of reward shaping. Changing them does not require scoring again."""

_SCORED_AS = ("temperature", "top_p", "top_k", "min_p", "min_new_tokens", "stop_token_ids")
DISTRIBUTION_KEYS = tuple(f"rollout.{key}" for key in _SCORED_AS)
"""Keys of the distribution that responses are sampled from."""

READS: dict[str, tuple[str, ...]] = {
    "rollout": ("seed", "model", "data.train", "rollout"),
    "reward": ("reward",),
    "values": ("model",),
    "logprobs": ("model", *DISTRIBUTION_KEYS, "ppo.kl", "ppo.old_logprobs"),
    "correction": ("ppo.rollout_correction", "ppo.rollout_rejection", "ppo.max_sequence_gap"),
    "advantages": ("ppo.advantages", "ppo.truncated", "ppo.kl", *SHAPING_KEYS),
    "critic_update": (
        "seed",
        "model",
        "critic.optimizer",
        "ppo.critic_epochs",
        "ppo.epochs",
        "ppo.minibatch_seqs",
        "ppo.minibatch_order",
        "ppo.critic_minibatch_seqs",
        "ppo.value_loss",
    ),
    "actor_update": (
        "seed",
        "model",
        "actor.optimizer",
        *DISTRIBUTION_KEYS,
        "ppo.epochs",
        "ppo.minibatch_seqs",
        "ppo.minibatch_order",
        "ppo.policy_loss",
        "ppo.kl",
    ),
    "eval": (
        "seed",
        "model",
        "eval",
        "reward",
        "rollout.stop_strings",
        "rollout.stop_token_ids",
        "rollout.max_window_tokens",
    ),
}
"""Recipe keys that each stage reads. The scoring stages do not read the keys of reward shaping. `_read_elsewhere`
yields the additional values that a stage reads."""


def stage_fingerprint(stage: str, recipe: Recipe, reward_digest: str = "") -> str:
    """Return the fingerprint of the RESULTS keys that a stage reads, and of the reward models if the stage scores; ""
    for an unknown stage."""
    stage = stage.partition(".")[0]
    if stage not in READS:
        return ""
    without = () if stage == "advantages" else SHAPING_KEYS
    scored_by = [reward_digest] if reward_digest and stage in ("reward", "eval") else []
    return _hash(fingerprint(recipe, READS[stage], without=without), *_read_elsewhere(recipe, stage), *scored_by)


def _read_elsewhere(recipe: Recipe, stage: str) -> Iterator[str]:
    """Yield the values that a stage reads from keys that are not in `READS`."""
    if stage == "values" and recipe.ppo.truncated == "bootstrap":
        # `filter` and `terminal` give the same fingerprint, so a run that stopped because `filter` left no response
        # can continue with `terminal`.
        yield "bootstrap"
    if stage == "advantages" and recipe.reward.overlong is not None and recipe.reward.overlong.max_tokens is None:
        yield f"{recipe.rollout.max_new_tokens} tokens"
    role = stage.removesuffix("_update")
    if role != stage:
        yield from _read_by_an_update(recipe, role)


def _read_by_an_update(recipe: Recipe, role: str) -> Iterator[str]:
    """Yield the number of optimizer steps if a learning rate depends on it, and the response length if a loss divides
    by it."""
    table = optimizer_of(recipe, role)
    if table.lr_schedule != "constant":
        yield f"{table.lr_decay_updates or planned_updates(recipe, role)} updates"
    if table.lr_warmup_frac is not None:
        yield f"{warmup_updates(recipe, role)} updates of warm-up"
    if table.lr_ticks == "step":
        yield f"{updates_per_tick(recipe, role)} updates a tick, after {critic_only_steps(recipe, role)} steps"
    loss = recipe.ppo.policy_loss if role == "actor" else recipe.ppo.value_loss
    if loss.aggregation == "fixed_length":
        yield f"{recipe.rollout.max_new_tokens} tokens"


@dataclass(frozen=True)
class StageBuilder:
    """Builds the stages of a recipe on the components of this run."""

    models: Models
    generation: SampleGeneration
    scorer: Scorer
    """Scorer of responses. An `OverlappedScorer` starts to score during generation."""
    notify: Callable[[str], None]
    reward_digest: str = ""
    """Digest of the reward models; empty: no reward model."""

    def stages(self, recipe: Recipe) -> Stages:
        penalty = recipe.ppo.kl.build()
        return Stages(
            rollout=RolloutStage(
                models=self.models,
                generation=self.generation,
                params=_rollout_sampling(recipe),
                samples_per_prompt=recipe.rollout.samples_per_prompt,
                seed=recipe.seed,
                fingerprint=stage_fingerprint("rollout", recipe),
                on_sample=self.scorer.start if isinstance(self.scorer, OverlappedScorer) else None,
            ),
            reward=RewardStage(
                scorer=self.scorer,
                max_error_frac=recipe.reward.max_error_frac,
                fingerprint=stage_fingerprint("reward", recipe, self.reward_digest),
                between=self.generation.gate.between,
                notify=self.notify,
            ),
            values=ValuesStage(
                models=self.models, truncated=recipe.ppo.truncated, fingerprint=stage_fingerprint("values", recipe)
            ),
            logprobs=LogprobsStage(
                models=self.models,
                scored=_scored(recipe),
                with_reference=penalty is not None and penalty.estimator != "full",
                with_full_kl=penalty is not None and penalty.reads_full_kl_first,
                source=recipe.ppo.old_logprobs,
                fingerprint=stage_fingerprint("logprobs", recipe),
            ),
            correction=recipe.ppo.build_correction(fingerprint=stage_fingerprint("correction", recipe))
            if recipe.ppo.corrects_rollouts
            else None,
            advantages=AdvantagesStage(
                reward_steps=recipe.reward.build_steps(max_new_tokens=recipe.rollout.max_new_tokens),
                estimator=recipe.ppo.advantages.estimator(),
                whitened=recipe.ppo.advantages.whiten,
                truncated=recipe.ppo.truncated,
                penalty=penalty,
                fingerprint=stage_fingerprint("advantages", recipe),
            ),
            critic_update=self._critic_update(recipe),
            actor_update=self._actor_update(recipe, penalty),
        )

    def _critic_update(self, recipe: Recipe) -> CriticUpdateStage:
        ppo = recipe.ppo
        return CriticUpdateStage(
            models=self.models,
            plan=_plan(recipe, "critic"),
            clip=ppo.value_loss.clip,
            scale=ppo.value_loss.scale,
            aggregation=aggregation(ppo.value_loss.aggregation, max_new_tokens=recipe.rollout.max_new_tokens),
            fingerprint=stage_fingerprint("critic_update", recipe),
        )

    def _actor_update(self, recipe: Recipe, penalty: KlPenalty | None) -> ActorUpdateStage:
        ppo = recipe.ppo
        return ActorUpdateStage(
            models=self.models,
            plan=_plan(recipe, "actor"),
            scored=_scored(recipe),
            loss=ppo.policy_loss.build(),
            aggregation=aggregation(ppo.policy_loss.aggregation, max_new_tokens=recipe.rollout.max_new_tokens),
            entropy_coef=ppo.policy_loss.entropy_coef,
            positive_nll_coef=ppo.policy_loss.positive_nll_coef,
            penalty=penalty,
            fingerprint=stage_fingerprint("actor_update", recipe),
        )


def evaluation_stage(
    recipe: Recipe,
    drawing: SampleGeneration,
    components: Components,
    sets: Mapping[str, Prompts],
    notify: Callable[[str], None] = ignore_message,
) -> EvaluateStage:
    """Return the evaluation stage for the given sets, of which there must be at least one."""
    identities = "".join(prompts.identity for prompts in sets.values())
    table = recipe.eval
    length = table.max_new_tokens or recipe.rollout.max_new_tokens
    plain = _sampling(recipe, table.temperature, length)
    return EvaluateStage(
        generation=drawing,
        scorer=components.scorer,
        sets=sets,
        sampled=replace(plain, top_p=table.top_p, top_k=table.top_k, min_p=table.min_p),
        samples_per_prompt=table.samples_per_prompt,
        seed=recipe.seed,
        fingerprint=_hash(stage_fingerprint("eval", recipe, components.reward_digest), str(length), identities),
        modes=table.modes,
        estimates=Estimates(table.pass_at, table.maj_at, table.pass_score),
        needs_truth=lambda prompt: recipe.reward.of_row(prompt.fields).reads_truth,
        measured=_measured(table.metrics, notify),
        printed=table.print_samples,
        notify=notify,
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


def _rollout_sampling(recipe: Recipe) -> SamplingParams:
    """Return the sampling parameters of a rollout."""
    rollout = recipe.rollout
    plain = _sampling(recipe, rollout.temperature, rollout.max_new_tokens)
    filtered = replace(plain, top_p=rollout.top_p, top_k=rollout.top_k, min_p=rollout.min_p)
    return replace(filtered, min_new_tokens=rollout.min_new_tokens)


def _sampling(recipe: Recipe, temperature: float, max_new_tokens: int) -> SamplingParams:
    rollout = recipe.rollout
    return SamplingParams(
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        stop_strings=rollout.stop_strings,
        stop_token_ids=rollout.stop_token_ids,
        max_window_tokens=rollout.max_window_tokens,
    )


def _scored(recipe: Recipe) -> OutputRequest:
    """Return the request for log-probs under the distribution that the generator (vLLM) samples from."""
    return OutputRequest(**{key: getattr(recipe.rollout, key) for key in _SCORED_AS})


def _plan(recipe: Recipe, role: str) -> MinibatchPlan:
    table = optimizer_of(recipe, role)
    constant = OptimizerStep(table.lr, table.weight_decay, table.grad_clip, table.beta1, table.beta2, table.eps)
    steps_before = critic_only_steps(recipe, role) if table.lr_ticks == "step" else None
    schedule = OptimizerSchedule(learning_rate_of(recipe, role), constant, steps_before)
    seed = recipe.seed if recipe.ppo.minibatch_order == "shuffled" else None
    return MinibatchPlan(epochs(recipe, role), minibatch_seqs(recipe, role), seed, schedule)


def _hash(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
