"""The rewards that the environment of an episode returned, as a score."""

import math
from concurrent.futures import Future
from dataclasses import replace
from typing import Annotated, Literal

from ppoctl.core.batch.prompts import Message
from ppoctl.core.batch.scores import Score, Scorer, ScoreRequest
from ppoctl.core.recipe_table import RESULTS
from ppoctl.rewards.combined_scores import flush_all_scorers
from ppoctl.rewards.scorer_table import RewardModels, ScorerTable, no_models


class EnvironmentScorer(ScorerTable):
    """Score that the environment of an episode returned, for recipes with `[environment]`.

    Formula: score = sum over the turns of the environment's reward; if per_turn is true, the reward of each turn is
        at the last token of the turn
    Source: NeMo-RL (`EnvironmentReturn.rewards`); verl (`turn_scores`)
    """

    kind: Annotated[Literal["environment"], RESULTS]
    """The rewards of the environment."""
    per_turn: Annotated[bool, RESULTS] = False
    """Whether the reward of a turn is at the last token of this turn. False: the sum is at the last token of the
    response."""

    def reports(self, figure: str) -> bool:  # noqa: ARG002 - only the environment knows
        return False

    def open(self, models: RewardModels = no_models) -> Scorer:  # noqa: ARG002 - no model
        return TurnRewards(per_turn=self.per_turn)


class TurnRewards:
    """Scorer that reads the rewards of an episode. It needs no process."""

    def __init__(self, *, per_turn: bool) -> None:
        self._per_turn = per_turn

    def submit(self, request: ScoreRequest) -> Future[Score]:
        """Return a finished future of the score. It has no value if no environment answered the response."""
        future: Future[Score] = Future()
        future.set_result(self._score(request))
        return future

    def _score(self, request: ScoreRequest) -> Score:
        if not request.turn_spans:
            return Score(None, "error", "no environment answered the response")
        total = math.fsum(request.turn_rewards)
        if not self._per_turn:
            return Score(total, "ok")
        at_end = {end - 1: reward for (_, end), reward in zip(request.turn_spans, request.turn_rewards, strict=True)}
        values = tuple(at_end.get(position, 0.0) for position in range(len(request.token_ids)))
        return Score(total, "ok", token_values=values)

    def close(self) -> None:
        """Do nothing: there is no process."""


class AsOneTurn:
    """Scorer of answers that are tried before a run with an environment: each answer is a conversation of one turn
    for which the environment returned the reward 0."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    def submit(self, request: ScoreRequest) -> Future[Score]:
        """Submit the request with one turn."""
        return self._scorer.submit(
            replace(
                request,
                conversation=(Message("assistant", request.response),),
                turn_spans=((0, len(request.token_ids)),),
                turn_rewards=(0.0,),
            )
        )

    def flush(self) -> None:
        """See `batch.scores.BatchScorer`."""
        flush_all_scorers([self._scorer])

    def close(self) -> None:
        """Close the scorer."""
        self._scorer.close()
