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
from ppoctl.rewards.scorer_process import ScorerProcess


class ScorerPool:
    """`workers` persistent children, started by the first requests. `close` it."""

    def __init__(self, spec: ScorerSpec, *, workers: int = 1, timeout_s: float = 10.0) -> None:
        self._processes = [ScorerProcess(spec, timeout_s) for _ in range(workers)]
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

    def _serve(self, process: ScorerProcess) -> None:
        while (given := self._waiting.get()) is not None:
            future, request = given
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._scored(process, request))
            except Exception as error:  # noqa: BLE001 - whoever asks for the result hears of it
                future.set_exception(error)

    def _scored(self, process: ScorerProcess, request: ScoreRequest) -> Score:
        if self._cannot_start is not None:
            raise self._cannot_start
        try:
            return _finite(process.score(request), request)
        except RewardError as error:
            self._cannot_start = error
            raise


def _finite(score: Score, request: ScoreRequest) -> Score:
    if score.value is not None:
        for name, figure in {"reward": score.value, **score.extras}.items():
            if not is_trainable(figure):
                raise NonFiniteError(
                    f"the scorer gave `{figure}` as {name} of a response to prompt `{request.prompt_id}`",
                    hint="let the scorer raise where it has no score: the sample then counts as an error and is left "
                    "out",
                )
    return score
