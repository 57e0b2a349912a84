"""One score computed from the scores of several scorers. Imports no torch."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from threading import Lock

from ppoctl.core.batch.scores import BatchScorer, Score, Scorer

Scores = Mapping[str, Score]
"""Scores of the components, by name."""


def combined(parts: Mapping[str, Future[Score]], of: Callable[[Scores], Score]) -> Future[Score]:
    """Return a future for the score that `of` computes from the scores of all components. The future raises the error
    of the first component that fails. Cancelling the future cancels the components."""
    whole: Future[Score] = Future()
    lock, missing = Lock(), len(parts)

    def arrived(_: Future[Score]) -> None:
        nonlocal missing
        with lock:
            missing -= 1
            is_last = missing == 0
        if is_last:
            _settle(whole, parts, of)

    def cancelled(future: Future[Score]) -> None:
        if future.cancelled():
            for part in parts.values():
                part.cancel()

    whole.add_done_callback(cancelled)
    for part in parts.values():
        part.add_done_callback(arrived)
    return whole


def _settle(whole: Future[Score], parts: Mapping[str, Future[Score]], of: Callable[[Scores], Score]) -> None:
    if any(part.cancelled() for part in parts.values()):
        whole.cancel()
    elif whole.set_running_or_notify_cancel():
        try:
            whole.set_result(of({name: part.result() for name, part in parts.items()}))
        except Exception as error:  # noqa: BLE001 - the caller of `result` gets it
            whole.set_exception(error)


def flush_all_scorers(scorers: Iterable[Scorer]) -> None:
    """Call `flush` of each scorer that collects requests into batches."""
    for scorer in scorers:
        if isinstance(scorer, BatchScorer):
            scorer.flush()


def close_all(scorers: Iterable[Scorer]) -> None:
    """Close each scorer, even if closing another one fails."""
    with ExitStack() as closing:
        for scorer in scorers:
            closing.callback(scorer.close)
