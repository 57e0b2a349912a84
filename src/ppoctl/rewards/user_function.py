"""A user's function in the process that scores: found, called, and what it returns understood. What it gets wrong is
said in the words of whoever wrote it, with the line of their file."""

import asyncio
import importlib
import importlib.util
import inspect
import json
import re
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from ppoctl.batch.scores import ScoreRequest
from ppoctl.rewards.function import BatchFunction, NoScoreError, RewardValue
from ppoctl.rewards.python import file_of

_OF_THE_LIMIT = 0.95
"""Share of the deadline after which an `async` call is given up: the others of its batch are then still heard."""
_NAME = re.compile("[A-Za-z0-9_]+")
_MESSAGE_CHARS = 150
"""Most characters of an error's own words, so that its line in the file is told too."""


def opened(*, function: str, options: dict[str, Any], batched: bool, limit_s: float) -> BatchFunction:
    """The scoring function that `function` names, called with `options`. Raises what its import raises, and TypeError
    where it cannot be called so."""
    call = partial(_found(function), **options)
    _require_callable(call, function, batched=batched)
    file = file_of(function)
    return _Scoring(call, batched=batched, limit_s=_OF_THE_LIMIT * limit_s, file="" if file is None else str(file))


def opened_metrics(*, function: str, options: dict[str, Any], limit_s: float) -> BatchFunction:
    """The metric function that `function` names, asked by a request whose `fields` have the `samples`. Raises as
    `opened` does."""
    call = partial(_found(function), **options)
    _require_callable(call, function, batched=True)
    file = file_of(function)
    measured = partial(_measured, call)
    return _Scoring(measured, batched=False, limit_s=_OF_THE_LIMIT * limit_s, file="" if file is None else str(file))


def _measured(call: Callable[..., Any], request: ScoreRequest) -> RewardValue:
    """Figures of the samples that a request has; none, and nothing is called, where it has no samples."""
    if "samples" not in request.fields:
        return RewardValue(0.0)
    answer = call(request.fields["samples"])
    if not isinstance(answer, Mapping):
        _refuse(f'returned a {_kind(answer)}, and figures have names: `{{"words_mean": 12.5}}`')
    for name in answer:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            _refuse(f"returned a figure named `{name}`: letters, digits and underscores make a name")
    return RewardValue(0.0, {name: _number(figure, f"as `{name}`") for name, figure in answer.items()})


def _found(function: str) -> Callable[..., Any]:
    place, _, name = function.rpartition(":")
    file = file_of(function)
    module = importlib.import_module(place) if file is None else _module_of(file)
    found = getattr(module, name, None)
    if callable(found):
        return found  # type: ignore[no-any-return]
    if found is not None:
        raise TypeError(f"`{name}` of `{place}` is a {type(found).__name__}, and no function")
    has = sorted(key for key, value in vars(module).items() if inspect.isfunction(value) and key[0] != "_")
    raise AttributeError(f"`{place}` has no `{name}`; its functions: {', '.join(has) or 'none'}")


def _module_of(file: Path) -> ModuleType:
    """The module of a file, whose folder is searched after everything else: a `math.py` there hides nobody's."""
    sys.path.append(str(file.parent))
    spec = importlib.util.spec_from_file_location(f"reward_of_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


def _require_callable(call: partial[Any], function: str, *, batched: bool) -> None:
    """Raises TypeError where the function does not take what it will be given."""
    try:
        signature = inspect.signature(call.func)
    except ValueError:  # of C: nobody knows
        return
    try:
        signature.bind([] if batched else object(), **call.keywords)
    except TypeError as error:
        given = "a list of samples" if batched else "a sample (`sample.response`, `sample.truth`, `sample.fields`)"
        options = ", ".join(f"`{name}`" for name in call.keywords)
        raise TypeError(
            f"`{function.rpartition(':')[2]}{signature}` is called with {given}"
            + (f" and the options {options}" if options else " alone")
            + f": {error}"
        ) from error


class _Scoring:
    """A user's function as one that scores batches."""

    def __init__(self, call: Callable[..., Any], *, batched: bool, limit_s: float, file: str) -> None:
        self._call, self._batched, self._limit_s, self._file = call, batched, limit_s, file

    def __call__(self, requests: Sequence[ScoreRequest]) -> Sequence[RewardValue | BaseException]:
        if not self._batched:
            answers = self._answers([partial(self._call, request) for request in requests])
        else:
            (whole,) = self._answers([partial(self._call, list(requests))])
            answers = [whole] * len(requests) if isinstance(whole, BaseException) else _listed(whole, len(requests))
        return [
            answer if isinstance(answer, BaseException) else self._value(answer, request)
            for answer, request in zip(answers, requests, strict=True)
        ]

    def _answers(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """What each call returns, or its error; those that are awaited go on side by side."""
        answers = list[Any]()
        for call in calls:
            try:
                answers.append(call())
            except BaseException as error:  # noqa: BLE001 - a function that calls sys.exit has failed like any other
                answers.append(self._told(error))
        if any(inspect.isawaitable(answer) for answer in answers):
            return asyncio.run(self._awaited(answers))
        return answers

    async def _awaited(self, answers: Sequence[Any]) -> list[Any]:
        return list(await asyncio.gather(*(self._one(answer) for answer in answers)))

    async def _one(self, answer: Any) -> Any:
        if not inspect.isawaitable(answer):
            return answer
        try:
            return await asyncio.wait_for(_as_coroutine(answer), self._limit_s)
        except TimeoutError:
            return NoScoreError("timeout", f"no score within {self._limit_s:g} s")
        except BaseException as error:  # noqa: BLE001 - as above
            return self._told(error)

    def _value(self, answer: Any, request: ScoreRequest) -> RewardValue | BaseException:
        try:
            return value_of(answer, request)
        except TypeError as error:
            return NoScoreError("error", str(error))

    def _told(self, error: BaseException) -> BaseException:
        """The error with the line of the user's file in which it came up."""
        if isinstance(error, NoScoreError):
            return error
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if frame.filename == self._file]
        others = [frame for frame in frames if frame.filename != __file__]
        at = (own or others or [None])[-1]  # type: ignore[list-item]
        where = "" if at is None else f" ({Path(at.filename).name}:{at.lineno}, in `{at.name}`: `{at.line}`)"
        says = " ".join(str(error).split())[:_MESSAGE_CHARS]
        return NoScoreError("error", f"{type(error).__name__}: {says}{where}")


async def _as_coroutine(answer: Awaitable[Any]) -> Any:
    return await answer


def _listed(answers: Any, wanted: int) -> list[Any]:
    """The answers of a batched function, which it must give one for each sample."""
    answers = answers.tolist() if hasattr(answers, "tolist") else answers
    if not isinstance(answers, list | tuple):
        _refuse(f"returned a {_kind(answers)}: with `batched = true` a list has one answer for each sample")
    if len(answers) != wanted:
        _refuse(f"returned {len(answers)} answers for {wanted} samples")
    return list(answers)


def value_of(answer: Any, request: ScoreRequest) -> RewardValue:
    """What a function returned, as a score. Raises TypeError saying what was expected."""
    if isinstance(answer, RewardValue):
        return answer
    answer = answer.tolist() if hasattr(answer, "tolist") else answer  # numbers and arrays of numpy and torch
    if answer is None:
        _refuse("returned None: does every path of it end with `return`?")
    if isinstance(answer, Mapping):
        return _of_mapping(answer)
    if isinstance(answer, list | tuple):
        return _of_tokens(answer, request)
    return RewardValue(_number(answer, "as the score"))


def _of_mapping(answer: Mapping[Any, Any]) -> RewardValue:
    if "score" not in answer:
        has = ", ".join(f"`{key}`" for key in answer) or "nothing"
        _refuse(f"returned a mapping without `score`, which says what the score is; it has {has}")
    said = answer.get("answer")
    given = said if isinstance(said, str) else None
    figures = {str(k): _number(figure, f"as `{k}`") for k, figure in answer.items() if k != "answer" or given is None}
    return RewardValue(figures.pop("score"), figures, answer=given)


def _of_tokens(answer: Sequence[Any], request: ScoreRequest) -> RewardValue:
    tokens = len(request.token_ids)
    if len(answer) != tokens:
        _refuse(
            f"returned {len(answer)} numbers for the {tokens} tokens of the response: a list has one number for each "
            "of `sample.token_ids`"
        )
    figures = [_number(figure, f"for token {number}") for number, figure in enumerate(answer)]
    return RewardValue(sum(figures), token_values=figures)


def _number(figure: Any, what: str) -> float:
    figure = figure.item() if hasattr(figure, "item") else figure
    if not isinstance(figure, Real):
        _refuse(f"returned a {_kind(figure)} {what}, not a number")
    return float(figure)


def _kind(value: Any) -> str:
    """A type and, where that is short, the value."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = ""
    return f"{type(value).__name__} (`{text}`)" if 0 < len(text) <= 40 else type(value).__name__


def _refuse(says: str) -> NoReturn:
    raise TypeError(f"the function {says}")
