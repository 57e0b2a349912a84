"""Rules about dynamic sampling (`rollout.groups`). See `all_rules`."""

from collections.abc import Iterator

from ppoctl.algorithms.role_model import reward_models
from ppoctl.algorithms.sizes import fewest_rounds, sees_all
from ppoctl.core.finding import Finding, conflict
from ppoctl.core.key_path import KeyPath, dotted
from ppoctl.recipe.schema import Recipe
from ppoctl.rewards.shaping_tables import NoMoments

_GROUPS: KeyPath = ("rollout", "groups")
_BY: KeyPath = (*_GROUPS, "by")
_SEES: KeyPath = (*_GROUPS, "critic_sees")
_MOST: KeyPath = (*_GROUPS, "max_rounds")
_OVERLAP: KeyPath = (*_GROUPS, "overlap_rounds")
_KIND: KeyPath = ("ppo", "advantages", "kind")
_MOMENTS: KeyPath = ("reward", "moments", "kind")


def check_kept_groups_have_several_samples(recipe: Recipe) -> Iterator[Finding]:
    if recipe.rollout.groups is not None and recipe.rollout.samples_per_prompt == 1:
        yield conflict(
            "[rollout.groups] chooses prompts by the scores of several responses, but each prompt has a single one",
            (("rollout", "samples_per_prompt"),),
            "--set rollout.samples_per_prompt=8",
        )


def check_rounds_can_fill_a_step(recipe: Recipe) -> Iterator[Finding]:
    groups = recipe.rollout.groups
    if groups is not None and (fewest := fewest_rounds(recipe)) > groups.max_rounds:
        yield conflict(
            "no step can have enough groups: all rounds together have fewer prompts than a step trains on",
            (_MOST, (*_GROUPS, "round_prompts"), ("rollout", "prompts_per_step")),
            f"--set rollout.groups.max_rounds={fewest}",
        )


def check_rounds_can_overlap(recipe: Recipe) -> Iterator[Finding]:
    """Check that the engines can generate a round while the scores of the round before are computed."""
    groups, off = recipe.rollout.groups, f"--set {dotted(_OVERLAP)}=false"
    if groups is None or not groups.overlap_rounds:
        return
    if groups.max_rounds == 1:
        yield conflict("a step has one round, so no other is generated while it is scored", (_OVERLAP, _MOST), off)
    if recipe.rollout.ahead > 0:
        yield conflict(
            "the engines receive the weights for further rounds only after the first round is scored",
            (_OVERLAP, ("rollout", "ahead")),
            off,
        )
    if recipe.cluster.offload and reward_models(recipe):
        yield conflict(
            "engines and reward models would work at the same time, and `cluster.offload` lets them work in turn",
            (_OVERLAP, ("cluster", "offload")),
            off,
        )


def check_kept_means(recipe: Recipe) -> Iterator[Finding]:
    keep = None if recipe.rollout.groups is None else recipe.rollout.groups.keep
    if keep is not None and keep.min > keep.max:
        yield conflict(
            f"no mean is at least {keep.min:g} and at most {keep.max:g}",
            ((*_GROUPS, "keep", "min"), (*_GROUPS, "keep", "max")),
        )


def check_kept_by_pass_has_score(recipe: Recipe) -> Iterator[Finding]:
    groups = recipe.rollout.groups
    if groups is not None and groups.by == "pass" and recipe.eval.pass_score is None:
        yield conflict("no score passes, because `eval.pass_score` is not set", (_BY,), "--set eval.pass_score=1")


def check_kept_by_components_has_them(recipe: Recipe) -> Iterator[Finding]:
    groups = recipe.rollout.groups
    if groups is None or groups.by != "components":
        return
    if not recipe.reward.component_weights:
        yield conflict(
            "groups cannot be chosen by components, because this reward is not a sum",
            (_BY, ("reward", "kind")),
            "--set rollout.groups.by=score",
        )
    if groups.keep is not None:
        yield conflict(
            "components have no single mean that could be within bounds",
            (_BY, (*_GROUPS, "keep")),
            "--set rollout.groups.keep=mixed",
        )


def check_kept_without_moments(recipe: Recipe) -> Iterator[Finding]:
    """Check that no reward is divided by moments that depend on whether its group is kept."""
    groups = recipe.rollout.groups
    if groups is None or isinstance(recipe.reward.moments, NoMoments):
        return
    if groups.by == "shaped":
        yield conflict(
            "groups cannot be chosen by rewards that are divided by the moments of the chosen groups",
            (_BY, _MOMENTS),
            "--set rollout.groups.by=score",
        )
    if groups.critic_sees == "all":
        yield conflict(
            "critic and actor would have rewards divided by moments of different responses",
            (_SEES, _MOMENTS),
            "--set rollout.groups.critic_sees=kept",
        )


def check_kept_without_whitened_rewards(recipe: Recipe) -> Iterator[Finding]:
    groups = recipe.rollout.groups
    if groups is not None and groups.critic_sees == "all" and recipe.ppo.whiten_rewards:
        yield conflict(
            "critic and actor would have rewards divided by the deviations of different responses",
            (_SEES, ("ppo", "whiten_rewards")),
            "--set rollout.groups.critic_sees=kept",
        )


def check_critic_sees_has_critic(recipe: Recipe) -> Iterator[Finding]:
    groups = recipe.rollout.groups
    if groups is not None and groups.critic_sees == "all" and not recipe.ppo.advantages.trains_critic:
        yield conflict(
            "no critic trains on the dropped groups, because these advantages have no critic",
            (_SEES, _KIND),
            "--set rollout.groups.critic_sees=kept",
        )


def check_schedule_of_critic_that_sees_all(recipe: Recipe) -> Iterator[Finding]:
    """Check that no learning rate depends on the number of updates of a role that trains on a varying number of
    responses."""
    for role, table in recipe.trained.items():
        optimizer = table.optimizer
        if not sees_all(recipe, role) or optimizer.lr_ticks == "step":
            continue
        message = (
            f"the number of updates of the {role} depends on the rounds of a step, so no fraction of it is known"
        )
        if optimizer.lr_warmup_frac is not None:
            yield conflict(
                message, ((role, "optimizer", "lr_warmup_frac"), _SEES), f"--set {role}.optimizer.lr_ticks=step"
            )
        if optimizer.lr_schedule != "constant" and optimizer.lr_decay_updates is None:
            yield conflict(
                message.replace("so no fraction of it is known", "so its schedule has no end"),
                ((role, "optimizer", "lr_schedule"), _SEES),
                f"--set {role}.optimizer.lr_ticks=step",
            )


def check_remax_has_one_round(recipe: Recipe) -> Iterator[Finding]:
    """Check that no estimator generates further responses outside the rounds."""
    if recipe.rollout.groups is not None and recipe.ppo.advantages.reads_baselines:
        yield conflict(
            "`remax` subtracts the score of a greedy response to each prompt, which no round generates",
            (_KIND,),
            "--set ppo.advantages.kind=rloo",
        )
