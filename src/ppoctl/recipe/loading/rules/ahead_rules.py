"""Rules about generation that is ahead of training (`rollout.ahead`). See `all_rules`."""

from collections.abc import Iterator

from ppoctl.algorithms.stages.resample_table import NoResampling
from ppoctl.core.finding import Finding, conflict
from ppoctl.core.key_path import KeyPath
from ppoctl.core.metric_registry import eval_set
from ppoctl.recipe.schema import Recipe

_AHEAD: KeyPath = ("rollout", "ahead")
_ACCEPT: KeyPath = ("rollout", "accept_stale")
_UNTIL: KeyPath = ("ppo", "critic_only_until", "explained_variance")
_RESAMPLE: KeyPath = ("ppo", "resample", "kind")
_OFF = "--set rollout.ahead=0"


def check_stale_responses_are_corrected(recipe: Recipe) -> Iterator[Finding]:
    """Check that the loss knows which weights generated the responses."""
    ppo, rollout = recipe.ppo, recipe.rollout
    if rollout.ahead == 0:
        if rollout.accept_stale:
            yield conflict("no response is old, because generation is not ahead", (_ACCEPT, _AHEAD))
        return
    if not (ppo.corrects_rollouts or ppo.old_logprobs == "sampler" or rollout.accept_stale):
        yield conflict(
            "responses are one update old, but nothing corrects for the weights that generated them",
            (_AHEAD, ("ppo", "rollout_correction", "kind"), ("ppo", "old_logprobs")),
            "--set ppo.rollout_correction.kind=tis  # or ppo.old_logprobs=sampler, or rollout.accept_stale=true",
        )


def check_step_has_one_generation(recipe: Recipe) -> Iterator[Finding]:
    """Check that a step generates nothing else while the engines work for the next step."""
    if recipe.rollout.ahead == 0:
        return
    others: tuple[tuple[bool, str, KeyPath], ...] = (
        (recipe.rollout.groups is not None, "rounds of dynamic sampling", ("rollout", "groups")),
        (recipe.ppo.advantages.reads_baselines, "greedy responses", ("ppo", "advantages", "kind")),
        (not isinstance(recipe.ppo.resample, NoResampling), "rows that are sampled again", _RESAMPLE),
        (recipe.environment is not None, "responses of several turns", ("environment",)),
        (recipe.ppo.critic_only_until is not None, "a condition on the critic", _UNTIL),
    )
    for is_on, what, key in others:
        if is_on:
            yield conflict(f"generation ahead of training does not support {what}", (_AHEAD, key), _OFF)


def check_best_actor_is_evaluated(recipe: Recipe) -> Iterator[Finding]:
    """Check that the weights that the metric of the best actor measures still exist when it is known."""
    best = recipe.checkpoint.best
    if recipe.rollout.ahead > 0 and best is not None and eval_set(best) is None:
        yield conflict(
            f"`{best}` describes responses of weights that an update has already changed",
            (("checkpoint", "best"), _AHEAD),
            "ppoctl recipes metrics eval",
        )


def check_models_stay_on_devices(recipe: Recipe) -> Iterator[Finding]:
    """Check that generator and trainers can be in memory at the same time."""
    if recipe.rollout.ahead > 0 and recipe.cluster.offload:
        yield conflict(
            "generator and trainers work at the same time, so none of them can be offloaded",
            (_AHEAD, ("cluster", "offload")),
            "--set cluster.offload=[]",
        )
