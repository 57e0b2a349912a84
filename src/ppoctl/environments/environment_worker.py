"""The process of environments: `python -m ppoctl.environments.environment_worker SPEC`. It holds the environments of
several episodes, and answers one message at a time.

    message   {"do": "open", "key": "...", "row": {...}, "seed": 5}      reply   {"observation": {...}}
              {"do": "step", "key": "...", "turn": {...}}                        {"failure": ["error", "why"]}
              {"do": "close", "key": "..."}                                      {}
              {"do": "describe"}                                                 {"schemas": [...]}

`rewards.message_loop` has the rest of the protocol. An environment that failed is closed.
"""

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from ppoctl.core import units
from ppoctl.core.batch.episodes import (
    EnvironmentRow,
    FailureReason,
    Observation,
    ToolCall,
    Turn,
    as_plain,
    messages_from,
)
from ppoctl.environments.answers import InvalidAnswerError, first_of, observation_of
from ppoctl.rewards.message_loop import Handler, entry_of, serve

OBSERVATION_BYTES = 1 << 20
"""Maximum size of an observation as JSON."""


class Running(Protocol):
    """Environment of one episode."""

    def open(self, row: EnvironmentRow, seed: int) -> Any: ...

    def step(self, turn: Turn) -> Any: ...

    def close(self) -> None: ...


class Opener(Protocol):
    """The entry of a spec returns it: it creates environments."""

    def create(self) -> Running:
        """Return an environment for one episode."""
        ...

    def schemas(self) -> Sequence[dict[str, Any]]:
        """Return the JSON schemas of the tools that the environment offers."""
        ...

    def explain(self, error: BaseException) -> str:
        """Return an error of the user's code as text, with the line of the user's file."""
        ...


class EnvironmentHandler:
    """Handler of the messages to this process."""

    def __init__(self, opener: Opener) -> None:
        self._opener = opener
        self._running: dict[str, Running] = {}

    def __call__(self, message: dict[str, Any]) -> dict[str, Any]:
        match message["do"]:
            case "open":
                return self._answer(message["key"], lambda: self._opened(message))
            case "step":
                return self._answer(message["key"], lambda: self._stepped(message))
            case "close":
                self._close(message["key"])
                return {}
            case _:
                return self._described()

    def _opened(self, message: dict[str, Any]) -> Observation:
        row = EnvironmentRow(**{**message["row"], "messages": messages_from(message["row"]["messages"])})
        self._running[message["key"]] = running = self._opener.create()
        return first_of(running.open(row, message["seed"]))

    def _stepped(self, message: dict[str, Any]) -> Observation:
        fields = message["turn"]
        calls = tuple(ToolCall(**call) for call in fields["calls"])
        turn = Turn(**{**fields, "tokens": tuple(fields["tokens"]), "calls": calls})
        answer = self._running[message["key"]].step(turn)
        return observation_of(answer, role="tool" if calls else "user")

    def _answer(self, key: str, observe: Callable[[], Observation]) -> dict[str, Any]:
        """Return the reply with an observation, or with the failure of the environment."""
        reason: FailureReason
        try:
            reply = {"observation": as_plain(observe())}
            size = len(json.dumps(reply))
            if size <= OBSERVATION_BYTES:
                return reply
            most = units.size(OBSERVATION_BYTES)
            reason, why = "too_large", f"the observation has {units.size(size)}, more than {most}"
        except InvalidAnswerError as error:
            reason, why = "invalid", str(error)
        except BaseException as error:  # noqa: BLE001 - code that calls sys.exit has failed like any other
            reason, why = "error", self._opener.explain(error)
        self._close(key)
        return {"failure": [reason, why]}

    def _close(self, key: str) -> None:
        if (running := self._running.pop(key, None)) is not None:
            with suppress(BaseException):  # the episode has ended, and its result is known
                running.close()

    def _described(self) -> dict[str, Any]:
        try:
            return {"schemas": list(self._opener.schemas())}
        except Exception as error:  # noqa: BLE001 - the code of a user may raise any error
            return {"failure": ["error", self._opener.explain(error)]}


def handler_of(spec: dict[str, Any]) -> Handler:
    """Return the handler of the environment that a spec names. Raises any error of its import."""
    return EnvironmentHandler(entry_of(spec)(**spec["options"]))


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1], handler_of))
