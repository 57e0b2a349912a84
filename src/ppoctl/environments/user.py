"""A user's class or async function in the process of environments: import it, create an environment for each episode,
and call it. Processes of environments import this module."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from ppoctl.core.batch.episodes import EnvironmentRow, Observation, Turn
from ppoctl.core.user_functions import described, imported, require_accepts
from ppoctl.environments.answers import InvalidAnswerError
from ppoctl.rewards.user_function import kind_of


class EventLoop:
    """The event loop of this process. It stays open between calls, so that connections of the user's code do too; it
    runs only during a call."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def resolved(self, value: Any) -> Any:
        """Return a value, or the result of an awaitable."""
        return self._runner.run(_as_coroutine(value)) if inspect.isawaitable(value) else value


async def _as_coroutine(value: Awaitable[Any]) -> Any:
    return await value


async def _without_exit(call: Awaitable[Any]) -> Any:
    """Return the result of a call. An exit becomes an error, because an exit in a task would also end the calls of
    other episodes in the same event loop."""
    try:
        return await call
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__) from None


class UserEnvironments:
    """Environments of a class, or of an async function."""

    def __init__(self, make: partial[Any], path: str) -> None:
        self._make, self._path, self._loop = make, path, EventLoop()

    def create(self) -> "ObjectEnvironment | FunctionEnvironment":
        """Return an environment for one episode."""
        if inspect.isclass(self._make.func):
            return ObjectEnvironment(self._make, self._loop)
        return FunctionEnvironment(self._make, self._loop)

    def schemas(self) -> Sequence[dict[str, Any]]:
        """Return the JSON schemas in the attribute `tools` of the class: a list of functions and schemas."""
        tools = getattr(self._make.func, "tools", ())
        if not tools:
            return ()
        # Late: pydantic is slow to import, and most environments have no tools.
        from ppoctl.environments.tool_schema import schema_of

        return [dict(tool) if isinstance(tool, Mapping) else schema_of(tool) for tool in tools]

    def explain(self, error: BaseException) -> str:
        """Return an error as text, with the line of the user's file."""
        return described(error, self._path, caller=__file__)


def opened(*, path: str, options: dict[str, Any]) -> UserEnvironments:
    """Return the environments of the class or async function that `path` names. Raises any error of its import, and
    TypeError if it is neither, or does not accept its arguments."""
    make = partial(imported(path), **options)
    name = path.rpartition(":")[2]
    if inspect.isclass(make.func):
        if missing := [method for method in ("open", "step") if not callable(getattr(make.func, method, None))]:
            raise TypeError(f"the class `{name}` has no method `{missing[0]}`")
        require_accepts(make, path, "no argument", count=0)
    elif inspect.iscoroutinefunction(make.func):
        require_accepts(make, path, "the row, the seed and `ask`", count=3)
    else:
        raise TypeError(f"`{name}` is neither a class nor an `async` function")
    return UserEnvironments(make, path)


class ObjectEnvironment:
    """Environment of one episode that is an object of the user's class."""

    def __init__(self, make: Callable[[], Any], loop: EventLoop) -> None:
        self._make, self._loop = make, loop
        self._object: Any = None

    def open(self, row: EnvironmentRow, seed: int) -> Any:
        self._object = self._make()
        return self._loop.resolved(self._object.open(row, seed))

    def step(self, turn: Turn) -> Any:
        return self._loop.resolved(self._object.step(turn))

    def close(self) -> None:
        close = getattr(self._object, "close", None)
        if close is not None:
            self._loop.resolved(close())


class FunctionEnvironment:
    """Environment of one episode that is a call of the user's async function. The call waits in `ask` between
    turns."""

    def __init__(self, make: Callable[..., Any], loop: EventLoop) -> None:
        self._make, self._loop = make, loop
        self._call: asyncio.Task[Any]
        self._asked: asyncio.Future[Mapping[str, Any]] | None = None
        """Observation that the function passes to `ask`; None: no call of `ask` is expected."""
        self._turn: asyncio.Future[Turn]

    def open(self, row: EnvironmentRow, seed: int) -> Any:
        return self._loop.resolved(self._open(row, seed))

    def step(self, turn: Turn) -> Any:
        return self._loop.resolved(self._step(turn))

    def close(self) -> None:
        self._loop.resolved(self._close())

    async def _open(self, row: EnvironmentRow, seed: int) -> Any:
        self._call = asyncio.ensure_future(_without_exit(self._make(row, seed, self._ask)))
        return await self._next()

    async def _step(self, turn: Turn) -> Any:
        self._turn.set_result(turn)
        return await self._next()

    async def _next(self) -> Any:
        """Return the observation of the next call of `ask`, or that of the function's end."""
        self._asked = asyncio.get_running_loop().create_future()
        await asyncio.wait((self._call, self._asked), return_when=asyncio.FIRST_COMPLETED)
        asked, self._asked = self._asked, None
        if asked.done():
            return asked.result()
        reward = self._call.result()
        if reward is not None and isinstance(reward, str | list | tuple | dict | Observation):
            raise InvalidAnswerError(f"the function returned a {kind_of(reward)}, not the last reward or None")
        return {"reward": 0.0 if reward is None else reward, "done": True}

    async def _ask(self, messages: Any = (), *, reward: Any = 0.0, metrics: Any = None) -> Turn:
        if self._asked is None or self._asked.done():
            raise RuntimeError("`ask` was called while another call of `ask` waits for its turn")
        self._turn = asyncio.get_running_loop().create_future()
        self._asked.set_result({"messages": messages, "reward": reward, "metrics": metrics or {}})
        return await self._turn

    async def _close(self) -> None:
        self._call.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await self._call
