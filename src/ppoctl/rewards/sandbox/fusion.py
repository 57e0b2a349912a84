"""Client of a Sandbox Fusion endpoint (`/run_code`), which runs programs."""

import json
from http import HTTPStatus
from typing import Any

from ppoctl.core.errors import ServiceLostError
from ppoctl.core.http_client import HttpClient, HttpLimits, NoAnswerError, Retries
from ppoctl.rewards.sandbox.job import ExitKind, Limits, Ran, SandboxJob, UnreachableError

_LETTER_BYTES = 6
"""Maximum bytes of one character of output in JSON."""


class FusionEndpoint:
    """Endpoint that runs programs of one language. Any thread may run a program."""

    def __init__(
        self,
        url: str,
        language: str,
        limits: Limits,
        *,
        retries: Retries = Retries(tries=3),
        slack_s: float = 10.0,
        other_bytes: int = 16 << 20,
    ) -> None:
        """`slack_s`: seconds for the start of a program, in addition to its time limits, and again for the transfer
        of its output. `other_bytes`: maximum bytes of an answer in addition to the program's output, such as errors
        and the output of a compiler."""
        self._language, self._most = language, limits.output_kib << 10
        first_byte_s = 2 * limits.timeout_s + slack_s
        most_bytes = _LETTER_BYTES * self._most + other_bytes
        http_limits = HttpLimits(first_byte_s + slack_s, most_bytes, first_byte_s=first_byte_s)
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        self._client = HttpClient(url, http_limits, retries, headers=headers)

    def run(self, job: SandboxJob) -> Ran:
        """Run a program. Raises UnreachableError if there is no answer after all tries, or if the endpoint reports
        its own failure."""
        limits = job.limits
        payload = {
            "code": job.program,
            "stdin": job.stdin,
            "language": self._language,
            "compile_timeout": limits.timeout_s,
            "run_timeout": limits.timeout_s,
            "memory_limit_MB": limits.memory_mib,
            "files": {},
            "fetch_files": [],
        }
        try:
            answer = self._client.request("POST", json.dumps(payload).encode())
            if answer.status != HTTPStatus.OK:
                raise UnreachableError(f"the Sandbox Fusion endpoint answers {answer.status}")
            return _ran(dict(json.loads(answer.body)), self._most) if answer.is_whole else Ran("output")
        except (NoAnswerError, ServiceLostError, ValueError, TypeError, RecursionError) as error:
            raise UnreachableError(f"no answer from the Sandbox Fusion endpoint: {error}") from error

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


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
