"""20-reward: score every response. An error never becomes a score of 0."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from ppoctl.core import metric_registry
from ppoctl.core.batch.episodes import Episode
from ppoctl.core.batch.prompts import Prompts
from ppoctl.core.batch.records import Rewards, Rollouts
from ppoctl.core.batch.scorer_metrics import require_own_names
from ppoctl.core.batch.scores import FINISH_REASONS, REWARD_OUTCOMES, BatchScorer, Score, ScoreRequest
from ppoctl.core.errors import NonFiniteError, RewardError, quoted
from ppoctl.core.ports import Scorer

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
    failed_score: float | None = None
    """Score of an episode whose environment failed; None: it has no score."""
    are_trained: bool = True
    """Whether the step trains on the samples, so that one of them must have a turn."""
    are_old: bool = False
    """Whether the step before generated the responses, so that this stage reports their metrics."""
    accept: str = ""
    """Options with which a resume accepts the changed files of the reward."""

    def run(self, prompts: Prompts, rollouts: Rollouts) -> Rewards:
        requests, episodes = requests_about(prompts, rollouts), episodes_of(rollouts)
        failures = [failure_of(episode, self.failed_score) for episode in episodes]
        to_score = [request for request, failure in zip(requests, failures, strict=True) if failure is None]
        scored = iter(score_all(self.scorer, to_score, self.between))
        scores = [next(scored) if failure is None else failure for failure in failures]
        if (slow := slowest(scores, requests)) is not None:
            self.notify(f"step {prompts.step}: {slow}")
        self._require_few_errors(scores, requests, episodes, prompts.step, generated=rollouts.step)
        require_own_names(scores, then=f", then run `{self._resume}`: the rollouts are saved")
        record = collect(scores, requests)
        return replace(record, of_rollouts=rollouts.metrics()) if self.are_old else record

    @property
    def _resume(self) -> str:
        return "ppoctl resume RUN" + self.accept

    def _require_few_errors(
        self,
        scores: list[Score],
        requests: list[ScoreRequest],
        episodes: list[Episode | None],
        step: int,
        *,
        generated: int,
    ) -> None:
        """Raise RewardError if no response can be trained on, or too many have no score or a failed environment.
        `generated` is the step that generated the responses."""
        rows = list(zip(scores, requests, episodes, strict=True))
        reasons = [reason for row in rows if (reason := _error(*row))]
        if not reasons:
            return
        failed = sum(episode is not None and episode.is_failed for episode in episodes)
        fraction, first = len(reasons) / len(scores), f"first {reasons[0]}"
        fix, command = "the rollouts are saved: fix the reward", self._resume
        if failed:
            fix = "the saved rollouts have the failures: fix the environment"
            before = generated - 1  # no states are saved before step 1
            command = f"ppoctl resume RUN --back-to {quoted(str(before))}" if before else "ppoctl train RECIPE"
        if all(score.value is None or (self.are_trained and _has_no_turn(episode)) for score, _, episode in rows):
            lacks = "has a score" if any(score.value is None for score in scores) else "has a turn"
            raise RewardError(
                f"none of the {len(scores)} samples of step {step} {lacks}, so no response is left to train on; "
                f"{first}",
                hint=f"{fix}, then run `{command}`",
            )
        if fraction > self.max_error_frac:
            counts = f"{len(reasons) - failed} of {len(scores)} samples have no score"
            if failed:
                counts = f"{failed} of {len(scores)} environments failed, and {len(reasons) - failed} other samples "
                counts += "have no score"
            raise RewardError(
                f"{counts} ({fraction:.1%}, `reward.max_error_frac` is {self.max_error_frac:.1%}); {first}",
                hint=f"{fix} and run `{command}`, or allow this many errors "
                f"with `ppoctl resume RUN --set reward.max_error_frac={math.ceil(fraction * 100) / 100:g}`",
            )


def _has_no_turn(episode: Episode | None) -> bool:
    return episode is not None and not episode.turns


def _error(score: Score, request: ScoreRequest, episode: Episode | None) -> str:
    """Return the prompt of a sample, and why its environment failed or why it has no score; empty: neither."""
    if episode is not None and episode.is_failed:
        return f"`{request.prompt_id}` {described(episode)}"
    return "" if score.outcome == "ok" else f"`{request.prompt_id}` {score.outcome} {score.message}".rstrip()


def described(episode: Episode) -> str:
    """Return why the environment of an episode failed: "environment timeout: no answer within 30 s"."""
    return f"environment {episode.end}: {episode.message}".rstrip(": ")


def failure_of(episode: Episode | None, failed_score: float | None) -> Score | None:
    """Return the result of an episode whose environment failed: `failed_score`, or no score if it is None. Return
    None for all other responses, which must be scored."""
    if episode is None or not episode.is_failed:
        return None
    if failed_score is not None:
        return Score(failed_score, "ok")
    return Score(None, "error", described(episode))


def episodes_of(rollouts: Rollouts) -> list[Episode | None]:
    """Return the episode of each response; None: it has one turn and no environment."""
    if rollouts.episodes is None:
        return [None] * rollouts.num_seqs
    return [Episode.from_json(episode) for episode in rollouts.episodes]


def requests_about(prompts: Prompts, rollouts: Rollouts) -> list[ScoreRequest]:
    """Return the request to score each response, in order."""
    prompt_by_id = {prompt.id: prompt for prompt in prompts.rows}
    rows = zip(rollouts.prompt_ids, rollouts.texts, rollouts.finish.tolist(), episodes_of(rollouts), strict=True)
    ids = (row[:length] for row, length in zip(rollouts.tokens.tolist(), rollouts.lengths.tolist(), strict=True))
    return [
        ScoreRequest.about(prompt_by_id[id_], text, FINISH_REASONS[finish], tuple(tokens), episode)
        for (id_, text, finish, episode), tokens in zip(rows, ids, strict=True)
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
