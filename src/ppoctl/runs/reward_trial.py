"""A reward tried on many rows before a run is (`validate --reward`): what came of it, and how long it took."""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from typing import Any

from ppoctl.errors import RewardError
from ppoctl.recipe.parallel import reward_models
from ppoctl.recipe.schema import Recipe
from ppoctl.rewards.findings import RewardFinding, findings
from ppoctl.rewards.trial import ATTACKS, Trial, chosen_rows, trials
from ppoctl.wire.engines import encoder, place_roles, read_questions
from ppoctl.wire.reward_models import RewardModelsOf


@dataclass(frozen=True)
class TrialLine:
    """One kind of response, over all rows."""

    response: str
    rows: int
    mean: float | None
    as_gold: float | None
    """Share of rows on which it scored at least what the gold answer did."""
    missing: int
    """Rows on which it has no score."""
    slowest_s: float


@dataclass(frozen=True)
class Report:
    """What came of trying one scorer."""

    scorer: str
    rows: int
    responses: tuple[TrialLine, ...]
    findings: tuple[RewardFinding, ...]
    seconds: dict[str, float]
    """`p50`, `p99` and `max` of a response, attacks left out; and `step`: scoring one step at that mean, by all
    workers."""

    def as_json(self) -> dict[str, Any]:
        """The report as `validate --json` has it."""
        return asdict(self)


def try_reward(recipe: Recipe, rows: int) -> list[Report]:
    """Try so many rows of the training set, and those that are probed at every start; a report for each scorer."""
    questions = read_questions(recipe)
    with ExitStack() as opened:
        # Where no model rewards, nothing is placed: Megatron-Core takes longer to import than most trials take.
        placed = opened.enter_context(closing(place_roles(recipe))).rewards if reward_models(recipe) else {}
        scorer = opened.enter_context(closing(recipe.reward.open(RewardModelsOf(recipe, placed))))
        chosen = chosen_rows(recipe.reward, questions.train, rows)
        return [_report(trial, recipe) for trial in trials(scorer, recipe.reward, chosen, encoder(recipe))]


def require_worth_training_on(reports: Sequence[Report]) -> None:
    """Raises RewardError with all findings that are wrong."""
    found = [(report.scorer, finding) for report in reports for finding in report.findings]
    wrong = [(f"{scorer}: {finding.says}", finding.hint) for scorer, finding in found if finding.level == "wrong"]
    if wrong:
        hints = [hint for _, hint in wrong if hint is not None]
        columns = "check that `reward.kind` and the columns of `data.train` belong together"
        raise RewardError("\n".join(says for says, _ in wrong), hint=hints[0] if hints else columns)


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
        max(each.score.seconds for each in tried),
    )


def _seconds(trial: Trial, recipe: Recipe) -> dict[str, float]:
    took = sorted(each.score.seconds for each in trial.tried if each.name not in ATTACKS) or [0.0]
    side_by_side = min(getattr(table, "workers", getattr(table, "concurrent", 1)) for table in recipe.reward.singles)
    responses = recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt
    return {
        "p50": took[len(took) // 2],
        "p99": took[min(int(0.99 * len(took)), len(took) - 1)],
        "max": took[-1],
        "step": responses * sum(took) / len(took) / side_by_side,
    }
