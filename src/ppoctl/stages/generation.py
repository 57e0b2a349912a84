"""Draws of one turn: everything is submitted at once, handled as it finishes, and kept over a crash of the stage."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

from ppoctl.activity import ACTIVITIES
from ppoctl.batch.records import State
from ppoctl.clock import WORK
from ppoctl.ports import FinishedSamples, Gate, Generator, Sample, SampleRequest, SampleSetKey, SamplingParams, Stream

OnProgress = Callable[[int, int, int], None]
"""(finished samples, all samples, tokens drawn so far; recalled ones are not)."""
OnSample = Callable[[Sample], None]
"""Told of each finished sample, in the order in which they finish; those that are recalled first."""


class RequestBatch(NamedTuple):
    """What is drawn with the same parameters."""

    params: SamplingParams
    requests: Sequence[SampleRequest]
    name: str = ""
    """What it is for, where a stage draws for several things."""


def _both(first: OnSample, then: OnSample) -> OnSample:
    def told(sample: Sample) -> None:
        first(sample)
        then(sample)

    return told


def ignore_sample(_: Sample) -> None:
    """Nobody is told."""


@dataclass(frozen=True)
class GenerationResult:
    """What a stage has drawn."""

    samples: Mapping[str, Sample]
    """All that were asked for, by key."""
    tokens: int = 0
    """Tokens of those that were not recalled."""
    seconds: float = 0.0
    """How long these were being drawn."""


@dataclass(frozen=True)
class SampleGeneration:
    """How a stage draws: finished samples survive a crash of it, and between two of them the job may be stopped."""

    generator: Generator
    parts: FinishedSamples
    gate: Gate
    progress: OnProgress

    @contextmanager
    def run(
        self,
        batches: Sequence[RequestBatch],
        drawn_for: SampleSetKey,
        at: Callable[[], State],
        heard: OnSample = ignore_sample,
    ) -> Iterator[GenerationResult]:
        """Samples of all turns, one turn after the other; keys are unique over all of them. Those that an earlier
        attempt kept are not drawn again, and where none is left to draw nobody asks for the state (`at`). Each sample
        is `heard` once it is kept.

        What the stage does with them belongs into the context: where that fails, the last ones are kept, too.
        """
        done = self.parts.load(drawn_for)
        for sample in done.values():
            heard(sample)
        missing = [turn._replace(requests=[one for one in turn.requests if one.key not in done]) for turn in batches]
        left = [turn for turn in missing if turn.requests]
        if not left:
            yield GenerationResult(done)
            return
        with self.parts.writer(drawn_for) as keep:
            yield self._draw(left, done, _both(keep, heard), at)

    def _draw(
        self, left: Sequence[RequestBatch], done: dict[str, Sample], keep: OnSample, at: Callable[[], State]
    ) -> GenerationResult:
        total = len(done) + sum(len(turn.requests) for turn in left)
        self.generator.prepare(at())
        tokens, started = 0, WORK.now()
        self.progress(len(done), total, tokens)
        for params, requests, name in left:
            named = ACTIVITIES.track(name) if name else nullcontext()
            with named, stream_samples(self.generator, requests, params) as finished:
                for samples in finished:
                    for sample in samples:
                        done[sample.key] = sample
                        tokens += len(sample.tokens)
                        keep(sample)
                        self.progress(len(done), total, tokens)
                    self.gate.between()  # all that finished together are kept by now
        return GenerationResult(done, tokens, WORK.now() - started)


@contextmanager
def stream_samples(
    generator: Generator, requests: Sequence[SampleRequest], params: SamplingParams
) -> Iterator[Iterator[Sequence[Sample]]]:
    """Samples of these requests, in any order, those together that finished together. Nothing is drawn any more when
    the context is left."""
    with closing(generator.open(params)) as stream:
        stream.submit(requests)
        yield _drained(stream)


def _drained(stream: Stream) -> Iterator[Sequence[Sample]]:
    while samples := stream.finished():
        yield samples
