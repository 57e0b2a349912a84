"""The `Scorer` port over a model. Submitted requests are collected and scored together when a caller waits for the
first result. Imports no torch.

A score depends on its text, and the rounding of the score depends on the other texts of the batch. The scorer
therefore sorts the texts and removes duplicates, so that the order of the requests has no effect.
"""

import time
from concurrent.futures import Future

from ppoctl.core.batch.scores import RewardModel, Score, ScoreRequest


class Collected(Future[Score]):
    """Future of one score in a batch. The first call of `result` computes all scores of the batch."""

    def __init__(self, scorer: "CollectingScorer") -> None:
        super().__init__()
        self._scorer = scorer

    def result(self, timeout: float | None = None) -> Score:
        """Return the score. Raises the error of the batch if the model could not score it."""
        if not self.done():
            self._scorer.flush()
        return super().result(timeout)


class CollectingScorer:
    """Scorer that runs a model on one batch at a time, in the thread that waits for the scores."""

    def __init__(self, model: RewardModel) -> None:
        self._model = model
        self._waiting: list[tuple[Collected, ScoreRequest]] = []

    def submit(self, request: ScoreRequest) -> Collected:
        """Queue a request. All queued requests are scored together when the first result is requested."""
        future = Collected(self)
        self._waiting.append((future, request))
        return future

    def flush(self) -> None:
        """Score all queued requests. A text that the model cannot read gets no score. Any other error is raised, and
        is also set as the error of every request."""
        waiting, self._waiting = self._waiting, []
        waiting = [entry for entry in waiting if entry[0].set_running_or_notify_cancel()]
        began = time.monotonic()
        try:
            texts = [self._text(request) for _, request in waiting]
            distinct = sorted({text for text in texts if isinstance(text, tuple)})
            scores = dict(zip(distinct, self._model.scores(distinct), strict=True)) if distinct else {}
        except BaseException as error:
            for future, _ in waiting:
                future.set_exception(error)
            raise
        each_s = (time.monotonic() - began) / max(len(waiting), 1)
        for (future, _), text in zip(waiting, texts, strict=True):
            future.set_result(Score(scores[text], "ok", seconds=each_s) if isinstance(text, tuple) else text)

    def close(self) -> None:
        """Cancel all queued requests. The caller that opened the model closes it."""
        waiting, self._waiting = self._waiting, []
        for future, _ in waiting:
            future.cancel()

    def _text(self, request: ScoreRequest) -> tuple[int, ...] | Score:
        try:
            return self._model.tokens(request)
        except ValueError as error:
            return Score(None, "refused", str(error))
