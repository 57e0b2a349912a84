"""Every figure ppoctl emits: its unit, what it says, and what a healthy run shows.

A part in braces stands for a name that a person or a stage chose: `eval/{set}/pass_at_1`. Names not listed here are
errors in `[expect]` and `checkpoint.best`, so that a misspelt contract is refused before the run and not after it.
"""

import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache

from ppoctl.errors import RecipeError


@dataclass(frozen=True)
class Metric:
    """One figure."""

    name: str
    unit: str
    says: str
    healthy: str = ""
    """What to expect; empty: depends on the task."""


METRICS: tuple[Metric, ...] = (
    Metric("rollout/response_tokens_mean", "tokens", "mean length of the responses", "no collapse towards 0"),
    Metric("rollout/response_tokens_max", "tokens", "longest response", "below rollout.max_new_tokens"),
    Metric("rollout/truncated_frac", "share", "responses cut by max_new_tokens", "below 0.1, not rising"),
    Metric("rollout/resent_seqs", "sequences", "responses asked for again because an engine died", "0"),
    Metric("rollout/tokens", "tokens", "response tokens of the step"),
    Metric("reward/score_mean", "score", "mean score as the scorer gave it", "rising"),
    Metric("reward/score_std", "score", "spread of the scores", "above 0: with none there is nothing to learn from"),
    Metric("reward/shaped_mean", "reward", "mean score after reward.scale, before any KL penalty", "rising"),
    Metric("reward/error_frac", "share", "samples whose scorer failed", "0"),
    Metric("reward/timeout_frac", "share", "samples whose scorer was killed at reward.timeout_s", "0"),
    Metric("reward/lenient_mean", "score", "mean score by the lenient reading of the answer", "above strict_mean"),
    Metric("reward/strict_mean", "score", "mean score by the strict reading of the answer", "nears lenient_mean"),
    Metric("mismatch/gap_mean_abs", "nats", "mean |trainer - sampler| log-prob of the sampled tokens", "below 0.05"),
    Metric("mismatch/gap_max_abs", "nats", "largest |trainer - sampler| log-prob", "below 2"),
    Metric("mismatch/gap_k3", "nats", "k3 estimate of KL(sampler, trainer) per token", "below 0.01"),
    Metric("mismatch/ess_frac", "share", "effective sample size of trainer/sampler weights", "above 0.9"),
    Metric("kl/reference_mean", "nats", "estimated KL of the actor from the reference, per token", "below 1"),
    Metric("kl/coef", "factor", "coefficient of the KL penalty"),
    Metric("kl/penalty_mean", "reward", "mean KL penalty per token", "small beside the shaped reward"),
    Metric("advantage/mean", "reward", "mean advantage over counted tokens", "0 where whitened"),
    Metric("advantage/std", "reward", "spread of the advantages", "1 where whitened"),
    Metric("advantage/abs_max", "reward", "largest |advantage|", "below 20 where whitened"),
    Metric("value/explained_variance", "share", "1 - Var(return - value) / Var(return)", "rising towards 1"),
    Metric("value/clip_frac", "share", "tokens whose clipped value error is the larger", "below 0.3"),
    Metric("value/value_mean", "reward", "mean value", "near return_mean"),
    Metric("value/return_mean", "reward", "mean return"),
    Metric("value/return_std", "reward", "spread of the returns"),
    Metric("value/value_error", "reward", "mean |value - return|", "falling"),
    Metric("value/loss", "loss", "the critic's loss", "falling"),
    Metric("value/grad_norm", "norm", "global gradient norm of the critic before clipping", "no spikes"),
    Metric("value/lr", "rate", "the critic's learning rate at the last update of the step"),
    Metric("policy/loss", "loss", "the actor's loss", "near 0; it says little"),
    Metric("policy/grad_norm", "norm", "global gradient norm of the actor before clipping", "no spikes"),
    Metric("policy/lr", "rate", "the actor's learning rate at the last update of the step"),
    Metric("policy/approx_kl", "nats", "how far the step moved the actor, per token (k3)", "below 0.05"),
    Metric("policy/clip_frac", "share", "tokens whose ratio was clipped", "0.01 to 0.3"),
    Metric("policy/clip_frac_high", "share", "tokens with A > 0 clipped above"),
    Metric("policy/clip_frac_low", "share", "tokens with A < 0 clipped below"),
    Metric("policy/dual_clip_frac", "share", "tokens bounded by dual_clip", "near 0"),
    Metric("policy/ratio_mean", "factor", "mean new / old probability", "near 1"),
    Metric("policy/ratio_p01", "factor", "1st percentile of the ratio", "above 0.5"),
    Metric("policy/ratio_p50", "factor", "median of the ratio", "near 1"),
    Metric("policy/ratio_p99", "factor", "99th percentile of the ratio", "below 2"),
    Metric("policy/ratio_max", "factor", "largest ratio", "below 10"),
    Metric("policy/entropy_mean", "nats", "entropy of the next-token distribution", "falling slowly, not to 0"),
    Metric("eval/{set}/pass_at_1", "share", "mean score of sampled responses", "rising"),
    Metric("eval/{set}/pass_at_1_stderr", "share", "standard error of pass_at_1, over prompts"),
    Metric("eval/{set}/truncated_frac", "share", "sampled responses cut by the length limit", "below 0.1"),
    Metric("eval/{set}/response_tokens_mean", "tokens", "mean length of the sampled responses"),
    Metric("eval/{set}/error_frac", "share", "sampled responses without a score", "0"),
    Metric("eval/{set}/greedy_pass_at_1", "share", "mean score of greedy responses", "rising"),
    Metric("eval/{set}/greedy_pass_at_1_stderr", "share", "standard error of greedy_pass_at_1, over prompts"),
    Metric("eval/{set}/greedy_truncated_frac", "share", "greedy responses cut by the length limit", "below 0.1"),
    Metric("eval/{set}/greedy_response_tokens_mean", "tokens", "mean length of the greedy responses"),
    Metric("eval/{set}/greedy_error_frac", "share", "greedy responses without a score", "0"),
    Metric("time/{stage}_s", "s", "wall time of a stage"),
    Metric("throughput/{name}", "per s", "work per second"),
)


def find(name: str) -> Metric | None:
    """The registry's entry for a metric name, patterns included."""
    return next((metric for metric, pattern in _patterns() if pattern.fullmatch(name)), None)


def eval_set(name: str) -> str | None:
    """The evaluation set that `eval/SET/...` speaks of; None for any other metric."""
    parts = name.split("/")
    return parts[1] if len(parts) == 3 and parts[0] == "eval" else None


def unknown(name: str) -> str:
    """What to say of a name that no metric has."""
    named = eval_set(name)
    known = [metric.name.replace("{set}", named or "SET") for metric in METRICS]
    close = get_close_matches(name, known, n=1, cutoff=0.6)
    last = [other for other in known if other.rsplit("/", 1)[-1] == name.rsplit("/", 1)[-1]]
    near = close or last
    return f"no metric is called `{name}`" + (f"; did you mean `{near[0]}`?" if near else "")


def require_known(name: str) -> Metric:
    """The metric of this name. Raises RecipeError with the nearest name when there is none."""
    metric = find(name)
    if metric is None:
        raise RecipeError(unknown(name), hint="ppoctl recipes metrics")
    return metric


@cache
def _patterns() -> tuple[tuple[Metric, re.Pattern[str]], ...]:
    return tuple((metric, re.compile(re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(metric.name)))) for metric in METRICS)
