"""Rules about the actor's loss and the old log-probs of its ratio. See `all_rules`."""

from collections.abc import Iterator

from ppoctl.algorithms.roles import POLICY
from ppoctl.algorithms.sizes import sequences_per_step, updates_per_step
from ppoctl.algorithms.stages.loss_tables import ClippedLoss
from ppoctl.core.finding import Finding, conflict
from ppoctl.core.key_path import KeyPath
from ppoctl.recipe.schema import Recipe

_OLD: KeyPath = ("ppo", "old_logprobs")


def check_dual_clip(recipe: Recipe) -> Iterator[Finding]:
    loss = recipe.ppo.policy_loss
    if isinstance(loss, ClippedLoss) and loss.dual_clip is not None and loss.dual_clip <= 1 + loss.clip_high:
        yield conflict(
            f"a dual clip of {loss.dual_clip} is inside the clip at 1 + {loss.clip_high}",
            (("ppo", "policy_loss", "dual_clip"), ("ppo", "policy_loss", "clip_high")),
        )


def check_single_update_if_on_policy(recipe: Recipe) -> Iterator[Finding]:
    updates = updates_per_step(recipe, POLICY)
    if recipe.ppo.old_logprobs == "current" and updates > 1:
        yield conflict(
            f"the actor has {updates} updates per step, but current log-probs equal the old ones only in the "
            f"first update",
            (_OLD, ("ppo", "epochs"), ("ppo", "minibatch_seqs")),
            f"--set ppo.epochs=1 --set ppo.minibatch_seqs={sequences_per_step(recipe)}",
        )


def check_reward_penalty_has_logprobs(recipe: Recipe) -> Iterator[Finding]:
    if recipe.ppo.old_logprobs == "current" and recipe.ppo.kl.place == "reward":
        yield conflict(
            "a KL penalty in the reward needs the actor's log-probs before its update, but they are not computed",
            (("ppo", "kl", "place"), _OLD),
            "--set ppo.old_logprobs=trainer",
        )


def check_correction_has_trainer_logprobs(recipe: Recipe) -> Iterator[Finding]:
    if recipe.ppo.old_logprobs != "trainer" and recipe.ppo.corrects_rollouts:
        tables = {
            "rollout_correction": recipe.ppo.rollout_correction,
            "rollout_rejection": recipe.ppo.rollout_rejection,
        }
        enabled: list[KeyPath] = [("ppo", name, "kind") for name, table in tables.items() if table.kind != "none"]
        enabled += [("ppo", "max_sequence_gap")] if recipe.ppo.max_sequence_gap is not None else []
        yield conflict(
            "a correction compares the sampler's log-probs with the trainer's, but the trainer computes none",
            (*enabled, _OLD),
            "--set ppo.old_logprobs=trainer",
        )
