"""Rules about metrics: `[expect]`, `[health]` and `checkpoint.best` name only what a run of this recipe reports, and
ask for it only where it is reported. See `rules`."""

from collections.abc import Iterator, Sequence

from ppoctl import metric_registry
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
"""Kind of policy loss -> its figures about clips; `clip` has all that there are."""


_OF_A_REWARD_STEP = {
    metric_registry.REWARD_CLAMPED_FRAC.name: ("scale", None),
    metric_registry.REWARD_CLIPPED_FRAC.name: ("clip", None),
    metric_registry.REWARD_MOMENTS_MEAN.name: ("moments", NoMoments(kind="none")),
    metric_registry.REWARD_MOMENTS_STD.name: ("moments", NoMoments(kind="none")),
    metric_registry.REWARD_UNFINISHED_MEAN.name: ("unfinished_factor", 1.0),
    metric_registry.REWARD_OVERLONG_MEAN.name: ("overlong", None),
    metric_registry.REWARD_LENGTH_MEAN.name: ("length_penalty", None),
}
"""Metric -> the key of `[reward]` that reports it, and its value where it does not."""
_OF_A_COEF = {
    metric_registry.POLICY_ENTROPY_LOSS.name: "entropy_coef",
    metric_registry.POLICY_NLL_LOSS.name: "positive_nll_coef",
    metric_registry.POLICY_NLL_TOKENS.name: "positive_nll_coef",
}
"""Metric of a term of the actor's loss -> the key of `ppo.policy_loss` that adds the term where it is above 0."""
_OF_TRUNCATED = {
    metric_registry.ADVANTAGE_BOOTSTRAP_MEAN.name: "bootstrap",
    metric_registry.ADVANTAGE_FILTERED_FRAC.name: "filter",
}
"""Metric -> the value of `ppo.truncated` that reports it."""


def check_expectation_bounds(recipe: Recipe) -> Iterator[Conflict]:
    for name, wanted in recipe.expect.items():
        key: KeyPath = ("expect", name)
        if metric_registry.find(name) is None:
            yield Conflict(metric_registry.unknown(name), (key,), "ppoctl recipes metrics")
        if wanted.min is None and wanted.max is None and wanted.rise_min is None:
            yield Conflict(f"`{dotted(key)}` has none of `min`, `max` and `rise_min`", (key,))
        if wanted.min is not None and wanted.max is not None and wanted.min > wanted.max:
            says = f"nothing is at least {wanted.min} and at most {wanted.max}"
            yield Conflict(says, ((*key, "min"), (*key, "max")))
        if wanted.at_step is not None and wanted.at_step > recipe.steps:
            says = f"`{name}` is expected at step {wanted.at_step} of a run of {recipe.steps} steps"
            yield Conflict(says, ((*key, "at_step"), ("steps",)))


def check_metrics_reported(recipe: Recipe) -> Iterator[Conflict]:
    for name, key in _watched(recipe):
        yield from _not_reported(recipe, name, key)


def _not_reported(recipe: Recipe, name: str, key: KeyPath) -> Iterator[Conflict]:
    """Reasons why no step of this recipe reports the metric."""
    named = metric_registry.eval_set(name)
    yield from _not_of_the_advantages(recipe, name, key)
    if name.startswith("kl/") and recipe.ppo.kl.place == "none":
        yield Conflict(f"`{name}` needs a reference, and none is loaded", (key, ("ppo", "kl", "place")))
    elif name == metric_registry.KL_MEASURED.name and getattr(recipe.ppo.kl, "adaptive", None) is None:
        yield Conflict(f"`{name}` needs a coefficient that adapts, and it is fixed", (key, ("ppo", "kl", "adaptive")))
    elif _is_of_a_correction(name):
        yield from _not_corrected(recipe, name, key)
    elif name == metric_registry.POLICY_KL_LOSS.name and recipe.ppo.kl.place != "loss":
        yield Conflict(f"`{name}` needs a KL penalty in the loss, and there is none", (key, ("ppo", "kl", "place")))
    elif (coef := _OF_A_COEF.get(name)) is not None and getattr(recipe.ppo.policy_loss, coef) == 0:
        says = f"`{name}` needs `ppo.policy_loss.{coef}` above 0"
        yield Conflict(says, (key, ("ppo", "policy_loss", coef)), f"--set ppo.policy_loss.{coef}=0.001")
    elif name.startswith("policy/") and _is_of_another_clip(name.removeprefix("policy/"), recipe):
        kind = recipe.ppo.policy_loss.kind
        yield Conflict(f"`{name}` is of a clip that `{kind}` has not", (key, ("ppo", "policy_loss", "kind")))
    elif named is not None and named not in recipe.data.eval:
        have = ", ".join(f"`{other}`" for other in recipe.data.eval) or "none"
        says = f"`{name}` speaks of an evaluation set `{named}`; [data.eval] has {have}"
        yield Conflict(says, (key, ("data", "eval")))
    elif named is not None:
        yield from evaluation.not_evaluated(recipe, name, key)
    elif name == metric_registry.TIME_EVAL_S.name and not recipe.data.eval:
        yield Conflict(f"`{name}` needs an evaluation set, and [data.eval] has none", (key, ("data", "eval")))
    elif name in (metric_registry.REWARD_STRICT_MEAN.name, metric_registry.REWARD_LENIENT_MEAN.name):
        yield from _no_other_reading(recipe, name, key)
    elif (part := metric_registry.reward_part(name)) is not None and not recipe.reward.reports(part):
        yield Conflict(metric_registry.unknown(name), (key,), "ppoctl recipes metrics")


def _not_of_the_advantages(recipe: Recipe, name: str, key: KeyPath) -> Iterator[Conflict]:
    """Reasons why the stage of the advantages does not report the metric: the step that would is not taken."""
    step, without = _OF_A_REWARD_STEP.get(name, ("", None))
    if step and getattr(recipe.reward, step) == without:
        yield Conflict(f"`{name}` needs `reward.{step}`, which is not set", (key,), "ppoctl recipes metrics")
    wanted = _OF_TRUNCATED.get(name, recipe.ppo.truncated)
    if recipe.ppo.truncated != wanted:
        yield Conflict(f"`{name}` needs `ppo.truncated` = `{wanted}`", (key, ("ppo", "truncated")))
    adapts = getattr(recipe.ppo.advantages, "length_adaptive_alpha", None) is not None
    if name == metric_registry.ADVANTAGE_LAMBDA_MEAN.name and not adapts:
        says = f"`{name}` needs `ppo.advantages.length_adaptive_alpha`, which is not set"
        yield Conflict(says, (key, ("ppo", "advantages", "kind")))


def _not_corrected(recipe: Recipe, name: str, key: KeyPath) -> Iterator[Conflict]:
    """Reasons why a figure of a correction is not reported: there is none, or none that could make it."""
    ppo, kind = recipe.ppo, recipe.ppo.rollout_correction.kind
    rejects = kind == "sequence_mask" or ppo.rollout_rejection.kind != "none" or ppo.max_sequence_gap is not None
    if not ppo.corrects_rollouts:
        says = f"`{name}` needs a correction of rollouts, and none is made"
        yield Conflict(says, (key, ("ppo", "rollout_correction", "kind")))
    elif name == metric_registry.CORRECTION_CAPPED_FRAC.name and kind in ("none", "sequence_mask"):
        says = f"`{name}` needs weights with bounds, and these have none"
        yield Conflict(says, (key, ("ppo", "rollout_correction", "kind")))
    elif (
        name in (metric_registry.CORRECTION_REJECTED_FRAC.name, metric_registry.CORRECTION_DROPPED_SEQS.name)
        and not rejects
    ):
        says = f"`{name}` needs a rejection, and nothing is rejected"
        yield Conflict(says, (key, ("ppo", "rollout_rejection", "kind"), ("ppo", "max_sequence_gap")))


def _is_of_another_clip(figure: str, recipe: Recipe) -> bool:
    return figure in _CLIPS["clip"] and figure not in _CLIPS[recipe.ppo.policy_loss.kind]


def _no_other_reading(recipe: Recipe, name: str, key: KeyPath) -> Iterator[Conflict]:
    """Reasons why a reading of an answer is not reported beside the score: only the reading that does not score
    is."""
    scorer, *others = recipe.reward.singles
    if others or isinstance(recipe.reward, SumReward) or not isinstance(scorer, Gsm8kScorer):
        says = f"`{name}` is one of the two readings of `gsm8k`, and this reward has one"
        yield Conflict(says, (key, ("reward", "kind")), "ppoctl recipes metrics")
    elif (name == metric_registry.REWARD_STRICT_MEAN.name) == scorer.strict:
        says = f"`{name}` is the score itself, which is reported as `{metric_registry.REWARD_SCORE_MEAN.name}`"
        yield Conflict(says, (key, ("reward", "strict")), "ppoctl recipes metrics")


def check_expected_step(recipe: Recipe) -> Iterator[Conflict]:
    for name, wanted in recipe.expect.items():
        step = wanted.at_step
        if step is None and recipe.data.eval and _is_of_an_evaluation(name):
            step = recipe.steps
        if (
            metric_registry.find(name) is None
            or step is None
            or step > recipe.steps
            or step in _reported_at(recipe, name)
        ):
            continue
        key: KeyPath = ("expect", name, "at_step")
        if _is_of_an_evaluation(name):
            where = "the end of the run" if wanted.at_step is None else f"step {step}"
            says = f"`{name}` is expected at {where}, where nothing is evaluated"
            off = _AT_END if step == recipe.steps else _AT_START
            yield Conflict(says, (key, _EVERY, off), f"--set {dotted(off)}=true" if off == _AT_END else None)
        elif step == 0:
            yield Conflict(f"`{name}` is expected at step 0, which is before the first; steps count from 1", (key,))
        else:
            says = f"`{name}` is expected at step {step}, where only the critic trains"
            yield Conflict(says, (key, ("ppo", "critic_only_steps")))


def check_rise_has_two_values(recipe: Recipe) -> Iterator[Conflict]:
    for name, wanted in recipe.expect.items():
        if wanted.rise_min is None or metric_registry.find(name) is None or len(_reported_at(recipe, name)) > 1:
            continue
        key: KeyPath = ("expect", name, "rise_min")
        if _is_of_an_evaluation(name):
            off = _AT_END if recipe.eval.at_start else _AT_START
            says = f"`{name}` must rise over its first value, and the run evaluates once"
            yield Conflict(says, (key, off, _EVERY), f"--set {dotted(off)}=true")
        else:
            yield Conflict(f"`{name}` must rise over its first value, and the run reports it once", (key, ("steps",)))


def check_health_metrics(recipe: Recipe) -> Iterator[Conflict]:
    rule = recipe.health.reference_kl
    if recipe.ppo.kl.place == "none" and (rule.min is not None or rule.max is not None):
        yield Conflict(
            "`health.reference_kl` bounds the distance to a reference, and none is loaded",
            (("health", "reference_kl"), ("ppo", "kl", "place")),
        )


def check_kl_rule_not_constant(recipe: Recipe) -> Iterator[Conflict]:
    rule, usual = recipe.health.kl, type(recipe.health).model_fields["kl"].default
    if recipe.ppo.old_logprobs == "current" and rule != usual and (rule.min is not None or rule.max is not None):
        yield Conflict(
            "`health.kl` bounds how far an update moves the actor from its old log-probs, and with those of the "
            "update itself that is always 0",
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
        says = f"`{best}` does not say which of two actors is better"
        yield Conflict(says, (key,), "--set checkpoint.best_direction=lower")
    elif recipe.data.eval and _is_of_an_evaluation(best) and not any(_reported_at(recipe, best)):
        says = f"`{best}` selects the best actor, and no actor is evaluated after a step"
        yield Conflict(says, (key, _AT_END, _EVERY), f"--set {dotted(_AT_END)}=true")
    elif _is_told_by_the_actors_update(recipe, best):
        says = f"`{best}` is told by the update of the actor that it is of, whose weights are gone by then"
        yield Conflict(says, (key,), "ppoctl recipes metrics")


def check_best_keys_need_best(recipe: Recipe) -> Iterator[Conflict]:
    checkpoint = recipe.checkpoint
    for name in ("best_keep", "best_direction"):
        if checkpoint.best is None and getattr(checkpoint, name) != type(checkpoint).model_fields[name].default:
            says = f"`checkpoint.{name}` is set, and no best actor is kept"
            yield Conflict(says, (("checkpoint", name),), "--set checkpoint.best=reward/score_mean")


def check_eval_set_names(recipe: Recipe) -> Iterator[Conflict]:
    for name in recipe.data.eval:
        if not name or "/" in name or name.strip() != name:
            yield Conflict(f"`{name}` names an evaluation set and may not hold `/`", (("data", "eval", name),))


METRIC_RULES = rules_of(globals())


def is_lower_better(checkpoint: CheckpointTable) -> bool:
    """Whether the actor with the lower figure is the best one: as written, else as the registry has it."""
    metric = metric_registry.find(checkpoint.best or "")
    return (checkpoint.best_direction or (metric.better if metric is not None else None)) == "lower"


def _reported_at(recipe: Recipe, name: str) -> Sequence[int]:
    """Steps at which a run reports this metric; 0 is before the first."""
    if _is_of_an_evaluation(name):
        return [step for step in range(recipe.steps + 1) if evaluates(recipe, step)]
    return range(1 + recipe.ppo.critic_only_steps * _needs_the_actors_update(recipe, name), recipe.steps + 1)


def _is_of_an_evaluation(name: str) -> bool:
    return metric_registry.eval_set(name) is not None or name == metric_registry.TIME_EVAL_S.name


def _needs_the_actors_update(recipe: Recipe, name: str) -> bool:
    return _is_told_by_the_actors_update(recipe, name) or _is_of_a_correction(name)


def _is_told_by_the_actors_update(recipe: Recipe, name: str) -> bool:
    # Of which log-probs there are before the update depends who says them.
    untold = {"trainer": (), "sampler": ("mismatch/",), "current": ("mismatch/", "kl/")}[recipe.ppo.old_logprobs]
    kl = recipe.ppo.kl
    if not isinstance(kl, NoKl) and kl.estimator == "full" and kl.place == "loss" and kl.adaptive is None:
        untold = (*untold, "kl/")
    return name.startswith(("policy/", *untold)) or name == metric_registry.TIME_ACTOR_UPDATE_S.name


def _is_of_a_correction(name: str) -> bool:
    return name.startswith("correction/") or name == metric_registry.TIME_CORRECTION_S.name


def _watched(recipe: Recipe) -> Sequence[tuple[str, KeyPath]]:
    """Known metrics that the recipe reads, each with the key that names it."""
    named: list[tuple[str, KeyPath]] = [(name, ("expect", name)) for name in recipe.expect]
    if recipe.checkpoint.best is not None:
        named.append((recipe.checkpoint.best, ("checkpoint", "best")))
    return [(name, key) for name, key in named if metric_registry.find(name) is not None]
