"""Scoring in child processes: each sample has its own deadline, and a scorer that hangs, raises or dies costs its
own sample only. Imports no torch: `validate` uses it on a login node.

    pool                         worker (parent's end)            child process
    pending: 0 1 2 3 4 ...  -->  queue: 0 1 2 .. 15         -->   scores 0, replies; scores 1, replies; ...
                            <--  one message per sample     <--
    deadline of a sample: `timeout_s` after the message before it

A worker is killed and started anew when its sample is overdue or its child is gone; the rest of its queue goes back
to `pending`. Not for use by two threads at a time. Call `score` from a thread that lives on: the kernel ends the
children with the thread that started them.
"""

import selectors
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

from ppoctl.errors import RewardError
from ppoctl.rewards.worker import Question, ScorerSpec, Worker

CHUNK_SAMPLES = 16
"""Enough that a quick scorer does not wait for the parent; few enough that workers share the load."""

_STARTS = 3
"""A child that is killed while it starts is started again this often: memory may be short for a moment."""


@dataclass(frozen=True)
class Outcome:
    """What came of one sample. `value` is None unless `kind` is "ok"."""

    kind: Literal["ok", "timeout", "error"]
    value: float | None = None
    message: str = ""
    extras: dict[str, float] = field(default_factory=dict)


@dataclass
class _Job:
    """One call of `score`."""

    questions: Sequence[Question]
    pending: deque[int]
    outcomes: dict[int, Outcome]

    @property
    def finished(self) -> bool:
        return len(self.outcomes) == len(self.questions)


class ScorerPool:
    """`workers` persistent children, started by the first call. `close` it, or use it as a context."""

    def __init__(self, spec: ScorerSpec, *, workers: int = 1, timeout_s: float = 10.0) -> None:
        self.spec = spec
        self._timeout_s = timeout_s
        self._workers = [Worker(spec) for _ in range(workers)]
        self._selector = selectors.DefaultSelector()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Of the children that run now."""
        return [worker.pid for worker in self._workers if worker.running]

    def score(self, questions: Sequence[Question]) -> list[Outcome]:
        """One outcome per question, in order. Raises RewardError when the scorer cannot be started at all."""
        assert not self._closed, "a closed pool scores nothing"
        job = _Job(questions, deque(range(len(questions))), {})
        try:
            while not job.finished:
                self._give_out(job)
                self._listen(job)
        finally:
            # Only an exception leaves a worker with a queue: its child is in the middle of something.
            for worker in self._workers:
                if worker.queue:
                    self._stop(worker)
        return [job.outcomes[number] for number in range(len(questions))]

    def close(self) -> None:
        """Kill and reap all children. May be called twice."""
        for worker in self._workers:
            if worker.running:
                self._stop(worker)
        if not self._closed:
            self._selector.close()
        self._closed = True

    def __enter__(self) -> "ScorerPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _give_out(self, job: _Job) -> None:
        """Give each free worker a chunk; start the workers that are needed and do not run."""
        for worker in self._workers:
            if not job.pending:
                return
            if worker.running and worker.ready and not worker.queue and worker.has_ended():
                self._stop(worker)  # between two samples, so nobody's fault and nobody's loss
            if not worker.running:
                self._start(worker)
            elif worker.ready and not worker.queue:
                share = -(-len(job.pending) // len(self._workers))
                chunk = [job.pending.popleft() for _ in range(min(CHUNK_SAMPLES, share))]
                worker.give(chunk, job.questions)
                worker.write()
                worker.deadline = time.monotonic() + self._timeout_s
                self._watch(worker)

    def _listen(self, job: _Job) -> None:
        """Wait for messages or the next deadline, and act on either."""
        active = [worker for worker in self._workers if worker.running and (worker.queue or not worker.ready)]
        asked_at = time.monotonic()
        # A deadline counts only when it had passed before we looked and found nothing: a parent that was stopped
        # for an hour must not blame the children.
        overdue = {worker for worker in active if worker.deadline <= asked_at}
        wait_s = max(0.0, min(worker.deadline for worker in active) - asked_at)
        heard: set[Worker] = set()
        for key, events in self._selector.select(wait_s):
            worker = key.data
            heard.add(worker)
            if not worker.running:
                continue  # stopped while its other pipe was handled
            if events & selectors.EVENT_WRITE:
                worker.write()
                self._watch(worker)
            if events & selectors.EVENT_READ:
                self._take(worker, job)
        for worker in overdue - heard:
            self._give_up(worker, job)

    def _take(self, worker: Worker, job: _Job) -> None:
        messages = worker.read()
        if messages is None:
            self._bury(worker, job)
            return
        for message in messages:
            if "failed" in message:
                self._stop(worker)
                raise _cannot_start(self.spec, str(message["failed"]))
            if "ready" in message:
                worker.ready = True
                worker.failed_starts = 0
                continue
            if not worker.queue or message.get("number") != worker.queue[0]:
                self._bury(worker, job)  # something else writes into its pipe
                return
            job.outcomes[worker.queue.popleft()] = _outcome(message)
            worker.deadline = time.monotonic() + self._timeout_s

    def _give_up(self, worker: Worker, job: _Job) -> None:
        """The sample in hand is overdue."""
        if not worker.ready:
            self._stop(worker)
            raise _cannot_start(self.spec, "it did not finish its imports in time")
        if worker.has_ended():
            self._bury(worker, job)
            return
        number = worker.queue.popleft()
        job.outcomes[number] = Outcome("timeout", message=f"no score within {self._timeout_s:g} s")
        self._requeue(worker, job)

    def _bury(self, worker: Worker, job: _Job) -> None:
        """The child is gone, or as good as gone: the sample in hand is an error, the others wait for the next."""
        worker.wait_for_end()
        blamed = worker.queue.popleft() if worker.queue else None
        was_ready = worker.ready
        how = self._requeue(worker, job) or "the scorer closed or misused the pipe to its parent"
        if blamed is not None:
            job.outcomes[blamed] = Outcome("error", message=how)
        elif not was_ready:
            worker.failed_starts += 1
            if worker.failed_starts >= _STARTS:
                raise _cannot_start(self.spec, how)

    def _requeue(self, worker: Worker, job: _Job) -> str:
        job.pending.extendleft(reversed(worker.queue))
        return self._stop(worker)

    def _start(self, worker: Worker) -> None:
        try:
            worker.start()
        except OSError as error:
            raise _cannot_start(self.spec, str(error)) from error
        self._selector.register(worker.replies_fd, selectors.EVENT_READ, worker)

    def _stop(self, worker: Worker) -> str:
        for fd in (worker.replies_fd, worker.requests_fd):
            if fd in self._selector.get_map():
                self._selector.unregister(fd)
        return worker.stop()

    def _watch(self, worker: Worker) -> None:
        """Listen for room in the child's pipe exactly while there is something left to send."""
        watched = worker.requests_fd in self._selector.get_map()
        if worker.wants_to_write and not watched:
            self._selector.register(worker.requests_fd, selectors.EVENT_WRITE, worker)
        elif watched and not worker.wants_to_write:
            self._selector.unregister(worker.requests_fd)


def _outcome(message: dict[str, Any]) -> Outcome:
    if "error" in message:
        return Outcome("error", message=str(message["error"]))
    return Outcome("ok", value=float(message["value"]), extras=dict(message["extras"]))


def _cannot_start(spec: ScorerSpec, why: str) -> RewardError:
    return RewardError(
        f"the scorer `{spec.entry}` does not start: {why}",
        hint=f"python -m {spec.entry.partition(':')[0]} shows why it cannot be imported",
    )
