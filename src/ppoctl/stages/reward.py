"""20-reward: score every response. An error is never a score of 0."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

import torch

from ppoctl.batch.prompts import Prompts
from ppoctl.batch.records import FINISH_REASONS, REWARD_OUTCOMES, Rewards, Rollouts
from ppoctl.batch.scores import Score, ScoreRequest
from ppoctl.errors import NonFiniteError, RewardError
from ppoctl.ports import Scorer

LOOK_EVERY_S = 0.2
"""How often whoever waits for a score looks whether the job is to stop."""


@dataclass(frozen=True)
class RewardStage:
    """Scores, and stops when too many samples have no score."""

    scorer: Scorer
    max_error_frac: float
    fingerprint: str
    between: Callable[[], None]
    """Called while scores are waited for; raises when the job is to stop."""
    name: str = "reward"

    def run(self, prompts: Prompts, rollouts: Rollouts) -> Rewards:
        asked = {prompt.id: prompt for prompt in prompts.rows}
        rows = zip(rollouts.prompt_ids, rollouts.texts, rollouts.finish.tolist(), strict=True)
        requests = [ScoreRequest.about(asked[id_], text, FINISH_REASONS[finish]) for id_, text, finish in rows]
        scores = score_all(self.scorer, requests, self.between)
        self._require_few_errors(scores, requests, rollouts)
        return collect(scores, requests)

    def _require_few_errors(self, scores: list[Score], requests: list[ScoreRequest], rollouts: Rollouts) -> None:
        missing = [(score, asked) for score, asked in zip(scores, requests, strict=True) if score.outcome != "ok"]
        if not missing:
            return
        share, (score, asked) = len(missing) / len(scores), missing[0]
        first = f"first `{asked.prompt_id}` {score.outcome} {score.message}".rstrip()
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


def score_all(scorer: Scorer, requests: Sequence[ScoreRequest], between: Callable[[], None]) -> list[Score]:
    """One score per request, in order. `between` is called while they are waited for; when it raises, what has not
    begun is not scored."""
    futures = [scorer.submit(request) for request in requests]
    try:
        return [_awaited(future, between) for future in futures]
    finally:
        for future in futures:
            future.cancel()


def _awaited(future: Future[Score], between: Callable[[], None]) -> Score:
    between()
    while not wait([future], timeout=LOOK_EVERY_S).done:
        between()
    return future.result()


def collect(scores: list[Score], requests: list[ScoreRequest]) -> Rewards:
    """Scores as a record; raises NonFiniteError naming the sample whose score is NaN or infinite."""
    for score, asked in zip(scores, requests, strict=True):
        if score.value is not None and not math.isfinite(score.value):
            raise NonFiniteError(
                f"the reward of `{asked.prompt_id}` is `{score.value}`",
                hint="nothing was trained on it; mend the reward and resume",
            )
    outcomes = torch.tensor([REWARD_OUTCOMES.index(score.outcome) for score in scores])
    values = torch.tensor([score.value or 0.0 for score in scores], dtype=torch.float32)
    names = sorted({name for score in scores for name in score.extras})
    return Rewards(
        scores=values,
        outcomes=outcomes,
        extras={name: [float(score.extras.get(name, 0.0)) for score in scores] for name in names},
        outcome_messages=[score.message for score in scores],
        truths=[asked.truth for asked in requests],
    )
