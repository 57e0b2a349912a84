"""Scoring beside drawing: each response is given to the scorer as it finishes, and the stage that scores gets what
was begun with. What is committed is the same: which response has which score depends on no order.

    10-rollout --each finished sample, recalled ones too--> heard --> the scorer, at work from then on
    20-reward  --submit(the same request)-----------------> the future that was begun with
"""

from concurrent.futures import Future

from ppoctl.batch.prompts import Prompt
from ppoctl.batch.scores import BatchScorer, Score, Scorer, ScoreRequest
from ppoctl.ports import Sample

_Key = tuple[str, str, str, tuple[int, ...]]


class OverlappedScorer:
    """A scorer that is told of responses before it is asked for their scores."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._begun: dict[_Key, list[tuple[ScoreRequest, Future[Score]]]] = {}

    def start(self, prompt: Prompt, sample: Sample) -> None:
        """Begin to score a response that is finished."""
        request = request_about(prompt, sample)
        self._begun.setdefault(_key(request), []).append((request, self._scorer.submit(request)))

    def submit(self, request: ScoreRequest) -> Future[Score]:
        """The score that was begun with, or is begun with now. Of equal responses each has one of its own."""
        begun = self._begun.get(_key(request), [])
        for number, (known, future) in enumerate(begun):
            if known == request:
                del begun[number]
                return future
        return self._scorer.submit(request)

    def flush(self) -> None:
        """Nothing is submitted until what was is scored. What nobody has asked for is given up."""
        for begun in self._begun.values():
            for _, future in begun:
                future.cancel()
        self._begun.clear()
        if isinstance(self._scorer, BatchScorer):
            self._scorer.flush()

    def close(self) -> None:
        self._scorer.close()


def request_about(prompt: Prompt, sample: Sample) -> ScoreRequest:
    """The request to score a sample, as the stage that scores makes it of the rollouts."""
    return ScoreRequest.about(prompt, sample.text, "terminated" if sample.terminated else "truncated", sample.tokens)


def _key(request: ScoreRequest) -> _Key:
    return request.prompt_id, request.response, request.finish, request.token_ids
