"""Rules about metrics: `[expect]`, `[health]` and `checkpoint.best` name only metrics that a run reports, at steps at
which it reports them.

See `across_tables`.
"""

from collections.abc import Iterator, Sequence

from ppoctl import metric_registry
from ppoctl.estimators.kinds import metrics_of
from ppoctl.loading.problems import Conflict, rules_of
from ppoctl.loading.rules import evaluation
from ppoctl.recipe.cadence import evaluates
from ppoctl.recipe.origins import KeyPath, dotted
from ppoctl.recipe.schema import CheckpointTable, NoKl, Recipe
from ppoctl.rewards.gsm8k import Gsm8kScorer
from ppoctl.rewards.shaping import NoMoments
from ppoctl.rewards.sum import SumReward

_EVERY: KeyPath = ("eval", "every_steps")
_AT_START: KeyPath = ("eval", "at_start")
_AT_END: KeyPath = ("eval", "at_end")
_CLIPS = {
    "clip": ("clip_frac", "clip_frac_high", "clip_frac_low", "dual_clip_frac"),
    "gspo": ("clip_frac", "clip_frac_high", "clip_frac_low"),
    "cispo": ("clip_frac", "clip_frac_high", "clip_frac_low"),
    "reinforce": (),
}
"""Kind of policy loss -> its metrics about clipping. `clip` has all of these metrics."""


_REWARD_KEYS = {
    metric_registry.REWARD_CLAMPED_FRAC.name: ("scale", None),
    metric_registry.REWARD_CLIPPED_FRAC.name: ("clip", None),
    metric_registry.REWARD_MOMENTS_MEAN.name: ("moments", NoMoments(kind="none")),
    metric_registry.REWARD_MOMENTS_STD.name: ("moments", NoMoments(kind="none")),
    metric_registry.REWARD_UNFINISHED_MEAN.name: ("unfinished_factor", 1.0),
    metric_registry.REWARD_OVERLONG_MEAN.name: ("overlong", None),
    metric_registry.REWARD_LENGTH_MEAN.name: ("length_penalty", None),
}
"""Metric -> the key of `[reward]` that makes a run report the metric, and the value of the key with which a run does
not report it."""
_COEF_KEYS = {
    metric_registry.POLICY_ENTROPY_LOSS.name: "entropy_coef",
    metric_registry.POLICY_NLL_LOSS.name: "positive_nll_coef",
    metric_registry.POLICY_NLL_TOKENS.name: "positive_nll_coef",
}
"""Metric of a term of the actor's loss -> the key of `ppo.policy_loss` that adds the term if it is above 0."""
_TRUNCATED_KINDS = {
    metric_registry.ADVANTAGE_BOOTSTRAP_MEAN.name: "bootstrap",
    metric_registry.ADVANTAGE_FILTERED_FRAC.name: "filter",
}
"""Metric -> the value of `ppo.truncated` with which it is reported."""


def check_expectation_bounds(recipe: Recipe) -> Iterator[Conflict]:
    for name, expected in recipe.expect.items():
        key: KeyPath = ("expect", name)
        if metric_registry.find(name) is None:
            yield Conflict(metric_registry.unknown(name), (key,), "ppoctl recipes metrics")
        if expected.min is None and expected.max is None and expected.rise_min is None:
            yield Conflict(f"`{dotted(key)}` has none of `min`, `max` and `rise_min`", (key,))
        if expected.min is not None and expected.max is not None and expected.min > expected.max:
            message = f"no value is at least {expected.min} and at most {expected.max}"
            yield Conflict(message, ((*key, "min"), (*key, "max")))
        if expected.at_step is not None and expected.at_step > recipe.steps:
            message = f"`{name}` is expected at step {expected.at_step} of a run of {recipe.steps} steps"
            yield Conflict(message, ((*key, "at_step"), ("steps",)))


def check_metrics_reported(recipe: Recipe) -> Iterator[Conflict]:
    for name, key in _watched(recipe):
        yield from _not_reported(recipe, name, key)


def _not_reported(recipe: Recipe, name: str, key: KeyPath) -> Iterator[Conflict]:
    """Yield the reasons why no step of this recipe reports the metric."""
    eval_set = metric_registry.eval_set(name)
    yield from _not_in_advantages(recipe, name, key)
    if name.startswith("kl/") and recipe.ppo.kl.place == "none":
        yield Conflict(f"`{name}` requires a reference, but none is loaded", (key, ("ppo", "kl", "place")))
    elif name == metric_registry.KL_MEASURED.name and getattr(recipe.ppo.kl, "adaptive", None) is None:
        yield Conflict(
            f"`{name}` requires an adaptive coefficient, but it is fixed", (key, ("ppo", "kl", "adaptive"))
        )
    elif _is_correction_metric(name):
        yield from _not_corrected(recipe, name, key)
    elif name == metric_registry.POLICY_KL_LOSS.name and recipe.ppo.kl.place != "loss":
        yield Conflict(
            f"`{name}` requires a KL penalty in the loss, but there is none", (key, ("ppo", "kl", "place"))
        )
    elif (coef := _COEF_KEYS.get(name)) is not None and getattr(recipe.ppo.policy_loss, coef) == 0:
        message = f"`{name}` requires `ppo.policy_loss.{coef}` above 0"
        yield Conflict(message, (key, ("ppo", "policy_loss", coef)), f"--set ppo.policy_loss.{coef}=0.001")
    elif name.startswith("policy/") and _is_of_another_clip(name.removeprefix("policy/"), recipe):
        kind = recipe.ppo.policy_loss.kind
        yield Conflict(
            f"`{name}` describes a clip that the loss `{kind}` does not have", (key, ("ppo", "policy_loss", "kind"))
        )
    elif eval_set is not None and eval_set not in recipe.data.eval:
        have = ", ".join(f"`{other}`" for other in recipe.data.eval) or "none"
        message = f"`{name}` names an evaluation set `{eval_set}`; [data.eval] has {have}"
        yield Conflict(message, (key, ("data", "eval")))
    elif eval_set is not None:
        yield from evaluation.not_evaluated(recipe, name, key)
    elif name == metric_registry.TIME_EVAL_S.name and not recipe.data.eval:
        yield Conflict(f"`{name}` requires an evaluation set, but [data.eval] has none", (key, ("data", "eval")))
    elif name in (metric_registry.REWARD_STRICT_MEAN.name, metric_registry.REWARD_LENIENT_MEAN.name):
        yield from _no_other_reading(recipe, name, key)
    elif (part := metric_registry.reward_part(name)) is not None and not recipe.reward.reports(part):
        yield Conflict(metric_registry.unknown(name), (key,), "ppoctl recipes metrics")


def _not_in_advantages(recipe: Recipe, name: str, key: KeyPath) -> Iterator[Conflict]:
    """Yield the reasons why the advantages stage does not report the metric: the recipe does not enable its step."""
    step, without = _REWARD_KEYS.get(name, ("", None))
    if step and getattr(recipe.reward, step) == without:
        yield Conflict(f"`{name}` requires `reward.{step}`, which is not set", (key,), "ppoctl recipes metrics")
    truncated = _TRUNCATED_KINDS.get(name, recipe.ppo.truncated)
    if recipe.ppo.truncated != truncated:
        yield Conflict(f"`{name}` requires `ppo.truncated` = `{truncated}`", (key, ("ppo", "truncated")))
    for added in metrics_of(recipe.ppo.advantages):
        if name == added.metric.name and not added.is_on:
            yield Conflict(f"`{name}` requires {added.needs}", (key, ("ppo", "advantages", "kind")))


def _not_corrected(recipe: Recipe, name: str, key: KeyPath) -> Iterator[Conflict]:
    """Yield the reasons why a metric of a correction is not reported: the recipe has no correction of its kind."""
    ppo, kind = recipe.ppo, recipe.ppo.rollout_correction.kind
    rejects = kind == "sequence_mask" or ppo.rollout_rejection.kind != "none" or ppo.max_sequence_gap is not None
    if not ppo.corrects_rollouts:
        message = f"`{name}` requires a rollout correction, but none is made"
        yield Conflict(message, (key, ("ppo", "rollout_correction", "kind")))
    elif name == metric_registry.CORRECTION_CAPPED_FRAC.name and kind in ("none", "sequence_mask"):
        message = f"`{name}` requires bounded weights, but these have no bounds"
        yield Conflict(message, (key, ("ppo", "rollout_correction", "kind")))
    elif (
        name in (metric_registry.CORRECTION_REJECTED_FRAC.name, metric_registry.CORRECTION_DROPPED_SEQS.name)
        and not rejects
    ):
        message = f"`{name}` requires a rejection, but nothing is rejected"
        yield Conflict(message, (key, ("ppo", "rollout_rejection", "kind"), ("ppo", "max_sequence_gap")))


def _is_of_another_clip(metric: str, recipe: Recipe) -> bool:
    return metric in _CLIPS["clip"] and metric not in _CLIPS[recipe.ppo.policy_loss.kind]


def _no_other_reading(recipe: Recipe, name: str, key: KeyPath) -> Iterator[Conflict]:
    """Yield the reasons why the strict or lenient reading of an answer is not reported in addition to the score.

    One of the two readings is the score itself, so only the other reading has a metric.
    """
    scorer, *others = recipe.reward.singles
    if others or isinstance(recipe.reward, SumReward) or not isinstance(scorer, Gsm8kScorer):
        message = f"`{name}` is one of two readings of an answer, which only `gsm8k` has"
        yield Conflict(message, (key, ("reward", "kind")), "ppoctl recipes metrics")
    elif (name == metric_registry.REWARD_STRICT_MEAN.name) == scorer.strict:
        message = f"`{name}` equals the score, which is reported as `{metric_registry.REWARD_SCORE_MEAN.name}`"
        yield Conflict(message, (key, ("reward", "strict")), "ppoctl recipes metrics")


def check_expected_step(recipe: Recipe) -> Iterator[Conflict]:
    for name, expected in recipe.expect.items():
        step = expected.at_step
        if step is None and recipe.data.eval and _is_evaluation_metric(name):
            step = recipe.steps
        if (
            metric_registry.find(name) is None
            or step is None
            or step > recipe.steps
            or step in _reported_at(recipe, name)
        ):
            continue
        key: KeyPath = ("expect", name, "at_step")
        if _is_evaluation_metric(name):
            where = "the end of the run" if expected.at_step is None else f"step {step}"
            message = f"`{name}` is expected at {where}, but nothing is evaluated then"
            off = _AT_END if step == recipe.steps else _AT_START
            yield Conflict(message, (key, _EVERY, off), f"--set {dotted(off)}=true" if off == _AT_END else None)
        elif step == 0:
            yield Conflict(f"`{name}` is expected at step 0, before the first step; steps count from 1", (key,))
        else:
            message = f"`{name}` is expected at step {step}, when only the critic trains"
            yield Conflict(message, (key, ("ppo", "critic_only_steps")))


def check_rise_has_two_values(recipe: Recipe) -> Iterator[Conflict]:
    for name, expected in recipe.expect.items():
        if expected.rise_min is None or metric_registry.find(name) is None or len(_reported_at(recipe, name)) > 1:
            continue
        key: KeyPath = ("expect", name, "rise_min")
        if _is_evaluation_metric(name):
            off = _AT_END if recipe.eval.at_start else _AT_START
            message = f"`{name}` must rise above its first value, but the run evaluates only once"
            yield Conflict(message, (key, off, _EVERY), f"--set {dotted(off)}=true")
        else:
            yield Conflict(
                f"`{name}` must rise above its first value, but the run reports it only once", (key, ("steps",))
            )


def check_health_metrics(recipe: Recipe) -> Iterator[Conflict]:
    rule = recipe.health.reference_kl
    if recipe.ppo.kl.place == "none" and (rule.min is not None or rule.max is not None):
        yield Conflict(
            "`health.reference_kl` bounds the KL to a reference, but none is loaded",
            (("health", "reference_kl"), ("ppo", "kl", "place")),
        )


def check_kl_rule_not_constant(recipe: Recipe) -> Iterator[Conflict]:
    rule, usual = recipe.health.kl, type(recipe.health).model_fields["kl"].default
    if recipe.ppo.old_logprobs == "current" and rule != usual and (rule.min is not None or rule.max is not None):
        yield Conflict(
            "`health.kl` bounds the KL between old and updated log-probs, which is always 0 with "
            "`ppo.old_logprobs` = `current`",
            (("health", "kl", "max" if rule.min is None else "min"), ("ppo", "old_logprobs")),
            "--set health.kl.max=0.5",
        )


def check_best_metric(recipe: Recipe) -> Iterator[Conflict]:
    best = recipe.checkpoint.best
    if best is None:
        return
    metric, key = metric_registry.find(best), ("checkpoint", "best")
    if metric is None:
        yield Conflict(metric_registry.unknown(best), (key,), "ppoctl recipes metrics")
    elif metric.better is None and recipe.checkpoint.best_direction is None:
        message = f"`{best}` does not define which of two actors is better"
        yield Conflict(message, (key,), "--set checkpoint.best_direction=lower")
    elif recipe.data.eval and _is_evaluation_metric(best) and not any(_reported_at(recipe, best)):
        message = f"`{best}` selects the best actor, but no actor is evaluated after a step"
        yield Conflict(message, (key, _AT_END, _EVERY), f"--set {dotted(_AT_END)}=true")
    elif _is_reported_by_actor_update(recipe, best):
        message = (
            f"`{best}` is measured during the actor's update, when the weights it describes have already been "
            f"replaced"
        )
        yield Conflict(message, (key,), "ppoctl recipes metrics")


def check_best_keys_need_best(recipe: Recipe) -> Iterator[Conflict]:
    checkpoint = recipe.checkpoint
    for name in ("best_keep", "best_direction"):
        if checkpoint.best is None and getattr(checkpoint, name) != type(checkpoint).model_fields[name].default:
            message = f"`checkpoint.{name}` is set, but no best actor is kept"
            yield Conflict(message, (("checkpoint", name),), "--set checkpoint.best=reward/score_mean")


def check_eval_set_names(recipe: Recipe) -> Iterator[Conflict]:
    for name in recipe.data.eval:
        if not name or "/" in name or name.strip() != name:
            yield Conflict(f"`{name}` names an evaluation set and must not contain `/`", (("data", "eval", name),))


METRIC_RULES = rules_of(globals())


def is_lower_better(checkpoint: CheckpointTable) -> bool:
    """Return whether the lower value is better, by `checkpoint.best_direction` or else by the metric registry."""
    metric = metric_registry.find(checkpoint.best or "")
    return (checkpoint.best_direction or (metric.better if metric is not None else None)) == "lower"


def _reported_at(recipe: Recipe, name: str) -> Sequence[int]:
    """Return the steps at which a run reports this metric; step 0 is before the first update."""
    if _is_evaluation_metric(name):
        return [step for step in range(recipe.steps + 1) if evaluates(recipe, step)]
    return range(1 + recipe.ppo.critic_only_steps * _needs_the_actors_update(recipe, name), recipe.steps + 1)


def _is_evaluation_metric(name: str) -> bool:
    return metric_registry.eval_set(name) is not None or name == metric_registry.TIME_EVAL_S.name


def _needs_the_actors_update(recipe: Recipe, name: str) -> bool:
    return _is_reported_by_actor_update(recipe, name) or _is_correction_metric(name)


def _is_reported_by_actor_update(recipe: Recipe, name: str) -> bool:
    # `ppo.old_logprobs` decides which log-probs exist before the update; metrics of other log-probs come from the
    # update.
    from_update = {"trainer": (), "sampler": ("mismatch/",), "current": ("mismatch/", "kl/")}[recipe.ppo.old_logprobs]
    kl = recipe.ppo.kl
    if not isinstance(kl, NoKl) and kl.estimator == "full" and kl.place == "loss" and kl.adaptive is None:
        from_update = (*from_update, "kl/")
    return name.startswith(("policy/", *from_update)) or name == metric_registry.TIME_ACTOR_UPDATE_S.name


def _is_correction_metric(name: str) -> bool:
    return name.startswith("correction/") or name == metric_registry.TIME_CORRECTION_S.name


def _watched(recipe: Recipe) -> Sequence[tuple[str, KeyPath]]:
    """Return the known metrics that the recipe names, each with the key that names it."""
    named: list[tuple[str, KeyPath]] = [(name, ("expect", name)) for name in recipe.expect]
    if recipe.checkpoint.best is not None:
        named.append((recipe.checkpoint.best, ("checkpoint", "best")))
    return [(name, key) for name, key in named if metric_registry.find(name) is not None]
