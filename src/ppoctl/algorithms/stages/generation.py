"""Generation of samples for a stage: all requests are submitted at once, and each sample is kept when it finishes.
The turns of an episode are kept one by one (`episode_loop`)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from ppoctl.algorithms.stages.episode_events import from_json
from ppoctl.algorithms.stages.episode_loop import EpisodeLoop
from ppoctl.algorithms.stages.episode_runner import EpisodeState, replayed
from ppoctl.core.activity import ACTIVITIES
from ppoctl.core.batch.episodes import EpisodeSettings
from ppoctl.core.batch.records import State
from ppoctl.core.clock import WORK
from ppoctl.core.ports import (
    EpisodeEntry,
    EpisodeLog,
    FinishedSamples,
    Gate,
    Generator,
    OnProgress,
    Sample,
    SampleRequest,
    SampleSetKey,
    SamplingParams,
    Stream,
)

OnSample = Callable[[Sample], None]
"""Called with each sample in the order in which samples finish, loaded samples first."""


class RequestBatch(NamedTuple):
    """Requests with the same sampling parameters."""

    params: SamplingParams
    requests: Sequence[SampleRequest]
    name: str = ""
    """Purpose of the requests, if a stage has several."""
    episodes: EpisodeSettings | None = None
    """Environment and limits of the responses; None: a response has one turn."""


def _both(first: OnSample, then: OnSample) -> OnSample:
    def notify_both(sample: Sample) -> None:
        first(sample)
        then(sample)

    return notify_both


def ignore_sample(_: Sample) -> None:
    """Ignore the sample."""


@dataclass(frozen=True)
class GenerationResult:
    """Samples of a stage."""

    samples: Mapping[str, Sample]
    """All requested samples, by key."""
    tokens: int = 0
    """Number of generated tokens. Tokens of loaded samples and turns, and those of observations, are not counted."""
    seconds: float = 0.0
    """Seconds that this generation took."""
    idle_s: float = 0.0
    """Seconds of these in which all open episodes waited for environments, so that no request was open."""


@dataclass(frozen=True)
class _Remaining:
    """Requests of a batch that are not finished, and the episodes of those that have several turns."""

    batch: RequestBatch
    episodes: Sequence[EpisodeState]


@dataclass(frozen=True)
class NoEpisodeLog:
    """Log of work that is not kept."""

    def load(self, key: SampleSetKey) -> Mapping[str, Sequence[Mapping[str, Any]]]:  # noqa: ARG002 - a port
        return {}

    def append(self, key: SampleSetKey, entries: Sequence[EpisodeEntry]) -> None:
        """Do nothing."""


@dataclass
class _Progress:
    """Progress of a generation."""

    done: dict[str, Sample]
    total: int
    notify: OnProgress
    tokens: int = 0
    idle_s: float = 0.0

    def report(self) -> None:
        self.notify(len(self.done), self.total, self.tokens)


@dataclass(frozen=True)
class SampleGeneration:
    """Generates the samples of a stage. Finished samples survive a crash, and the job may stop between two
    samples."""

    generator: Generator
    parts: FinishedSamples
    gate: Gate
    progress: OnProgress
    log: EpisodeLog = field(default_factory=NoEpisodeLog)
    clock: Callable[[], float] = WORK.now
    """Clock of the generation, in seconds."""
    is_committed_later: bool = False
    """Whether other work follows before the stage is committed, so that the last samples are kept on disk too."""

    @contextmanager
    def run(
        self,
        batches: Sequence[RequestBatch],
        key: SampleSetKey,
        at: Callable[[], State],
        on_sample: OnSample = ignore_sample,
    ) -> Iterator[GenerationResult]:
        """Generate the samples of all batches, one batch after another; keys are unique over all batches.

        Samples that an earlier attempt finished are loaded, and episodes continue from their recorded turns. If no
        sample is missing, `at` is not called, so no state is restored. `on_sample` is called with each sample after
        the sample is kept.

        The caller processes the samples inside the context. If that processing fails, the last samples are kept too.
        """
        done = self.parts.load(key)
        recorded = self.log.load(key) if any(batch.episodes for batch in batches) else {}
        missing = [_remaining(batch, done, recorded) for batch in batches]
        for sample in done.values():
            on_sample(sample)
        remaining = [each for each in missing if each.batch.requests]
        if not remaining:
            yield GenerationResult(done)
            return
        with self.parts.writer(key, to_the_end=self.is_committed_later) as keep:
            kept = _both(keep, on_sample)
            self.generator.prepare(at())
            total = len(done) + sum(len(each.batch.requests) for each in remaining)
            progress, started = _Progress(done, total, self.progress), self.clock()
            progress.report()
            for batch, episodes in ((each.batch, each.episodes) for each in remaining):
                with ACTIVITIES.track(batch.name) if batch.name else nullcontext():
                    if batch.episodes is None:
                        self._generate(batch, progress, kept)
                    else:
                        self._run_episodes(batch, episodes, progress, partial(self.log.append, key), on_sample)
            yield GenerationResult(done, progress.tokens, self.clock() - started, progress.idle_s)

    def _generate(self, batch: RequestBatch, progress: _Progress, keep: OnSample) -> None:
        with stream_samples(self.generator, batch.requests, batch.params) as finished:
            for samples in finished:
                for sample in samples:
                    progress.done[sample.key] = sample
                    progress.tokens += len(sample.tokens)
                    keep(sample)
                    progress.report()
                # The gate is checked only here: all samples that finished together are kept by now, so a stop loses
                # none of them.
                self.gate.between()

    def _run_episodes(
        self,
        batch: RequestBatch,
        episodes: Sequence[EpisodeState],
        progress: _Progress,
        record: Callable[[Sequence[EpisodeEntry]], None],
        on_sample: OnSample,
    ) -> None:
        assert batch.episodes is not None
        with closing(self.generator.open(batch.params)) as stream:
            loop, before = EpisodeLoop(stream, batch.episodes, record), progress.tokens
            with closing(loop.run(episodes)) as finished:
                for samples in finished:
                    progress.tokens = before + loop.generated
                    for sample in samples:
                        progress.done[sample.key] = sample
                        on_sample(sample)
                    progress.report()
                    self.gate.between()
            progress.idle_s += loop.idle_s


def _remaining(
    batch: RequestBatch, done: dict[str, Sample], recorded: Mapping[str, Sequence[Mapping[str, Any]]]
) -> _Remaining:
    """Return the requests of a batch that are not in `done`, after adding the episodes whose end is recorded."""
    if batch.episodes is None:
        requests = [request for request in batch.requests if request.key not in done]
        return _Remaining(batch._replace(requests=requests), ())
    limits, unfinished = batch.episodes.limits, []
    for request in batch.requests:
        events = map(from_json, recorded.get(request.key, ()))
        episode = replayed(request, batch.params, limits, events)
        if isinstance(action := episode.action, Sample):
            done[request.key] = action
        else:
            unfinished.append(episode)
    return _Remaining(batch._replace(requests=[episode.request for episode in unfinished]), unfinished)


@contextmanager
def stream_samples(
    generator: Generator, requests: Sequence[SampleRequest], params: SamplingParams
) -> Iterator[Iterator[Sequence[Sample]]]:
    """Yield an iterator over groups of samples that finished together, in any order. A group is empty if the engines
    replied before a sample finished, so that a stop need not wait for a long response. Open requests are aborted on
    exit."""
    with closing(generator.open(params)) as stream:
        stream.submit(requests)
        yield _drained(stream, len(requests))


def _drained(stream: Stream, missing: int) -> Iterator[Sequence[Sample]]:
    while missing:
        samples = stream.poll()
        missing -= len(samples)
        yield samples
