"""Generation of samples for a stage: all requests are submitted at once, and each sample is kept when it finishes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

from ppoctl.activity import ACTIVITIES
from ppoctl.batch.episodes import EpisodeSettings
from ppoctl.batch.records import State
from ppoctl.clock import WORK
from ppoctl.ports import FinishedSamples, Gate, Generator, Sample, SampleRequest, SampleSetKey, SamplingParams, Stream

OnProgress = Callable[[int, int, int], None]
"""Called with (finished samples, all samples, tokens generated so far); tokens of loaded samples are not counted."""
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
    """Number of tokens of the generated samples. Tokens of loaded samples are not counted."""
    seconds: float = 0.0
    """Seconds that this generation took."""


@dataclass(frozen=True)
class SampleGeneration:
    """Generates the samples of a stage. Finished samples survive a crash, and the job may stop between two
    samples."""

    generator: Generator
    parts: FinishedSamples
    gate: Gate
    progress: OnProgress

    @contextmanager
    def run(
        self,
        batches: Sequence[RequestBatch],
        key: SampleSetKey,
        at: Callable[[], State],
        on_sample: OnSample = ignore_sample,
    ) -> Iterator[GenerationResult]:
        """Generate the samples of all batches, one batch after another; keys are unique over all batches.

        Samples that an earlier attempt finished are loaded. If no sample is missing, `at` is not called, so no state
        is restored. `on_sample` is called with each sample after the sample is kept.

        The caller processes the samples inside the context. If that processing fails, the last samples are kept too.
        """
        done = self.parts.load(key)
        for sample in done.values():
            on_sample(sample)
        missing = [
            batch._replace(requests=[request for request in batch.requests if request.key not in done])
            for batch in batches
        ]
        remaining = [batch for batch in missing if batch.requests]
        if not remaining:
            yield GenerationResult(done)
            return
        with self.parts.writer(key) as keep:
            yield self._generate(remaining, done, _both(keep, on_sample), at)

    def _generate(
        self, remaining: Sequence[RequestBatch], done: dict[str, Sample], keep: OnSample, at: Callable[[], State]
    ) -> GenerationResult:
        total = len(done) + sum(len(batch.requests) for batch in remaining)
        self.generator.prepare(at())
        tokens, started = 0, WORK.now()
        self.progress(len(done), total, tokens)
        for params, requests, name, _ in remaining:
            activity = ACTIVITIES.track(name) if name else nullcontext()
            with activity, stream_samples(self.generator, requests, params) as finished:
                for samples in finished:
                    for sample in samples:
                        done[sample.key] = sample
                        tokens += len(sample.tokens)
                        keep(sample)
                        self.progress(len(done), total, tokens)
                    # The gate is checked only here: all samples that finished together are kept by now, so a stop
                    # loses none of them.
                    self.gate.between()
        return GenerationResult(done, tokens, WORK.now() - started)


@contextmanager
def stream_samples(
    generator: Generator, requests: Sequence[SampleRequest], params: SamplingParams
) -> Iterator[Iterator[Sequence[Sample]]]:
    """Yield an iterator over groups of samples that finished together, in any order. Open requests are aborted on
    exit."""
    with closing(generator.open(params)) as stream:
        stream.submit(requests)
        yield _drained(stream)


def _drained(stream: Stream) -> Iterator[Sequence[Sample]]:
    while samples := stream.finished():
        yield samples
