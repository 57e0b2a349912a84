"""The `Scorer` port over a service that is asked by HTTP. Imports no torch.

    submit(request) --> one queue --> `concurrent` threads: try, back off, try again --> future
                                          |
                                       Breaker: whether the service answers at all, known to all threads

What comes of a response is one of: a score; `timeout` and `unreachable`, after all tries; `refused`, where the
service would not score it (4xx, or an `error` in its answer); `error`, where its answer is no score, or 5xx after all
tries.
"""

import json
import os
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from queue import Empty, SimpleQueue
from random import Random
from socket import SHUT_RDWR
from threading import Condition, Event, Thread, Timer
from typing import Any
from urllib.parse import urlsplit

from ppoctl.batch.scores import Outcome, Score, ScoreRequest
from ppoctl.errors import MissingAssetError, ServiceLostError, quoted
from ppoctl.rewards.function import NoScoreError
from ppoctl.rewards.pool import not_finite

_BUSY = frozenset((408, 425, 429))
_ANSWER_BYTES = 1 << 20
_SHOWN_CHARS = 200
_LONGEST_BACKOFF_S = 60.0


@dataclass(frozen=True)
class Service:
    """Where a service is and how it is asked; the keys of `HttpScorer`, which say what they mean."""

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
    """Threads that ask a service, started by the first requests. `close` it."""

    def __init__(self, service: Service) -> None:
        """Raises MissingAssetError where the variable of the token is not set."""
        self._service = service
        self._headers = {"Content-Type": "application/json", **_authorization(service.token_env)}
        self._closing = Event()
        self._breaker = Breaker(service, self._closing)
        self._waiting: SimpleQueue[tuple[Future[Score], ScoreRequest] | None] = SimpleQueue()
        """Requests that no thread has begun with; None ends a thread."""
        self._lines: list[Line] = []
        self._threads: list[Thread] = []

    def submit(self, request: ScoreRequest) -> Future[Score]:
        """The score, once it is there. The future raises NonFiniteError of a number that cannot be trained on, and
        ServiceLostError when the service is given up."""
        future: Future[Score] = Future()
        self._waiting.put((future, request))
        if len(self._threads) < self._service.concurrent:
            self._lines.append(Line(self._service, self._headers))
            self._threads.append(Thread(target=self._serve, args=(self._lines[-1],), name="scorer", daemon=True))
            self._threads[-1].start()
        return future

    def close(self) -> None:
        """Give up what has no score yet, and hang up. May be called twice."""
        self._closing.set()
        with suppress(Empty):
            while (left := self._waiting.get_nowait()) is not None:
                left[0].cancel()
        self._breaker.wake()
        for _ in self._threads:
            self._waiting.put(None)
        for line in self._lines:
            line.cut()
        for thread in self._threads:
            thread.join()

    def _serve(self, line: "Line") -> None:
        while (given := self._waiting.get()) is not None:
            future, request = given
            if not future.set_running_or_notify_cancel():
                continue
            began = time.monotonic()
            try:
                score = replace(self._scored(line, request), seconds=time.monotonic() - began)
                if (fault := not_finite(score, request)) is not None:
                    raise fault
                future.set_result(score)
            except Exception as error:  # noqa: BLE001 - whoever asks for the result hears of it
                future.set_exception(error)
        line.close()

    def _scored(self, line: "Line", request: ScoreRequest) -> Score:
        body = json.dumps({**vars(request), "messages": [vars(message) for message in request.messages]}).encode()
        chance = Random(body)  # so that tries are spread, and in each run alike
        tried, failed = 0, NoScoreError("unreachable", "the scorer was closed")
        while not self._closing.is_set():
            is_only_try = self._breaker.enter()
            try:
                status, headers, answer = self._asked(line, body)
            except NoScoreError as why:
                headers, failed = {}, why
            else:
                if status not in _BUSY and status < 500:
                    return _read(status, answer)
                failed = NoScoreError("error", f"it answered {status}: {_start(answer)}")
            # A try of a service that is down is made for all, and costs the response that makes it nothing.
            tried += not is_only_try
            if tried >= self._service.tries:
                return Score(None, failed.outcome, f"{failed} (after {tried} tries)")
            self._closing.wait(self._backoff_s(tried, headers, chance))
        return Score(None, failed.outcome, str(failed))

    def _asked(self, line: "Line", body: bytes) -> tuple[int, Mapping[str, str], bytes]:
        try:
            answer = line.post(body)
        except Exception as why:
            self._breaker.failed(str(why))
            raise
        if answer[0] >= 500:
            self._breaker.failed(f"it answered {answer[0]}: {_start(answer[2])}")
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
    """Whether the service answers, as all threads together know it."""

    def __init__(self, service: Service, closing: Event) -> None:
        self._service = service
        self._closing = closing
        self._changed = Condition()
        self._failures = 0
        """Tries in a row that were not answered, or with 5xx."""
        self._down_s = 0.0
        """How long it has been down while somebody tried."""
        self._failed_s = 0.0
        """When a try failed last."""
        self._is_tried = False
        """Whether some thread makes the only try."""
        self._why = ""

    def enter(self) -> bool:
        """Wait until a try may be made, or the scorer is closed, and say whether it is the only one. Raises
        ServiceLostError when the service is given up."""
        service = self._service
        with self._changed:
            while self._failures >= service.breaker_failures and not self._closing.is_set():
                if self._down_s > service.give_up_s:
                    raise ServiceLostError(
                        f"the service `{service.url}` has not answered for {service.give_up_s:g} s; at last: "
                        f"{self._why}",
                        hint="start the service again; the rollouts are kept: `ppoctl resume RUN`",
                    )
                left_s = self._failed_s + service.breaker_pause_s - time.monotonic()
                if not self._is_tried and left_s <= 0:
                    self._is_tried = True
                    return True
                self._changed.wait(None if self._is_tried else left_s)
        return False

    def failed(self, why: str) -> None:
        """A try was not answered, or with 5xx."""
        now, longest_s = time.monotonic(), self._service.breaker_pause_s + self._service.try_timeout_s
        with self._changed:
            # Between two steps nobody tries: that time says nothing of the service.
            self._down_s = min(now - self._failed_s, longest_s) + self._down_s if self._failures else 0.0
            self._failures += 1
            self._failed_s, self._why, self._is_tried = now, why, False
            self._changed.notify_all()

    def answered(self) -> None:
        """The service is there."""
        with self._changed:
            self._failures, self._is_tried = 0, False
            self._changed.notify_all()

    def wake(self) -> None:
        """Let those look again that wait: the scorer is closed."""
        with self._changed:
            self._changed.notify_all()


class Line:
    """One connection to the service, which stays open between tries. One thread posts; any may cut it."""

    def __init__(self, service: Service, headers: Mapping[str, str]) -> None:
        address = urlsplit(service.url)
        kind = HTTPSConnection if address.scheme == "https" else HTTPConnection
        self._connection = kind(address.netloc.rpartition("@")[2], timeout=service.try_timeout_s)
        self._target = (address.path or "/") + (f"?{address.query}" if address.query else "")
        self._limit_s = service.try_timeout_s
        self._headers = dict(headers)

    def post(self, body: bytes) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers (names in lower case) and body of the answer. Raises NoScoreError where there is none in
        time."""
        began, was_open = time.monotonic(), self._connection.sock is not None
        is_late = Event()
        try:
            try:
                return self._exchange(body, is_late)
            except (HTTPException, OSError):
                # A service may hang up between two tries: that is no failure of this one.
                if is_late.is_set() or not was_open:
                    raise
                self._connection.close()
                return self._exchange(body, is_late)
        except (HTTPException, OSError, ValueError) as error:
            self._connection.close()
            if is_late.is_set() or isinstance(error, TimeoutError) or time.monotonic() - began >= self._limit_s:
                raise NoScoreError("timeout", f"no answer within {self._limit_s:g} s") from error
            raise NoScoreError("unreachable", f"{type(error).__name__}: {error}") from error

    def _exchange(self, body: bytes, is_late: Event) -> tuple[int, Mapping[str, str], bytes]:
        if self._connection.sock is None:
            self._connection.connect()
        # The limit of a socket begins again with each byte: one that trickles would never be late.
        watch = Timer(self._limit_s, self._expire, (is_late,))
        watch.daemon = True
        watch.start()
        try:
            self._connection.request("POST", self._target, body, self._headers)
            response = self._connection.getresponse()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, _all_of(response)
        finally:
            watch.cancel()

    def _expire(self, is_late: Event) -> None:
        is_late.set()
        self.cut()

    def close(self) -> None:
        """Hang up for good; said by the thread that posts."""
        self._connection.close()

    def cut(self) -> None:
        """Hang up; whoever waits for an answer hears that there is none."""
        if (connected := self._connection.sock) is not None:
            with suppress(OSError):
                connected.shutdown(SHUT_RDWR)


def _all_of(response: HTTPResponse) -> bytes:
    body = response.read(_ANSWER_BYTES + 1)
    if len(body) > _ANSWER_BYTES:
        raise ValueError(f"its answer is longer than {_ANSWER_BYTES} bytes")
    response.read()  # the end, so that the connection can be used again
    return body


def _read(status: int, body: bytes) -> Score:
    """What an answer that is final says."""
    if status != 200:
        says: tuple[Outcome, str] = ("refused" if status >= 400 else "error", f"it answered {status}: {_start(body)}")
        return Score(None, *says)
    try:
        answer: Any = json.loads(body)
    except ValueError:
        return Score(None, "error", f"its answer is no JSON: {_start(body)}")
    told = answer if isinstance(answer, dict) else {"score": answer}
    if isinstance(told.get("error"), str):
        return Score(None, "refused", told["error"][:_SHOWN_CHARS])
    try:
        figures = {name: _number(figure) for name, figure in told.items()}
        return Score(figures.pop("score"), "ok", extras=figures)
    except (KeyError, TypeError, OverflowError):
        expected = "a number, or a mapping of numbers with `score`"
        return Score(None, "error", f"its answer is not {expected}: {_start(body)}")


def _number(figure: Any) -> float:
    if not isinstance(figure, int | float):
        raise TypeError
    return float(figure)


def _start(body: bytes) -> str:
    text = " ".join(body[: 4 * _SHOWN_CHARS].decode(errors="replace").split())
    return f"`{text[:_SHOWN_CHARS]}`"


def _authorization(variable: str | None) -> dict[str, str]:
    if variable is None:
        return {}
    token = os.environ.get(variable, "")
    if not token:
        raise MissingAssetError(
            f"the environment has no `{variable}`, which `reward.token_env` names",
            hint=f"export {quoted(variable)}=VALUE",
        )
    return {"Authorization": f"Bearer {token}"}
