"""Scoring in parallel with generation: each response is submitted to the scorer when it finishes.

The reward stage then receives the scores that were started earlier. The committed record is the same as without
overlap, because the score of a response does not depend on the order.

    10-rollout --each finished sample, loaded ones too--> start  --> the scorer starts at once
    20-reward  --the same request-----------------------> submit --> the future that was started

A generation beside other stages starts the scores of a later step, or of the next round, from its own thread.
"""

from concurrent.futures import Future
from threading import Lock

from ppoctl.core.batch.prompts import Prompt
from ppoctl.core.batch.scores import BatchScorer, Finish, Score, Scorer, ScoreRequest
from ppoctl.core.ports import Sample

_Key = tuple[str, str, str, tuple[int, ...]]
_Started = dict[_Key, list[tuple[ScoreRequest, Future[Score]]]]


class OverlappedScorer:
    """Scorer that can start to score a response before the reward stage submits the request."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._started: _Started = {}
        self._of_next: _Started = {}
        self._lock = Lock()

    def start(self, prompt: Prompt, sample: Sample) -> None:
        """Start to score a finished response. A response whose environment failed is not scored."""
        self._start(self._started, prompt, sample)

    def start_of_next(self, prompt: Prompt, sample: Sample) -> None:
        """Start to score a finished response of a later step or the next round; `flush` does not cancel it. Nothing
        is started if the scorer scores in batches: they would have responses of several steps or rounds."""
        if not isinstance(self._scorer, BatchScorer):
            self._start(self._of_next, prompt, sample)

    def cancel_next(self) -> None:
        """Cancel the scores of the next round, which is not needed."""
        with self._lock:
            for started in self._of_next.values():
                for _, future in started:
                    future.cancel()
            self._of_next.clear()

    def _start(self, started: _Started, prompt: Prompt, sample: Sample) -> None:
        if sample.episode is not None and sample.episode.is_failed:
            return
        request = request_about(prompt, sample)
        with self._lock:
            started.setdefault(_key(request), []).append((request, self._scorer.submit(request)))

    def submit(self, request: ScoreRequest) -> Future[Score]:
        """Return the score whose computation was started, or start to compute it now. Equal responses have separate
        scores."""
        with self._lock:
            for started in (self._started, self._of_next):
                of_response = started.get(_key(request), [])
                for number, (known, future) in enumerate(of_response):
                    if known == request:
                        del of_response[number]
                        if not of_response:
                            del started[_key(request)]
                        return future
            return self._scorer.submit(request)

    def flush(self) -> None:
        """Score all submitted requests, and cancel the requests that were started but not submitted."""
        for started in self._started.values():
            for _, future in started:
                future.cancel()
        self._started.clear()
        if isinstance(self._scorer, BatchScorer):
            self._scorer.flush()

    def close(self) -> None:
        self._scorer.close()


def request_about(prompt: Prompt, sample: Sample) -> ScoreRequest:
    """Return the request to score a sample, equal to the request that the reward stage builds from the rollouts."""
    finish: Finish = "terminated" if sample.terminated else "truncated"
    return ScoreRequest.about(prompt, sample.text, finish, sample.tokens, sample.episode)


def _key(request: ScoreRequest) -> _Key:
    return request.prompt_id, request.response, request.finish, request.token_ids
