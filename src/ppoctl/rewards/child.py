"""The process a scorer runs in: `python -m ppoctl.rewards.child SPEC`. It imports little, so that it starts fast.

    stdin   one JSON line per sample:  {"number": n, "request": {...}}, a `ScoreRequest`
    stdout  one JSON line at start:    {"ready": true} or {"failed": "why"}
            one per sample:            {"number": n, "value": 1.0, "extras": {...}} or {"number": n, "error": "why"}

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
from collections.abc import Callable, Mapping
from numbers import Real
from typing import IO, Any

from ppoctl.batch.prompts import Message
from ppoctl.batch.scores import ScoreRequest
from ppoctl.rewards.function import RewardValue, ScoringFunction

_PR_SET_PDEATHSIG = 1
_MESSAGE_CHARS = 300


def main(spec_json: str) -> int:
    """Score what comes until stdin ends; the exit code."""
    spec = json.loads(spec_json)
    _die_with(spec["parent"])
    requests, replies = _private_pipes()
    try:
        function = load(spec["entry"])
    except BaseException as error:  # noqa: BLE001 - the parent reports it, whatever it is
        _reply(replies, {"failed": describe(error)})
        return 1
    _reply(replies, {"ready": True})
    own_pid = os.getpid()
    for line in requests:
        asked = json.loads(line)
        reply = {"number": asked["number"], **judge(function, received(asked["request"]), spec["options"])}
        if os.getpid() != own_pid:
            os._exit(1)  # a copy that the scorer forked and let return: it must not speak for us
        _reply(replies, reply)
    return 0


def load(entry: str) -> ScoringFunction:
    """The function that `module:name` names; raises what the import raises."""
    module, _, name = entry.partition(":")
    function: ScoringFunction = getattr(importlib.import_module(module), name)
    return function


def received(fields: dict[str, Any]) -> ScoreRequest:
    """The request whose fields came as JSON."""
    return ScoreRequest(**{**fields, "messages": tuple(Message(**message) for message in fields["messages"])})


def judge(function: Callable[..., object], request: ScoreRequest, options: Mapping[str, Any]) -> dict[str, Any]:
    """`value` and `extras`, or `error`. Nothing a scorer raises ends the child."""
    try:
        found = function(request, **options)
        if not isinstance(found, RewardValue):
            return {"error": f"the scorer returned `{type(found).__name__}`, not a RewardValue"}
        figures: dict[str, object] = {"value": found.value, **found.extras}
        for name, figure in figures.items():
            if not isinstance(figure, Real):
                return {"error": f"the scorer returned a `{type(figure).__name__}` as {name}, not a number"}
        return {"value": float(found.value), "extras": {str(k): float(v) for k, v in found.extras.items()}}
    except BaseException as error:  # noqa: BLE001 - a scorer that calls sys.exit has failed like any other
        return {"error": describe(error)}


def describe(error: BaseException) -> str:
    """Type and message on one line, the same in every run: addresses in it are blanked."""
    text = re.sub(r"0x[0-9a-fA-F]+", "0x..", str(error))
    return f"{type(error).__name__}: {' '.join(text.split())}"[:_MESSAGE_CHARS]


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
    return requests, replies


def _reply(replies: IO[bytes], message: dict[str, Any]) -> None:
    replies.write(json.dumps(message).encode() + b"\n")
    replies.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
