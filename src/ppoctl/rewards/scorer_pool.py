"""The `Scorer` port over child processes. Each sample has its own deadline; if a scorer hangs, raises or dies, only
its current sample is lost. Imports no torch, because `validate` uses it on a login node.

    submit(request) --> one queue --> a thread per child process: send, wait until the deadline --> future

A score that is not a finite float32 becomes an error here and never reaches training.
"""

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import ClassVar

from ppoctl.core.batch.scores import Score, ScoreRequest
from ppoctl.core.errors import NonFiniteError, RewardError
from ppoctl.rewards.function import ScorerSpec, is_trainable
from ppoctl.rewards.scorer_output import Dropped
from ppoctl.rewards.scorer_process import ScorerProcess

ScoreAll = Callable[[Sequence[ScoreRequest]], Sequence[Score]]
"""Function that returns the score of each request."""


class WorkerPool:
    """Threads that score the requests of one queue, each by its own function. The first requests start them. Call
    `close` at the end."""

    closing_s: ClassVar[float | None] = None
    """Seconds that `close` waits for the threads; None: without limit."""

    def __init__(self, workers: Sequence[ScoreAll], *, batch_size: int = 1) -> None:
        self._workers, self._batch_size = workers, batch_size
        self._waiting: SimpleQueue[tuple[Future[Score], ScoreRequest] | None] = SimpleQueue()
        """Requests that no thread has taken yet; a None ends one thread."""
        self._threads: list[Thread] = []

    def submit(self, request: ScoreRequest) -> Future[Score]:
        """Return a future for the score. It can be cancelled until a thread takes the request.

        The future raises NonFiniteError if the score or one of its extras is NaN, infinite or outside the range of
        float32. It raises RewardError if the scorer cannot be started at all, and ServiceLostError if a service stays
        down.
        """
        future: Future[Score] = Future()
        self._waiting.put((future, request))
        if len(self._threads) < len(self._workers):
            worker = self._workers[len(self._threads)]
            # These are daemon threads, unlike the threads of an executor: a process that exits without closing the
            # pool must not wait for a scorer or for the queue.
            self._threads.append(Thread(target=self._serve, args=(worker,), name="scorer", daemon=True))
            self._threads[-1].start()
        return future

    def close(self) -> None:
        """End the workers. Requests without a score are cancelled or get an error. May be called twice."""
        with suppress(Empty):
            while (left := self._waiting.get_nowait()) is not None:
                left[0].cancel()
        self.end_work()
        for _ in self._threads:
            self._waiting.put(None)
        until = None if self.closing_s is None else time.monotonic() + self.closing_s
        for thread in self._threads:
            thread.join(None if until is None else max(until - time.monotonic(), 0.0))

    @abstractmethod
    def end_work(self) -> None:
        """End the running work of all workers; further work fails at once."""

    def _serve(self, worker: ScoreAll) -> None:
        while (first := self._waiting.get()) is not None:
            batch = [entry for entry in self._batch_with(first) if entry[0].set_running_or_notify_cancel()]
            if not batch:
                continue
            try:
                scores = worker([request for _, request in batch])
            except Exception as error:  # noqa: BLE001 - the caller of `result` gets it
                for future, _ in batch:
                    future.set_exception(error)
                continue
            for (future, request), score in zip(batch, scores, strict=True):
                if (fault := not_finite(score, request)) is not None:
                    future.set_exception(fault)
                else:
                    future.set_result(score)

    def _batch_with(self, first: tuple[Future[Score], ScoreRequest]) -> list[tuple[Future[Score], ScoreRequest]]:
        """Return the request and the requests queued after it, up to the batch size."""
        batch = [first]
        with suppress(Empty):
            while len(batch) < self._batch_size:
                if (following := self._waiting.get_nowait()) is None:
                    self._waiting.put(None)  # None ends one thread, and this thread still has work
                    break
                batch.append(following)
        return batch


class ScorerPool(WorkerPool):
    """`workers` persistent child processes."""

    def __init__(self, spec: ScorerSpec, *, workers: int = 1, timeout_s: float = 10.0) -> None:
        self._dropped = Dropped(f"scorer `{spec.known_as or spec.entry}`")
        self._processes = [ScorerProcess(spec, timeout_s, self._dropped) for _ in range(workers)]
        self._cannot_start: RewardError | None = None
        super().__init__([partial(self._scored, process) for process in self._processes], batch_size=spec.batch_size)

    @property
    def pids(self) -> list[int]:
        """Process ids of the children that run now."""
        return [process.pid for process in self._processes if process.pid is not None]

    def end_work(self) -> None:
        for process in self._processes:
            process.close()

    def close(self) -> None:
        """Kill and reap all children. Requests without a score are cancelled or get an error. May be called twice."""
        super().close()
        for process in self._processes:
            process.reap()
        self._dropped.report()

    def _scored(self, process: ScorerProcess, requests: Sequence[ScoreRequest]) -> Sequence[Score]:
        if self._cannot_start is not None:
            raise self._cannot_start
        try:
            return process.score(requests)
        except RewardError as error:
            self._cannot_start = error
            raise


def not_finite(score: Score, request: ScoreRequest) -> NonFiniteError | None:
    """Return the error of a score that is not finite, or is outside the range of float32; None: the score can be
    trained on."""
    if score.value is None:
        return None
    tokens = {f"the value of token {number}": value for number, value in enumerate(score.token_values or ())}
    for name, value in {"reward": score.value, **score.extras, **tokens}.items():
        if not is_trainable(value):
            return NonFiniteError(
                f"the scorer returned `{value}` as {name} of a response to prompt `{request.prompt_id}`",
                hint="raise in the scorer if there is no score: the sample then counts as an error and is left out",
            )
    return None
