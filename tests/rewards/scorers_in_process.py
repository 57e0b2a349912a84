"""Scorers in the process of the test, which decides when and what they return."""

from collections.abc import Callable
from concurrent.futures import Future

from ppoctl.core.batch.scores import Score, ScoreRequest


class Held:
    """A scorer that returns its scores when the test sets them."""

    def __init__(self) -> None:
        self.futures: list[Future[Score]] = []
        self.asked: list[str] = []
        self.is_closed = False

    def submit(self, request: ScoreRequest) -> Future[Score]:
        self.asked.append(request.response)
        self.futures.append(Future())
        return self.futures[-1]

    def close(self) -> None:
        self.is_closed = True


class Gathers(Held):
    """A scorer that collects requests until `flush` is called."""

    def flush(self) -> None:
        for future in self.futures:
            future.set_result(Score(2.0, "ok"))


class Scoring:
    """A scorer that runs a function. The function returns a number, or the outcome without a score."""

    def __init__(self, function: Callable[[ScoreRequest], float | str]) -> None:
        self.function = function
        self.asked: list[ScoreRequest] = []

    def submit(self, request: ScoreRequest) -> Future[Score]:
        self.asked.append(request)
        result = self.function(request)
        future: Future[Score] = Future()
        future.set_result(Score(None, result, "why") if isinstance(result, str) else Score(result, "ok"))  # type: ignore[arg-type]
        return future

    def close(self) -> None:
        pass
