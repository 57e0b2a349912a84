"""Events of episodes as JSON values, for the log of a stage that is not committed yet."""

from collections.abc import Mapping
from typing import Any

from ppoctl.algorithms.stages.episode_runner import Event, Observed, Opened
from ppoctl.core.batch.episodes import EnvironmentFailure, Observation, ToolCall, messages_from
from ppoctl.core.ports import Sample


def as_json(event: Event) -> dict[str, Any]:
    """Return an event as a JSON value."""
    match event:
        case Opened(observation, prompt_tokens):
            return {"kind": "opened", "observation": _observation(observation), "prompt_tokens": prompt_tokens}
        case Observed(observation, suffix):
            return {"kind": "observed", "observation": _observation(observation), "suffix": suffix}
        case EnvironmentFailure(reason, message):
            return {"kind": "failure", "reason": reason, "message": message}
        case Sample():
            return {
                "kind": "turn",
                "key": event.key,
                "tokens": event.tokens,
                "logprobs": event.logprobs,
                "terminated": event.terminated,
                "text": event.text,
                "stamp": event.stamp,
                "sends": event.sends,
                "calls": [{"name": call.name, "arguments": dict(call.arguments)} for call in event.calls],
                "malformed": event.malformed,
            }


def from_json(value: Mapping[str, Any]) -> Event:
    """Return the event that `as_json` returned."""
    match value:
        case {"kind": "opened", "observation": observation, "prompt_tokens": ids}:
            return Opened(_read(observation), None if ids is None else tuple(ids))
        case {"kind": "observed", "observation": observation, "suffix": suffix}:
            return Observed(_read(observation), tuple(suffix))
        case {"kind": "failure", "reason": reason, "message": message}:
            return EnvironmentFailure(reason, message)
    calls = tuple(ToolCall(**call) for call in value["calls"])
    lists = {name: tuple(value[name]) for name in ("tokens", "logprobs")}
    return Sample(**{name: item for name, item in value.items() if name != "kind"} | lists | {"calls": calls})


def _observation(observation: Observation) -> dict[str, Any]:
    return {
        "messages": [message.as_json() for message in observation.messages],
        "reward": observation.reward,
        "done": observation.done,
        "metrics": dict(observation.metrics),
    }


def _read(value: Mapping[str, Any]) -> Observation:
    return Observation(**{**value, "messages": messages_from(value["messages"])})
