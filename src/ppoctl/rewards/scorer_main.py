"""The scorer process: `python -m ppoctl.rewards.scorer_main SPEC`. It imports little, so that it starts fast.

    message   {"number": n, "requests": [{...}, ...]}, each a `ScoreRequest`
    reply     {"number": n, "scores": [...]}, for each request one of
              {"value": 1.0, "extras": {...}}
              {"value": 1.0, "extras": {...}, "tokens": [0.0, 1.0]}
              {"error": "why"} or {"error": "why", "outcome": "unreachable"}

`rewards.message_loop` has the rest of the protocol.
"""

import sys
from collections.abc import Sequence
from functools import partial
from numbers import Real
from typing import Any

from ppoctl.core.batch.scores import ScoreRequest
from ppoctl.rewards.function import BatchFunction, NoScoreError, RewardValue, ScoringFunction
from ppoctl.rewards.message_loop import Handler, describe, entry_of, on_one_line, serve


def handler_of(spec: dict[str, Any]) -> Handler:
    """Return the handler that scores the requests of a message. Raises any error of the scorer's import."""
    function = opened(spec)
    return lambda message: {"scores": judge(function, list(map(ScoreRequest.from_json, message["requests"])))}


def opened(spec: dict[str, Any]) -> BatchFunction:
    """Return the function of a `ScorerSpec`. Raises any error of its import."""
    entry = entry_of(spec)
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
        return {"error": on_one_line(str(result)), "outcome": result.outcome}
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


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1], handler_of))
