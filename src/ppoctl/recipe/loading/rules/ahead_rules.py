"""Rules about responses that are older than the weights at the start of a step: generation ahead of training
(`rollout.ahead`) and partial rollouts (`rollout.tokens_per_step`). See `all_rules`."""

from collections.abc import Iterator

from ppoctl.algorithms.stages.resample_table import NoResampling
from ppoctl.core.finding import Finding, Level, conflict
from ppoctl.core.key_path import KeyPath, dotted
from ppoctl.core.metric_registry import eval_set
from ppoctl.recipe.schema import Recipe

_AHEAD: KeyPath = ("rollout", "ahead")
_PARTIAL: KeyPath = ("rollout", "tokens_per_step")
_ACCEPT: KeyPath = ("rollout", "accept_stale")
_UNTIL: KeyPath = ("ppo", "critic_only_until", "explained_variance")
_RESAMPLE: KeyPath = ("ppo", "resample", "kind")
_GROUPS: KeyPath = ("rollout", "groups")
_CRITIC_SEES: KeyPath = (*_GROUPS, "critic_sees")
_ALLOWED_AHEAD = (_GROUPS, ("environment",))
_OFF = {_AHEAD: "--set rollout.ahead=0", _PARTIAL: None}


def _sources(recipe: Recipe) -> Iterator[tuple[KeyPath, str]]:
    """Yield each key because of which a response may be old, and what the key does."""
    if recipe.rollout.ahead > 0:
        yield _AHEAD, "generation ahead of training"
    if recipe.rollout.tokens_per_step is not None:
        yield _PARTIAL, "a response of several steps"


def check_stale_responses_are_corrected(recipe: Recipe) -> Iterator[Finding]:
    """Check that the loss knows which weights generated the responses."""
    ppo, rollout = recipe.ppo, recipe.rollout
    if not rollout.may_be_stale:
        if rollout.accept_stale:
            yield conflict("no response is old, because a step generates its own", (_ACCEPT, _AHEAD, _PARTIAL))
        return
    if not (ppo.corrects_rollouts or ppo.old_logprobs == "sampler" or rollout.accept_stale):
        yield conflict(
            "responses are older than the last update, but nothing corrects for the weights that generated them",
            (*(key for key, _ in _sources(recipe)), ("ppo", "rollout_correction", "kind"), ("ppo", "old_logprobs")),
            "--set ppo.rollout_correction.kind=tis  # or ppo.old_logprobs=sampler, or rollout.accept_stale=true",
        )


def check_step_has_one_generation(recipe: Recipe) -> Iterator[Finding]:
    """Check that a step generates nothing else while the engines work for the next step, and that each group has its
    responses of one turn."""
    groups = recipe.rollout.groups
    others: tuple[tuple[bool, str, KeyPath], ...] = (
        (groups is not None, "rounds of dynamic sampling", _GROUPS),
        (groups is not None and groups.critic_sees == "all", "a critic that sees all groups", _CRITIC_SEES),
        (recipe.ppo.advantages.reads_baselines, "greedy responses", ("ppo", "advantages", "kind")),
        (not isinstance(recipe.ppo.resample, NoResampling), "rows that are sampled again", _RESAMPLE),
        (recipe.environment is not None, "responses of several turns", ("environment",)),
        (recipe.ppo.critic_only_until is not None, "a condition on the critic", _UNTIL),
    )
    for source, name in _sources(recipe):
        for is_on, what, key in others:
            if is_on and not (source == _AHEAD and key in _ALLOWED_AHEAD):
                yield conflict(f"{name} does not support {what}", (source, key), _OFF[source])


def check_prompts_two_steps_ahead_are_known(recipe: Recipe) -> Iterator[Finding]:
    """Check that a step two steps ahead begins with known prompts, and generates whole responses of them."""
    if recipe.rollout.ahead < 2:
        return
    others = (
        (recipe.rollout.groups is not None, "the next step may use the same prompts for further rounds", _GROUPS),
        (recipe.rollout.tokens_per_step is not None, "the next step continues the same responses", _PARTIAL),
    )
    for is_on, why, key in others:
        if is_on:
            yield conflict(f"generation cannot be two steps ahead: {why}", (_AHEAD, key), "--set rollout.ahead=1")


def check_generation_may_end_in_the_next_step(recipe: Recipe) -> Iterator[Finding]:
    """Note that no generation two steps ahead can end in the next step, because each step waits for it."""
    if recipe.rollout.ahead < 2:
        return
    waits = (
        (recipe.checkpoint.every_steps, "saved", ("checkpoint", "every_steps")),
        (recipe.eval.every_steps, "evaluated", ("eval", "every_steps")),
    )
    for every, what, key in waits:
        if every == 1:
            yield conflict(
                f"each step is {what}, and then waits for the generation that it began: responses are older than "
                "with 1, and steps not shorter",
                (_AHEAD, key),
                f"--set {dotted(key)}=5",
                level=Level.NOTE,
            )


def check_best_actor_is_evaluated(recipe: Recipe) -> Iterator[Finding]:
    """Check that the weights that the metric of the best actor measures still exist when it is known."""
    best = recipe.checkpoint.best
    if recipe.rollout.may_be_stale and best is not None and eval_set(best) is None:
        yield conflict(
            f"`{best}` describes responses of weights that an update has already changed",
            (("checkpoint", "best"), *(key for key, _ in _sources(recipe))),
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


def check_responses_can_continue(recipe: Recipe) -> Iterator[Finding]:
    """Check that a response can end in any of its steps as it would end in one."""
    rollout = recipe.rollout
    if rollout.tokens_per_step is None:
        return
    if rollout.tokens_per_step >= rollout.max_new_tokens:
        yield conflict(
            "no response has more tokens than one step generates, so none continues",
            (_PARTIAL, ("rollout", "max_new_tokens")),
            f"--set rollout.tokens_per_step={max(1, rollout.max_new_tokens // 2)}",
        )
    if rollout.stop_strings:
        yield conflict(
            "a stop string that begins in one step and ends in the next would not be found",
            (_PARTIAL, ("rollout", "stop_strings")),
            "--set 'rollout.stop_strings=[]'  # or rollout.stop_token_ids",
        )
    if rollout.min_new_tokens > rollout.tokens_per_step:
        yield conflict(
            "the first step of a response cannot generate its minimum",
            (_PARTIAL, ("rollout", "min_new_tokens")),
            f"--set rollout.tokens_per_step={rollout.min_new_tokens}",
        )
