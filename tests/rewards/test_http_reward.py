"""HTTP reward: what is sent, how answers are read, and what happens to a run when the service fails."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from fakes.hostile import closed_port
from ppoctl.core.batch.prompts import Message
from ppoctl.core.batch.scores import Score, ScoreRequest
from ppoctl.core.errors import ExitCode, MissingAssetError, NonFiniteError, RewardError
from ppoctl.rewards.http import HttpScorer
from ppoctl.rewards.http_scorer import ServiceScorer
from rewards.asking import request, scores
from rewards.scoring_service import Service, serving

Open = Callable[..., ServiceScorer]
NO_SCORE = "its answer is not a number, or a mapping of numbers with `score`: "


@pytest.fixture
def service() -> Iterator[Service]:
    with serving() as service:
        yield service


@pytest.fixture
def client(service: Service) -> Iterator[Open]:
    """Open clients of the service with short timeouts; afterwards none of their threads may be left."""
    opened: list[ServiceScorer] = []

    def open_client(**keys: Any) -> ServiceScorer:
        short = {"url": service.url, "backoff_s": 0.01, "try_timeout_s": 5.0, "breaker_failures": 1000}
        scorer = HttpScorer(kind="http", **(short | keys)).open()
        assert isinstance(scorer, ServiceScorer)
        opened.append(scorer)
        return scorer

    yield open_client
    for scorer in opened:
        scorer.close()
    assert [thread for thread in threading.enumerate() if thread.name == "scorer"] == []


def scores_of(client: ServiceScorer, *responses: str) -> list[Score]:
    return scores(client, [request(response) for response in responses])


def test_score_request_is_posted_as_json(service: Service, client: Open) -> None:
    sent = ScoreRequest(
        "train/7", "<user>Q", (Message("user", "Q"),), "200 0.5", "42", {"level": 3}, "truncated", (5, 6)
    )
    assert scores(client(), [sent]) == [Score(0.5, "ok")]
    assert service.asked == [
        {
            "prompt_id": "train/7",
            "prompt": "<user>Q",
            "messages": [{"role": "user", "content": "Q"}],
            "response": "200 0.5",
            "truth": "42",
            "fields": {"level": 3},
            "finish": "truncated",
            "token_ids": [5, 6],
        }
    ]
    assert service.headers[0]["Content-Type"] == "application/json"
    assert service.headers[0]["path"] == "/score?v=1"


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("200 1", Score(1.0, "ok")),
        ('200 {"score": 0.25, "helpful": 2}', Score(0.25, "ok", extras={"helpful": 2.0})),
        ('200 {"error": "no such language"}', Score(None, "refused", "no such language")),
        ('200 "good"', Score(None, "error", NO_SCORE + '`"good"`')),
        ('200 {"value": 1}', Score(None, "error", NO_SCORE + '`{"value": 1}`')),
        ("200 <html>", Score(None, "error", "its answer is not JSON: `<html>`")),
        ("200 ", Score(None, "error", "its answer is not JSON: ``")),
        ("200 1" + "0" * 400, Score(None, "error", NO_SCORE + f"`1{'0' * 199}`")),
        ("302 there", Score(None, "error", "it answered 302: `there`")),
        ("404 no\nroute", Score(None, "refused", "it answered 404: `no route`")),
        ("500,500,500,500 oh", Score(None, "error", "it answered 500: `oh` (after 4 tries)")),
        ("500,503,429 1", Score(1.0, "ok")),
        ("408 1", Score(1.0, "ok")),
    ],
)  # fmt: skip
def test_http_answer_is_a_score_or_an_error(client: Open, response: str, score: Score) -> None:
    assert scores_of(client(), response, "200 3") == [score, Score(3.0, "ok")]


def test_disconnected_or_missing_service_is_unreachable(client: Open) -> None:
    (score,) = scores_of(client(tries=2), "vanish")
    assert (score.outcome, score.message) == (
        "unreachable",
        "RemoteProtocolError: Server disconnected without sending a response. (after 2 tries)",
    )
    (score,) = scores_of(client(url=f"http://{closed_port()}", tries=2), "200 1")
    refused = "ConnectError: [Errno 111] Connection refused (after 2 tries)"
    assert (score.outcome, score.message) == ("unreachable", refused)


def test_late_answer_times_out_for_its_own_sample_only(client: Open) -> None:
    began = time.monotonic()
    late, good = scores_of(client(tries=2, try_timeout_s=0.3), "hang", "200 1")
    assert late.outcome == "timeout"
    assert re.fullmatch(r"no (answer|connection) within 0\.3 s \(after 2 tries\)", late.message)
    assert good == Score(1.0, "ok")
    assert 0.6 <= late.seconds <= time.monotonic() - began < 30


def test_concurrent_requests_reuse_connections(service: Service, client: Open) -> None:
    assert scores_of(client(concurrent=3), *["sleep 0.1"] * 9) == [Score(1.0, "ok")] * 9
    assert service.most_at_once == 3
    assert service.connections == 3


def test_each_request_on_reused_connection_has_full_timeout(service: Service, client: Open) -> None:
    scorer = client(concurrent=1, tries=1, try_timeout_s=2.0)
    for _ in range(2):
        assert scores_of(scorer, "sleep 1.2") == [Score(1.0, "ok")]
    assert service.connections == 1


def test_closed_idle_connection_is_reopened_without_failure(service: Service, client: Open) -> None:
    assert scores_of(client(concurrent=1, tries=1), "once 1", "once 1", "200 2") == [
        Score(1.0, "ok"), Score(1.0, "ok"), Score(2.0, "ok"),
    ]  # fmt: skip
    assert len(service.asked) == 3


def test_requests_wait_without_losing_tries_while_service_is_down(service: Service, client: Open) -> None:
    # Four tries open the breaker, at worst all for the same response; after that, one try is made at a time.
    scorer = client(tries=5, concurrent=4, breaker_failures=4, breaker_pause_s=0.02, give_up_s=30)
    service.is_down = True
    futures = [scorer.submit(request(f"200 {number}")) for number in range(8)]
    while len(service.asked) <= 5 * 4:  # enough for one response to use up its 5 tries, if waiting lost tries
        time.sleep(0.01)
    assert not any(future.done() for future in futures)
    service.is_down = False
    assert [future.result(timeout=10).value for future in futures] == list(range(8))


def test_service_that_stays_down_stops_run(service: Service, client: Open) -> None:
    scorer = client(concurrent=2, breaker_failures=2, breaker_pause_s=0.05, give_up_s=0.3)
    service.is_down = True
    for future in [scorer.submit(request(f"200 {number}")) for number in range(4)]:
        with pytest.raises(RewardError) as caught:
            future.result(timeout=10)
        assert caught.value.message.startswith(
            f"the service `{service.url}` has not answered for 0.3 s; last error: Remote"
        )
        assert caught.value.exit_code == ExitCode.DATA
    assert len(service.asked) < 20


def test_idle_time_between_steps_is_not_counted_as_down(service: Service, client: Open) -> None:
    scorer = client(concurrent=1, tries=2, breaker_failures=2, breaker_pause_s=0.05, try_timeout_s=1.0, give_up_s=3.0)
    service.is_down = True
    assert scores_of(scorer, "200 1")[0].outcome in ("unreachable", "timeout")
    time.sleep(3.5)  # longer than the time after which it gives up
    future = scorer.submit(request("200 2"))
    time.sleep(0.1)  # its first try then finds the service down
    service.is_down = False
    assert future.result(timeout=10) == Score(2.0, "ok")


@pytest.mark.parametrize(("answer", "named"), [("NaN", "reward"), ('{"score": 1, "margin": Infinity}', "margin")])
def test_non_finite_http_score_raises(client: Open, answer: str, named: str) -> None:
    with pytest.raises(NonFiniteError, match=f"as {named} of a response to prompt `train/0`"):
        scores_of(client(), f"200 {answer}")


def test_http_scorer_close_cancels_requests_and_is_idempotent(service: Service, client: Open) -> None:
    scorer = client(concurrent=1, try_timeout_s=600)
    hanging, waiting = scorer.submit(request("hang")), scorer.submit(request("200 1"))
    while not service.asked:
        time.sleep(0.01)
    scorer.close()
    scorer.close()
    assert hanging.result(timeout=20).outcome == "unreachable"
    assert waiting.cancelled()


def test_http_scorer_close_ends_requests_waiting_for_service(service: Service, client: Open) -> None:
    scorer = client(concurrent=3, breaker_failures=1, breaker_pause_s=600, give_up_s=10_000)
    service.is_down = True
    futures = [scorer.submit(request("200 1")) for _ in range(3)]
    while not (service.asked and all(future.running() for future in futures)):
        time.sleep(0.01)
    scorer.close()
    assert {future.result(timeout=20).outcome for future in futures} == {"unreachable"}


def test_bearer_token_is_read_from_environment(
    service: Service, client: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MissingAssetError, match="`SCORING_TOKEN`, which is not set"):
        client(token_env="SCORING_TOKEN")
    monkeypatch.setenv("SCORING_TOKEN", "s3cret")
    scores_of(client(token_env="SCORING_TOKEN"), "200 1")
    assert service.headers[0]["Authorization"] == "Bearer s3cret"


def test_lone_surrogates_are_sent(service: Service, client: Open) -> None:
    assert scores(client(), [replace(request("200 1"), response="200 1 \ud800")])[0].outcome == "error"
    assert service.asked[0]["response"] == "200 1 \ud800"
