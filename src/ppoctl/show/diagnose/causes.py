"""The rules in the order of causes, and which symptoms follow from others."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ppoctl.core.finding import Finding, Level, note, ok
from ppoctl.core.metric_registry import REWARD_SCORE_MEAN, ROLLOUT_TRUNCATED_FRAC
from ppoctl.show.diagnose import limits, reward_rules, update_rules
from ppoctl.show.diagnose.curves import Curves, Phase, Symptom
from ppoctl.show.report.run_reader import read_runs

RULES: Sequence[Callable[[Curves], Symptom | None]] = (
    reward_rules.scorer_errors,
    reward_rules.temperature,
    reward_rules.template,
    update_rules.learning_rate_high,
    reward_rules.gamed,
    reward_rules.truncation,
    reward_rules.reward_dead,
    update_rules.learning_rate_low,
    reward_rules.reward_noise,
    update_rules.kl_penalty,
    reward_rules.groups,
    update_rules.critic,
    update_rules.mismatch,
    reward_rules.overfitting,
    update_rules.entropy,
    update_rules.clip,
    update_rules.experts_unused,
    reward_rules.score_falls,
)
"""Rules; a cause comes before its consequences."""
BREAKING = (
    "temperature", "template", "learning-rate-high", "truncation", "reward-dead", "reward-noise", "scorer", "length",
)  # fmt: skip
"""Kinds of errors that change everything later in the run: symptoms that begin in the same part of the same step, or
later, are consequences."""
FEWEST = 5
"""Number of steps below which trends are not judged."""


def read(run: Path) -> Curves:
    """Read a run. Raises the errors of `read_runs`."""
    [recorded] = read_runs([run])
    # The journal keeps lines of steps that were undone.
    newest = max(recorded.paths.committed_steps(), default=math.inf)
    series = {name: [point for point in points if point[0] <= newest] for name, points in recorded.series.items()}
    curves = Curves(str(run), recorded.recipe, series, recorded.saved_steps)
    is_truncated = curves.since(ROLLOUT_TRUNCATED_FRAC, 0.1) is not None
    return replace(curves, limits=limits.read(recorded)) if is_truncated else curves


def examine(run: Curves) -> list[Symptom]:
    """Return the symptoms of a run: what broke the run first, then other causes in the order of `RULES`, then the
    consequences, as notes."""
    found = [symptom for rule in RULES if (symptom := rule(run)) is not None]
    breaking = sorted(filter(_is_breaking, found), key=_began)
    causes: list[Symptom] = []
    consequences: list[Symptom] = []
    for each in [*breaking, *(each for each in found if not _is_breaking(each))]:
        root = next((cause for cause in causes if _is_breaking(cause) and _began(each) >= _began(cause)), None)
        if root is None:
            causes.append(each)
        else:
            text = f"{each.finding.what}; a consequence of `{root.finding.kind}`"
            consequences.append(replace(each, finding=replace(each.finding, level=Level.NOTE, what=text, hint=None)))
    return [*causes, *consequences]


def summary(run: Curves, found: Sequence[Symptom]) -> list[Finding]:
    """Return what the symptoms do not say: that there are none, or that the run is too short to show all."""
    findings = []
    if run.steps < FEWEST:
        findings.append(note(f"`{run.steps}` steps are too few to judge trends", kind="run"))
    if run.steps and not any(each.finding.level in (Level.WARNING, Level.ERROR) for each in found):
        score = f"{run.early(REWARD_SCORE_MEAN):.3g} -> {run.recent(REWARD_SCORE_MEAN):.3g}"
        findings.append(
            ok(f"{len(RULES)} rules found no problem; reward/score_mean {score}", f"{run.steps} steps", kind="run")
        )
    return findings


def _began(found: Symptom) -> tuple[int, Phase]:
    return found.step, found.phase


def _is_breaking(found: Symptom) -> bool:
    return found.finding.is_error and found.finding.kind in BREAKING
