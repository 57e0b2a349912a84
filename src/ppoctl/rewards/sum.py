"""A reward that is the sum of others, each with its weight: the parts are scored side by side, each by its own
processes."""

import math
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal, Union

from pydantic import Field

from ppoctl.batch.scores import Score, Scorer, ScoreRequest
from ppoctl.recipe_table import RESULTS
from ppoctl.rewards.combined_scores import Scores, close_all, combined, flush_all_scorers
from ppoctl.rewards.kinds import PARTS
from ppoctl.rewards.model import ModelScorer
from ppoctl.rewards.table import Candidates, PartTable, RewardModels, RewardTable, ScorerTable, no_models

if TYPE_CHECKING:
    Part = PartTable
else:
    Part = Annotated[Union[PARTS], Field(discriminator="kind")]  # noqa: UP007 - the members are known by now only


class SumReward(RewardTable):
    """Score = sum of weight x score over the parts; each part's own score is reported as `reward/NAME_mean`.

    A response without a score of one part has none.
    """

    kind: Annotated[Literal["sum"], RESULTS]
    """The weighted sum of several."""
    parts: dict[str, Part] = Field(min_length=1)
    """Scorers that are added up, by a name of your own."""

    @property
    def scorers(self) -> dict[tuple[str, ...], ScorerTable]:
        parts = (
            (name, part) for name, part in self.parts.items() if part is not None
        )  # None: it is wrong (`partial`)
        return {("parts", name): part for name, part in parts}

    @property
    def overlaps_generation(self) -> bool:
        return all(scorer.overlaps_generation for scorer in self.singles)

    @property
    def reads_truth(self) -> bool:
        return any(part.reads_truth for part in self.parts.values())

    @property
    def reads_answers(self) -> bool:
        return any(part.reads_answers for part in self.parts.values())

    def reports(self, figure: str) -> bool:
        return figure in self.parts or any(figure.startswith(f"{name}_") for name in self.parts)

    def candidates(self, truth: str) -> Candidates | None:
        """Those of the first part that knows any; None beside a reward model, whose score of a bare answer may be the
        larger one."""
        if any(isinstance(part, ModelScorer) for part in self.parts.values()):
            return None
        found = (part.candidates(truth) for part in self.parts.values())
        return next((each for each in found if each is not None), None)

    def open(self, models: RewardModels = no_models) -> Scorer:
        return SumScorer({name: (part.weight, part.open(models)) for name, part in self.parts.items()})


class SumScorer:
    """Scores by all parts; they are given by name, each with its weight."""

    def __init__(self, parts: Mapping[str, tuple[float, Scorer]]) -> None:
        self._weights = {name: weight for name, (weight, _) in parts.items()}
        self._scorers = {name: scorer for name, (_, scorer) in parts.items()}

    def submit(self, request: ScoreRequest) -> Future[Score]:
        """The sum of the parts' scores, with each as an extra of the part's name."""
        parts = {name: scorer.submit(request) for name, scorer in self._scorers.items()}
        return combined(parts, partial(summed, self._weights, tokens=len(request.token_ids)))

    def flush(self) -> None:
        flush_all_scorers(self._scorers.values())

    def close(self) -> None:
        close_all(self._scorers.values())


def summed(weights: Mapping[str, float], scores: Scores, *, tokens: int) -> Score:
    """The weighted sum, rounded once. Extras of a part are called `PART_EXTRA`. Where a part has a figure for each of
    the `tokens`, the others stand at the last one. The answer is that of the first part that read one."""
    seconds = max(score.seconds for score in scores.values())
    for name, score in scores.items():
        if score.value is None:
            return Score(None, score.outcome, f"part `{name}`: {score.message}".rstrip(": "), seconds=seconds)
    values = {name: score.value for name, score in scores.items() if score.value is not None}
    extras = {f"{name}_{extra}": figure for name, score in scores.items() for extra, figure in score.extras.items()}
    token_values = None
    if any(score.token_values is not None for score in scores.values()):
        columns = [[weights[name] * figure for figure in _per_token(score, tokens)] for name, score in scores.items()]
        token_values = tuple(map(math.fsum, zip(*columns, strict=True)))
    total = math.fsum(weights[name] * value for name, value in values.items())
    answer = next((score.answer for score in scores.values() if score.answer is not None), None)
    return Score(total, "ok", extras=extras | values, token_values=token_values, answer=answer, seconds=seconds)


def _per_token(score: Score, tokens: int) -> tuple[float, ...]:
    assert score.value is not None
    return score.token_values or (*((0.0,) * (tokens - 1)), score.value)
