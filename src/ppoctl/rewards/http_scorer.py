"""The `Scorer` port over an HTTP service. Imports no torch.

    submit(request) --> one queue --> `concurrent` threads, which share one `HttpClient` --> future

The outcome of a response is one of: a score; `timeout` or `unreachable`, after all tries; `refused`, if the service
will not score it (4xx, or an `error` in its answer); `error`, if the answer is not a score, or is 408, 425, 429 or
5xx after all tries.
"""

import json
import os
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from ppoctl.batch.scores import Score, ScoreRequest
from ppoctl.errors import MissingAssetError, quoted
from ppoctl.http_client import HttpClient, HttpLimits, HttpResponse, NoAnswerError, Retries
from ppoctl.rewards.pool import not_finite

_ANSWER_BYTES = 1 << 20
_SHOWN_CHARS = 200
_CLOSING_S = 2.0
"""Seconds that threads have to end after the client is closed. A thread that waits for a name lookup or a connection
may take longer; `close` does not wait for such a thread."""


class ServiceScorer:
    """Threads that send requests to a service, started by the first requests. Call `close` at the end."""

    def __init__(
        self, url: str, try_timeout_s: float, retries: Retries, *, token_env: str | None, concurrent: int
    ) -> None:
        """Raises MissingAssetError if the environment variable of the token is not set. The parameters are keys of
        `HttpScorer`, documented there."""
        headers = {"Content-Type": "application/json", **_authorization(token_env)}
        self._client = HttpClient(url, HttpLimits(try_timeout_s, _ANSWER_BYTES), retries, headers=headers)
        self._concurrent = concurrent
        self._waiting: SimpleQueue[tuple[Future[Score], ScoreRequest] | None] = SimpleQueue()
        """Requests that no thread has taken yet; a None ends one thread."""
        self._threads: list[Thread] = []

    def submit(self, request: ScoreRequest) -> Future[Score]:
        """Return a future for the score. The future raises NonFiniteError if a number cannot be trained on, and
        ServiceLostError if the service stays down for `give_up_s`."""
        future: Future[Score] = Future()
        self._waiting.put((future, request))
        if len(self._threads) < self._concurrent:
            self._threads.append(Thread(target=self._serve, name="scorer", daemon=True))
            self._threads[-1].start()
        return future

    def close(self) -> None:
        """Cancel requests without a score, and close the connections. May be called twice."""
        with suppress(Empty):
            while (left := self._waiting.get_nowait()) is not None:
                left[0].cancel()
        for _ in self._threads:
            self._waiting.put(None)
        self._client.close()
        until = time.monotonic() + _CLOSING_S
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0.0))

    def _serve(self) -> None:
        while (entry := self._waiting.get()) is not None:
            future, request = entry
            if not future.set_running_or_notify_cancel():
                continue
            began = time.monotonic()
            try:
                score = replace(self._scored(request), seconds=time.monotonic() - began)
                if (fault := not_finite(score, request)) is not None:
                    raise fault
                future.set_result(score)
            except Exception as error:  # noqa: BLE001 - the caller of `result` gets it
                future.set_exception(error)

    def _scored(self, request: ScoreRequest) -> Score:
        try:
            return _read(self._client.request("POST", json.dumps(request.as_json()).encode()))
        except NoAnswerError as error:
            return Score(None, "timeout" if error.is_late else "unreachable", str(error))


def _read(response: HttpResponse) -> Score:
    """Return the score, or the reason for its absence, from an answer."""
    body = response.body
    if response.status != 200:
        message = f"it answered {response.status}: {_start(body)}"
        if response.is_temporary:
            return Score(None, "error", f"{message} (after {response.tries} tries)")
        return Score(None, "refused" if response.status >= 400 else "error", message)
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
