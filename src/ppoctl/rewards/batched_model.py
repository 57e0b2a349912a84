"""The `Scorer` port over a model: what is submitted is collected, and scored together when the first of it is waited
for. Imports no torch.

A score is a function of its own text; which texts share a batch decides how it is rounded. So they are given to the
model in one order, whatever the order in which they were submitted, and each once.
"""

import time
from concurrent.futures import Future

from ppoctl.batch.scores import RewardModel, Score, ScoreRequest


class Collected(Future[Score]):
    """A score of a batch, which whoever asks for the result first has computed."""

    def __init__(self, scorer: "CollectingScorer") -> None:
        super().__init__()
        self._scorer = scorer

    def result(self, timeout: float | None = None) -> Score:
        """The score. Raises what kept the model from scoring."""
        if not self.done():
            self._scorer.flush()
        return super().result(timeout)


class CollectingScorer:
    """Scores by a model, a batch at a time, in the thread that waits for them."""

    def __init__(self, model: RewardModel) -> None:
        self._model = model
        self._waiting: list[tuple[Collected, ScoreRequest]] = []

    def submit(self, request: ScoreRequest) -> Collected:
        """The score, which is computed with all others that were submitted once one of them is asked for."""
        future = Collected(self)
        self._waiting.append((future, request))
        return future

    def flush(self) -> None:
        """Score what waits. A text that the model cannot read has no score; what else goes wrong is the error of all,
        and raised."""
        waiting, self._waiting = self._waiting, []
        waiting = [one for one in waiting if one[0].set_running_or_notify_cancel()]
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
        """Cancel what waits; the model is closed by whoever opened it."""
        waiting, self._waiting = self._waiting, []
        for future, _ in waiting:
            future.cancel()

    def _text(self, request: ScoreRequest) -> tuple[int, ...] | Score:
        try:
            return self._model.tokens(request)
        except ValueError as error:
            return Score(None, "refused", str(error))
