"""Recorded runs: the metrics and recipe keys that the rules of `diagnose` read, as JSON.

python tests/diagnose/recorded.py RUN [NAME]     # writes runs/NAME.json; PYTHONPATH=src
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from ppoctl.core import metric_registry as registry
from ppoctl.show.diagnose.causes import read
from ppoctl.show.diagnose.curves import Curves

RUNS = Path(__file__).with_name("runs")
KEYS = (
    "actor.optimizer.lr", "critic.on", "critic.optimizer.lr", "environment.tokens", "environment.tokens_per_turn",
    "environment.turns", "eval.environment", "eval.temperature", "model.dtype", "ppo.critic_epochs", "ppo.epochs",
    "ppo.kl.adaptive", "ppo.kl.coef", "ppo.minibatch_seqs", "ppo.old_logprobs", "ppo.policy_loss.clip_high",
    "ppo.policy_loss.kind", "ppo.rollout_correction.kind", "ppo.value_loss.coef", "reward.timeout_s",
    "rollout.groups", "rollout.max_new_tokens", "rollout.max_prompt_tokens", "rollout.max_window_tokens",
    "rollout.prompts_per_step", "rollout.samples_per_prompt", "rollout.temperature",
)  # fmt: skip
METRICS = (
    "advantage/equal_groups_frac", "environment/observed_tokens_mean", "environment/turn_limit_frac",
    "kl/coef", "kl/reference_mean", "mismatch/gap_k3", "mismatch/gap_mean_abs",
    "policy/approx_kl", "policy/clip_frac", "policy/entropy_mean", "policy/lr", "reward/error_frac",
    "reward/score_mean", "reward/score_std", "reward/timeout_frac", "rollout/response_tokens_mean",
    "rollout/truncated_frac", "value/explained_variance", "value/return_mean", "value/value_mean",
)  # fmt: skip


def recorded(name: str) -> Curves:
    content = json.loads((RUNS / f"{name}.json").read_text())
    return Curves(f"runs/{name}", content["recipe"], content["series"], content["saved"], content.get("limits", {}))


def changed(run: Curves, series: dict[str, list[float]], **keys: object) -> Curves:
    """Return the run with other metrics from step 1 on, and with other keys (`ppo__epochs=2`)."""
    recipe = json.loads(json.dumps(run.recipe))
    for key, value in keys.items():
        *tables, last = key.split("__")
        table = recipe
        for each in tables:
            table = table[each]
        table[last] = value
    points = {name: list(enumerate(values, start=1)) for name, values in series.items()}
    return replace(run, recipe=recipe, series={**run.series, **points})


def record(run: Path, name: str) -> None:
    curves = read(run)
    recipe: dict[str, Any] = {}
    for key in KEYS:
        *tables, last = key.split(".")
        table = recipe
        for each in tables:
            table = table.setdefault(each, {})
        table[last] = curves.key(key)
    series = {
        metric: [(step, float(f"{value:.4g}")) for step, value in points]
        for metric, points in sorted(curves.series.items())
        if metric in METRICS
        or registry.reward_part(metric)
        or registry.find(metric) in registry.EVALUATION_METRICS[:2]
    }
    content = {"recipe": recipe, "saved": curves.saved, "series": series, "limits": curves.limits}
    (RUNS / f"{name}.json").write_text(json.dumps(content, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    record(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else Path(sys.argv[1]).name)
