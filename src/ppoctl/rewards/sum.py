"""A reward that is the weighted sum of several scorers, which run in parallel, each in its own processes."""

import math
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal, Union

from pydantic import Field

from ppoctl.core.batch.scores import Score, Scorer, ScoreRequest
from ppoctl.core.recipe_table import RESULTS
from ppoctl.rewards.combined_scores import Scores, close_all, combined, flush_all_scorers
from ppoctl.rewards.model_reward import ModelScorer
from ppoctl.rewards.reward_kinds import PARTS
from ppoctl.rewards.scorer_table import Candidates, PartTable, RewardModels, RewardTable, ScorerTable, no_models

if TYPE_CHECKING:
    Part = PartTable
else:
    Part = Annotated[Union[PARTS], Field(discriminator="kind")]  # noqa: UP007 - members are known at run time


class SumReward(RewardTable):
    """Score = sum of weight x score over the components; the score of each component is reported as
    `reward/NAME_mean`.

    A response has no score if a component has none.
    """

    kind: Annotated[Literal["sum"], RESULTS]
    """The weighted sum of several scorers."""
    parts: dict[str, Part] = Field(min_length=1)
    """Components of the sum, under names of your choice."""

    @property
    def scorers(self) -> dict[tuple[str, ...], ScorerTable]:
        # `loading.partial` replaces an invalid component by None.
        parts = ((name, part) for name, part in self.parts.items() if part is not None)
        return {("parts", name): part for name, part in parts}

    @property
    def component_weights(self) -> Mapping[str, float]:
        return {name: part.weight for name, part in self.parts.items()}

    @property
    def reads_truth(self) -> bool:
        return any(part.reads_truth for part in self.parts.values())

    @property
    def reads_answers(self) -> bool:
        return any(part.reads_answers for part in self.parts.values())

    def reports(self, figure: str) -> bool:
        return figure in self.parts or any(figure.startswith(f"{name}_") for name in self.parts)

    def require_truth(self, truth: str) -> None:
        for part in self.parts.values():
            part.require_truth(truth)

    def response_with(self, answer: str, truth: str) -> str | None:
        by_part = (part.response_with(answer, truth) for part in self.parts.values())
        return next((text for text in by_part if text is not None), None)

    def candidates(self, truth: str) -> Candidates | None:
        """Return the candidates of the first component that has any. Return None if a component is a reward model:
        its score of a wrong answer may outweigh the scores of the other components."""
        if any(isinstance(part, ModelScorer) for part in self.parts.values()):
            return None
        by_part = (part.candidates(truth) for part in self.parts.values())
        return next((candidates for candidates in by_part if candidates is not None), None)

    def open(self, models: RewardModels = no_models) -> Scorer:
        return SumScorer({name: (part.weight, part.open(models)) for name, part in self.parts.items()})


class SumScorer:
    """Scorer that adds the weighted scores of its components, which are given by name."""

    def __init__(self, parts: Mapping[str, tuple[float, Scorer]]) -> None:
        self._weights = {name: weight for name, (weight, _) in parts.items()}
        self._scorers = {name: scorer for name, (_, scorer) in parts.items()}

    def submit(self, request: ScoreRequest) -> Future[Score]:
        """Return a future for the weighted sum; the score of each component is an extra under its name."""
        parts = {name: scorer.submit(request) for name, scorer in self._scorers.items()}
        return combined(parts, partial(summed, self._weights, tokens=len(request.token_ids)))

    def flush(self) -> None:
        flush_all_scorers(self._scorers.values())

    def close(self) -> None:
        close_all(self._scorers.values())


def summed(weights: Mapping[str, float], scores: Scores, *, tokens: int) -> Score:
    """Return the weighted sum, rounded once. Extras of a component are named `COMPONENT_EXTRA`. If a component has a
    value for each of the `tokens`, the scores of components without such values are added to the last token. The
    answer is the first answer that a component extracted."""
    seconds = max(score.seconds for score in scores.values())
    for name, score in scores.items():
        if score.value is None:
            return Score(None, score.outcome, f"component `{name}`: {score.message}".rstrip(": "), seconds=seconds)
    values = {name: score.value for name, score in scores.items() if score.value is not None}
    extras = {f"{name}_{extra}": value for name, score in scores.items() for extra, value in score.extras.items()}
    token_values = None
    if any(score.token_values is not None for score in scores.values()):
        columns = [[weights[name] * value for value in _per_token(score, tokens)] for name, score in scores.items()]
        token_values = tuple(map(math.fsum, zip(*columns, strict=True)))
    total = math.fsum(weights[name] * value for name, value in values.items())
    answer = next((score.answer for score in scores.values() if score.answer is not None), None)
    return Score(total, "ok", extras=extras | values, token_values=token_values, answer=answer, seconds=seconds)


def _per_token(score: Score, tokens: int) -> tuple[float, ...]:
    assert score.value is not None
    return score.token_values or (*((0.0,) * (tokens - 1)), score.value)
