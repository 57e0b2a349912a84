"""Rules over scores, responses and evaluations.

Each rule returns a symptom, or None. Bounds are from docs/reading-curves.md and the registry of metrics.
"""

import math

from ppoctl.core import metric_registry as registry
from ppoctl.core.errors import quoted
from ppoctl.core.finding import Level
from ppoctl.show.diagnose.curves import Curves, Phase, Symptom, mean, symptom
from ppoctl.show.diagnose.limits import TURNS, main_limit, raised
from ppoctl.show.diagnose.update_rules import EQUAL, HELD_KL, generated_tokens, stronger_penalty

SCORE, SPREAD = registry.REWARD_SCORE_MEAN, registry.REWARD_SCORE_STD


def scorer_errors(run: Curves) -> Symptom | None:
    """Over 1 % of the samples without a score (bound of `health.reward_errors`)."""
    failed, slow = run.recent(registry.REWARD_ERROR_FRAC), run.recent(registry.REWARD_TIMEOUT_FRAC)
    metric = registry.REWARD_ERROR_FRAC if failed >= slow else registry.REWARD_TIMEOUT_FRAC
    if not max(failed, slow) > 0.01:
        return None
    step = run.since(metric, 0.01) or 1
    return symptom(
        Level.WARNING,
        "scorer-errors",
        (step, Phase.SCORED),
        f"the scorer fails: {metric.name} is {run.shown(metric, step)}, above 0.01",
        run.scaled("reward.timeout_s", 2)
        if metric is registry.REWARD_TIMEOUT_FRAC
        else f"ppoctl show {quoted(run.run)} --list --outcome error",
    )


def template(run: Curves) -> Symptom | None:
    """Nine in ten responses of step 1 do not end, and their scores are near 0: the model does not recognize the form
    of the prompt. The page's truncated run, whose template was right, had 0.58 at a score of 0.24.

    If responses end, but under a tenth of them is right, the task may also be hard, and the finding is a note. Scores
    are 0 and 1 if their variance is m (1 - m).
    """
    score, spread, truncated = run.of(SCORE), run.of(SPREAD), run.of(registry.ROLLOUT_TRUNCATED_FRAC)
    if not score or not spread or not truncated or _turn_limited(run) >= 0.5 or run.recent(SCORE) > 0.5:
        return None
    (step, mean), (_, deviation), (_, cut) = score[0], spread[0], truncated[0]
    is_endless = cut >= 0.9 and abs(mean) <= 0.05
    if not is_endless and not (0 < mean < 0.1 and abs(deviation**2 - mean * (1 - mean)) < 0.01):
        return None
    longer = raised(run, main_limit(run, _turn_limited(run)), 4)
    return symptom(
        Level.ERROR if is_endless else Level.NOTE,
        "template",
        (step, Phase.GENERATED),
        f"before any update, `{cut:.2g}` of the responses do not end, and the mean score is {mean:.2g}: the chat "
        "template or the prompt is wrong, or the limit of tokens is far too low"
        if is_endless
        else f"before any update, the mean score is `{mean:.2g}`: the chat template or the prompt is wrong, or the "
        "task is hard",
        f"ppoctl preview {quoted(run.toml)} --rows 1" + (f"; if the prompt is right: {longer}" if is_endless else ""),
        "longest" if is_endless else "worst",
    )


def temperature(run: Curves) -> Symptom | None:
    """A temperature above 1.3, and scores at step 1 below half of those of the evaluation before step 1, whose
    temperature is lower; without such an evaluation, nine in ten truncated responses, or scores below 0.1."""
    sampled, score = run.key("rollout.temperature"), run.of(SCORE)
    is_alike = run.key("eval.environment") is None and (run.key("eval.temperature") or 0.0) < sampled
    before = [
        points[0][1]
        for name, points in run.series.items()
        if is_alike and registry.find(name) is registry.EVAL_PASS_AT_1 and points[0][0] == 0
    ]
    truncated = run.of(registry.ROLLOUT_TRUNCATED_FRAC)
    if sampled <= 1.3 or not score:
        return None
    is_endless = bool(truncated) and truncated[0][1] >= 0.9 and _turn_limited(run) < 0.5
    if not (score[0][1] < max(before) / 2 if before else is_endless or 0 <= score[0][1] < 0.1):
        return None
    return symptom(
        Level.ERROR if before or is_endless else Level.WARNING,
        "temperature",
        (score[0][0], Phase.GENERATED),
        f"the temperature is too high: before any update, the mean score is `{score[0][1]:.2g}` at "
        f"rollout.temperature {sampled:g}" + (f", and {max(before):.2g} in the evaluation" if before else ""),
        run.set("rollout.temperature", 1.0),
        "worst",
    )


def _turn_limited(run: Curves) -> float:
    """Return the fraction of the truncated responses that the limit of turns ended."""
    truncated = mean(run.of(registry.ROLLOUT_TRUNCATED_FRAC))
    turns = run.of(registry.ENVIRONMENT_TURN_LIMIT_FRAC)
    return mean(turns) / truncated if turns and truncated > 0 else 0.0


def reward_dead(run: Curves) -> Symptom | None:
    """All scores equal in each of the last three steps, or in all steps."""
    equal, scores = run.trailing(SPREAD, EQUAL), dict(run.of(SCORE))
    if not scores or not equal or len(equal) < min(3, len(run.of(SPREAD))):
        return None
    step, score = equal[0][0], scores[equal[-1][0]]
    is_learned = len(equal) < len(run.of(SPREAD)) and score >= max(scores.values())
    if not is_learned and _is_shaped(run):
        return None
    return symptom(
        Level.NOTE if is_learned else Level.ERROR,
        "reward-dead",
        (step, Phase.SCORED),
        f"every response scores `{score:.3g}`, so that there is nothing to learn"
        + (": the task is learned" if is_learned else ""),
        None
        if is_learned
        else f"ppoctl validate {quoted(run.toml)} --reward; if the scorer is right, use other rows",
        None if is_learned else "worst",
    )


def _is_shaped(run: Curves) -> bool:
    """Whether the reward of a response is more than its score, so that equal scores can have gradients."""
    return any(run.key(f"reward.{key}") for key in ("length_penalty", "overlong", "per_turn")) or (
        run.key("reward.unfinished_factor") not in (None, 1.0)
    )


def reward_noise(run: Curves) -> Symptom | None:
    """The critic has learned the mean of the returns (within a half) but none of their differences, and the score has
    not risen, for ten steps or more that trained the actor. Runs with shuffled scores of `benchmarks/learning.py`
    have this form. The bounds of the explained variance: now within 0.01 of 0, and never above 0.02; a healthy run
    leaves them within ten steps. An actor that a KL penalty or a small learning rate keeps at the reference (within
    0.02) is not judged: its score cannot rise.
    """
    first = run.first_update or 0
    explained = [point for point in run.of(registry.VALUE_EXPLAINED_VARIANCE) if point[0] >= first]
    returned = run.recent(registry.VALUE_RETURN_MEAN)
    is_mean_known = abs(run.recent(registry.VALUE_MEAN) - returned) <= abs(returned) / 2
    is_risen = run.recent(SCORE) - run.early(SCORE) > run.recent(SPREAD) / 4
    recent = run.recent(registry.VALUE_EXPLAINED_VARIANCE)
    if first == 0 or len(explained) < 10 or abs(recent) >= 0.01 or not is_mean_known or is_risen:
        return None
    if run.recent(SPREAD) <= EQUAL or max(value for _, value in explained) > 0.02:
        return None
    if run.recent(registry.KL_REFERENCE_MEAN) < HELD_KL:
        return None
    step = explained[0][0]
    return symptom(
        Level.ERROR,
        "reward-noise",
        (step, Phase.SCORED),
        "scores do not depend on the responses: the critic predicts their mean, but value/explained_variance is "
        f"{run.shown(registry.VALUE_EXPLAINED_VARIANCE, step)}, and the score does not rise",
        f"ppoctl validate {quoted(run.toml)} --reward",
        "best",
    )


def groups(run: Curves) -> Symptom | None:
    """Over nine in ten prompts have equal scores (registry: a healthy run is below a half), so that their responses
    have advantage 0. If this is so because the score has risen, the task is learned."""
    metric = registry.ADVANTAGE_EQUAL_GROUPS_FRAC
    if not run.recent(metric) > 0.9 or run.rise > 0:
        return None
    step = run.since(metric, 0.9) or 1
    is_cold = run.key("rollout.temperature") < 0.7
    mixed = run.set("rollout.groups", '{keep="mixed",when_short="use_fewer"}')
    return symptom(
        Level.WARNING,
        "groups",
        (step, Phase.SCORED),
        f"the scores of a prompt are equal for {run.shown(metric, step)} of the prompts, which have no gradient",
        run.set("rollout.temperature", 1.0) if is_cold else None if run.key("rollout.groups") else mixed,
        "worst",
    )


def truncation(run: Curves) -> Symptom | None:
    """Over a tenth of the responses truncated (registry). The limit of turns is also how an episode can fail: if
    fewer and fewer episodes reach it, nothing is wrong.

    If most responses are truncated and all scores are equal, the limit is the cause of both.
    """
    metric = registry.ROLLOUT_TRUNCATED_FRAC
    if not run.recent(metric) > 0.1:
        return None
    key = main_limit(run, _turn_limited(run))
    if key == TURNS and run.steps >= 5 and run.recent(metric) < 0.7 * run.early(metric):
        return None
    step = run.since(metric, 0.1) or 1
    is_dead = dict(run.of(SPREAD)).get(step, math.inf) <= EQUAL and run.recent(SPREAD) <= EQUAL
    is_breaking = is_dead and dict(run.of(metric))[step] >= 0.5
    return symptom(
        Level.ERROR if is_breaking else Level.WARNING,
        "truncation",
        (step, Phase.GENERATED),
        f"{'episodes reach the limit of turns' if key == TURNS else 'responses are truncated'}: {metric.name} is "
        f"{run.shown(metric, step)}, above 0.1"
        + (f" ({key} is {run.key(key)})" if key else " by a limit of tokens")
        + (", and all scores are equal" if is_breaking else ""),
        raised(run, key, 2),
        "longest",
    )


def gamed(run: Curves) -> Symptom | None:
    """The score rises, and two of three signs are against it: a further metric of the scorer falls below 0.7 of its
    first value (page: 0.37), the KL from the reference is above 0.5 (page), or responses have grown by half; or the
    KL is above 1 (registry). If responses grew before the other sign, length is what the scorer rewards.

    If only a metric falls, the finding is a note, because a lower value may be the better one.
    """
    early, recent = run.early(SCORE), run.recent(SCORE)
    if run.steps < 5 or not recent - early > run.early(SPREAD) / 4:
        return None
    signs, distance = _falls(run), run.recent(registry.KL_REFERENCE_MEAN)
    falls = len(signs)
    if distance > 0.5 and (far := run.since(registry.KL_REFERENCE_MEAN, 0.5)) is not None:
        signs[f"kl/reference_mean is `{distance:.2g}`, above 0.5"] = far
    if not signs:
        return None
    sign = min(signs, key=lambda each: signs[each])
    tokens = generated_tokens(run)
    longer = next((step for step, length in tokens if length > 1.5 * tokens[0][1]), None)
    is_length = longer is not None and longer <= signs[sign] + 1
    is_sure = is_length or distance > 1 or (falls > 0 and len(signs) > falls)
    if not is_sure and not falls:
        return None
    growth = f"responses grow from {tokens[0][1]:.3g} to {tokens[-1][1]:.3g} tokens, and " if is_length else ""
    has_reference = distance > 0 and run.key("ppo.kl.place") != "none"
    stop = run.set("health.reference_kl", '{max=0.5, action="stop"}')
    doubt = "" if is_sure else ", unless a lower value is better"
    return symptom(
        Level.ERROR if is_sure else Level.NOTE,
        "length" if is_length else "scorer",
        (signs[sign], Phase.SCORED),
        f"the scorer rewards the wrong thing{doubt}: the score rises from {early:.3g} to `{recent:.3g}`, but "
        f"{growth}{sign}",
        _against_length(run) if is_length else "the scorer" + (f"; to stop early: {stop}" if has_reference else ""),
        "longest" if is_length else "best",
    )


def _against_length(run: Curves) -> str | None:
    penalty = run.key("reward.length_penalty")
    if penalty is None:
        return run.set("reward.length_penalty", "{per_token=0.01}")
    return run.scaled("reward.length_penalty.per_token", 3)


def _falls(run: Curves) -> dict[str, int]:
    """Return the further metrics of the scorer that fall, each with the step, unless another one rises by a half."""
    names = [f"reward/{name}_mean" for name in map(registry.reward_part, run.series) if name]
    if any(run.recent(name) > 1.5 * run.early(name) > 0 for name in names):
        return {}
    return {f"{name} falls": step for name in names if (step := _fall(run, name)) is not None}


def _fall(run: Curves, name: str) -> int | None:
    """Return the first step at which a metric is below 0.7 of its first value, if it stays there; otherwise None."""
    bound = 0.7 * run.of(name)[0][1] if run.of(name) else 0.0
    return run.since(name, bound, below=True) if bound > 0 and run.recent(name) <= bound else None


def overfitting(run: Curves) -> Symptom | None:
    """An evaluation fell by three standard errors of the difference, while the training score did not fall."""
    for name, points in run.series.items():
        metric = registry.find(name)
        if registry.eval_set(name) is None or metric is None or metric.better != "higher" or len(points) < 2:
            continue
        step, best = max(points, key=lambda point: point[1])
        error = dict(run.series.get(f"{name}_stderr", ())).get(step, 0.03)
        if best - points[-1][1] > 3 * 2**0.5 * error and run.recent(SCORE) >= run.early(SCORE):
            return symptom(
                Level.WARNING,
                "overfitting",
                (step, Phase.UPDATED),
                f"{name} fell from {best:.3g} to `{points[-1][1]:.3g}` in step {points[-1][0]}, while the training "
                "score did not fall",
                run.set("ppo.epochs", 1)
                if run.key("ppo.epochs") > 1
                else stronger_penalty(run, 3) or "use more rows",
                "best",
            )
    return None


def score_falls(run: Curves) -> Symptom | None:
    """The mean score fell from the highest mean of as many steps, by more than may be chance."""
    steps, best = run.best()
    if run.steps < 6 or not best - run.recent(SCORE) > run.noise:
        return None
    return symptom(
        Level.WARNING,
        "score-falls",
        (steps[1] + 1, Phase.SCORED),
        f"the mean score fell from {best:.3g} in steps {steps[0]} to {steps[1]} to {run.shown(SCORE, -1)}",
        f"{run.scaled('actor.optimizer.lr', 0.3)}{run.back_to(steps[1] + 1)}",
        "worst",
    )
