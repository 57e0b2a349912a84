"""Rules over scores, responses and evaluations.

Each rule returns a symptom, or None. Bounds are from docs/reading-curves.md and the registry of metrics.
"""

from ppoctl import metric_registry as registry
from ppoctl.diagnose.curves import Curves, Symptom, mean, symptom
from ppoctl.diagnose.update_rules import EQUAL
from ppoctl.errors import quoted
from ppoctl.finding import Level

SCORE, SPREAD = registry.REWARD_SCORE_MEAN, registry.REWARD_SCORE_STD


def scorer_errors(run: Curves) -> Symptom | None:
    """Over 1 % of the samples without a score (bound of `health.reward_errors`)."""
    failed, slow = run.recent(registry.REWARD_ERROR_FRAC), run.recent(registry.REWARD_TIMEOUT_FRAC)
    metric = registry.REWARD_ERROR_FRAC if failed >= slow else registry.REWARD_TIMEOUT_FRAC
    if not max(failed, slow) > 0.01:
        return None
    return symptom(
        Level.WARNING,
        "scorer-errors",
        run.since(metric, 0.01) or 1,
        f"the scorer fails: {metric.name} is `{max(failed, slow):.2g}`, above 0.01",
        run.scaled("reward.timeout_s", 2)
        if metric is registry.REWARD_TIMEOUT_FRAC
        else f"ppoctl show {quoted(run.run)} --list --outcome error",
    )


def template(run: Curves) -> Symptom | None:
    """Nine in ten responses of step 1 do not end, and their scores are near 0: the model does not recognize the form
    of the prompt. The page's truncated run, whose template was right, had 0.58 at a score of 0.24.

    If responses end, but under a tenth of them is right (scores of 0 and 1 have the variance m (1 - m)), the task may
    also be hard, and the finding is a note.
    """
    score, spread, truncated = run.of(SCORE), run.of(SPREAD), run.of(registry.ROLLOUT_TRUNCATED_FRAC)
    if not score or not spread or not truncated:
        return None
    (step, mean), (_, deviation), (_, cut) = score[0], spread[0], truncated[0]
    is_endless = cut >= 0.9 and abs(mean) <= 0.05
    if not is_endless and not (0 < mean < 0.1 and abs(deviation**2 - mean * (1 - mean)) < 0.01):
        return None
    longer = run.set("rollout.max_new_tokens", 4 * run.key("rollout.max_new_tokens"))
    return symptom(
        Level.ERROR if is_endless else Level.NOTE,
        "template",
        step,
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
    temperature is lower; without an evaluation, nine in ten truncated responses."""
    sampled, score = run.key("rollout.temperature"), run.of(SCORE)
    before = [
        points[0][1]
        for name, points in run.series.items()
        if registry.find(name) is registry.EVAL_PASS_AT_1 and points[0][0] == 0
    ]
    truncated = run.of(registry.ROLLOUT_TRUNCATED_FRAC)
    if sampled <= 1.3 or not score or run.key("eval.temperature") >= sampled:
        return None
    if not (score[0][1] < max(before) / 2 if before else truncated and truncated[0][1] >= 0.9):
        return None
    return symptom(
        Level.ERROR,
        "temperature",
        score[0][0],
        f"the temperature is too high: before any update, the mean score is `{score[0][1]:.2g}` at "
        f"rollout.temperature {sampled:g}" + (f", and {max(before):.2g} in the evaluation" if before else ""),
        run.set("rollout.temperature", 1.0),
        "worst",
    )


def reward_dead(run: Curves) -> Symptom | None:
    """All scores equal in each of the last three steps, or in all steps."""
    equal, scores = run.trailing(SPREAD, EQUAL), dict(run.of(SCORE))
    if not equal or len(equal) < min(3, len(run.of(SPREAD))):
        return None
    step, score = equal[0][0], scores[equal[-1][0]]
    is_learned = len(equal) < len(run.of(SPREAD)) and score >= max(scores.values())
    return symptom(
        Level.NOTE if is_learned else Level.ERROR,
        "reward-dead",
        step,
        f"every response scores `{score:.3g}`, so that all gradients are 0"
        + (": the task is learned" if is_learned else ""),
        None
        if is_learned
        else f"ppoctl validate {quoted(run.toml)} --reward; if the scorer is right, use other rows",
        None if is_learned else "worst",
    )


def reward_noise(run: Curves) -> Symptom | None:
    """For ten steps or more, the critic has learned the mean of the returns (within a half) but none of their
    differences (explained variance within 0.01 of 0; a healthy run leaves it within five steps), and the score has
    not risen. The runs with shuffled scores of `benchmarks/learning.py` have this form."""
    explained, returned = run.of(registry.VALUE_EXPLAINED_VARIANCE), run.recent(registry.VALUE_RETURN_MEAN)
    is_mean_known = abs(run.recent(registry.VALUE_MEAN) - returned) <= abs(returned) / 2
    is_risen = run.recent(SCORE) - run.early(SCORE) > run.recent(SPREAD) / 4
    recent = run.recent(registry.VALUE_EXPLAINED_VARIANCE)
    if len(explained) < 10 or abs(recent) >= 0.01 or not is_mean_known or is_risen or run.recent(SPREAD) <= EQUAL:
        return None
    return symptom(
        Level.ERROR,
        "reward-noise",
        explained[0][0],
        "scores do not depend on the responses: the critic predicts their mean, but value/explained_variance is "
        f"`{recent:.1g}`, and the score does not rise",
        f"ppoctl validate {quoted(run.toml)} --reward",
        "best",
    )


def groups(run: Curves) -> Symptom | None:
    """Over nine in ten prompts have equal scores (registry: a healthy run is below a half, until the task is
    learned), so that their responses have advantage 0."""
    equal = run.recent(registry.ADVANTAGE_EQUAL_GROUPS_FRAC)
    if not equal > 0.9:
        return None
    return symptom(
        Level.WARNING,
        "groups",
        run.since(registry.ADVANTAGE_EQUAL_GROUPS_FRAC, 0.9) or 1,
        f"the scores of a prompt are equal for `{equal:.2g}` of the prompts, which have no gradient",
        run.set("rollout.temperature", 1.0)
        if run.key("rollout.temperature") < 0.7
        else run.set("rollout.groups", '{keep="mixed"}'),
        "worst",
    )


def truncation(run: Curves) -> Symptom | None:
    """Over a tenth of the responses truncated (registry)."""
    metric = registry.ROLLOUT_TRUNCATED_FRAC
    if not run.recent(metric) > 0.1:
        return None
    return symptom(
        Level.WARNING,
        "truncation",
        run.since(metric, 0.1) or 1,
        f"responses are truncated: {metric.name} is `{run.recent(metric):.2g}`, above 0.1 "
        f"(rollout.max_new_tokens is {run.key('rollout.max_new_tokens')})",
        run.set("rollout.max_new_tokens", 2 * run.key("rollout.max_new_tokens")),
        "longest",
    )


def gamed(run: Curves) -> Symptom | None:
    """The score rises, and a further metric of the scorer falls below 0.7 of its first value (page: 0.37), or the KL
    from the reference is above 0.5 (page). If responses have grown by half before, length is what the scorer rewards.
    """
    early, recent = run.early(SCORE), run.recent(SCORE)
    if run.steps < 5 or not recent - early > run.early(SPREAD) / 4:
        return None
    signs = {
        f"reward/{name}_mean falls": step
        for name in map(registry.reward_part, run.series)
        if name and (step := _fall(run, f"reward/{name}_mean")) is not None
    }
    distance = run.recent(registry.KL_REFERENCE_MEAN)
    if distance > 0.5 and (far := run.since(registry.KL_REFERENCE_MEAN, 0.5)) is not None:
        signs[f"kl/reference_mean is `{distance:.2g}`, above 0.5"] = far
    if not signs:
        return None
    sign = min(signs, key=lambda each: signs[each])
    tokens = run.of(registry.ROLLOUT_RESPONSE_TOKENS_MEAN)
    longer = run.since(registry.ROLLOUT_RESPONSE_TOKENS_MEAN, 1.5 * tokens[0][1])
    is_length = longer is not None and longer <= signs[sign] + 1
    growth = f"responses grow from {tokens[0][1]:.3g} to {tokens[-1][1]:.3g} tokens, and " if is_length else ""
    stop = run.set("health.reference_kl", '{max=0.5, action="stop"}')
    return symptom(
        Level.ERROR,
        "length" if is_length else "scorer",
        signs[sign],
        f"the scorer rewards the wrong thing: the score rises from {early:.3g} to `{recent:.3g}`, but {growth}{sign}",
        run.set("reward.length_penalty", "{per_token=0.01}") if is_length else f"the scorer; to stop early: {stop}",
        "longest" if is_length else "best",
    )


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
                step,
                f"{name} fell from {best:.3g} to `{points[-1][1]:.3g}`, while the training score did not fall",
                run.set("ppo.epochs", 1)
                if run.key("ppo.epochs") > 1
                else run.scaled("ppo.kl.coef", 3) or "use more rows",
                "best",
            )
    return None


def score_falls(run: Curves) -> Symptom | None:
    """The mean score fell by a quarter of its standard deviation, from the highest mean of as many steps."""
    points = run.of(SCORE)
    window = min(max(len(points) // 3, 1), 10)
    means = [(points[at][0], mean(points[at : at + window])) for at in range(len(points) - window + 1)]
    step, best = max(means, key=lambda point: point[1], default=(0, 0.0))
    if len(points) < 6 or best - run.recent(SCORE) <= max(value for _, value in run.of(SPREAD)) / 4:
        return None
    return symptom(
        Level.WARNING,
        "score-falls",
        step,
        f"the mean score of {window} steps fell from {best:.3g} to `{run.recent(SCORE):.3g}`",
        f"{run.scaled('actor.optimizer.lr', 0.3)}{run.back_to(step + 1)}",
        "worst",
    )
