"""The `Scorer` port over child processes: each sample has its own deadline, and a scorer that hangs, raises or dies
costs its own sample only. Imports no torch: `validate` uses it on a login node.

    submit(request) --> one queue --> a thread for each child process: asks it, waits until the deadline --> future

What is not a finite float32 stops here: it never trains.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from threading import local

from ppoctl.batch.scores import Score, ScoreRequest
from ppoctl.errors import NonFiniteError, RewardError
from ppoctl.rewards.function import ScorerSpec, is_trainable
from ppoctl.rewards.scorer_process import ScorerProcess


class ScorerPool:
    """`workers` persistent children, started by the first requests. `close` it."""

    def __init__(self, spec: ScorerSpec, *, workers: int = 1, timeout_s: float = 10.0) -> None:
        self._processes = [ScorerProcess(spec, timeout_s) for _ in range(workers)]
        self._own = local()
        """The `process` that a thread asks."""
        unasked = iter(self._processes)
        self._threads = ThreadPoolExecutor(
            workers, "scorer", initializer=lambda: setattr(self._own, "process", next(unasked))
        )
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
        return self._threads.submit(self._scored, request)

    def close(self) -> None:
        """Kill and reap all children; what has no score yet is cancelled or an error. May be called twice."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.close()
        self._threads.shutdown()
        for process in self._processes:
            process.reap()

    def _scored(self, request: ScoreRequest) -> Score:
        if self._cannot_start is not None:
            raise self._cannot_start
        try:
            return _finite(self._own.process.score(request), request)
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
