"""The rewards that the environment of an episode returned, as a score."""

from concurrent.futures import Future
from typing import Annotated, Literal

from ppoctl.batch.scores import Score, Scorer, ScoreRequest
from ppoctl.recipe_table import RESULTS
from ppoctl.rewards.table import RewardModels, ScorerTable, no_models


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
        raise NotImplementedError

    def close(self) -> None:
        """Do nothing: there is no process."""
