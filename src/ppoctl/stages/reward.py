"""20-reward: score every response. An error never becomes a score of 0."""

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
"""Seconds between two checks whether the job must stop, while the stage waits for scores."""


_SLOW_S, _SLOWER = 1.0, 4.0
"""A sample is slow if its scoring took at least `_SLOW_S` seconds and at least `_SLOWER` times the mean."""


def ignore_message(_: str) -> None:
    """Ignore the message."""


@dataclass(frozen=True)
class RewardStage:
    """Stage that scores all responses. It stops the run if too many samples have no score."""

    scorer: Scorer
    max_error_frac: float
    fingerprint: str
    between: Callable[[], None]
    """Called while the stage waits for scores; raises an error if the job must stop."""
    notify: Callable[[str], None] = ignore_message
    """Called with a message about a sample whose scoring took much longer than the others."""
    name: str = "reward"

    def run(self, prompts: Prompts, rollouts: Rollouts) -> Rewards:
        requests = requests_about(prompts, rollouts)
        scores = score_all(self.scorer, requests, self.between)
        if (slow := slowest(scores, requests)) is not None:
            self.notify(f"step {rollouts.step}: {slow}")
        self._require_few_errors(scores, requests, rollouts)
        return collect(scores, requests)

    def _require_few_errors(self, scores: list[Score], requests: list[ScoreRequest], rollouts: Rollouts) -> None:
        missing = [(score, request) for score, request in zip(scores, requests, strict=True) if score.outcome != "ok"]
        if not missing:
            return
        fraction, (score, request) = len(missing) / len(scores), missing[0]
        first = f"first `{request.prompt_id}` {score.outcome} {score.message}".rstrip()
        if fraction == 1:
            raise RewardError(
                f"none of the {len(scores)} samples of step {rollouts.step} has a score, so no response is left "
                f"to train on; {first}",
                hint="the rollouts are saved: fix the reward, then run `ppoctl resume RUN`",
            )
        if fraction > self.max_error_frac:
            raise RewardError(
                f"{len(missing)} of {len(scores)} samples have no score ({fraction:.1%}, `reward.max_error_frac` is "
                f"{self.max_error_frac:.1%}); {first}",
                hint="the rollouts are saved: fix the reward and run `ppoctl resume RUN`, or allow this many errors "
                f"with `ppoctl resume RUN --set reward.max_error_frac={math.ceil(fraction * 100) / 100:g}`",
            )


def requests_about(prompts: Prompts, rollouts: Rollouts) -> list[ScoreRequest]:
    """Return the request to score each response, in order."""
    prompt_by_id = {prompt.id: prompt for prompt in prompts.rows}
    rows = zip(rollouts.prompt_ids, rollouts.texts, rollouts.finish.tolist(), strict=True)
    ids = (row[:length] for row, length in zip(rollouts.tokens.tolist(), rollouts.lengths.tolist(), strict=True))
    return [
        ScoreRequest.about(prompt_by_id[id_], text, FINISH_REASONS[finish], tuple(tokens))
        for (id_, text, finish), tokens in zip(rows, ids, strict=True)
    ]


def score_all(scorer: Scorer, requests: Sequence[ScoreRequest], between: Callable[[], None]) -> list[Score]:
    """Return one score per request, in order.

    `between` is called while this function waits for scores. If `between` raises, requests that have not started are
    cancelled.
    """
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
    """Return the scores as a record. Raises NonFiniteError that names the sample whose score is NaN or infinite."""
    for score, request in zip(scores, requests, strict=True):
        if score.value is not None and not math.isfinite(score.value):
            raise NonFiniteError(
                f"the reward of `{request.prompt_id}` is `{score.value}`",
                hint="it was not used for training; fix the reward and resume",
            )
    outcomes = torch.tensor([REWARD_OUTCOMES.index(score.outcome) for score in scores])
    values = torch.tensor([score.value or 0.0 for score in scores], dtype=torch.float32)
    names = sorted({name for score in scores for name in score.extras})
    return Rewards(
        scores=values,
        outcomes=outcomes,
        extras={name: [_extra(score, name) for score in scores] for name in names},
        outcome_messages=[score.message for score in scores],
        truths=[request.truth for request in requests],
        token_scores=_token_scores(scores, requests),
        timing=_timing([score.seconds for score in scores]),
    )


def require_own_names(scores: Iterable[Score]) -> None:
    """Raise RewardError if a metric that the scorer returns has the name of another metric."""
    names = {name for score in scores for name in score.extras}
    if taken := sorted(name for name in names if not metric_registry.is_of_a_scorer(name)):
        plain = re.sub(r"[^A-Za-z0-9_-]+", "_", taken[0]).strip("_")
        raise RewardError(
            f"the reward returns a metric `{taken[0]}` in addition to its score, but `reward/{taken[0]}_mean` is the "
            "name of another metric, or not a valid name (letters, digits, `_` and `-`)",
            hint=f"return it under another name, such as `my_{plain}`",
        )


def _extra(score: Score, name: str) -> float | None:
    if score.value is None:
        return 0.0
    return float(score.extras[name]) if name in score.extras else None


def _timing(seconds: Sequence[float]) -> dict[str, float]:
    mean = sum(seconds) / len(seconds)
    return {metric_registry.REWARD_SECONDS_MEAN.name: mean, metric_registry.REWARD_SECONDS_MAX.name: max(seconds)}


def slowest(scores: Sequence[Score], requests: Sequence[ScoreRequest]) -> str | None:
    """Return a message about the sample whose scoring took longest; None if it did not take much longer than the
    others."""
    mean = sum(score.seconds for score in scores) / len(scores)
    score, request = max(zip(scores, requests, strict=True), key=lambda pair: pair[0].seconds)
    if score.seconds < max(_SLOW_S, _SLOWER * mean):
        return None
    took = f"{score.seconds:.1f} s to score (mean {mean:.2g} s)"
    return f"the slowest sample took {took}: of prompt `{request.prompt_id}`, {score.outcome}"


def _token_scores(scores: list[Score], requests: list[ScoreRequest]) -> Float[Tensor, "B R"] | None:
    """Return the score of each token, or None if no response has token scores.

    The score of a whole response is at its last token.
    """
    if all(score.token_values is None for score in scores):
        return None
    grid = torch.zeros(len(scores), max(len(request.token_ids) for request in requests))
    for row, score, request in zip(grid, scores, requests, strict=True):
        if score.token_values is not None:
            row[: len(score.token_values)] = torch.tensor(score.token_values)
        elif score.value is not None:
            row[len(request.token_ids) - 1] = score.value
    return grid
