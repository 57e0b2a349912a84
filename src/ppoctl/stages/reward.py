"""20-reward: score every response. An error is never a score of 0."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ppoctl import metric_registry
from ppoctl.batch.prompts import Prompts
from ppoctl.batch.records import Rewards, Rollouts
from ppoctl.batch.scores import FINISH_REASONS, REWARD_OUTCOMES, BatchScorer, Score, ScoreRequest
from ppoctl.errors import NonFiniteError, RewardError
from ppoctl.ports import Scorer

LOOK_EVERY_S = 0.2
"""How often whoever waits for a score looks whether the job is to stop."""


_SLOW_S, _SLOWER = 1.0, 4.0
"""A sample is slow that took so many seconds, and so many times the mean."""


def nobody(_: str) -> None:
    """Nobody is told."""


@dataclass(frozen=True)
class RewardStage:
    """Scores, and stops when too many samples have no score."""

    scorer: Scorer
    max_error_frac: float
    fingerprint: str
    between: Callable[[], None]
    """Called while scores are waited for; raises when the job is to stop."""
    notify: Callable[[str], None] = nobody
    """Told of a sample that took much longer than the others."""
    name: str = "reward"

    def run(self, prompts: Prompts, rollouts: Rollouts) -> Rewards:
        requests = requests_about(prompts, rollouts)
        scores = score_all(self.scorer, requests, self.between)
        if (told := slowest(scores, requests)) is not None:
            self.notify(f"step {rollouts.step}: {told}")
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


def requests_about(prompts: Prompts, rollouts: Rollouts) -> list[ScoreRequest]:
    """The request to score each response, in order."""
    asked = {prompt.id: prompt for prompt in prompts.rows}
    rows = zip(rollouts.prompt_ids, rollouts.texts, rollouts.finish.tolist(), strict=True)
    ids = (row[:length] for row, length in zip(rollouts.tokens.tolist(), rollouts.lengths.tolist(), strict=True))
    return [
        ScoreRequest.about(asked[id_], text, FINISH_REASONS[finish], tuple(tokens))
        for (id_, text, finish), tokens in zip(rows, ids, strict=True)
    ]


def score_all(scorer: Scorer, requests: Sequence[ScoreRequest], between: Callable[[], None]) -> list[Score]:
    """One score per request, in order. `between` is called while they are waited for; when it raises, what has not
    begun is not scored."""
    futures = [scorer.submit(request) for request in requests]
    try:
        if isinstance(scorer, BatchScorer):
            scorer.flush()
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
        extras={name: [_extra(score, name) for score in scores] for name in names},
        outcome_messages=[score.message for score in scores],
        truths=[asked.truth for asked in requests],
        token_scores=_token_scores(scores, requests),
        timing=_timing([score.seconds for score in scores]),
    )


def require_own_names(scores: Iterable[Score]) -> None:
    """Raise RewardError where a figure beside a score would be reported by the name of another one."""
    names = {name for score in scores for name in score.extras}
    if taken := sorted(name for name in names if not metric_registry.is_of_a_scorer(name)):
        plain = re.sub(r"[^A-Za-z0-9_-]+", "_", taken[0]).strip("_")
        raise RewardError(
            f"the reward gives a figure `{taken[0]}` beside its score, and `reward/{taken[0]}_mean` is the name of "
            "another figure, or no name (letters, digits, `_` and `-`)",
            hint=f"give it another name where the reward returns it, such as `my_{plain}`",
        )


def _extra(score: Score, name: str) -> float | None:
    if score.value is None:
        return 0.0
    return float(score.extras[name]) if name in score.extras else None


def _timing(seconds: Sequence[float]) -> dict[str, float]:
    mean = sum(seconds) / len(seconds)
    return {metric_registry.REWARD_SECONDS_MEAN.name: mean, metric_registry.REWARD_SECONDS_MAX.name: max(seconds)}


def slowest(scores: Sequence[Score], requests: Sequence[ScoreRequest]) -> str | None:
    """What to say of the sample that took longest; None where it did not take much longer than the others."""
    mean = sum(score.seconds for score in scores) / len(scores)
    score, asked = max(zip(scores, requests, strict=True), key=lambda pair: pair[0].seconds)
    if score.seconds < max(_SLOW_S, _SLOWER * mean):
        return None
    took = f"{score.seconds:.1f} s to score (mean {mean:.2g} s)"
    return f"the slowest sample took {took}: of prompt `{asked.prompt_id}`, {score.outcome}"


def _token_scores(scores: list[Score], requests: list[ScoreRequest]) -> Float[Tensor, "B R"] | None:
    """The score of each token, where some response has such; one for a whole response stands at its last token."""
    if all(score.token_values is None for score in scores):
        return None
    found = torch.zeros(len(scores), max(len(asked.token_ids) for asked in requests))
    for row, score, asked in zip(found, scores, requests, strict=True):
        if score.token_values is not None:
            row[: len(score.token_values)] = torch.tensor(score.token_values)
        elif score.value is not None:
            row[len(asked.token_ids) - 1] = score.value
    return found
