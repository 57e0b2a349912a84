"""Trial of a reward on many rows before a run (`validate --reward`): the findings, and how long scoring took."""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from typing import Any

from ppoctl.algorithms.role_model import reward_models
from ppoctl.core.errors import RewardError
from ppoctl.core.finding import Finding, as_error
from ppoctl.recipe.schema import Recipe
from ppoctl.rewards.reward_findings import findings
from ppoctl.rewards.trial import ATTACKS, Trial, chosen_rows, trials
from ppoctl.run.wire.engines import encoder, place_roles, read_prompts, tried_scorer
from ppoctl.run.wire.reward_models import RewardModelsOf


@dataclass(frozen=True)
class TrialLine:
    """Result for one kind of response, over all rows."""

    response: str
    rows: int
    mean: float | None
    as_gold: float | None
    """Fraction of rows on which this response scored at least as high as the gold answer."""
    missing: int
    """Number of rows on which this response has no score."""
    slowest_s: float


@dataclass(frozen=True)
class Report:
    """Result of the trial of one scorer."""

    scorer: str
    rows: int
    responses: tuple[TrialLine, ...]
    findings: tuple[Finding, ...]
    seconds: dict[str, float]
    """`p50`, `p99` and `max`: seconds to score one response, without attacks. `step`: seconds to score one step with
    all workers, if each response takes the mean time."""

    def as_json(self) -> dict[str, Any]:
        """Return the report for `validate --json`."""
        return {**asdict(self), "findings": [finding.as_json() for finding in self.findings]}


def try_reward(recipe: Recipe, rows: int) -> list[Report]:
    """Try the reward on `rows` rows of the training set and on the rows that are checked at every start of a run.
    Return a report for each scorer."""
    prompt_source = read_prompts(recipe)
    with ExitStack() as opened:
        # Without a reward model, nothing is placed: importing Megatron-Core takes longer than most trials.
        placed = opened.enter_context(closing(place_roles(recipe))).rewards if reward_models(recipe) else {}
        scorer = opened.enter_context(closing(recipe.reward.open(RewardModelsOf(recipe, placed))))
        chosen = chosen_rows(recipe.reward, prompt_source.train, rows)
        tried = trials(tried_scorer(recipe, scorer), recipe.reward, chosen, encoder(recipe))
        return [_report(trial, recipe) for trial in tried]


def require_worth_training_on(reports: Sequence[Report]) -> None:
    """Raise RewardError with all findings of level `error`."""
    errors = [finding for report in reports for finding in report.findings if finding.is_error]
    if errors:
        columns = "check that `reward.kind` and the columns of `data.train` belong together"
        error = as_error(errors)
        raise RewardError(error.message, hint=error.hint or columns)


def _report(trial: Trial, recipe: Recipe) -> Report:
    lines = tuple(_line(trial, name) for name in trial.names)
    return Report(trial.scorer, len(trial.rows), lines, tuple(findings(trial)), _seconds(trial, recipe))


def _line(trial: Trial, name: str) -> TrialLine:
    tried, scored = trial.of(name), trial.scored(name)
    return TrialLine(
        name,
        len(tried),
        sum(scored) / len(scored) if scored else None,
        trial.as_gold(name),
        len(tried) - len(scored),
        max(attempt.score.seconds for attempt in tried),
    )


def _seconds(trial: Trial, recipe: Recipe) -> dict[str, float]:
    seconds = sorted(attempt.score.seconds for attempt in trial.tried if attempt.name not in ATTACKS) or [0.0]
    num_parallel = min(getattr(table, "workers", getattr(table, "concurrent", 1)) for table in recipe.reward.singles)
    responses = recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt
    return {
        "p50": seconds[len(seconds) // 2],
        "p99": seconds[min(int(0.99 * len(seconds)), len(seconds) - 1)],
        "max": seconds[-1],
        "step": responses * sum(seconds) / len(seconds) / num_parallel,
    }
