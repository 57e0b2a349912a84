"""Client of a Sandbox Fusion endpoint (`/run_code`), which runs programs. Imports only the standard library."""

import json
import time
from http import HTTPStatus
from http.client import HTTPException
from typing import Any

from ppoctl.http_client import Connection
from ppoctl.rewards.sandbox.job import ExitKind, Ran, SandboxJob

_TRIES = 3
_PAUSE_S = 1.0
_SLACK_S = 10.0
_OTHER_BYTES = 16 << 20
"""Maximum bytes of an answer in addition to the program's output: errors, output of a compiler."""
_LETTER_BYTES = 6
"""Maximum bytes of one character of output in JSON."""


class UnreachableError(Exception):
    """The endpoint did not answer, or its answer is not valid."""


def run(url: str, language: str, job: SandboxJob) -> Ran:
    """Run a program at the endpoint. A gateway timeout or failed connection is tried again.

    Raises UnreachableError if there is no answer after all tries, or if the endpoint reports its own failure.
    """
    limits = job.limits
    payload = {
        "code": job.program,
        "stdin": job.stdin,
        "language": language,
        "compile_timeout": limits.timeout_s,
        "run_timeout": limits.timeout_s,
        "memory_limit_MB": limits.memory_mib,
        "files": {},
        "fetch_files": [],
    }
    most = limits.output_kib << 10
    connection = Connection(
        url, limit_s=2 * limits.timeout_s + _SLACK_S, most_bytes=_LETTER_BYTES * most + _OTHER_BYTES
    )
    try:
        answer = _answer(connection, json.dumps(payload).encode())
    finally:
        connection.close()
    return Ran("output") if answer is None else _ran(answer, most)


def _answer(connection: Connection, body: bytes) -> dict[str, Any] | None:
    """Return the answer of the endpoint; None: it is longer than the output limit allows."""
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    why = ""
    for number in range(_TRIES):
        if number:
            time.sleep(_PAUSE_S * number)
        try:
            answer = connection.exchange("POST", body, headers)
            if answer.status == HTTPStatus.OK:
                return dict(json.loads(answer.body)) if answer.is_whole else None
            why = f"it answers {answer.status}"
            if answer.status != HTTPStatus.GATEWAY_TIMEOUT:
                break
        except (OSError, HTTPException, ValueError, RecursionError) as error:
            why = str(error)
    raise UnreachableError(f"no answer from the Sandbox Fusion endpoint: {why}")


def _ran(answer: dict[str, Any], most: int) -> Ran:
    """Convert the endpoint's answer to a `Ran`. A failed compilation counts as a failed program."""
    if answer.get("status") not in ("Success", "Failed"):
        raise UnreachableError(f"the Sandbox Fusion endpoint failed: {answer.get('message') or answer.get('status')}")
    for result in (answer.get("compile_result"), answer.get("run_result")):
        if not result:
            continue
        output, code = str(result.get("stdout") or ""), int(result.get("return_code") or 0)
        if result.get("status") == "TimeLimitExceeded":
            return Ran("timeout", output=output[:most])
        if result.get("status") != "Finished" or code != 0:
            return Ran("exit", code or 1, output[:most])
    if not answer.get("run_result"):
        return Ran("exit", 1)
    outcome: ExitKind = "output" if len(output.encode(errors="replace")) > most else "ok"
    return Ran(outcome, output=output[:most])
