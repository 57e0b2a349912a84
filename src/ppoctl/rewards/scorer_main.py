"""The process a scorer runs in: `python -m ppoctl.rewards.scorer_main SPEC`. It imports little, so that it starts fast.

    stdin   one JSON line per batch:   {"number": n, "requests": [{...}, ...]}, each a `ScoreRequest`
    stdout  one JSON line at start:    {"ready": true} or {"failed": "why"}
            one per batch:             {"number": n, "scores": [...]}, for each request one of
                                       {"value": 1.0, "extras": {...}}
                                       {"value": 1.0, "extras": {...}, "tokens": [0.0, 1.0]}
                                       {"error": "why"} or {"error": "why", "outcome": "unreachable"}

It ends by itself when the parent is gone: at the end of stdin, and, where a scorer hangs and reads nothing any more,
by a signal of the kernel (Linux; elsewhere a hanging child of a killed parent stays until its scorer returns).
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

from ppoctl.batch.prompts import Message
from ppoctl.batch.scores import ScoreRequest
from ppoctl.rewards.function import BatchFunction, NoScoreError, RewardValue, ScoringFunction

_PR_SET_PDEATHSIG = 1
_MESSAGE_CHARS = 300


def main(spec_json: str) -> int:
    """Score what comes until stdin ends; the exit code."""
    spec = json.loads(spec_json)
    _die_with(spec["parent"])
    requests, replies = _private_pipes()
    try:
        function = opened(spec)
    except BaseException as error:  # noqa: BLE001 - the parent reports it, whatever it is
        _reply(replies, {"failed": describe(error)})
        return 1
    _reply(replies, {"ready": True})
    own_pid = os.getpid()
    for line in requests:
        asked = json.loads(line)
        reply = {"number": asked["number"], "scores": judge(function, list(map(received, asked["requests"])))}
        if os.getpid() != own_pid:
            os._exit(1)  # a copy that the scorer forked and let return: it must not speak for us
        _reply(replies, reply)
    return 0


def opened(spec: dict[str, Any]) -> BatchFunction:
    """The function of a `ScorerSpec`; raises what its import raises."""
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


def received(fields: dict[str, Any]) -> ScoreRequest:
    """The request whose fields came as JSON."""
    chat = tuple(Message(**message) for message in fields["messages"])
    return ScoreRequest(**{**fields, "messages": chat, "token_ids": tuple(fields["token_ids"])})


def judge(function: BatchFunction, requests: Sequence[ScoreRequest]) -> list[dict[str, Any]]:
    """What is replied of each request. Nothing a scorer raises ends the child."""
    try:
        return [_told(value, request) for value, request in zip(function(requests), requests, strict=True)]
    except BaseException as error:  # noqa: BLE001 - as above
        return [{"error": describe(error)}] * len(requests)


def _told(found: object, request: ScoreRequest) -> dict[str, Any]:
    """`value` and `extras`, an `answer` where one was read, and `tokens` where each has a figure; or `error`."""
    if isinstance(found, NoScoreError):
        return {"error": _on_one_line(str(found)), "outcome": found.outcome}
    if isinstance(found, BaseException):
        return {"error": describe(found)}
    if not isinstance(found, RewardValue):
        return {"error": f"the scorer returned `{type(found).__name__}`, not a RewardValue"}
    figures: dict[str, object] = {"value": found.value, **found.extras}
    for name, figure in figures.items():
        if not isinstance(figure, Real):
            return {"error": f"the scorer returned a `{type(figure).__name__}` as {name}, not a number"}
    extras = {str(k): float(v) for k, v in found.extras.items()}
    told: dict[str, Any] = {"value": float(found.value), "extras": extras}
    if found.answer is not None:
        told["answer"] = str(found.answer)
    if found.token_values is None:
        return told
    if len(found.token_values) != len(request.token_ids):
        given, tokens = len(found.token_values), len(request.token_ids)
        return {"error": f"the scorer returned {given} figures for the {tokens} tokens of the response"}
    return {**told, "tokens": [float(figure) for figure in found.token_values]}


def describe(error: BaseException) -> str:
    """Type and message on one line, the same in every run: addresses in it are blanked."""
    return _on_one_line(f"{type(error).__name__}: {error}")


def _on_one_line(text: str) -> str:
    return " ".join(re.sub(r"0x[0-9a-fA-F]+", "0x..", text).split())[:_MESSAGE_CHARS]


def _die_with(parent: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it died before the request stood


def _private_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """The pipes to the parent, moved away from 0 and 1: a scorer that prints or reads input must not meet them."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a line belongs to the call that prints it
    return requests, replies


def _reply(replies: IO[bytes], message: dict[str, Any]) -> None:
    replies.write(json.dumps(message).encode() + b"\n")
    replies.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
