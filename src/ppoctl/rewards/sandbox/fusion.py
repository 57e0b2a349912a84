"""A Sandbox Fusion endpoint (`/run_code`) as a place where programs run. Standard library only."""

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
"""Bytes of an answer beside the output that counts: errors, output of a compiler."""
_LETTER_BYTES = 6
"""Bytes of one letter of output in JSON, at most."""


class UnreachableError(Exception):
    """The endpoint did not answer, or not with what it is asked for."""


def run(url: str, language: str, job: SandboxJob) -> Ran:
    """Run a program there. A gateway that gives up, or a connection that fails, is tried again.

    Raises UnreachableError where there is no answer after that, and where the endpoint says that it failed itself.
    """
    limits = job.limits
    asked = {
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
        answer = _answer(connection, json.dumps(asked).encode())
    finally:
        connection.close()
    return Ran("output") if answer is None else _ran(answer, most)


def _answer(connection: Connection, body: bytes) -> dict[str, Any] | None:
    """What the endpoint answers; None: more than the output that a program may have."""
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
    raise UnreachableError(f"no answer of the Sandbox Fusion endpoint: {why}")


def _ran(answer: dict[str, Any], most: int) -> Ran:
    """What it says, in our words: of a compilation that failed as of a program that did."""
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
