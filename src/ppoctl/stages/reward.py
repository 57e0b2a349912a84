"""20-reward: score every response. An error is never a score of 0."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ppoctl.batch.records import REWARD_OK, REWARD_OUTCOMES, Rewards, Rollouts
from ppoctl.errors import NonFiniteError, RewardError
from ppoctl.ports import Answer, Score, Scorer


@dataclass(frozen=True)
class RewardStage:
    """Scores, scales, and stops when too many samples have no score."""

    scorer: Scorer
    scale: Callable[[Float[Tensor, " B"]], Float[Tensor, " B"]]
    max_error_frac: float
    fingerprint: str
    name: str = "reward"

    def run(self, rollouts: Rollouts) -> Rewards:
        answers = [
            Answer(response=text, truth=truth, prompt_id=prompt)
            for text, truth, prompt in zip(rollouts.texts, rollouts.answers, rollouts.prompt_ids, strict=True)
        ]
        scores = self.scorer.score(answers)
        self._require_few_errors(scores, answers, rollouts)
        return collect(scores, answers, self.scale)

    def _require_few_errors(self, scores: list[Score], answers: list[Answer], rollouts: Rollouts) -> None:
        missing = [(score, answer) for score, answer in zip(scores, answers, strict=True) if score.outcome != "ok"]
        if not missing:
            return
        share, (score, answer) = len(missing) / len(scores), missing[0]
        first = f"first `{answer.prompt_id}` {score.outcome} {score.message}".rstrip()
        if share == 1:
            raise RewardError(
                f"none of the {len(scores)} samples of step {rollouts.step} has a score: there is nothing to learn "
                f"from; {first}",
                hint="the rollouts are kept: mend the reward, and `ppoctl resume RUN`",
            )
        if share > self.max_error_frac:
            raise RewardError(
                f"{len(missing)} of {len(scores)} samples have no score ({share:.1%}, `reward.max_error_frac` is "
                f"{self.max_error_frac:.1%}); {first}",
                hint="the rollouts are kept: mend the reward and `ppoctl resume RUN`, or allow so many with "
                f"`ppoctl resume RUN --set reward.max_error_frac={math.ceil(share * 100) / 100:g}`",
            )


def collect(
    scores: list[Score], answers: list[Answer], scale: Callable[[Float[Tensor, " B"]], Float[Tensor, " B"]]
) -> Rewards:
    """Scores as a record; raises NonFiniteError naming the sample whose score is NaN or infinite."""
    for score, answer in zip(scores, answers, strict=True):
        if score.value is not None and not math.isfinite(score.value):
            raise NonFiniteError(
                f"the reward of `{answer.prompt_id}` is `{score.value}`",
                hint="nothing was trained on it; mend the reward and resume",
            )
    outcomes = torch.tensor([REWARD_OUTCOMES.index(score.outcome) for score in scores])
    values = torch.tensor([score.value or 0.0 for score in scores], dtype=torch.float32)
    names = sorted({name for score in scores for name in score.extras or {}})
    return Rewards(
        scores=values,
        shaped=torch.where(outcomes == REWARD_OK, scale(values), 0.0),
        outcomes=outcomes,
        extras={name: [float((score.extras or {}).get(name, 0.0)) for score in scores] for name in names},
        outcome_messages=[score.message for score in scores],
    )
