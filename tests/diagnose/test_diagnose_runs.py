"""`diagnose` on recorded runs: the planted cause is first, and healthy runs have no problem.

The runs in `runs/` are real (recipes/quickstart, quickstart-grpo and calculator-small with the changes below), except
that only the metrics and keys that rules read are kept.
"""

import json
from dataclasses import replace

from diagnose.recorded import RUNS, recorded
from for_each import for_each
from ppoctl.core.finding import Level
from ppoctl.show.diagnose.causes import examine

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
    "turns-1": ("truncation", 1, "--set environment.turns=2"),
    "tool-max-tokens-14": ("truncation", 1, "--set rollout.max_new_tokens=28"),
    "lora-lr-5e-2": ("learning-rate-high", 1, "--set actor.optimizer.lr=0.001"),
    "value-head-kl-3": ("kl-penalty", 2, "--set ppo.kl.coef=0.3"),
    "dynamic-lr-4e-3": ("learning-rate-high", 1, "--set actor.optimizer.lr=2e-4"),
    "untrained": ("template", 1, "ppoctl preview runs/untrained/recipe.toml --rows 1"),
    "wrong-role": ("template", 1, "ppoctl preview runs/wrong-role/recipe.toml --rows 1"),
}
"""Run -> kind of the first finding, first step, and the beginning of its hint."""
NOTES = ("wrong-role",)
"""Runs whose metrics are also those of a hard task, so that the finding is a note."""
HEALTHY = (
    "ppo", "grpo", "rloo", "lora", "environment", "tool", "value-head", "dynamic", "critic-only", "last-layers",
)  # fmt: skip


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


@for_each((name,) for name in (*PLANTED, *HEALTHY))
def test_run_can_be_judged_at_any_time_and_without_any_metric(name: str) -> None:
    run = recorded(name)
    for last in (0, 1, 2, 5):
        begun = {metric: [point for point in points if point[0] <= last] for metric, points in run.series.items()}
        examine(replace(run, series=begun))
        # step 2 has only been generated
        examine(
            replace(
                run, series=begun | {metric: run.series[metric][:2] for metric in run.series if metric[:3] == "rol"}
            )
        )
    for metric in run.series if name in ("tool", "dynamic", "lr-2e-2") else ():
        examine(replace(run, series={other: points for other, points in run.series.items() if other != metric}))


@for_each(HEALTHY)
def test_healthy_run_has_no_finding_at_any_step(name: str) -> None:
    run = recorded(name)
    for last in range(1, 40):
        begun = {metric: [point for point in points if point[0] <= last] for metric, points in run.series.items()}
        is_new = name == "environment" and last == 1  # a large first step, from which the run recovers
        assert [each.finding.kind for each in examine(replace(run, series=begun))] == [
            "learning-rate-high"
        ] * is_new, last


@for_each((name, *expected) for name, expected in PLANTED.items())
def test_no_other_error_is_the_first_finding_at_an_earlier_step(name: str, kind: str, *_: object) -> None:
    run = recorded(name)
    for last in range(1, run.steps):
        begun = {metric: [point for point in points if point[0] <= last] for metric, points in run.series.items()}
        errors = [each.finding.kind for each in examine(replace(run, series=begun)) if each.finding.is_error]
        assert errors in ([], [kind]), last


def test_every_recorded_run_is_tested() -> None:
    assert {path.stem for path in RUNS.iterdir()} == {*PLANTED, *HEALTHY}
    assert all(json.loads(path.read_text()).keys() >= {"recipe", "saved", "series"} for path in RUNS.iterdir())
