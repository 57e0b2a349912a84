"""Rules over the updates: learning rates, KL penalty, critic, clipping, entropy, and sampler log-probs.

Each rule returns a symptom, or None. Bounds are from docs/reading-curves.md and the registry of metrics.
"""

import math

from ppoctl import metric_registry as registry
from ppoctl.diagnose.curves import Curves, Symptom, symptom
from ppoctl.finding import Level

HEALTHY_KL = 1e-3
"""`policy/approx_kl` of a step that learns well (page: 0.0005 to 0.003)."""
LARGE_KL, BREAKING_KL = 0.05, 0.5
"""Upper bound of a healthy step (registry), and bound of `health.kl` by default."""
EQUAL = 1e-6
"""Standard deviation of equal scores (bound of `health.reward_spread`)."""
ABSENT_KL = 1e-5
"""`policy/approx_kl` below which the actor does not change (page)."""


def learning_rate_high(run: Curves) -> Symptom | None:
    """KL of a step above 0.05. The page's broken runs had 0.17 and 3.57 at step 1. A healthy run can recover from one
    large first step (0.11): the rule is silent if the newest steps are small and the score has risen.

    The KL of a small step grows with the square of the learning rate, which gives the suggested value.
    """
    large = [(step, kl) for step, kl in run.of(registry.POLICY_APPROX_KL) if kl > LARGE_KL]
    rise = run.recent(registry.REWARD_SCORE_MEAN) - run.early(registry.REWARD_SCORE_MEAN)
    if not large or (rise > 0 and run.recent(registry.POLICY_APPROX_KL) <= LARGE_KL):
        return None
    step, kl = large[0]
    is_broken = max(kl for _, kl in large) > BREAKING_KL or rise < 0
    return symptom(
        Level.ERROR if is_broken else Level.WARNING,
        "learning-rate-high",
        step,
        f"the actor changes too much: policy/approx_kl is `{kl:.3g}`, above {LARGE_KL} "
        f"(actor.optimizer.lr is {run.key('actor.optimizer.lr'):g})",
        f"{run.scaled('actor.optimizer.lr', math.sqrt(HEALTHY_KL / kl))}{run.back_to(step) if is_broken else ''}",
        "worst",
    )


def learning_rate_low(run: Curves) -> Symptom | None:
    """KL of every step below 1e-5, although scores differ. With one update per step, the KL is 0 at any learning
    rate, and the KL from the reference is read instead."""
    metric = registry.POLICY_APPROX_KL if _updates_per_step(run) > 1 else registry.KL_REFERENCE_MEAN
    points = [point for point in run.of(metric) if metric is registry.POLICY_APPROX_KL or point[0] > 2]
    if not points or run.recent(registry.REWARD_SCORE_STD) <= EQUAL:
        return None
    peak = max(value for _, value in points)
    if peak >= ABSENT_KL or _is_warming_up(run):
        return None
    factor = min(max(math.sqrt(HEALTHY_KL / peak), 10.0), 1000.0) if peak > 0 else 1000.0
    return symptom(
        Level.ERROR,
        "learning-rate-low",
        points[0][0],
        f"the actor does not change: {metric.name} is at most `{peak:.2g}`, below 1e-5 "
        f"(actor.optimizer.lr is {run.key('actor.optimizer.lr'):g})",
        run.scaled("actor.optimizer.lr", factor),
    )


def _updates_per_step(run: Curves) -> float:
    if run.key("ppo.old_logprobs") == "current":
        return 1
    sequences = run.key("rollout.prompts_per_step") * run.key("rollout.samples_per_prompt")
    return float(run.key("ppo.epochs") * sequences / run.key("ppo.minibatch_seqs"))


def _is_warming_up(run: Curves) -> bool:
    rates = [rate for _, rate in run.of(registry.POLICY_LR)]
    return bool(rates) and rates[-1] < run.key("actor.optimizer.lr") / 2 and rates[-1] > rates[0]


def kl_penalty(run: Curves) -> Symptom | None:
    """The penalty of a response is over a tenth of the standard deviation of the scores, and the KL from the
    reference stays below 0.02 (page: 0.007 instead of 0.064), and the score hardly rises."""
    reference, score = run.of(registry.KL_REFERENCE_MEAN), registry.REWARD_SCORE_MEAN
    coef = run.recent(registry.KL_COEF) if run.of(registry.KL_COEF) else run.key("ppo.kl.coef")
    if len(reference) < 5 or coef is None or max(kl for _, kl in reference) > 0.02:
        return None
    distance, spread = run.recent(registry.KL_REFERENCE_MEAN), run.recent(registry.REWARD_SCORE_STD)
    penalty = coef * distance * run.recent(registry.ROLLOUT_RESPONSE_TOKENS_MEAN)
    if penalty < spread / 10 or run.recent(score) - run.early(score) > spread / 4:
        return None
    targets = [name for name, value in (run.key("ppo.kl.adaptive") or {}).items() if "target" in name and value]
    return symptom(
        Level.WARNING,
        "kl-penalty",
        reference[1][0],
        f"the KL penalty holds the actor at the reference: kl/reference_mean is `{distance:.2g}`, a penalty of "
        f"{penalty:.2g} per response at scores with a standard deviation of {spread:.2g} (ppo.kl.coef is {coef:g})",
        run.scaled(f"ppo.kl.adaptive.{targets[0]}", 10) if targets else run.scaled("ppo.kl.coef", 0.1),
    )


def critic(run: Curves) -> Symptom | None:
    """Explained variance within 0.01 of 0 in five steps or more (page: -0.00007 instead of 0.1 to 0.2), and values
    that differ from the returns by half; or an explained variance below -0.1: the critic's errors are then greater
    than the differences between returns."""
    explained = run.of(registry.VALUE_EXPLAINED_VARIANCE)[1:]
    if len(explained) < 5 or run.recent(registry.REWARD_SCORE_STD) <= EQUAL:
        return None
    recent, value = run.recent(registry.VALUE_EXPLAINED_VARIANCE), run.recent(registry.VALUE_MEAN)
    returned = run.recent(registry.VALUE_RETURN_MEAN)
    is_frozen = max(abs(each) for _, each in explained) < 0.01 and abs(value - returned) > abs(returned) / 2
    if not is_frozen and recent >= -0.1:
        return None
    epochs = run.key("ppo.critic_epochs") or run.key("ppo.epochs")
    if run.key("critic.on"):  # a value head on the actor's model has no update of its own
        hint = run.scaled("ppo.value_loss.coef", 3)
    elif is_frozen:
        hint = run.set("critic.optimizer.lr", 10 * run.key("actor.optimizer.lr"))
    else:
        hint = run.set("ppo.critic_epochs", 2 * epochs)
    return symptom(
        Level.WARNING,
        "explained-variance",
        explained[0][0],
        f"the critic explains nothing: value/explained_variance is `{recent:.2g}`, the mean value is {value:.2g} "
        f"at a mean return of {returned:.2g}",
        hint,
    )


def entropy(run: Curves) -> Symptom | None:
    """Entropy below a tenth of its first values (the page's healthy run: a fifth after 40 steps), and a score that is
    below the highest by more than a tenth of its standard deviation."""
    first, score = run.early(registry.POLICY_ENTROPY_MEAN), registry.REWARD_SCORE_MEAN
    step = run.since(registry.POLICY_ENTROPY_MEAN, first / 10, below=True)
    best = max((value for _, value in run.of(score)), default=0.0)
    if step is None or run.steps < 6 or run.recent(score) > best - run.recent(registry.REWARD_SCORE_STD) / 10:
        return None
    is_clip = run.key("ppo.policy_loss.kind") == "clip" and run.key("ppo.policy_loss.clip_high") < 0.28
    return symptom(
        Level.WARNING,
        "entropy",
        step,
        f"entropy collapses: policy/entropy_mean fell from `{first:.2g}` to "
        f"`{run.recent(registry.POLICY_ENTROPY_MEAN):.2g}`",
        run.set("ppo.policy_loss.clip_high", 0.28) if is_clip else run.scaled("actor.optimizer.lr", 0.3),
        "best",
    )


def clip(run: Curves) -> Symptom | None:
    """Clipped fraction above 0.3 (registry) on average: most tokens have no gradient. Sequence ratios (GSPO) have
    narrow bounds, so the rule reads only losses with ratios of tokens."""
    clipped = run.recent(registry.POLICY_CLIP_FRAC)
    if run.key("ppo.policy_loss.kind") != "clip" or not clipped > 0.3:
        return None
    return symptom(
        Level.WARNING,
        "clip",
        run.since(registry.POLICY_CLIP_FRAC, 0.3) or 1,
        f"policy/clip_frac is `{clipped:.2g}`, above 0.3: these tokens no longer have a gradient",
        run.set("ppo.epochs", 1) if run.key("ppo.epochs") > 1 else run.scaled("actor.optimizer.lr", 0.3),
    )


def mismatch(run: Curves) -> Symptom | None:
    """Log-probs of sampler and trainer differ by more than 0.05, or by a k3 of more than 0.01 (registry)."""
    bounds = {registry.MISMATCH_GAP_MEAN_ABS: 0.05, registry.MISMATCH_GAP_K3: 0.01}
    above = [metric for metric, bound in bounds.items() if run.recent(metric) > bound]
    if not above:
        return None
    metric = above[0]
    return symptom(
        Level.WARNING,
        "mismatch",
        run.since(metric, bounds[metric]) or 1,
        f"sampler and trainer disagree: {metric.name} is `{run.recent(metric):.2g}`, above {bounds[metric]}",
        run.set("ppo.rollout_correction", '{kind="tis"}')
        if run.key("ppo.rollout_correction.kind") == "none"
        else run.set("model.dtype", "float32"),
    )
