"""`diagnose` on recorded runs: the planted cause is first, and healthy runs have no problem.

The runs in `runs/` are real (recipes/quickstart, quickstart-grpo and calculator-small with the changes below), except
that only the metrics and keys that rules read are kept.
"""

import json

from diagnose.recorded import RUNS, recorded
from for_each import for_each
from ppoctl.diagnose.examine import examine
from ppoctl.finding import Level

PLANTED = {
    "lr-2e-2": ("learning-rate-high", 1, "--set actor.optimizer.lr=3e-4"),
    "lr-4e-3": ("learning-rate-high", 1, "--set actor.optimizer.lr=2e-4"),
    "grpo-lr-4e-7": ("learning-rate-low", 1, "--set actor.optimizer.lr=8e-5"),
    "critic-lr-1e-6": ("explained-variance", 2, "--set critic.optimizer.lr=0.004"),
    "critic-frozen": ("explained-variance", 2, "--set critic.optimizer.lr=0.004"),
    "paid-by-length": ("length", 10, "--set 'reward.length_penalty={per_token=0.01}'"),
    "kl-3": ("kl-penalty", 2, "--set ppo.kl.coef=0.3"),
    "digit-1": ("scorer", 8, "the scorer; to stop early"),
    "max-tokens-12": ("truncation", 1, "--set rollout.max_new_tokens=24"),
    "never-right": ("reward-dead", 1, "ppoctl validate runs/never-right/recipe.toml --reward"),
    "no-tool": ("reward-dead", 9, "ppoctl validate runs/no-tool/recipe.toml --reward"),
    "shuffled": ("reward-noise", 1, "ppoctl validate runs/shuffled/recipe.toml --reward"),
    "shuffled-3": ("reward-noise", 1, "ppoctl validate runs/shuffled-3/recipe.toml --reward"),
    "temperature-2": ("temperature", 1, "--set rollout.temperature=1.0"),
    "untrained": ("template", 1, "ppoctl preview runs/untrained/recipe.toml --rows 1"),
    "wrong-role": ("template", 1, "ppoctl preview runs/wrong-role/recipe.toml --rows 1"),
}
"""Run -> kind of the first finding, first step, and the beginning of its hint."""
NOTES = ("wrong-role",)
"""Runs whose metrics are also those of a hard task, so that the finding is a note."""
HEALTHY = ("ppo", "grpo", "rloo", "lora", "environment", "tool")


@for_each((name, *expected) for name, expected in PLANTED.items())
def test_planted_cause_is_the_first_finding(name: str, kind: str, step: int, hint: str) -> None:
    first, *others = examine(recorded(name))
    assert (first.finding.kind, first.finding.where) == (kind, f"step {step}")
    assert (first.finding.hint or "").startswith(hint), first.finding.hint
    assert (first.finding.level is Level.NOTE) == (name in NOTES)
    assert all(each.finding.level is Level.NOTE for each in others), others


@for_each(HEALTHY)
def test_healthy_run_has_no_finding(name: str) -> None:
    assert examine(recorded(name)) == []


def test_every_recorded_run_is_tested() -> None:
    assert {path.stem for path in RUNS.iterdir()} == {*PLANTED, *HEALTHY}
    assert all(json.loads(path.read_text()).keys() == {"recipe", "saved", "series"} for path in RUNS.iterdir())
