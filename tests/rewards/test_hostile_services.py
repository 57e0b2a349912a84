"""Services that misuse HTTP: a try ends in time, only its own sample is lost, and the scorer can always be closed."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fakes.hostile import BROKEN, LONG, SLOW, hostile
from ppoctl.batch.scores import Score
from ppoctl.rewards.http import HttpScorer
from ppoctl.rewards.http_scorer import HttpClient
from rewards.asking import request, scores

LIMIT_S = 0.4


@contextmanager
def client(url: str, limit_s: float = LIMIT_S) -> Iterator[HttpClient]:
    """Yield a client that makes one try; afterwards its threads must have ended."""
    scorer = HttpScorer(kind="http", url=url, tries=1, try_timeout_s=limit_s).open()
    assert isinstance(scorer, HttpClient)
    try:
        yield scorer
    finally:
        scorer.close()
    assert [thread for thread in threading.enumerate() if thread.name == "scorer"] == []


def timed_score(url: str) -> tuple[Score, float]:
    """Return the score of one response, and the seconds that it took."""
    with client(url) as scorer:
        began = time.monotonic()
        future = scorer.submit(request("1"))
        return future.result(timeout=20), time.monotonic() - began


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", SLOW)
def test_slow_http_answer_times_out(name: str) -> None:
    with hostile(SLOW[name]) as url:
        score, took_s = timed_score(url)
    assert (score.outcome, score.message) == ("timeout", "no answer within 0.4 s (after 1 tries)")
    assert LIMIT_S <= took_s < LIMIT_S + 2


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", LONG)
def test_oversized_http_answer_is_an_error_without_retry(name: str) -> None:
    with hostile(LONG[name]) as url:
        score, took_s = timed_score(url)
    assert score == Score(None, "error", "its answer is longer than 1048576 bytes", seconds=score.seconds)
    assert took_s < LIMIT_S + 2


@pytest.mark.timeout(60)
@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("name", BROKEN)
def test_broken_http_answer_is_unreachable(name: str, reset: bool) -> None:
    with hostile(BROKEN[name], reset=reset) as url:
        score, took_s = timed_score(url)
    assert score.outcome == "unreachable"
    assert took_s < LIMIT_S + 2


@pytest.mark.parametrize("body", ["[" * 100_000, '{"a":' * 100_000])
def test_deeply_nested_http_answer_fails_its_own_sample_only(body: str) -> None:
    with hostile(lambda _: iter([b"HTTP/1.0 200 OK\r\n\r\n", body.encode()])) as url, client(url) as scorer:
        (score,) = scores(scorer, [request("1")])
    assert (score.outcome, score.message[:22]) == ("error", "its answer is not JSON")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", SLOW)
def test_close_ends_running_http_request(name: str) -> None:
    with hostile(SLOW[name]) as url, client(url, limit_s=600) as scorer:
        pending = scorer.submit(request("1"))
        time.sleep(3 * LIMIT_S)
        began = time.monotonic()
        scorer.close()
        assert time.monotonic() - began < 2
        assert pending.result(timeout=5).outcome == "unreachable"
