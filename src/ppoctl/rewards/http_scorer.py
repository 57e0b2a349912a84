"""The `Scorer` port over an HTTP service. Imports no torch.

    submit(request) --> one queue --> `concurrent` threads: try, back off, try again --> future
                                          |
                                       Breaker: whether the service answers at all, shared by all threads

The outcome of a response is one of: a score; `timeout` or `unreachable`, after all tries; `refused`, if the service
will not score it (4xx, or an `error` in its answer); `error`, if the answer is not a score, or is 5xx after all
tries.
"""

import json
import os
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from http.client import HTTPException
from queue import Empty, SimpleQueue
from random import Random
from threading import Condition, Event, Thread
from typing import Any

from ppoctl.batch.scores import Score, ScoreRequest
from ppoctl.errors import MissingAssetError, ServiceLostError, quoted
from ppoctl.http_client import Connection, HttpResponse
from ppoctl.rewards.function import NoScoreError
from ppoctl.rewards.pool import not_finite

_BUSY = frozenset((408, 425, 429))
_ANSWER_BYTES = 1 << 20
_SHOWN_CHARS = 200
_LONGEST_BACKOFF_S = 60.0
_CLOSING_S = 2.0
"""Seconds that threads have to end after their connections are closed. A thread that waits for name resolution may
take longer; `close` does not wait for such a thread."""


@dataclass(frozen=True)
class Service:
    """Address of a service and settings of its client: the keys of `HttpScorer`, documented there."""

    url: str
    token_env: str | None
    concurrent: int
    try_timeout_s: float
    tries: int
    backoff_s: float
    breaker_failures: int
    breaker_pause_s: float
    give_up_s: float


class HttpClient:
    """Threads that send requests to a service, started by the first requests. Call `close` at the end."""

    def __init__(self, service: Service) -> None:
        """Raises MissingAssetError if the environment variable of the token is not set."""
        self._service = service
        self._headers = {"Content-Type": "application/json", **_authorization(service.token_env)}
        self._closing = Event()
        self._breaker = Breaker(service, self._closing)
        self._waiting: SimpleQueue[tuple[Future[Score], ScoreRequest] | None] = SimpleQueue()
        """Requests that no thread has taken yet; a None ends one thread."""
        self._connections: list[Connection] = []
        self._threads: list[Thread] = []

    def submit(self, request: ScoreRequest) -> Future[Score]:
        """Return a future for the score. The future raises NonFiniteError if a number cannot be trained on, and
        ServiceLostError if the service stays down for `give_up_s`."""
        future: Future[Score] = Future()
        self._waiting.put((future, request))
        if len(self._threads) < self._service.concurrent:
            service = self._service
            self._connections.append(Connection(service.url, limit_s=service.try_timeout_s, most_bytes=_ANSWER_BYTES))
            arguments = (self._connections[-1],)
            self._threads.append(Thread(target=self._serve, args=arguments, name="scorer", daemon=True))
            self._threads[-1].start()
        return future

    def close(self) -> None:
        """Cancel requests without a score, and close the connections. May be called twice."""
        self._closing.set()
        with suppress(Empty):
            while (left := self._waiting.get_nowait()) is not None:
                left[0].cancel()
        self._breaker.wake()
        for _ in self._threads:
            self._waiting.put(None)
        for connection in self._connections:
            connection.cut()
        until = time.monotonic() + _CLOSING_S
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0.0))

    def _serve(self, connection: Connection) -> None:
        while (entry := self._waiting.get()) is not None:
            future, request = entry
            if not future.set_running_or_notify_cancel():
                continue
            began = time.monotonic()
            try:
                score = replace(self._scored(connection, request), seconds=time.monotonic() - began)
                if (fault := not_finite(score, request)) is not None:
                    raise fault
                future.set_result(score)
            except Exception as error:  # noqa: BLE001 - the caller of `result` gets it
                future.set_exception(error)
        connection.close()

    def _scored(self, connection: Connection, request: ScoreRequest) -> Score:
        body = json.dumps(request.as_json()).encode()
        chance = Random(body)  # distributes tries over time, equally in every run
        headers: Mapping[str, str]
        tried, failed = 0, NoScoreError("unreachable", "the scorer was closed")
        while not self._closing.is_set():
            is_only_try = self._breaker.enter()
            try:
                answer = self._post(connection, body)
            except NoScoreError as why:
                headers, failed = {}, why
            else:
                if answer.status not in _BUSY and answer.status < 500:
                    return _read(answer)
                headers, failed = answer.headers, NoScoreError("error", _status_of(answer))
            # The single try while the service is down is made for all responses, so it does not count as a try of
            # this response.
            tried += not is_only_try
            if tried >= self._service.tries:
                return Score(None, failed.outcome, f"{failed} (after {tried} tries)")
            self._closing.wait(self._backoff_s(tried, headers, chance))
        return Score(None, failed.outcome, str(failed))

    def _post(self, connection: Connection, body: bytes) -> HttpResponse:
        try:
            answer = connection.exchange("POST", body, self._headers)
        except (HTTPException, OSError) as error:
            is_late = isinstance(error, TimeoutError)
            late = f"no answer within {self._service.try_timeout_s:g} s"
            why = late if is_late else f"{type(error).__name__}: {error}"
            self._breaker.failed(why)
            raise NoScoreError("timeout" if is_late else "unreachable", why) from error
        if answer.status >= 500:
            self._breaker.failed(_status_of(answer))
        else:
            self._breaker.answered()
        return answer

    def _backoff_s(self, tried: int, headers: Mapping[str, str], chance: Random) -> float:
        spread = 0.5 + chance.random()
        asked_for = headers.get("retry-after", "")
        if asked_for.isdecimal():
            return min(float(asked_for), self._service.give_up_s)
        return min(self._service.backoff_s * 2.0 ** max(tried - 1, 0), _LONGEST_BACKOFF_S) * spread


class Breaker:
    """Circuit breaker: whether the service answers, shared by all threads."""

    def __init__(self, service: Service, closing: Event) -> None:
        self._service = service
        self._closing = closing
        self._changed = Condition()
        self._failures = 0
        """Number of consecutive tries without an answer, or with status 5xx."""
        self._down_s = 0.0
        """Seconds of downtime, counted only while tries were made."""
        self._failed_s = 0.0
        """Time of the last failed try, on the monotonic clock."""
        self._is_tried = False
        """Whether a thread is making the single try."""
        self._why = ""

    def enter(self) -> bool:
        """Wait until a try may be made or the scorer is closed. Return whether the try is the single one while the
        service is down. Raises ServiceLostError if the service has been down for `give_up_s`."""
        service = self._service
        with self._changed:
            while self._failures >= service.breaker_failures and not self._closing.is_set():
                if self._down_s > service.give_up_s:
                    raise ServiceLostError(
                        f"the service `{service.url}` has not answered for {service.give_up_s:g} s; last error: "
                        f"{self._why}",
                        hint="restart the service, then run `ppoctl resume RUN`; the rollouts are saved",
                    )
                left_s = self._failed_s + service.breaker_pause_s - time.monotonic()
                if not self._is_tried and left_s <= 0:
                    self._is_tried = True
                    return True
                self._changed.wait(None if self._is_tried else left_s)
        return False

    def failed(self, why: str) -> None:
        """Record a try without an answer, or with status 5xx."""
        now, longest_s = time.monotonic(), self._service.breaker_pause_s + self._service.try_timeout_s
        with self._changed:
            # No tries are made between two steps, so that time must not count as downtime.
            self._down_s = min(now - self._failed_s, longest_s) + self._down_s if self._failures else 0.0
            self._failures += 1
            self._failed_s, self._why, self._is_tried = now, why, False
            self._changed.notify_all()

    def answered(self) -> None:
        """Record that the service answered."""
        with self._changed:
            self._failures, self._is_tried = 0, False
            self._changed.notify_all()

    def wake(self) -> None:
        """Wake all waiting threads, so that they see that the scorer is closed."""
        with self._changed:
            self._changed.notify_all()


def _read(response: HttpResponse) -> Score:
    """Return the score, or the reason for its absence, from a final answer."""
    body = response.body
    if response.status != 200:
        return Score(None, "refused" if response.status >= 400 else "error", _status_of(response))
    if not response.is_whole:
        return Score(None, "error", f"its answer is longer than {_ANSWER_BYTES} bytes")
    try:
        answer: Any = json.loads(body)
    except (ValueError, RecursionError):
        return Score(None, "error", f"its answer is not JSON: {_start(body)}")
    fields = answer if isinstance(answer, dict) else {"score": answer}
    if isinstance(fields.get("error"), str):
        return Score(None, "refused", fields["error"][:_SHOWN_CHARS])
    try:
        numbers = {name: _number(value) for name, value in fields.items()}
        return Score(numbers.pop("score"), "ok", extras=numbers)
    except (KeyError, TypeError, OverflowError):
        expected = "a number, or a mapping of numbers with `score`"
        return Score(None, "error", f"its answer is not {expected}: {_start(body)}")


def _number(value: Any) -> float:
    if not isinstance(value, int | float):
        raise TypeError
    return float(value)


def _status_of(answer: HttpResponse) -> str:
    return f"it answered {answer.status}: {_start(answer.body)}"


def _start(body: bytes) -> str:
    text = " ".join(body[: 4 * _SHOWN_CHARS].decode(errors="replace").split())
    return f"`{text[:_SHOWN_CHARS]}`"


def _authorization(variable: str | None) -> dict[str, str]:
    if variable is None:
        return {}
    token = os.environ.get(variable, "")
    if not token:
        raise MissingAssetError(
            f"`reward.token_env` names the environment variable `{variable}`, which is not set",
            hint=f"export {quoted(variable)}=VALUE",
        )
    return {"Authorization": f"Bearer {token}"}
