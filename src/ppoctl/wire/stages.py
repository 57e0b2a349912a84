"""Recipe tables -> stages, each with the fingerprint of what it reads."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from ppoctl.batch.prompts import Prompts
from ppoctl.loop.stories import Stages
from ppoctl.ports import Models, OptimizerStep, SamplingParams, Scorer
from ppoctl.ppo.policy_loss import PolicyClip
from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.fingerprint import fingerprint
from ppoctl.recipe.schema import (
    GaeAdvantages,
    KlInLoss,
    KlInReward,
    MonteCarloAdvantages,
    OptimizerTable,
    Recipe,
    TruncatedImportance,
)
from ppoctl.recipe.sizes import epochs, planned_updates
from ppoctl.rewards.arithmetic import RewardArithmetic
from ppoctl.stages.actor_update import ActorUpdateStage
from ppoctl.stages.advantages import AdvantagesStage
from ppoctl.stages.correction import CorrectionStage
from ppoctl.stages.critic_update import CriticUpdateStage
from ppoctl.stages.drawing import Drawing
from ppoctl.stages.estimators import Estimator, Gae, MonteCarlo
from ppoctl.stages.evaluate import EvaluateStage
from ppoctl.stages.logprobs import KlPenalty, LogprobsStage
from ppoctl.stages.reward import RewardStage
from ppoctl.stages.rollout import RolloutStage
from ppoctl.stages.updates import MinibatchPlan, Schedule
from ppoctl.stages.values import ValuesStage
from ppoctl.wire.reward_steps import reward_steps

ARITHMETIC = tuple(f"reward.{key}" for key in tree.of(RewardArithmetic).keys)
"""What becomes of scores: a change of it scores nothing again."""

READS: dict[str, tuple[str, ...]] = {
    "rollout": ("seed", "model", "data.train", "rollout"),
    "reward": ("reward",),
    "values": ("model",),
    "logprobs": ("model", "rollout.temperature", "ppo.kl"),
    "correction": ("ppo.rollout_correction",),
    "advantages": ("ppo.advantages", "ppo.truncated", "ppo.kl", *ARITHMETIC),
    "critic_update": (
        "seed",
        "model",
        "critic.optimizer",
        "ppo.critic_epochs",
        "ppo.epochs",
        "ppo.minibatch_seqs",
        "ppo.value_loss",
    ),
    "actor_update": (
        "seed",
        "model",
        "actor.optimizer",
        "rollout.temperature",
        "ppo.epochs",
        "ppo.minibatch_seqs",
        "ppo.policy_loss",
        "ppo.kl",
    ),
    "eval": ("seed", "model", "eval", "reward", "rollout.stop_strings"),
}
"""The recipe keys each stage reads. An update also reads how many optimizer steps its schedule spans, if it ends; who
scores does not read the arithmetic of rewards."""


def read_by(stage: str, recipe: Recipe) -> str:
    """Fingerprint of the result keys that a stage reads; "" for one that no recipe describes."""
    stage = stage.partition(".")[0]
    if stage not in READS:
        return ""
    role = stage.removesuffix("_update")
    span = _plan(recipe, role).schedule.total_updates if role != stage else 0
    without = () if stage == "advantages" else ARITHMETIC
    # The other two values of `ppo.truncated` are the same to it: a run that stops as all are left out is mended so.
    goes_on = ["bootstrap"] if stage == "values" and recipe.ppo.truncated == "bootstrap" else []
    return _hash(fingerprint(recipe, READS[stage], without=without), *([f"{span} updates"] if span else []), *goes_on)


@dataclass(frozen=True)
class StageBuilder:
    """Stages of a recipe, on the engines of this job."""

    models: Models
    drawing: Drawing
    scorer: Scorer

    def stages(self, recipe: Recipe) -> Stages:
        penalty = _penalty(recipe)
        return Stages(
            rollout=RolloutStage(
                models=self.models,
                drawing=self.drawing,
                params=_sampling(recipe, recipe.rollout.temperature, recipe.rollout.max_new_tokens),
                samples_per_prompt=recipe.rollout.samples_per_prompt,
                seed=recipe.seed,
                fingerprint=read_by("rollout", recipe),
            ),
            reward=RewardStage(
                scorer=self.scorer,
                max_error_frac=recipe.reward.max_error_frac,
                fingerprint=read_by("reward", recipe),
                between=self.drawing.gate.between,
            ),
            values=ValuesStage(
                models=self.models, truncated=recipe.ppo.truncated, fingerprint=read_by("values", recipe)
            ),
            logprobs=LogprobsStage(
                models=self.models,
                temperature=recipe.rollout.temperature,
                with_reference=penalty is not None,
                fingerprint=read_by("logprobs", recipe),
            ),
            correction=_correction(recipe),
            advantages=AdvantagesStage(
                reward_steps=reward_steps(recipe.reward, max_new_tokens=recipe.rollout.max_new_tokens),
                estimator=_estimator(recipe.ppo.advantages),
                whitened=recipe.ppo.advantages.whiten,
                truncated=recipe.ppo.truncated,
                penalty=penalty,
                fingerprint=read_by("advantages", recipe),
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
            fingerprint=read_by("critic_update", recipe),
        )

    def _actor_update(self, recipe: Recipe, penalty: KlPenalty | None) -> ActorUpdateStage:
        ppo = recipe.ppo
        return ActorUpdateStage(
            models=self.models,
            plan=_plan(recipe, "actor"),
            clip=PolicyClip(ppo.policy_loss.clip_low, ppo.policy_loss.clip_high, ppo.policy_loss.dual_clip),
            entropy_coef=ppo.policy_loss.entropy_coef,
            penalty=penalty,
            fingerprint=read_by("actor_update", recipe),
        )


def evaluation_stage(recipe: Recipe, drawing: Drawing, scorer: Scorer, sets: Mapping[str, Prompts]) -> EvaluateStage:
    """The evaluation of the given sets (there must be some)."""
    identities = "".join(prompts.identity for prompts in sets.values())
    length = recipe.eval.max_new_tokens or recipe.rollout.max_new_tokens
    return EvaluateStage(
        drawing=drawing,
        scorer=scorer,
        sets=sets,
        sampled=_sampling(recipe, recipe.eval.temperature, length),
        samples_per_prompt=recipe.eval.samples_per_prompt,
        seed=recipe.seed,
        fingerprint=_hash(read_by("eval", recipe), str(length), identities),
    )


def _correction(recipe: Recipe) -> CorrectionStage | None:
    table = recipe.ppo.rollout_correction
    if isinstance(table, TruncatedImportance):
        return CorrectionStage(table.max_ratio, read_by("correction", recipe))
    return None


def _estimator(table: GaeAdvantages | MonteCarloAdvantages) -> Estimator:
    if isinstance(table, MonteCarloAdvantages):
        return MonteCarlo(table.gamma)
    lam_value = table.gae_lambda if table.gae_lambda_value is None else table.gae_lambda_value
    return Gae(table.gamma, table.gae_lambda, lam_value, table.length_adaptive_alpha)


def _penalty(recipe: Recipe) -> KlPenalty | None:
    kl = recipe.ppo.kl
    if isinstance(kl, KlInReward | KlInLoss):
        return KlPenalty(place=kl.place, estimator=kl.estimator, coef=kl.coef)
    return None


def _sampling(recipe: Recipe, temperature: float, max_new_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=temperature, max_new_tokens=max_new_tokens, stop_strings=recipe.rollout.stop_strings
    )


def _plan(recipe: Recipe, role: str) -> MinibatchPlan:
    table = (recipe.critic if role == "critic" else recipe.actor).optimizer
    schedule = _schedule(table, planned=planned_updates(recipe, role))
    return MinibatchPlan(epochs(recipe, role), recipe.ppo.minibatch_seqs, recipe.seed, schedule)


def _schedule(table: OptimizerTable, *, planned: int) -> Schedule:
    # A constant rate does not depend on how many steps are planned, so raising `steps` must not change its
    # fingerprint.
    total = 0 if table.lr_schedule == "constant" else table.lr_decay_updates or planned
    constant = OptimizerStep(table.lr, table.weight_decay, table.grad_clip, table.beta1, table.beta2, table.eps)
    return Schedule(table.lr, table.lr_schedule, table.lr_warmup_updates, total, table.lr_min_frac, constant)


def _hash(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
