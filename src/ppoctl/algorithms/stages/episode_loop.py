"""Many open episodes on one stream of requests: the engines generate while environments answer other turns.

Every event is recorded, and is on disk, before it is used. Events that arrive together are recorded together.
"""

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field

from ppoctl.algorithms.stages.episode_events import as_json
from ppoctl.algorithms.stages.episode_runner import EpisodeState, Event, Open, Step
from ppoctl.core.batch.episodes import EpisodeSettings, Outcome
from ppoctl.core.clock import WORK
from ppoctl.core.ports import EpisodeEntry, Sample, SampleRequest, Stream

LOOK_EVERY_S = 0.2
"""Seconds between two checks whether the job must stop, while all open episodes wait for environments."""

RecordEntries = Callable[[Sequence[EpisodeEntry]], None]
"""Function that returns when these entries are on disk."""


@dataclass
class EpisodeLoop:
    """Runs episodes to their ends."""

    stream: Stream
    settings: EpisodeSettings
    record: RecordEntries
    generated: int = 0
    """Number of tokens that the actor generated so far; recorded turns are not counted."""
    idle_s: float = 0.0
    """Seconds in which no request was open, because all open episodes waited for environments."""
    _open: dict[str, EpisodeState] = field(default_factory=dict)
    _requested: dict[str, EpisodeState] = field(default_factory=dict)
    """Key of an open request -> its episode."""
    _answers: dict[str, Future[Outcome]] = field(default_factory=dict)
    """Key of an episode -> the future that it waits for."""

    def run(self, episodes: Sequence[EpisodeState]) -> Generator[list[Sample]]:
        """Yield the responses of the episodes that ended together, in any order. A group may be empty: the caller can
        then check whether the job must stop, and everything that has happened is recorded. Environments that are
        still open are closed when the iterator is closed."""
        self._open = {episode.request.key: episode for episode in episodes}
        try:
            finished = self._start(episodes)
            while self._open:
                yield finished
                arrived = self._arrived()
                self.record([EpisodeEntry(e.request.key, e.num_events, as_json(event)) for e, event in arrived])
                for episode, event in arrived:
                    episode.take(event)
                finished = self._start([episode for episode, _ in arrived])
            yield finished
        finally:
            for key in self._open:
                self.settings.environments.close(key)

    def _start(self, episodes: Sequence[EpisodeState]) -> list[Sample]:
        """Start the next action of each episode, and return the responses of those that have ended."""
        requests: list[SampleRequest] = []
        finished: list[Sample] = []
        for episode in episodes:
            key = episode.request.key
            match episode.action:
                case Open(start):
                    self._answers[key] = self.settings.environments.open(start)
                case Step(past, turn):
                    self._answers[key] = self.settings.environments.step(past, turn)
                case SampleRequest() as request:
                    self._requested[request.key] = episode
                    requests.append(request)
                case Sample() as sample:
                    finished.append(sample)
                    del self._open[key]
                    self.settings.environments.close(key)
        if requests:
            self.stream.submit(requests)
        return finished

    def _arrived(self) -> list[tuple[EpisodeState, Event]]:
        """Return the events that have arrived, which may be none. Waits for engines if a request is open, so that no
        environment delays them; otherwise for environments."""
        if answers := self._answered():
            return answers
        if self._requested:
            samples = self.stream.poll()
            self.generated += sum(len(sample.tokens) for sample in samples)
            turns: list[tuple[EpisodeState, Event]] = [
                (self._requested.pop(sample.key), sample) for sample in samples
            ]
            return [*turns, *self._answered()]
        started = WORK.now()
        wait(self._answers.values(), timeout=LOOK_EVERY_S, return_when=FIRST_COMPLETED)
        self.idle_s += WORK.now() - started
        return self._answered()

    def _answered(self) -> list[tuple[EpisodeState, Event]]:
        """Return the answers of environments that have arrived."""
        done = [key for key, future in self._answers.items() if future.done()]
        return [
            (self._open[key], self._open[key].event_of(self._answers.pop(key).result(), self.settings.dialogue))
            for key in done
        ]
