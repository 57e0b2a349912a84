"""A user's function in the scorer process: import it, call it, and convert its result. Errors name the line of the
user's file."""

import asyncio
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any, NoReturn

from ppoctl.core.batch.scores import ScoreRequest
from ppoctl.core.user_functions import described, imported, require_accepts
from ppoctl.rewards.function import BatchFunction, NoScoreError, RewardValue

_LIMIT_FRAC = 0.95
"""Fraction of the deadline after which an `async` call is cancelled, so that the other scores of the batch still
arrive."""
_NAME = re.compile("[A-Za-z0-9_]+")
_SAMPLE = "a sample (`sample.response`, `sample.truth`, `sample.fields`)"
_SAMPLES = "a list of samples"


def opened(*, function: str, options: dict[str, Any], batched: bool, limit_s: float) -> BatchFunction:
    """Return the scoring function that `function` names, called with `options`. Raises any error of its import, and
    TypeError if it does not accept its arguments."""
    call = partial(imported(function), **options)
    require_accepts(call, function, _SAMPLES if batched else _SAMPLE)
    return _Scoring(call, batched=batched, limit_s=_LIMIT_FRAC * limit_s, function=function)


def opened_metrics(*, function: str, options: dict[str, Any], limit_s: float) -> BatchFunction:
    """Return the metric function that `function` names, for requests whose `fields` contain the `samples`. Raises the
    same errors as `opened`."""
    call = partial(imported(function), **options)
    require_accepts(call, function, _SAMPLES)
    return _Scoring(partial(_metrics, call), batched=False, limit_s=_LIMIT_FRAC * limit_s, function=function)


def _metrics(call: Callable[..., Any], request: ScoreRequest) -> RewardValue:
    """Return the metrics of the request's samples as extras. Without samples, the function is not called, and there
    are no metrics."""
    if "samples" not in request.fields:
        return RewardValue(0.0)
    answer = call(request.fields["samples"])
    if not isinstance(answer, Mapping):
        _refuse(f'returned a {kind_of(answer)}, not a mapping of metrics such as `{{"words_mean": 12.5}}`')
    for name in answer:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            _refuse(f"returned a metric named `{name}`: a name consists of letters, digits and underscores")
    return RewardValue(0.0, {name: _number(value, f"as `{name}`") for name, value in answer.items()})


class _Scoring:
    """A user's function as a `BatchFunction`."""

    def __init__(self, call: Callable[..., Any], *, batched: bool, limit_s: float, function: str) -> None:
        self._call, self._batched, self._limit_s, self._function = call, batched, limit_s, function

    def __call__(self, requests: Sequence[ScoreRequest]) -> Sequence[RewardValue | BaseException]:
        if not self._batched:
            answers = self._answers([partial(self._call, request) for request in requests])
        else:
            (batch,) = self._answers([partial(self._call, list(requests))])
            answers = [batch] * len(requests) if isinstance(batch, BaseException) else _listed(batch, len(requests))
        return [
            answer if isinstance(answer, BaseException) else self._value(answer, request)
            for answer, request in zip(answers, requests, strict=True)
        ]

    def _answers(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Return the result or error of each call. Awaitable results run concurrently."""
        answers = list[Any]()
        for call in calls:
            try:
                answers.append(call())
            except BaseException as error:  # noqa: BLE001 - a function that calls sys.exit has failed like any other
                answers.append(self._with_line(error))
        if any(inspect.isawaitable(answer) for answer in answers):
            return asyncio.run(self._awaited(answers))
        return answers

    async def _awaited(self, answers: Sequence[Any]) -> list[Any]:
        return list(await asyncio.gather(*(self._await(answer) for answer in answers)))

    async def _await(self, answer: Any) -> Any:
        if not inspect.isawaitable(answer):
            return answer
        try:
            return await asyncio.wait_for(_as_coroutine(answer), self._limit_s)
        except TimeoutError:
            return NoScoreError("timeout", f"no score within {self._limit_s:g} s")
        except BaseException as error:  # noqa: BLE001 - as above
            return self._with_line(error)

    def _value(self, answer: Any, request: ScoreRequest) -> RewardValue | BaseException:
        try:
            return value_of(answer, request)
        except TypeError as error:
            return NoScoreError("error", str(error))

    def _with_line(self, error: BaseException) -> BaseException:
        """Return the error with the line of the user's file that raised it."""
        if isinstance(error, NoScoreError):
            return error
        return NoScoreError("error", described(error, self._function, caller=__file__))


async def _as_coroutine(answer: Awaitable[Any]) -> Any:
    return await answer


def _listed(answers: Any, samples: int) -> list[Any]:
    """Return the answers of a batched function as a list. Raises TypeError unless it has one answer per sample."""
    answers = answers.tolist() if hasattr(answers, "tolist") else answers
    if not isinstance(answers, list | tuple):
        _refuse(f"returned a {kind_of(answers)}, not a list: `batched = true` requires one answer for each sample")
    if len(answers) != samples:
        _refuse(f"returned {len(answers)} answers for {samples} samples")
    return list(answers)


def value_of(answer: Any, request: ScoreRequest) -> RewardValue:
    """Convert the return value of a function to a score. Raises TypeError that names the expected type."""
    if isinstance(answer, RewardValue):
        return answer
    answer = answer.tolist() if hasattr(answer, "tolist") else answer  # numbers and arrays of numpy and torch
    if answer is None:
        _refuse("returned None: does every path through it end with `return`?")
    if isinstance(answer, Mapping):
        return _of_mapping(answer)
    if isinstance(answer, list | tuple):
        return _of_tokens(answer, request)
    return RewardValue(_number(answer, "as the score"))


def _of_mapping(answer: Mapping[Any, Any]) -> RewardValue:
    if "score" not in answer:
        has = ", ".join(f"`{key}`" for key in answer) or "nothing"
        _refuse(f"returned a mapping without the required key `score`; it has {has}")
    returned = answer.get("answer")
    vote = returned if isinstance(returned, str) else None
    numbers = {str(k): _number(value, f"as `{k}`") for k, value in answer.items() if k != "answer" or vote is None}
    return RewardValue(numbers.pop("score"), numbers, answer=vote)


def _of_tokens(answer: Sequence[Any], request: ScoreRequest) -> RewardValue:
    tokens = len(request.token_ids)
    if len(answer) != tokens:
        _refuse(
            f"returned {len(answer)} numbers for the {tokens} tokens of the response: a list must have one number "
            "for each of `sample.token_ids`"
        )
    values = [_number(value, f"for token {number}") for number, value in enumerate(answer)]
    return RewardValue(sum(values), token_values=values)


def _number(value: Any, role: str) -> float:
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, Real):
        _refuse(f"returned a {kind_of(value)} {role}, not a number")
    return float(value)


def kind_of(value: Any) -> str:
    """Return the type of a value, and the value itself if it is short."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = ""
    return f"{type(value).__name__} (`{text}`)" if 0 < len(text) <= 40 else type(value).__name__


def _refuse(problem: str) -> NoReturn:
    raise TypeError(f"the function {problem}")
