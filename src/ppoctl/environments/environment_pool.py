"""The `Environments` port over child processes. Imports no torch.

    open(start)      --> the process with the fewest episodes --> its queue --> its thread --> future
    step(past, turn) --> the process of the episode -------------^

An episode stays with its process and the thread of that process. If the process dies or is killed, the thread starts
it again, and each of its other episodes is restored at its next step.
"""

from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Lock, Thread

from ppoctl.core.batch.episodes import Outcome, Past, Turn
from ppoctl.core.errors import PpoctlError
from ppoctl.environments.environment_process import EnvironmentProcess
from ppoctl.environments.environment_table import EnvironmentTable, EpisodeTable
from ppoctl.rewards.scorer_output import Dropped

Job = tuple[Future[Outcome] | None, Callable[[], Outcome | None]]
"""A call of a process, and the future of its outcome; None: its outcome is not used."""


@dataclass(eq=False)
class _Lane:
    """One process, its thread, and the calls that wait for it."""

    process: EnvironmentProcess
    jobs: SimpleQueue[Job | None] = field(default_factory=SimpleQueue)
    """A None ends the thread."""
    thread: Thread | None = None
    """None: no call has been made yet."""
    episodes: set[str] = field(default_factory=set)


class EnvironmentPool:
    """Processes of all environments of a table: `workers` for each kind. Call `shutdown` at the end."""

    def __init__(self, table: EpisodeTable) -> None:
        self._table = table
        self._kinds = {id(kind): _KindProcesses(kind) for kind in table.kinds.values()}
        self._lock = Lock()
        """Held while an episode is assigned or a call is queued."""
        self._of_episode: dict[str, _KindProcesses] = {}
        self._is_shut = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the children that run now."""
        return [pid for kind in self._kinds.values() for pid in kind.pids]

    def open(self, start: Past) -> Future[Outcome]:
        """Open the environment of an episode, and return a future of its first observation.

        The future raises RecipeError if no process can be started, and DataError if the row has no environment.
        """
        return self._queued(start, lambda process: process.open(start))

    def step(self, past: Past, turn: Turn) -> Future[Outcome]:
        """Return a future of the observation of a turn. An environment that was lost, or that another pool opened,
        is first restored from its past."""
        return self._queued(past, lambda process: process.step(past, turn))

    def close(self, key: str) -> None:
        """Close the environment of an episode that has ended. An unknown key is ignored."""
        with self._lock:
            if not self._is_shut and (kind := self._of_episode.pop(key, None)) is not None:
                kind.close(key)

    def shutdown(self) -> None:
        """Kill and reap all processes. Futures without an outcome are cancelled. May be called again."""
        with self._lock:
            self._is_shut = True
        for kind in self._kinds.values():
            kind.shutdown()

    def _queued(self, past: Past, call: Callable[[EnvironmentProcess], Outcome]) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        with self._lock:
            if self._is_shut:
                future.cancel()
                return future
            try:
                kind = self._of_episode.get(past.key) or self._kinds[id(self._table.of_row(past.row.fields))]
            except PpoctlError as error:
                future.set_exception(error)
                return future
            self._of_episode[past.key] = kind
            kind.queue(past.key, future, call)
        return future


class _KindProcesses:
    """Processes of one kind of environment."""

    def __init__(self, table: EnvironmentTable) -> None:
        spec = table.answers_by
        self._dropped = Dropped(f"environment `{spec.known_as}`")
        self._lanes = [
            _Lane(EnvironmentProcess(spec, self._dropped, table.seconds, has_state=table.has_state))
            for _ in range(table.workers)
        ]
        self._lane_of: dict[str, _Lane] = {}
        self._is_shut = False
        self._cannot_start: PpoctlError | None = None

    @property
    def pids(self) -> list[int]:
        """Process ids of the children that run now."""
        return [lane.process.pid for lane in self._lanes if lane.process.pid is not None]

    def queue(self, key: str, future: Future[Outcome], call: Callable[[EnvironmentProcess], Outcome]) -> None:
        """Queue a call for the process of an episode. A new episode gets the process with the fewest episodes."""
        lane = self._lane_of.get(key) or min(self._lanes, key=lambda lane: len(lane.episodes))
        self._lane_of[key] = lane
        lane.episodes.add(key)
        lane.jobs.put((future, lambda: call(lane.process)))
        if lane.thread is None:
            # These are daemon threads, unlike the threads of an executor: a process that exits without a shutdown
            # must not wait for an environment or for the queue.
            lane.thread = Thread(target=self._serve, args=(lane,), name="environment", daemon=True)
            lane.thread.start()

    def close(self, key: str) -> None:
        """Queue the end of an episode."""
        lane = self._lane_of.pop(key)
        lane.episodes.discard(key)
        lane.jobs.put((None, lambda: lane.process.close_episode(key)))

    def shutdown(self) -> None:
        """Kill and reap all processes. May be called again."""
        self._is_shut = True
        for lane in self._lanes:
            with suppress(Empty):
                while (job := lane.jobs.get_nowait()) is not None:
                    if job[0] is not None:
                        job[0].cancel()
            lane.process.close()
        # All processes are killed by now, so no thread waits for an answer.
        for lane in self._lanes:
            if lane.thread is not None:
                lane.jobs.put(None)
                lane.thread.join()
            lane.process.reap()
        self._dropped.report()

    def _serve(self, lane: _Lane) -> None:
        while (job := lane.jobs.get()) is not None:
            future, call = job
            if future is None:
                call()
            elif future.set_running_or_notify_cancel():
                try:
                    outcome = self._outcome(call)
                except BaseException as error:  # noqa: BLE001 - the caller of `result` gets it
                    future.set_exception(error)
                else:
                    future.set_result(outcome)

    def _outcome(self, call: Callable[[], Outcome | None]) -> Outcome:
        if self._cannot_start is not None:
            raise self._cannot_start
        try:
            outcome = call()
        except PpoctlError as error:
            self._cannot_start = error
            raise
        finally:
            if self._is_shut:  # the process was killed by `shutdown`, so its end is not the environment's failure
                raise CancelledError
        assert outcome is not None
        return outcome
