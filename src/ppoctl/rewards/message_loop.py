"""The child's side of a `UserProcess`: receive messages, and reply to each of them. It imports little, so that the
child starts fast.

    stdin   one JSON line per message:  {"number": n, ...}
    stdout  one JSON line at start:     {"ready": true} or {"failed": "why"}
            one per message:            {"number": n, ...}

The process ends when its parent does: at the end of stdin, or, if the user's code hangs and no longer reads, by a
signal of the kernel. Only Linux has that signal; elsewhere a hanging child of a killed parent runs until the code
returns.
"""

import ctypes
import importlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from io import TextIOWrapper
from typing import IO, Any

_PR_SET_PDEATHSIG = 1
_MESSAGE_CHARS = 300
Handler = Callable[[dict[str, Any]], dict[str, Any]]
"""Function that returns the reply to a message."""


def serve(spec_json: str, opened: Callable[[dict[str, Any]], Handler]) -> int:
    """Reply to messages until stdin ends, and return the exit code. `opened` returns the handler that a `ScorerSpec`
    describes."""
    spec = json.loads(spec_json)
    _die_with(spec["parent"])
    messages, replies = _private_pipes()
    try:
        handler = opened(spec)
    except BaseException as error:  # noqa: BLE001 - the parent reports any error
        _reply(replies, {"failed": describe(error)})
        return 1
    _reply(replies, {"ready": True})
    own_pid = os.getpid()
    for line in messages:
        message = json.loads(line)
        reply = {"number": message["number"], **handler(message)}
        if os.getpid() != own_pid:
            os._exit(1)  # a process that the user's code forked: it must not write to the parent's pipe
        _reply(replies, reply)
    return 0


def entry_of(spec: dict[str, Any]) -> Callable[..., Any]:
    """Return the entry of a `ScorerSpec`. Raises any error of its import."""
    module, _, name = spec["entry"].partition(":")
    entry: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return entry


def describe(error: BaseException) -> str:
    """Return type and message on one line, with memory addresses replaced, so that the line is the same in every
    run."""
    return on_one_line(f"{type(error).__name__}: {error}")


def on_one_line(text: str) -> str:
    """Return the first characters of a text on one line, with memory addresses replaced."""
    return " ".join(re.sub(r"0x[0-9a-fA-F]+", "0x..", text).split())[:_MESSAGE_CHARS]


def _die_with(parent: int) -> None:
    """Let the kernel kill this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent died before prctl took effect


def _private_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """Return the pipes to the parent, moved away from descriptors 0 and 1, so that code that prints or reads
    standard input does not use them."""
    messages, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # so that the call that prints a line also writes it
    return messages, replies


def _reply(replies: IO[bytes], message: dict[str, Any]) -> None:
    replies.write(json.dumps(message).encode() + b"\n")
    replies.flush()
