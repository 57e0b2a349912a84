"""Draws of one turn: everything is submitted at once, and handled as it finishes."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

from ppoctl.ports import Generator, Sample, SampleRequest, SamplingParams, Stream


@contextmanager
def one_turn(
    generator: Generator, requests: Sequence[SampleRequest], params: SamplingParams
) -> Iterator[Iterator[Sample]]:
    """Samples of these requests, in any order, as they finish. Nothing is drawn any more when the context is left."""
    with closing(generator.open(params)) as stream:
        stream.submit(requests)
        yield _drained(stream)


def _drained(stream: Stream) -> Iterator[Sample]:
    while samples := stream.finished():
        yield from samples
