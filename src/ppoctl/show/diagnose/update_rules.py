"""Rules over the updates: learning rates, KL penalty, critic, clipping, entropy, and sampler log-probs.

Each rule returns a symptom, or None. Bounds are from docs/reading-curves.md and the registry of metrics.
"""

import math

from ppoctl.core import metric_registry as registry
from ppoctl.core.finding import Level
from ppoctl.show.diagnose.curves import AVERAGED, Curves, Phase, Points, Symptom, mean, symptom

HEALTHY_KL = 1e-3
"""`policy/approx_kl` of a step that learns well (page: 0.0005 to 0.003)."""
LARGE_KL, BREAKING_KL = 0.05, 0.5
"""Upper bound of a healthy step (registry), and bound of `health.kl` by default."""
EQUAL = 1e-6
"""Standard deviation of equal scores (bound of `health.reward_spread`)."""
HELD_KL = 0.02
"""`kl/reference_mean` of an actor that stays at the reference (page: 0.007 instead of 0.064)."""
UNUSED = 0.2
"""Fraction of the experts with tokens that a collapsed router no longer uses."""
ABSENT_KL = 1e-5
"""`policy/approx_kl` below which the actor does not change (page)."""


def learning_rate_high(run: Curves) -> Symptom | None:
    """KL of a step above 0.05. The page's broken runs had 0.17 and 3.57 at step 1. A healthy run can recover from one
    large first step (0.11): the rule is silent if the newest steps are small and the score has not fallen.

    The KL of a small step grows with the square of the learning rate, which gives the suggested value. The learning
    rate is that of the step: a schedule or a resume may have changed it.
    """
    metric, points = _changes(run)
    large = [(step, kl) for step, kl in points if kl > LARGE_KL]
    if not large:
        return None
    step, kl = large[0]
    before = mean([point for point in run.of(registry.REWARD_SCORE_MEAN) if point[0] <= step][-AVERAGED:])
    has_fallen = before - run.recent(registry.REWARD_SCORE_MEAN) > run.noise
    if not has_fallen and run.steps > step and run.recent(registry.POLICY_APPROX_KL) <= LARGE_KL:
        return None
    is_broken = max(kl for _, kl in large) > BREAKING_KL or has_fallen
    key, began = "actor.optimizer.lr", step if metric is registry.POLICY_APPROX_KL else step - 1
    rate = dict(run.of(registry.POLICY_LR)).get(began) or run.key(key)
    lower = float(f"{rate * math.sqrt(HEALTHY_KL / kl):.1g}")
    hint = run.set(key, lower) if lower < run.key(key) else ""
    hint += run.back_to(began) if is_broken else ""
    return symptom(
        Level.ERROR if is_broken else Level.WARNING,
        "learning-rate-high",
        (began, Phase.UPDATED),
        f"the actor changes too much: {metric.name} is `{kl:.3g}`"
        f"{'' if step == began else f' in step {step}'}, above {LARGE_KL} "
        f"({key} is {rate:g}{'' if rate == run.key(key) else ' in this step'})",
        hint.removeprefix("; ") or None,
        "worst",
    )


def _changes(run: Curves) -> tuple[registry.Metric, Points]:
    """Return how much the actor changes in each step.

    With one update per step, `policy/approx_kl` is 0 at any learning rate, and the KL from the reference after the
    first update is read instead. If the old log-probs are those of the sampler, the difference between sampler and
    trainer is not a change of the actor.
    """
    first = run.first_update
    if first is None or _updates_per_step(run) > 1:
        from_sampler = run.key("ppo.old_logprobs") == "sampler"
        gaps = dict(run.of(registry.MISMATCH_GAP_K3)) if from_sampler else {}
        return registry.POLICY_APPROX_KL, [(s, kl - gaps.get(s, 0.0)) for s, kl in run.of(registry.POLICY_APPROX_KL)]
    reference = registry.KL_REFERENCE_MEAN
    before = dict(run.of(reference)).get(first, 0.0)  # above 0 if the actor starts with an adapter
    return reference, [(step, kl - before) for step, kl in run.of(reference) if step == first + 1]


def learning_rate_low(run: Curves) -> Symptom | None:
    """KL of every step below 1e-5, although scores differ. With one update per step, the KL is 0 at any learning
    rate, and the KL from the reference is read instead. Steps of a warm-up are not judged."""
    several, key = _updates_per_step(run) > 1, "actor.optimizer.lr"
    metric = registry.POLICY_APPROX_KL if several else registry.KL_REFERENCE_MEAN
    judged = _at_full_rate(run, registry.POLICY_LR, key)
    points = [(step, kl) for step, kl in run.of(metric) if (step if several else step - 1) in judged]
    if run.first_update is None or not points or run.recent(registry.REWARD_SCORE_STD) <= EQUAL:
        return None
    peak = max(value for _, value in points)
    if peak >= ABSENT_KL or run.recent(registry.ADVANTAGE_EQUAL_GROUPS_FRAC) > 0.9:
        return None
    factor = min(max(math.sqrt(HEALTHY_KL / peak), 10.0), 1000.0) if peak > 0 else 1000.0
    return symptom(
        Level.ERROR,
        "learning-rate-low",
        (points[0][0], Phase.UPDATED),
        f"the actor does not change: {metric.name} is at most `{peak:.2g}` in steps {points[0][0]} to "
        f"{points[-1][0]}, below 1e-5 ({key} is {run.key(key):g})",
        run.scaled(key, factor),
    )


def _updates_per_step(run: Curves) -> float:
    if run.key("ppo.old_logprobs") == "current":
        return 1
    sequences = run.key("rollout.prompts_per_step") * run.key("rollout.samples_per_prompt")
    return float(run.key("ppo.epochs") * sequences / run.key("ppo.minibatch_seqs"))


def _at_full_rate(run: Curves, metric: registry.Metric, key: str) -> set[int]:
    """Return the steps whose learning rate was at least half of the recipe's, so not those of a warm-up; all steps if
    the rate is not recorded."""
    rates = run.of(metric) or [(step, math.inf) for step, _ in run.of(registry.REWARD_SCORE_MEAN)]
    return {step for step, rate in rates if rate >= (run.key(key) or 0.0) / 2}


def generated_tokens(run: Curves) -> Points:
    """Return the mean number of tokens that the actor generated per response: those of observations are not among
    them."""
    observed = dict(run.of(registry.ENVIRONMENT_OBSERVED_TOKENS_MEAN))
    return [
        (step, tokens - observed.get(step, 0.0)) for step, tokens in run.of(registry.ROLLOUT_RESPONSE_TOKENS_MEAN)
    ]


def kl_penalty(run: Curves) -> Symptom | None:
    """The penalty of a response is over a tenth of the standard deviation of the scores, and the KL from the
    reference stays below 0.02 (page: 0.007 instead of 0.064), and the score hardly rises. Steps before the first
    update are not judged."""
    score, first = registry.REWARD_SCORE_MEAN, run.first_update
    reference = [point for point in run.of(registry.KL_REFERENCE_MEAN) if first is not None and point[0] > first]
    coef = run.recent(registry.KL_COEF) if run.of(registry.KL_COEF) else run.key("ppo.kl.coef")
    if len(reference) < 4 or coef is None or max(kl for _, kl in reference) > HELD_KL:
        return None
    distance, spread = run.recent(registry.KL_REFERENCE_MEAN), run.recent(registry.REWARD_SCORE_STD)
    penalty = coef * distance * mean(generated_tokens(run)[-AVERAGED:])
    if spread <= EQUAL or penalty < spread / 10 or run.recent(score) - run.early(score) > spread / 4:
        return None
    step = reference[0][0]
    return symptom(
        Level.WARNING,
        "kl-penalty",
        (step, Phase.MEASURED),
        f"the KL penalty holds the actor at the reference: kl/reference_mean is "
        f"{run.shown(registry.KL_REFERENCE_MEAN, step)}, a penalty of {penalty:.2g} per response at scores with a "
        f"standard deviation of {spread:.2g} (ppo.kl.coef is {coef:g})",
        stronger_penalty(run, 0.1),
    )


def stronger_penalty(run: Curves, factor: float) -> str | None:
    """Return the option that makes the KL penalty stronger (`factor` above 1) or weaker; None if there is none."""
    targets = [name for name, value in (run.key("ppo.kl.adaptive") or {}).items() if "target" in name and value]
    return run.scaled(f"ppo.kl.adaptive.{targets[0]}", 1 / factor) if targets else run.scaled("ppo.kl.coef", factor)


def critic(run: Curves) -> Symptom | None:
    """Explained variance within 0.01 of 0 in five steps or more (page: -0.00007 instead of 0.1 to 0.2), and values
    that differ from the returns by half; or an explained variance below -0.1: the critic's errors are then greater
    than the differences between returns."""
    judged = _at_full_rate(run, registry.VALUE_LR, "critic.optimizer.lr")
    differing = {step for step, deviation in run.of(registry.REWARD_SCORE_STD) if deviation > EQUAL}
    explained = [each for each in run.of(registry.VALUE_EXPLAINED_VARIANCE)[1:] if each[0] in judged & differing]
    spread = run.recent(registry.REWARD_SCORE_STD)
    if len(explained) < 5 or spread <= EQUAL or not (run.key("critic.on") or run.key("critic.optimizer.lr")):
        return None
    recent, value = run.recent(registry.VALUE_EXPLAINED_VARIANCE), run.recent(registry.VALUE_MEAN)
    returned = run.recent(registry.VALUE_RETURN_MEAN)
    is_wrong = abs(value - returned) > max(abs(returned) / 2, spread / 10)
    is_frozen = max(abs(each) for _, each in explained) < 0.01 and is_wrong
    if not is_frozen and not recent < -0.1:
        return None
    step = explained[0][0]
    return symptom(
        Level.WARNING,
        "explained-variance",
        (step, Phase.MEASURED),
        f"the critic explains nothing: value/explained_variance is "
        f"{run.shown(registry.VALUE_EXPLAINED_VARIANCE, step)}; the mean value is {value:.2g} at a mean return of "
        f"{returned:.2g}",
        _for_the_critic(run, is_frozen=is_frozen),
    )


def _for_the_critic(run: Curves, *, is_frozen: bool) -> str | None:
    """Return the option that helps a critic that does not learn (`is_frozen`), or that learns worse than a mean."""
    if run.key("critic.on"):  # a value head on the actor's model has no update of its own
        return run.scaled("ppo.value_loss.coef", 3)
    key, usual = "critic.optimizer.lr", 10 * run.key("actor.optimizer.lr")
    if is_frozen:
        return run.set(key, usual) if run.key(key) < usual else run.scaled(key, 10)
    if run.key(key) > usual:
        return run.scaled(key, 0.1)
    return run.set("ppo.critic_epochs", 2 * (run.key("ppo.critic_epochs") or run.key("ppo.epochs")))


def entropy(run: Curves) -> Symptom | None:
    """Entropy below a tenth of its first values (the page's healthy run: a fifth after 40 steps), and a score that is
    below the highest, by more than may be chance."""
    first, metric = run.early(registry.POLICY_ENTROPY_MEAN), registry.POLICY_ENTROPY_MEAN
    late = run.of(metric)[len(run.of(metric)) // 3 :]
    step = next((step for step, value in late if value <= first / 10), None)
    if run.steps < 6 or step is None or not run.best()[1] - run.recent(registry.REWARD_SCORE_MEAN) > run.noise:
        return None
    is_clip = run.key("ppo.policy_loss.kind") == "clip" and run.key("ppo.policy_loss.clip_high") < 0.28
    return symptom(
        Level.WARNING,
        "entropy",
        (step, Phase.MEASURED),
        f"entropy collapses: policy/entropy_mean fell from {first:.2g} to {run.shown(metric, step)}",
        run.set("ppo.policy_loss.clip_high", 0.28) if is_clip else run.scaled("actor.optimizer.lr", 0.3),
        "best",
    )


def clip(run: Curves) -> Symptom | None:
    """Clipped fraction above 0.3 (registry) on average: most tokens have no gradient. Sequence ratios (GSPO) have
    narrow bounds, so the rule reads only losses with ratios of tokens."""
    clipped = run.recent(registry.POLICY_CLIP_FRAC)
    if run.key("ppo.policy_loss.kind") != "clip" or not clipped > 0.3:
        return None
    step = run.since(registry.POLICY_CLIP_FRAC, 0.3) or 1
    return symptom(
        Level.WARNING,
        "clip",
        (step, Phase.UPDATED),
        f"policy/clip_frac is {run.shown(registry.POLICY_CLIP_FRAC, step)}, above 0.3: these tokens no longer have a "
        "gradient",
        run.set("ppo.epochs", 1) if run.key("ppo.epochs") > 1 else run.scaled("actor.optimizer.lr", 0.3),
    )


def mismatch(run: Curves) -> Symptom | None:
    """Log-probs of sampler and trainer differ by more than 0.05, or by a k3 of more than 0.01 (registry)."""
    bounds = {registry.MISMATCH_GAP_MEAN_ABS: 0.05, registry.MISMATCH_GAP_K3: 0.01}
    above = [metric for metric, bound in bounds.items() if run.recent(metric) > bound]
    if not above:
        return None
    metric = above[0]
    step = run.since(metric, bounds[metric]) or 1
    is_correctable = run.key("ppo.rollout_correction.kind") == "none" and run.key("ppo.old_logprobs") == "trainer"
    wider = run.set("model.dtype", "float32") if run.key("model.dtype") != "float32" else None
    return symptom(
        Level.WARNING,
        "mismatch",
        (step, Phase.MEASURED),
        f"sampler and trainer disagree: {metric.name} is {run.shown(metric, step)}, above {bounds[metric]}",
        run.set("ppo.rollout_correction", '{kind="tis"}') if is_correctable else wider,
    )


def experts_unused(run: Curves) -> Symptom | None:
    """A fifth of all experts, and of the experts with tokens in the first update, no longer receive a token: the
    router has collapsed. Experts without a token in the first update are not judged: a step may have few tokens."""
    points = run.of(registry.POLICY_EXPERTS_UNUSED_FRAC)
    if len(points) < AVERAGED:
        return None
    first, bound = points[0][1], points[0][1] + UNUSED * max(1 - points[0][1], 0.0)
    later = [step for step, unused in points if unused > bound]
    if run.recent(registry.POLICY_EXPERTS_UNUSED_FRAC) <= bound or not later:
        return None
    return symptom(
        Level.WARNING,
        "experts",
        (later[0], Phase.UPDATED),
        f"`{run.recent(registry.POLICY_EXPERTS_UNUSED_FRAC):.0%}` of the experts receive no token, `{first:.0%}` in "
        "the first update: the router chooses ever fewer experts",
        run.scaled("actor.optimizer.lr", 0.3),
    )
