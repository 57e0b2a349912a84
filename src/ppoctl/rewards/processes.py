"""The `Scorer` port over a pool of child processes. What is not a finite float32 stops here: it never trains."""

from collections.abc import Sequence

from ppoctl.errors import NonFiniteError
from ppoctl.ports import Answer, Score
from ppoctl.recipe.schema import ExactMatchReward, Gsm8kReward
from ppoctl.rewards.pool import Outcome, ScorerPool
from ppoctl.rewards.scorers import pool_of
from ppoctl.rewards.verdict import is_trainable
from ppoctl.rewards.worker import Question


class ProcessScorer:
    """Implements `ports.Scorer`. `pool` is what `probe` asks."""

    def __init__(self, pool: ScorerPool) -> None:
        self.pool = pool

    @classmethod
    def of(cls, reward: Gsm8kReward | ExactMatchReward) -> "ProcessScorer":
        """The scorer a recipe asks for."""
        return cls(pool_of(reward))

    def score(self, answers: Sequence[Answer]) -> list[Score]:
        """One Score per answer, in order.

        Raises NonFiniteError, naming the first sample, when a score or one of its extras is NaN, infinite or beyond
        float32; RewardError when the scorer cannot be started at all.
        """
        outcomes = self.pool.score([Question(answer.response, answer.truth) for answer in answers])
        for position, (answer, outcome) in enumerate(zip(answers, outcomes, strict=True)):
            _require_finite(position, answer, outcome)
        return [Score(outcome.value, outcome.kind, outcome.message, outcome.extras) for outcome in outcomes]

    def close(self) -> None:
        """Kill and reap the children."""
        self.pool.close()


def _require_finite(position: int, answer: Answer, outcome: Outcome) -> None:
    if outcome.value is None:
        return
    for name, figure in {"reward": outcome.value, **outcome.extras}.items():
        if not is_trainable(figure):
            raise NonFiniteError(
                f"the scorer gave `{figure}` as {name} of sample {position} (prompt `{answer.prompt_id}`)",
                hint="let the scorer raise where it has no score: the sample then counts as an error and is left out",
            )
