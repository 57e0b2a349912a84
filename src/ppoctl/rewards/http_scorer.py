"""The `Scorer` port over an HTTP service. Imports no torch.

    submit(request) --> one queue --> `concurrent` threads, which share one `HttpClient` --> future

The outcome of a response is one of: a score; `timeout` or `unreachable`, after all tries; `refused`, if the service
will not score it (4xx, or an `error` in its answer); `error`, if the answer is not a score, or is 408, 425, 429 or
5xx after all tries.
"""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ppoctl.core.batch.scores import Score, ScoreRequest
from ppoctl.core.errors import MissingAssetError, quoted
from ppoctl.core.http_client import HttpClient, HttpLimits, HttpResponse, NoAnswerError, Retries
from ppoctl.rewards.scorer_pool import WorkerPool

_ANSWER_BYTES = 1 << 20
_SHOWN_CHARS = 200


class ServiceScorer(WorkerPool):
    """Threads that send requests to a service."""

    # A thread that waits for a name lookup or a connection may take longer; `close` does not wait for such a thread.
    closing_s = 2.0

    def __init__(
        self, url: str, try_timeout_s: float, retries: Retries, *, token_env: str | None, concurrent: int
    ) -> None:
        """Raises MissingAssetError if the environment variable of the token is not set. The parameters are keys of
        `HttpScorer`, documented there."""
        headers = {"Content-Type": "application/json", **_authorization(token_env)}
        self._client = HttpClient(url, HttpLimits(try_timeout_s, _ANSWER_BYTES), retries, headers=headers)
        super().__init__([self._scored] * concurrent)

    def end_work(self) -> None:
        self._client.close()

    def _scored(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        (request,) = requests
        began = time.monotonic()
        try:
            score = _read(self._client.request("POST", json.dumps(request.as_json()).encode()))
        except NoAnswerError as error:
            score = Score(None, "timeout" if error.is_late else "unreachable", str(error))
        return [replace(score, seconds=time.monotonic() - began)]


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
