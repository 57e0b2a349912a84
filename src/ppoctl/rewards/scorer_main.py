"""The scorer process: `python -m ppoctl.rewards.scorer_main SPEC`. It imports little, so that it starts fast.

    stdin   one JSON line per batch:   {"number": n, "requests": [{...}, ...]}, each a `ScoreRequest`
    stdout  one JSON line at start:    {"ready": true} or {"failed": "why"}
            one per batch:             {"number": n, "scores": [...]}, for each request one of
                                       {"value": 1.0, "extras": {...}}
                                       {"value": 1.0, "extras": {...}, "tokens": [0.0, 1.0]}
                                       {"error": "why"} or {"error": "why", "outcome": "unreachable"}

The process ends when its parent does: at the end of stdin, or, if a scorer hangs and no longer reads, by a signal of
the kernel. Only Linux has that signal; elsewhere a hanging child of a killed parent runs until its scorer returns.
"""

import ctypes
import importlib
import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from functools import partial
from io import TextIOWrapper
from numbers import Real
from typing import IO, Any

from ppoctl.batch.scores import ScoreRequest
from ppoctl.rewards.function import BatchFunction, NoScoreError, RewardValue, ScoringFunction

_PR_SET_PDEATHSIG = 1
_MESSAGE_CHARS = 300


def main(spec_json: str) -> int:
    """Score requests until stdin ends, and return the exit code."""
    spec = json.loads(spec_json)
    _die_with(spec["parent"])
    requests, replies = _private_pipes()
    try:
        function = opened(spec)
    except BaseException as error:  # noqa: BLE001 - the parent reports any error
        _reply(replies, {"failed": describe(error)})
        return 1
    _reply(replies, {"ready": True})
    own_pid = os.getpid()
    for line in requests:
        batch = json.loads(line)
        reply = {"number": batch["number"], "scores": judge(function, list(map(ScoreRequest.from_json, batch["requests"])))}
        if os.getpid() != own_pid:
            os._exit(1)  # a process that the scorer forked: it must not write to the parent's pipe
        _reply(replies, reply)
    return 0


def opened(spec: dict[str, Any]) -> BatchFunction:
    """Return the function of a `ScorerSpec`. Raises any error of its import."""
    module, _, name = spec["entry"].partition(":")
    entry = getattr(importlib.import_module(module), name)
    if spec["opens"]:
        function: BatchFunction = entry(**spec["options"])
        return function
    return partial(_each, partial(entry, **spec["options"]))


def _each(function: ScoringFunction, requests: Sequence[ScoreRequest]) -> list[RewardValue | BaseException]:
    scored: list[RewardValue | BaseException] = []
    for request in requests:
        try:
            scored.append(function(request))
        except BaseException as error:  # noqa: BLE001 - a scorer that calls sys.exit has failed like any other
            scored.append(error)
    return scored


def judge(function: BatchFunction, requests: Sequence[ScoreRequest]) -> list[dict[str, Any]]:
    """Return the reply for each request. An error of the scorer becomes a reply; it does not end the process."""
    try:
        return [_reply_for(value, request) for value, request in zip(function(requests), requests, strict=True)]
    except BaseException as error:  # noqa: BLE001 - as above
        return [{"error": describe(error)}] * len(requests)


def _reply_for(result: object, request: ScoreRequest) -> dict[str, Any]:
    """Return `value` and `extras`, with `answer` and `tokens` if the scorer returned them; or `error`."""
    if isinstance(result, NoScoreError):
        return {"error": _on_one_line(str(result)), "outcome": result.outcome}
    if isinstance(result, BaseException):
        return {"error": describe(result)}
    if not isinstance(result, RewardValue):
        return {"error": f"the scorer returned `{type(result).__name__}`, not a RewardValue"}
    numbers: dict[str, object] = {"value": result.value, **result.extras}
    for name, number in numbers.items():
        if not isinstance(number, Real):
            return {"error": f"the scorer returned a `{type(number).__name__}` as {name}, not a number"}
    extras = {str(k): float(v) for k, v in result.extras.items()}
    reply: dict[str, Any] = {"value": float(result.value), "extras": extras}
    if result.answer is not None:
        reply["answer"] = str(result.answer)
    if result.token_values is None:
        return reply
    if len(result.token_values) != len(request.token_ids):
        count, tokens = len(result.token_values), len(request.token_ids)
        return {"error": f"the scorer returned {count} values for the {tokens} tokens of the response"}
    return {**reply, "tokens": [float(value) for value in result.token_values]}


def describe(error: BaseException) -> str:
    """Return type and message on one line, with memory addresses replaced, so that the line is the same in every
    run."""
    return _on_one_line(f"{type(error).__name__}: {error}")


def _on_one_line(text: str) -> str:
    return " ".join(re.sub(r"0x[0-9a-fA-F]+", "0x..", text).split())[:_MESSAGE_CHARS]


def _die_with(parent: int) -> None:
    """Let the kernel kill this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent died before prctl took effect


def _private_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """Return the pipes to the parent, moved away from descriptors 0 and 1, so that a scorer that prints or reads
    standard input does not use them."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # so that the call that prints a line also writes it
    return requests, replies


def _reply(replies: IO[bytes], message: dict[str, Any]) -> None:
    replies.write(json.dumps(message).encode() + b"\n")
    replies.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
