"""The parent's side of one process of environments: open, answer, restore and close. Imports no torch."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ppoctl.core.batch.episodes import EnvironmentFailure, Observation, Outcome, Past, Turn, as_plain, messages_from
from ppoctl.core.errors import RecipeError
from ppoctl.rewards.function import ScorerSpec
from ppoctl.rewards.scorer_output import Dropped
from ppoctl.rewards.user_process import READY_LIMIT_S, NoReplyError, UserProcess

_SHOWN_CHARS = 80
"""Maximum number of characters of an observation in the message about a difference."""


class EnvironmentProcess(UserProcess):
    """A child process that holds the environments of several episodes."""

    module = "ppoctl.environments.environment_worker"
    role = "environment"
    reply_bytes = 1 << 21
    """The child replaces an observation of more than 1 MiB by a failure; only code that writes to the pipe itself
    reaches this limit."""

    def __init__(self, spec: ScorerSpec, dropped: Dropped, seconds: float, *, has_state: bool = True) -> None:
        """`seconds` is the time limit of each answer. An environment without state is restored by `open` alone."""
        super().__init__(spec, dropped)
        self._has_state = has_state
        self._seconds = seconds
        self._open: set[str] = set()
        """Keys of the environments that the child holds."""

    def open(self, start: Past) -> Outcome:
        """Open the environment of an episode, and return its first observation. Raises the error of `refused`."""
        self._start_with_none()
        return self._opened(start)

    def step(self, past: Past, turn: Turn) -> Outcome:
        """Return the observation of a turn. If the child does not hold the environment, it is first restored from its
        past. Raises the error of `refused`."""
        self._start_with_none()
        if past.key not in self._open and (failure := self._restored(past)) is not None:
            return failure
        return self._stepped(past.key, turn)

    def close_episode(self, key: str) -> None:
        """Close the environment of an episode, if the child holds it."""
        if key in self._open:
            self._open.discard(key)
            self._reply({"do": "close", "key": key}, self._seconds)

    def schemas(self) -> list[dict[str, Any]] | EnvironmentFailure:
        """Return the JSON schemas of the tools that the environment offers. Raises the error of `refused`."""
        self._start_with_none()
        reply = self._reply({"do": "describe"}, READY_LIMIT_S)
        return reply if isinstance(reply, EnvironmentFailure) else list(reply["schemas"])

    def refused(self, why: str) -> RecipeError:
        return RecipeError(why, hint=self.spec.hint)

    def _start_with_none(self) -> None:
        if self.start_if_ended():
            self._open.clear()

    def _opened(self, start: Past) -> Outcome:
        outcome = self._observed({"do": "open", "key": start.key, "row": as_plain(start.row), "seed": start.seed})
        if isinstance(outcome, Observation):
            self._open.add(start.key)
        return outcome

    def _stepped(self, key: str, turn: Turn) -> Outcome:
        outcome = self._observed({"do": "step", "key": key, "turn": asdict(turn)})
        if isinstance(outcome, EnvironmentFailure):
            self._open.discard(key)
        return outcome

    def _restored(self, past: Past) -> EnvironmentFailure | None:
        """Open an environment again, and repeat the recorded turns. Return a failure if it does not answer as
        recorded; metrics may differ, because they may be times."""
        outcome = self._opened(past)
        repeated = past.exchanges if self._has_state else ()
        for number, (turn, recorded) in enumerate(((None, past.first), *repeated)):
            if turn is not None:
                outcome = self._stepped(past.key, turn)
            if isinstance(outcome, EnvironmentFailure):
                return outcome
            if (difference := _difference(recorded, outcome)) is not None:
                self.close_episode(past.key)
                which = f"turn {number}" if number else "`open`"
                return EnvironmentFailure(
                    "changed", f"after a restart, the environment answered {which} differently: {difference}"
                )
        return None

    def _observed(self, message: Mapping[str, Any]) -> Outcome:
        reply = self._reply(message, self._seconds)
        if isinstance(reply, EnvironmentFailure):
            return reply
        try:
            fields = reply["observation"]
            return Observation(**{**fields, "messages": messages_from(fields["messages"])})
        except (KeyError, TypeError):
            # The code of the user wrote into the pipe. The reply of the child may still come, and would be taken for
            # that to the next message.
            self._stop()
            self._open.clear()
            return EnvironmentFailure("invalid", "the environment's process sent a reply that is not an observation")

    def _reply(self, message: Mapping[str, Any], limit_s: float) -> dict[str, Any] | EnvironmentFailure:
        try:
            reply = self.call(message, limit_s)
        except NoReplyError as error:
            self._open.clear()
            return EnvironmentFailure(error.reason, str(error))
        return EnvironmentFailure(*reply["failure"]) if "failure" in reply else reply


def _difference(recorded: Observation, repeated: Observation) -> str | None:
    """Return both observations around their first difference; None: they are equal up to metrics."""
    first, second = (json.dumps({**as_plain(one), "metrics": {}}) for one in (recorded, repeated))
    if first == second:
        return None
    pairs = enumerate(zip(first, second, strict=False))
    same = next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))
    start = max(0, same - _SHOWN_CHARS // 4)
    shown = (text[start : start + _SHOWN_CHARS] for text in (first, second))
    return "`{}`, recorded `{}`".format(*reversed(tuple(shown)))
