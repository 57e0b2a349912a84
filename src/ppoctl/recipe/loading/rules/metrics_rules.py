"""Rules about metrics: `[expect]`, `[health]` and `checkpoint.best` name only metrics that a run reports, at steps at
which it reports them.

See `all_rules`.
"""

from collections.abc import Iterator, Sequence
from itertools import chain

from ppoctl.algorithms.choose import missing, reported_at, trained_at, updated_role
from ppoctl.algorithms.roles import POLICY
from ppoctl.core import metric_registry
from ppoctl.core.finding import Finding, conflict
from ppoctl.core.key_path import KeyPath, dotted
from ppoctl.recipe.cadence import evaluates, saves
from ppoctl.recipe.loading.rules import evaluation_rules
from ppoctl.recipe.schema import CheckpointTable, Recipe
from ppoctl.rewards.gsm8k import Gsm8kScorer
from ppoctl.rewards.sum import SumReward

_EVERY: KeyPath = ("eval", "every_steps")
_AT_START: KeyPath = ("eval", "at_start")
_AT_END: KeyPath = ("eval", "at_end")
_ADVANTAGES: KeyPath = ("ppo", "advantages", "kind")


def check_expectation_bounds(recipe: Recipe) -> Iterator[Finding]:
    for name, expected in recipe.expect.items():
        key: KeyPath = ("expect", name)
        if metric_registry.find(name) is None:
            yield conflict(metric_registry.unknown(name), (key,), "ppoctl recipes metrics")
        if expected.min is None and expected.max is None and expected.rise_min is None:
            yield conflict(f"`{dotted(key)}` has none of `min`, `max` and `rise_min`", (key,))
        if expected.min is not None and expected.max is not None and expected.min > expected.max:
            message = f"no value is at least {expected.min} and at most {expected.max}"
            yield conflict(message, ((*key, "min"), (*key, "max")))
        if expected.at_step is not None and expected.at_step > recipe.steps:
            message = f"`{name}` is expected at step {expected.at_step} of a run of {recipe.steps} steps"
            yield conflict(message, ((*key, "at_step"), ("steps",)))


def check_metrics_reported(recipe: Recipe) -> Iterator[Finding]:
    for name, key in _watched(recipe):
        yield from _not_reported(recipe, name, key)


def _not_reported(recipe: Recipe, name: str, key: KeyPath) -> Iterator[Finding]:
    """Yield the reasons why no step of this recipe reports the metric."""
    eval_set = metric_registry.eval_set(name)
    lacking = missing(recipe, name)
    if lacking is not None:
        yield conflict(f"`{name}` {lacking.needs}", (key, *lacking.keys), lacking.hint)
    elif eval_set is not None and eval_set not in recipe.data.eval:
        have = ", ".join(f"`{other}`" for other in recipe.data.eval) or "none"
        message = f"`{name}` names an evaluation set `{eval_set}`; [data.eval] has {have}"
        yield conflict(message, (key, ("data", "eval")))
    elif eval_set is not None:
        yield from evaluation_rules.not_evaluated(recipe, name, key)
    elif name == metric_registry.TIME_EVAL_S.name and not recipe.data.eval:
        yield conflict(f"`{name}` requires an evaluation set, but [data.eval] has none", (key, ("data", "eval")))
    elif name in metric_registry.WAITS and not recipe.cluster.offload:
        message = f"`{name}` requires that a role is offloaded, but `cluster.offload` lists none"
        yield conflict(message, (key, ("cluster", "offload")))
    elif name in metric_registry.SAVES and not steps_with_metric(recipe, name):
        yield conflict(f"`{name}` belongs to a role that no step of this recipe trains", (key, _ADVANTAGES))
    elif name in (metric_registry.REWARD_STRICT_MEAN.name, metric_registry.REWARD_LENIENT_MEAN.name):
        yield from _no_other_reading(recipe, name, key)
    elif (part := metric_registry.reward_part(name)) is not None and not recipe.reward.reports(part):
        yield conflict(metric_registry.unknown(name), (key,), "ppoctl recipes metrics")


def _no_other_reading(recipe: Recipe, name: str, key: KeyPath) -> Iterator[Finding]:
    """Yield the reasons why the strict or lenient reading of an answer is not reported in addition to the score.

    One of the two readings is the score itself, so only the other reading has a metric.
    """
    scorer, *others = recipe.reward.singles
    if others or isinstance(recipe.reward, SumReward) or not isinstance(scorer, Gsm8kScorer):
        message = f"`{name}` is one of two readings of an answer, which only `gsm8k` has"
        yield conflict(message, (key, ("reward", "kind")), "ppoctl recipes metrics")
    elif (name == metric_registry.REWARD_STRICT_MEAN.name) == scorer.strict:
        message = f"`{name}` equals the score, which is reported as `{metric_registry.REWARD_SCORE_MEAN.name}`"
        yield conflict(message, (key, ("reward", "strict")), "ppoctl recipes metrics")


def check_expected_step(recipe: Recipe) -> Iterator[Finding]:
    for name, expected in recipe.expect.items():
        step = expected.at_step
        if step is None and recipe.data.eval and is_evaluation_metric(name):
            step = recipe.steps
        if (
            metric_registry.find(name) is None
            or step is None
            or step > recipe.steps
            or any(step in steps for steps in steps_with_metric(recipe, name))
            or missing(recipe, name) is not None
        ):
            continue
        key: KeyPath = ("expect", name, "at_step")
        if is_evaluation_metric(name):
            where = "the end of the run" if expected.at_step is None else f"step {step}"
            message = f"`{name}` is expected at {where}, but nothing is evaluated then"
            off = _AT_END if step == recipe.steps else _AT_START
            yield conflict(message, (key, _EVERY, off), f"--set {dotted(off)}=true" if off == _AT_END else None)
        elif name in metric_registry.SAVES:
            message = f"`{name}` is expected at step {step}, but the run saves no newly trained state then"
            yield conflict(message, (key, ("checkpoint", "every_steps")))
        elif step == 0:
            yield conflict(f"`{name}` is expected at step 0, before the first step; steps count from 1", (key,))
        else:
            until = recipe.ppo.critic_only_until
            message = f"`{name}` is expected at step {step}, when only the critic "
            message += "trains" if until is None else "may train"
            steps: KeyPath = ("critic_only_steps",) if until is None else ("critic_only_until", "at_most")
            yield conflict(message, (key, ("ppo", *steps)))


def check_rise_has_two_values(recipe: Recipe) -> Iterator[Finding]:
    for name, expected in recipe.expect.items():
        if expected.rise_min is None or metric_registry.find(name) is None:
            continue
        if sum(map(len, steps_with_metric(recipe, name))) > 1 or missing(recipe, name) is not None:
            continue
        key: KeyPath = ("expect", name, "rise_min")
        if is_evaluation_metric(name):
            off = _AT_END if recipe.eval.at_start else _AT_START
            message = f"`{name}` must rise above its first value, but the run evaluates only once"
            yield conflict(message, (key, off, _EVERY), f"--set {dotted(off)}=true")
        else:
            yield conflict(
                f"`{name}` must rise above its first value, but the run reports it only once", (key, ("steps",))
            )


def check_health_metrics(recipe: Recipe) -> Iterator[Finding]:
    rule = recipe.health.reference_kl
    if recipe.ppo.kl.place == "none" and (rule.min is not None or rule.max is not None):
        yield conflict(
            "`health.reference_kl` bounds the KL to a reference, but none is loaded",
            (("health", "reference_kl"), ("ppo", "kl", "place")),
        )


def check_kl_rule_not_constant(recipe: Recipe) -> Iterator[Finding]:
    rule, usual = recipe.health.kl, type(recipe.health).model_fields["kl"].default
    if recipe.ppo.old_logprobs == "current" and rule != usual and (rule.min is not None or rule.max is not None):
        yield conflict(
            "`health.kl` bounds the KL between old and updated log-probs, which is always 0 with "
            "`ppo.old_logprobs` = `current`",
            (("health", "kl", "max" if rule.min is None else "min"), ("ppo", "old_logprobs")),
            "--set health.kl.max=0.5",
        )


def check_best_metric(recipe: Recipe) -> Iterator[Finding]:
    best = recipe.checkpoint.best
    if best is None:
        return
    metric, key = metric_registry.find(best), ("checkpoint", "best")
    if metric is None:
        yield conflict(metric_registry.unknown(best), (key,), "ppoctl recipes metrics")
    elif metric.better is None and recipe.checkpoint.best_direction is None:
        message = f"`{best}` does not define which of two actors is better"
        yield conflict(message, (key,), "--set checkpoint.best_direction=lower")
    elif recipe.data.eval and is_evaluation_metric(best) and not _is_evaluated_after_a_step(recipe):
        message = f"`{best}` selects the best actor, but no actor is evaluated after a step"
        yield conflict(message, (key, _AT_END, _EVERY), f"--set {dotted(_AT_END)}=true")
    elif updated_role(recipe, best) == POLICY:
        message = (
            f"`{best}` is measured during the actor's update, when the weights it describes have already been "
            f"replaced"
        )
        yield conflict(message, (key,), "ppoctl recipes metrics")


def check_best_keys_need_best(recipe: Recipe) -> Iterator[Finding]:
    checkpoint = recipe.checkpoint
    for name in ("best_keep", "best_direction"):
        if checkpoint.best is None and getattr(checkpoint, name) != type(checkpoint).model_fields[name].default:
            message = f"`checkpoint.{name}` is set, but no best actor is kept"
            yield conflict(message, (("checkpoint", name),), "--set checkpoint.best=reward/score_mean")


def check_eval_set_names(recipe: Recipe) -> Iterator[Finding]:
    for name in recipe.data.eval:
        if not name or "/" in name or name.strip() != name:
            yield conflict(f"`{name}` names an evaluation set and must not contain `/`", (("data", "eval", name),))


def is_lower_better(checkpoint: CheckpointTable) -> bool:
    """Return whether the lower value is better, by `checkpoint.best_direction` or else by the metric registry."""
    metric = metric_registry.find(checkpoint.best or "")
    return (checkpoint.best_direction or (metric.better if metric is not None else None)) == "lower"


def steps_with_metric(recipe: Recipe, name: str) -> list[range]:
    """Return the steps at which a run reports this metric; step 0 is before the first update."""
    if is_evaluation_metric(name):
        return [range(step, step + 1) for step in range(recipe.steps + 1) if evaluates(recipe, step)]
    if name in metric_registry.SAVES:
        saved = (role for role in recipe.trained if metric_registry.save_metric(role) == name)
        steps = chain.from_iterable(chain.from_iterable(trained_at(recipe, role) for role in saved))
        return [range(step, step + 1) for step in steps if saves(recipe, step)]
    return reported_at(recipe, name)


def is_evaluation_metric(name: str) -> bool:
    """Return whether an evaluation reports the metric, not a stage of a step."""
    return metric_registry.eval_set(name) is not None or name == metric_registry.TIME_EVAL_S.name


def _is_evaluated_after_a_step(recipe: Recipe) -> bool:
    return any(evaluates(recipe, step) for step in range(1, recipe.steps + 1))


def _watched(recipe: Recipe) -> Sequence[tuple[str, KeyPath]]:
    """Return the known metrics that the recipe names, each with the key that names it."""
    named: list[tuple[str, KeyPath]] = [(name, ("expect", name)) for name in recipe.expect]
    named += [(name, ("until", name)) for name in recipe.until]
    if recipe.checkpoint.best is not None:
        named.append((recipe.checkpoint.best, ("checkpoint", "best")))
    return [(name, key) for name, key in named if metric_registry.find(name) is not None]
