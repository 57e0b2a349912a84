"""The `Scorer` port over child processes: each sample has its own deadline, and a scorer that hangs, raises or dies
costs its own sample only. Imports no torch: `validate` uses it on a login node.

    submit(request) --> one queue --> a thread for each child process: asks it, waits until the deadline --> future

What is not a finite float32 stops here: it never trains.
"""

from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread

from ppoctl.batch.scores import Score, ScoreRequest
from ppoctl.errors import NonFiniteError, RewardError
from ppoctl.rewards.function import ScorerSpec, is_trainable
from ppoctl.rewards.scorer_output import Dropped
from ppoctl.rewards.scorer_process import ScorerProcess


class ScorerPool:
    """`workers` persistent children, started by the first requests. `close` it."""

    def __init__(self, spec: ScorerSpec, *, workers: int = 1, timeout_s: float = 10.0) -> None:
        self._dropped = Dropped(spec.known_as or spec.entry)
        self._processes = [ScorerProcess(spec, timeout_s, self._dropped) for _ in range(workers)]
        self._batch_size = spec.batch_size
        self._waiting: SimpleQueue[tuple[Future[Score], ScoreRequest] | None] = SimpleQueue()
        """Requests that no child has begun with; None ends a thread."""
        self._threads: list[Thread] = []
        self._cannot_start: RewardError | None = None

    @property
    def pids(self) -> list[int]:
        """Process ids of the children that run now."""
        return [process.pid for process in self._processes if process.pid is not None]

    def submit(self, request: ScoreRequest) -> Future[Score]:
        """The score, once it is there. Cancelling helps while no child has begun with it.

        The future raises NonFiniteError when a score or one of its extras is NaN, infinite or beyond float32, and
        RewardError when the scorer cannot be started at all.
        """
        future: Future[Score] = Future()
        self._waiting.put((future, request))
        if len(self._threads) < len(self._processes):
            process = self._processes[len(self._threads)]
            # Daemons, which an executor's threads are not: a process that leaves without closing the pool waits for
            # no scorer, and for nothing in the queue.
            self._threads.append(Thread(target=self._serve, args=(process,), name="scorer", daemon=True))
            self._threads[-1].start()
        return future

    def close(self) -> None:
        """Kill and reap all children; what has no score yet is cancelled or an error. May be called twice."""
        with suppress(Empty):
            while (left := self._waiting.get_nowait()) is not None:
                left[0].cancel()
        for process in self._processes:
            process.close()
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join()
        for process in self._processes:
            process.reap()
        self._dropped.report()

    def _serve(self, process: ScorerProcess) -> None:
        while (first := self._waiting.get()) is not None:
            given = [one for one in self._together_with(first) if one[0].set_running_or_notify_cancel()]
            if not given:
                continue
            try:
                scores = self._scored(process, [request for _, request in given])
            except Exception as error:  # noqa: BLE001 - whoever asks for the result hears of it
                for future, _ in given:
                    future.set_exception(error)
                continue
            for (future, request), score in zip(given, scores, strict=True):
                if (fault := not_finite(score, request)) is not None:
                    future.set_exception(fault)
                else:
                    future.set_result(score)

    def _together_with(self, first: tuple[Future[Score], ScoreRequest]) -> list[tuple[Future[Score], ScoreRequest]]:
        """The request and those that wait behind it, as many as a child is given together."""
        batch = [first]
        with suppress(Empty):
            while len(batch) < self._batch_size:
                if (behind := self._waiting.get_nowait()) is None:
                    self._waiting.put(None)  # it ends a thread, and this one has work
                    break
                batch.append(behind)
        return batch

    def _scored(self, process: ScorerProcess, requests: list[ScoreRequest]) -> list[Score]:
        if self._cannot_start is not None:
            raise self._cannot_start
        try:
            return process.score(requests)
        except RewardError as error:
            self._cannot_start = error
            raise


def not_finite(score: Score, request: ScoreRequest) -> NonFiniteError | None:
    """The error of a score that cannot be trained on; None: it can."""
    if score.value is None:
        return None
    tokens = {f"the figure of token {number}": figure for number, figure in enumerate(score.token_values or ())}
    for name, figure in {"reward": score.value, **score.extras, **tokens}.items():
        if not is_trainable(figure):
            return NonFiniteError(
                f"the scorer gave `{figure}` as {name} of a response to prompt `{request.prompt_id}`",
                hint="let the scorer raise where it has no score: the sample then counts as an error and is left out",
            )
    return None
